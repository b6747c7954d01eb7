"""The process between the pool and a worker. It kills all processes that the worker has started.

    pool -> subreaper -> worker -> processes that a user's functions start

Orphans become children of the subreaper, also if they have moved to another session or group. The
subreaper waits until the worker ends, the pool closes its end of the life socket, or the pool's
process is killed. Then it kills all processes below it, and ends with the worker's status. It
imports little.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys

_PDEATHSIG = 1
_SUBREAPER = 36
_SHORT_MS = 20
_WATCH_MS = 100
_IDLE_MS = 1000
_OOM_SCORE = "500"  # the kernel ends processes of high scores first; a trainer has 0


def become_worker(life: int, *, memory_bytes: int) -> None:
    """Fork: this process becomes the subreaper, and the fork returns as the worker.

    Args:
        life: socket; only the parent has the other end. If the subreaper ends the worker because of
            its memory, it writes the number of bytes to the socket.
        memory_bytes: limit for the worker and all processes that it starts; 0 for none.
    """
    os.set_inheritable(life, False)
    _prctl(_SUBREAPER, 1)
    subreaper = os.getpid()
    worker = os.fork()
    if worker:
        try:
            _watch(worker, life, memory_bytes)
        finally:
            os._exit(1)
    os.close(life)
    _prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != subreaper:
        os._exit(1)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(_OOM_SCORE)
    if memory_bytes:
        # Limits private writable memory. RLIMIT_AS would count memory that torch only reserves.
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


class Strays:
    """Kills orphans of jobs, from the worker. Children of the worker itself are not orphans: later
    jobs may need them."""

    def __init__(self) -> None:
        subreaper = os.getppid()
        self._own = b"%d" % os.getpid()
        # The file stays open, because it is read after each job. Some kernels do not have it:
        # orphans are then killed only when the worker ends.
        self._children = -1
        with contextlib.suppress(OSError):
            self._children = os.open(f"/proc/{subreaper}/task/{subreaper}/children", os.O_RDONLY)

    def end(self) -> None:
        """Kill the orphans. Call this between jobs, because a job may need its processes."""
        children = b"" if self._children < 0 else os.pread(self._children, 65536, 0)
        for child in children.split():
            if child != self._own:
                for pid in _tree(int(child)):
                    _kill(pid)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _watch(worker: int, life: int, memory_bytes: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):  # the pool's pipes belong to the worker
        os.dup2(nothing, fd)
    poller = select.poll()
    poller.register(life, select.POLLIN)
    poll_ms = _WATCH_MS if memory_bytes else _IDLE_MS
    try:
        poller.register(os.pidfd_open(worker), select.POLLIN)
    except OSError:  # an old kernel, or one that forbids it
        poll_ms = _SHORT_MS
    while not poller.poll(poll_ms) and not _has_ended(worker):
        _reap(worker)
        if memory_bytes and (used_bytes := _memory_above(memory_bytes)):
            with contextlib.suppress(OSError):
                os.write(life, b"%d" % used_bytes)
            break
    status = _end_all(worker)
    _end_like(os.waitstatus_to_exitcode(status))


def _has_ended(worker: int) -> bool:
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, worker, flags) is not None


def _reap(worker: int) -> None:
    """Reap orphans that have ended, but not the worker."""
    for pid in _children(os.getpid()):
        if pid != worker:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _end_all(worker: int) -> int:
    """Kill everything below this process; return the worker's status."""
    worker_status = 0
    while True:
        for pid in _tree(os.getpid())[1:]:
            _kill(pid)
        try:
            pid, status = os.waitpid(-1, 0)  # then the children of `pid` are our children
        except ChildProcessError:
            return worker_status
        if pid == worker:
            worker_status = status


def _end_like(code: int) -> None:
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it ended
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    return found


def _tree(pid: int) -> list[int]:
    """Return a process and all below it."""
    found = [pid]
    for one in found:
        found += _children(one)
    return found


def _memory_above(limit: int) -> int:
    """Return the bytes of memory of all processes below this one; 0 within the limit."""
    pids = _tree(os.getpid())[1:]
    if sum(map(_resident_bytes, pids)) <= limit:
        return 0
    used_bytes = sum(map(_proportional_bytes, pids))  # slower, but counts shared pages once
    return used_bytes if used_bytes > limit else 0


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
    return 0


def _proportional_bytes(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0
