"""Start ranks as torchrun does, with less to type and no traceback of the launcher's own.

python -m spmdrl launch --nproc-per-node 2 train.py --config FILE [--any.field value]

Every option of torchrun goes before the program. Without one that says where several nodes meet,
the ranks are those of this node alone (--standalone). The exit status is that of the rank that
failed first.
"""

from __future__ import annotations

import logging
import shlex
import sys

_MEETING = ("--standalone", "--nnodes", "--rdzv", "--node", "--master")
"""Beginnings of the options that name where nodes meet."""


def main(argv: list[str] | None = None) -> int:
    """Start the ranks, wait for them, and return the exit status: 128 + N after signal N."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv else 2
    from spmdrl.world.launch import use_one_thread

    use_one_thread()  # as torchrun does, with a warning
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # ranks say it
    options = [word.replace("_", "-") for word in argv[: _program(argv)]]
    is_told = any(word.startswith(_MEETING) for word in options)
    try:
        run(parse_args(argv if is_told else ["--standalone", *argv]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # it could say nothing itself
            print(f"rank {rank} was ended by {failure.signal_name()}", file=sys.stderr)
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    except (ValueError, AssertionError, RendezvousError) as error:  # what torchrun cannot use
        why = str(error) or "a number is out of range"
        print(
            f"launch: {why}; the options before the program were: {_shown(argv)}; see torchrun "
            "--help",
            file=sys.stderr,
        )
        return 2
    return 0


def _shown(argv: list[str]) -> str:
    return shlex.join(argv[: _program(argv)]) or "(none)"


def _program(argv: list[str]) -> int:
    """Return where the program begins, after the options."""
    begins = (i for i, w in enumerate(argv) if w.endswith(".py") or w in ("-m", "--module"))
    return next(begins, len(argv))
