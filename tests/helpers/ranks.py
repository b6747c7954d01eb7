"""Start real ranks for a test: one process each, gloo, a free port, never without a deadline."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from spmdrl.tools.proof import ranks
from spmdrl.tools.proof.ranks import RankError, on_ranks

ranks.PRELOADED = [*ranks.PRELOADED, "tests.helpers.preloaded"]
_PORTS = range(16000, 20000)  # below those of jobs under Slurm, and those that the system deals out


def free_port() -> int:
    """Return a TCP port that was free a moment ago, and that no other test gets meanwhile.

    It may be seconds until ranks bind it. All processes of all runs of the tests on this machine
    therefore take the next one by a counter in a locked file.
    """
    counter = Path(tempfile.gettempdir()) / f"spmdrl-test-ports-{os.getuid()}"
    with counter.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        taken = int(file.read() or random.SystemRandom().choice(_PORTS))
        port = _next_free(taken)
        file.truncate(0)
        file.write(str(port))
    return port


def _next_free(port: int) -> int:
    for _ in _PORTS:
        port = port + 1 if port + 1 in _PORTS else _PORTS.start
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port of {_PORTS} is free")


def forget_imports() -> None:
    """Have the next rank be a fork of a new process, which finds the modules of today's paths."""
    forkserver._forkserver._stop()  # waits for the ranks that it has made, all of which are gone


def run_ranks(world_size: int, target: Callable, *args: Any, timeout_s: float = 600.0) -> list[Any]:
    """Run `target(*args)` (module-level, picklable) in `world_size` fresh processes.

    The target starts torch.distributed itself (env:// variables are set) and returns a
    picklable value. Returns the values in rank order. Raises AssertionError with the rank's
    traceback when one fails, or when the deadline passes, and naming those that died without a
    word, whatever their peers said of it before; all processes are gone either way.
    """
    try:
        return on_ranks(world_size, target, *args, timeout_s=timeout_s, port=free_port())
    except RankError as error:
        raise AssertionError(f"{error}\n{error.text}") from None
