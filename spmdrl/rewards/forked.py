"""Compute something small in a forked child, which may hang or crash."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
from collections.abc import Callable

_MEMORY_BYTES = 4 << 30  # more than now


def run_forked(function: Callable[[], str], *, timeout_s: float) -> str | None:
    """Return what the function returns; None if it raises, crashes or is not done in time.

    A lock that another thread holds stays locked in the child: the function must need none. The
    threads of a reward worker wait for pipes and sockets.

    Args:
        function: its result is at most 4096 bytes of UTF-8, which a pipe takes at once.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            with open("/proc/self/statm") as file:
                used = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES,) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.write(write, function().encode())
        os._exit(0)
    os.close(write)
    try:
        poller = select.poll()  # not select(), which fails for descriptors above 1023
        poller.register(read, select.POLLIN)
        answer = os.read(read, 4096) if poller.poll(max(0.0, 1000 * timeout_s)) else b""
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return answer.decode() or None
