"""Compute something small in a forked child, which may hang or crash."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
from collections.abc import Callable

_MEMORY_BYTES = 4 << 30  # more than now
_MAX_BYTES = 1 << 16


def run_forked(function: Callable[[], str], *, timeout_s: float) -> str | None:
    """Return what the function returns; None if it raises, crashes or is not done in time.

    A lock that another thread holds stays locked in the child: the function must need none. The
    threads of a reward worker wait for pipes and sockets.

    Args:
        function: its result is a text; what is cut off at the deadline is no result.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            with open("/proc/self/statm") as file:
                used = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES,) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with open(write, "wb", closefd=False) as file:
                file.write(function().encode())
        os._exit(0)
    os.close(write)
    end = time.monotonic() + timeout_s
    try:
        answer = _read_until(end, read)
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return answer.decode() if answer else None


def _read_until(end: float, fd: int) -> bytes | None:
    """Return all that comes through a pipe; None where it is not closed in time."""
    parts: list[bytes] = []
    poller = select.poll()  # not select(), which fails for descriptors above 1023
    poller.register(fd, select.POLLIN)
    while poller.poll(max(0.0, 1000 * (end - time.monotonic()))):
        if not (data := os.read(fd, _MAX_BYTES)):
            return b"".join(parts)
        parts.append(data)
        if sum(map(len, parts)) > _MAX_BYTES:
            return None
    return None
