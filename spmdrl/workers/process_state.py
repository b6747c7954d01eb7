"""The state of a process that its jobs share, restored after each: a job must not change others."""

from __future__ import annotations

import _signal
import builtins
import contextlib
import operator
import os
import signal
import sys
from collections.abc import MutableMapping
from typing import Any

# `_signal.getsignal`: that of `signal` makes an enum member of each handler, at ten times the cost.
_SIGNALS = [n for n in range(1, 32) if n not in (signal.SIGKILL, signal.SIGSTOP)]


class ProcessState:
    """Working directory, umask, signals, timers, recursion limit, and the entries of environment,
    modules and builtins, as they are when this is made. Used in the main thread."""

    def __init__(self) -> None:
        self._folder = os.getcwd()
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        self._handlers = {n: _signal.getsignal(n) for n in _SIGNALS}
        self._recursion = sys.getrecursionlimit()
        self._trace = sys.gettrace()
        self._streams = {name: getattr(sys, name) for name in ("stdin", "stdout", "stderr")}
        # Entries that are added later stay: a function may import at its first call.
        self._kept: list[tuple[MutableMapping, dict]] = [
            (shared, dict(shared)) for shared in (sys.modules, vars(builtins))
        ]
        self._environment = dict(os.environ)
        self._as_bytes = dict(vars(os.environb)["_data"])
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])

    def restore(self) -> None:
        """Restore what a job has changed, and stop its timers."""
        with contextlib.suppress(OSError):  # the folder is gone
            os.chdir(self._folder)
        os.umask(self._umask)
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        for number, handler in self._handlers.items():
            if handler is not None and _signal.getsignal(number) is not handler:
                with contextlib.suppress(OSError):  # one of the C library's own
                    signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        sys.setrecursionlimit(self._recursion)
        if sys.gettrace() is not self._trace:
            sys.settrace(self._trace)
        for name, stream in self._streams.items():
            setattr(sys, name, stream)
        for shared, kept in self._kept:
            for name in _changed(shared, kept):
                shared[name] = kept[name]
        if _changed(vars(os.environb)["_data"], self._as_bytes):
            os.environ.update(self._environment)


def _changed(shared: MutableMapping[Any, Any], kept: dict[Any, Any]) -> list[Any]:
    """Return the names that have another value now, or none."""
    is_same = list(map(operator.is_, map(shared.get, kept), kept.values()))
    if all(is_same):  # 30 ns each, and there may be thousands of modules
        return []
    return [name for name, same in zip(kept, is_same) if not same]
