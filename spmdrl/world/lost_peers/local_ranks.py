"""The processes of other ranks on this machine, whose death is seen without the network."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def own_process() -> dict[str, Any]:
    """Return what identifies this rank's process, for the other ranks of this machine."""
    try:
        machine = f"{_BOOT.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no such files: this rank cannot recognise others of its machine
        machine = ""
    pid = os.getpid()
    return {"host": socket.gethostname(), "machine": machine, "pid": pid, "born": birth(pid)}


class LocalRanks:
    """The ranks whose states say that they are on this machine.

    Args:
        own: of `own_process`.
    """

    def __init__(self, own: Mapping[str, Any]):
        self._own = own
        self._born: dict[int, tuple[int, str]] = {}
        """{rank: (process id, start time) from its state}. The process may be dead already."""
        self._found_dead: set[int] = set()
        """Ranks that were found dead. Their last states stay in the store."""
        self.are_known = False
        """Every rank has written a state."""

    def update(self, states: Sequence[Mapping[str, Any] | None]) -> None:
        """Take the last state of each rank, None for a rank that wrote none."""
        self.are_known = all(states)
        for rank, state in enumerate(states):
            if state and rank not in self._found_dead and self._is_local(state):
                self._born.setdefault(rank, (state["pid"], state["born"]))

    def find_dead(self) -> list[int]:
        """Return the ranks whose processes have ended, each of them once. Threads may share it."""
        gone = [rank for rank, (pid, born) in list(self._born.items()) if birth(pid) != born]
        own = [rank for rank in gone if self._born.pop(rank, None)]
        self._found_dead.update(own)
        return own

    def _is_local(self, state: Mapping[str, Any]) -> bool:
        machine = self._own["machine"]
        is_here = machine and state.get("machine") == machine
        return bool(is_here and state["pid"] != self._own["pid"])


def birth(pid: int) -> str:
    """Return the start time of a process in ticks; empty for one that has ended or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    words = text.rpartition(")")[2].split()  # the name before it may hold any character
    return "" if words[0] in "ZX" else words[19]
