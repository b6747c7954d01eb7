"""Processes of other ranks on this machine: a death is seen here first, and by itself."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def own_process() -> dict[str, Any]:
    """Return what this rank says of itself, so that those beside it can watch its process."""
    try:
        machine = f"{_BOOT.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no such files: nobody is beside this rank
        machine = ""
    pid = os.getpid()
    return {"host": socket.gethostname(), "machine": machine, "pid": pid, "born": birth(pid)}


class Neighbours:
    """The ranks on this machine that have said so.

    Args:
        own: of `own_process`.
    """

    def __init__(self, own: Mapping[str, Any]):
        self._own = own
        self._born: dict[int, tuple[int, str]] = {}
        """{rank: its process, and when that began, as it said: it may be dead by now}."""
        self._told: set[int] = set()
        """Ranks whose end was seen: what they wrote last stays where it is."""
        self.are_known = False
        """Every rank has said where it is."""

    def learn(self, states: Sequence[Mapping[str, Any] | None]) -> None:
        """Take in what each rank wrote last, None for nothing."""
        self.are_known = all(states)
        for rank, state in enumerate(states):
            if state and rank not in self._told and self._is_beside(state):
                self._born.setdefault(rank, (state["pid"], state["born"]))

    def dead(self) -> list[int]:
        """Return the ranks whose processes have ended, each once; several threads may ask."""
        gone = [rank for rank, (pid, born) in list(self._born.items()) if birth(pid) != born]
        own = [rank for rank in gone if self._born.pop(rank, None)]
        self._told.update(own)
        return own

    def _is_beside(self, state: Mapping[str, Any]) -> bool:
        return bool(self._own["machine"]) and (
            state.get("machine") == self._own["machine"] and state["pid"] != self._own["pid"]
        )


def birth(pid: int) -> str:
    """Return when a process began, in ticks; empty for one that is over, reaped or not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    words = text.rpartition(")")[2].split()  # its name, before, may have any character
    return "" if words[0] in "ZX" else words[19]
