"""Compute something small in a forked child, which may hang or crash."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection

_MEMORY_BYTES = 4 << 30  # more than now
_MAX_BYTES = 1 << 16


def run_forked(function: Callable[[], str], *, timeout_s: float) -> str | None:
    """Return what the function returns; None if it raises, crashes or is not done in time.

    A lock that another thread holds stays locked in the child: the function must need none. The
    threads of a reward worker wait for pipes and sockets.

    Args:
        function: its result is a text; what is cut off at the deadline is no result.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(function, theirs))
    child.start()
    theirs.close()
    try:
        return ours.recv_bytes(_MAX_BYTES).decode() if ours.poll(timeout_s) else None
    except (EOFError, OSError):  # it sent nothing, or too much
        return None
    finally:
        child.kill()
        child.join()
        ours.close()


def _answer(function: Callable[[], str], theirs: Connection) -> None:
    with contextlib.suppress(BaseException):
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        theirs.send_bytes(function().encode())
    os._exit(0)
