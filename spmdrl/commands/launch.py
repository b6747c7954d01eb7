"""Start ranks as torchrun does, with less to type and no traceback of the launcher's own.

python -m spmdrl launch --nproc-per-node 2 train.py --config FILE [--any.field value]

--survive-engines --nproc-per-node N: the ranks of this machine, each of which ends by itself; for
layout.survive_engines. --replace-engines M besides: up to M times a rank that ends badly is started
anew, and joins as an engine. The exit status is that of rank 0 then.

Every option of torchrun goes before the program. Without one that says where several nodes meet,
the ranks are those of this node alone (--standalone). The exit status is that of the rank that
failed first.
"""

from __future__ import annotations

import logging
import shlex
import sys

_MEETING = ("--standalone", "--nnodes", "--rdzv", "--node", "--master")
"""Beginnings of the options that say where nodes meet."""


def main(argv: list[str] | None = None) -> int:
    """Start the ranks, wait for them, and return the exit status: 128 + N after signal N."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv else 2
    from spmdrl.world.launch import use_one_thread

    use_one_thread()  # as torchrun does, with a warning
    if "--survive-engines" in argv[: _program(argv)]:
        return _start_apart(argv)
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


def _start_apart(argv: list[str]) -> int:
    """Start ranks of which each ends by itself."""
    import argparse

    parser = argparse.ArgumentParser("launch", allow_abbrev=False)
    parser.add_argument("--survive-engines", action="store_true")
    parser.add_argument("--nproc-per-node", "--nproc_per_node", type=int, required=True)
    parser.add_argument("--replace-engines", type=int, default=0)
    begin = _program(argv)
    told = parser.parse_args(argv[:begin])
    if told.nproc_per_node < 1 or begin == len(argv):
        parser.error(f"nothing to start: {shlex.join(argv)}")
    from spmdrl.world.start_ranks import start_ranks

    return start_ranks(argv[begin:], ranks=told.nproc_per_node, replacements=told.replace_engines)


def _shown(argv: list[str]) -> str:
    return shlex.join(argv[: _program(argv)]) or "(none)"


def _program(argv: list[str]) -> int:
    """Return where the program begins, behind the options."""
    begins = (i for i, w in enumerate(argv) if w.endswith(".py") or w in ("-m", "--module"))
    return next(begins, len(argv))
