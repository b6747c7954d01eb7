"""The process between the pool and a worker: what the worker started ends with it.

    pool -> keeper -> worker -> whatever a user's functions start

Orphans come back to the keeper (a subreaper), whatever session or group they moved to. When the
worker ends, the pool lets go of its end of the life line, or the pool's process is killed, the
keeper kills all that is below it and then ends like the worker. It imports next to nothing.
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
_FIRST_VICTIM = "500"  # of the kernel, where the machine's memory ends; the trainer has 0


def become_worker(life: int, *, memory_bytes: int) -> None:
    """Return in the worker, a fork of this process, which becomes its keeper.

    Args:
        life: socket whose other end only the parent holds; what is said here goes there.
        memory_bytes: that the worker and all that it starts may hold; 0 for no limit.
    """
    os.set_inheritable(life, False)
    _prctl(_SUBREAPER, 1)
    keeper = os.getpid()
    worker = os.fork()
    if worker:
        try:
            _keep(worker, life, memory_bytes)
        finally:
            os._exit(1)
    os.close(life)
    _prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        os._exit(1)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(_FIRST_VICTIM)
    if memory_bytes:
        # Private memory that can be written: RLIMIT_AS would count what torch only reserves.
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


class Strays:
    """What jobs started and left alone. In the worker; what the worker itself is the parent of may
    be wanted again, and lives as long as it does."""

    def __init__(self) -> None:
        keeper = os.getppid()
        self._own = b"%d" % os.getpid()
        # Held open: it is read after each job. Absent from some kernels: then at the end only.
        self._children = -1
        with contextlib.suppress(OSError):
            self._children = os.open(f"/proc/{keeper}/task/{keeper}/children", os.O_RDONLY)

    def end(self) -> None:
        """Kill them. Between jobs: in a job, they may have something to do for it."""
        found = b"" if self._children < 0 else os.pread(self._children, 65536, 0)
        for pid in found.split():
            if pid != self._own:
                for one in _tree(int(pid)):
                    _kill(one)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _keep(worker: int, life: int, memory_bytes: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):  # the pool's pipes are the worker's
        os.dup2(nothing, fd)
    poller = select.poll()
    poller.register(life, select.POLLIN)
    rest_ms = _WATCH_MS if memory_bytes else _IDLE_MS
    try:
        poller.register(os.pidfd_open(worker), select.POLLIN)
    except OSError:  # an old kernel, or one that forbids it
        rest_ms = _SHORT_MS
    while not poller.poll(rest_ms) and not _has_ended(worker):
        _reap(worker)
        if memory_bytes and (held := _held(memory_bytes)):
            with contextlib.suppress(OSError):
                os.write(life, b"%d" % held)
            break
    status = _end_all(worker)
    _end_like(os.waitstatus_to_exitcode(status))


def _has_ended(worker: int) -> bool:
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, worker, flags) is not None


def _reap(worker: int) -> None:
    """Take note of orphans that ended, not of the worker."""
    for pid in _children(os.getpid()):
        if pid != worker:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _end_all(worker: int) -> int:
    """Kill everything below this process; return the worker's status."""
    found = 0
    while True:
        for pid in _tree(os.getpid())[1:]:
            _kill(pid)
        try:
            pid, status = os.waitpid(-1, 0)  # and the children of what ended are ours
        except ChildProcessError:
            return found
        if pid == worker:
            found = status


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


def _held(limit: int) -> int:
    """Return the bytes of memory that everything below this process holds; 0 up to the limit."""
    own = _tree(os.getpid())[1:]
    if sum(map(_resident_bytes, own)) <= limit:
        return 0
    held = sum(map(_proportional_bytes, own))  # what forks share counts once; slower to tell
    return held if held > limit else 0


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
