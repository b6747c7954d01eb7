"""The host's memory: how much is left, and who holds the most.

When it is full, the kernel kills the largest process silently. A warning comes before that.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from spmdrl.world.lost_peers.watch import Watch

log = logging.getLogger(__name__)

_CGROUPS = (  # limit, usage, what the kernel killed: of version 2 and version 1
    ("memory.max", "memory.current", "memory.events"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.oom_control"),
)
_EVERY_S = 2.0
_LOW = 0.05  # of the host's memory: warn when less is free
_FINE = 0.10  # of the host's memory: the warning ends when more is free
_NAMED = 3
_GIB = 2**30
_TRIM_THRESHOLD = -1  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h
_MMAP_THRESHOLD = -3
_KEPT_BYTES = 2**28
_LARGE_BYTES = 2**25  # the highest to which glibc itself raises its threshold


@dataclass(frozen=True)
class HostMemory:
    """Memory of this host, or of this container if its limit is lower. Bytes."""

    free: int
    """Bytes that all processes together can still allocate."""
    total: int


def keep_freed_memory() -> None:
    """Have malloc keep up to 256 MiB that this process has freed; only with glibc.

    By default it returns the end of the heap to the kernel after each backward pass on a CPU. The
    next forward pass then takes a page fault for every 4 KiB: 10 ms of a step of 0.7 s.
    """
    if (libc := _glibc()) is not None:
        # To set one ends glibc's own adjustment of both.
        libc.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)


def return_freed_memory() -> None:
    """Have malloc return what it keeps of freed memory to the kernel; only with glibc."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None


def host_memory(cgroups: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """Measure the host's memory."""
    memory = psutil.virtual_memory()
    free = memory.available
    total = memory.total
    for limit_name, usage_name, _ in _CGROUPS:
        limit = _number(cgroups / limit_name)
        usage = _number(cgroups / usage_name)
        if limit is not None and usage is not None and limit < total:
            free = min(free, max(0, limit - usage))
            total = limit
    return HostMemory(free, total)


def kills(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many processes the kernel has killed here because memory was full."""
    files = [Path("/proc/vmstat"), *(cgroups / events for *_, events in _CGROUPS)]
    counts = [0]
    for file in files:
        with contextlib.suppress(OSError):
            words = (line.split() for line in file.read_text().splitlines())
            counts += [int(value) for name, value in words if name == "oom_kill"]
    return max(counts)


def largest_holders(count: int = _NAMED) -> list[str]:
    """Name the processes that hold the most memory, largest first."""
    return [text for _, text in sorted(_processes(), reverse=True)[:count]]


class MemoryWatch:
    """Warns once when little of the host's memory is left, and again each time it halves.

    Args:
        measure: returns the present memory.
    """

    def __init__(self, measure: Callable[[], HostMemory] = host_memory):
        self._measure = measure
        self._said_at = _LOW
        self._killed_before = kills()

    def start(self, watch: Watch) -> None:
        """Look every two seconds, in a thread. If this rank ends early, print what the kernel
        killed."""
        threading.Thread(target=self._run, daemon=True, name="spmdrl-memory").start()
        watch.before_exit.append(lambda _: print(self.tell_kills(), end="", file=sys.stderr))

    def look(self) -> str:
        """Return a warning if one is due, else an empty text."""
        memory = self._measure()
        left = memory.free / memory.total
        if left > _FINE:
            self._said_at = _LOW
        if left >= self._said_at:
            return ""
        self._said_at = left / 2
        return (
            f"the host's memory is nearly full: {memory.free / _GIB:.2f} of "
            f"{memory.total / _GIB:.1f} GiB are left, and the kernel kills the largest process "
            f"when none is. The largest: {'; '.join(largest_holders())}. Complete "
            "checkpoints stay. To need less: fewer reward workers (rewards.workers), a smaller "
            "engine.cpu_kv_cache_gib, or without model.memory.offload"
        )

    def tell_kills(self) -> str:
        """Return what the kernel killed since this object was made; empty if it killed nothing."""
        killed = kills() - self._killed_before
        if killed <= 0:
            return ""
        return (
            f"the kernel killed {killed} process{'es' if killed > 1 else ''} of this host for want "
            "of memory since the start: a rank that vanished without a word was likely one\n"
        )

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(_EVERY_S):
            with contextlib.suppress(OSError):  # /proc may be unreadable for a moment
                if warning := self.look():
                    log.warning(warning)


def _processes() -> Iterator[tuple[int, str]]:
    for process in psutil.process_iter(["memory_info", "cmdline", "environ"]):
        info = process.info  # None for what is another user's
        if not (memory := info["memory_info"]):
            continue
        env = info["environ"] or {}
        command = " ".join(info["cmdline"] or ())
        rank = env.get("RANK") or env.get("SLURM_PROCID")  # its own, or of the one that it serves
        of_rank = f" of rank {rank}" if rank else ""
        size = f"{memory.rss / _GIB:.2f} GiB"
        yield memory.rss, f"process {process.pid}{of_rank}, {size} ({command.strip()[:60]})"


def _number(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        return int(file.read_text())
    return None
