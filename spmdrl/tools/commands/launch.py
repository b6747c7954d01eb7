"""Start ranks as torchrun does, with less to type and without tracebacks of the launcher.

python -m spmdrl launch --nproc-per-node 2 train.py --config FILE [--any.field value]

Options of torchrun go before the program. Without an option that says where several nodes meet, all
ranks run on this node (--standalone). The exit status is that of the rank that failed first.
"""

from __future__ import annotations

import logging
import shlex
import sys

from spmdrl.tools.commands import typed

_MEETING = ("--standalone", "--nnodes", "--rdzv", "--node", "--master")
"""Beginnings of the options that name where nodes meet."""


def main(argv: list[str] | None = None) -> int:
    """Start the ranks, wait for them, and return the exit status: 128 + N after signal N."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print((__doc__ or "").replace("python -m spmdrl launch", typed("launch")))
        return 0 if argv else 2
    from spmdrl.world.launch import use_one_thread

    use_one_thread()  # as torchrun does, with a warning
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    # The ranks log their errors themselves.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    options = [word.replace("_", "-") for word in argv[: _program(argv)]]
    names_meeting = any(word.startswith(_MEETING) for word in options)
    try:
        run(parse_args(argv if names_meeting else ["--standalone", *argv]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # a signal ended the rank before it could log anything
            print(f"rank {rank} was ended by {failure.signal_name()}", file=sys.stderr)
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    except (ValueError, AssertionError, RendezvousError) as error:
        # torchrun cannot use the options.
        why = str(error) or "a number is out of range"
        print(
            f"launch: {why}; the options before the program were: {_options_text(argv)}; see "
            "torchrun --help",
            file=sys.stderr,
        )
        return 2
    return 0


def _options_text(argv: list[str]) -> str:
    return shlex.join(argv[: _program(argv)]) or "(none)"


def _program(argv: list[str]) -> int:
    """Return where the program begins, after the options."""
    begins = (i for i, w in enumerate(argv) if w.endswith(".py") or w in ("-m", "--module"))
    return next(begins, len(argv))
