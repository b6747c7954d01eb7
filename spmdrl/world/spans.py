"""When this rank was in which phase or wait, for the timeline of a run."""

from __future__ import annotations

import time
from collections import Counter
from typing import NamedTuple

_SAME_S = 1e-3  # stretches that are this close to each other are one
_MOST = 500  # of a name in a step


class Stretch(NamedTuple):
    """A stretch of time of this rank, in seconds of time.monotonic()."""

    name: str
    began: float
    ended: float


class Spans:
    """Holds the stretches of this rank since the last call of `take`.

    `Watch` adds each phase and wait, and others add idle times that have no phase of their own.
    """

    def __init__(self) -> None:
        self._stretches: list[Stretch] = []
        self._counts = Counter[str]()

    def add(self, name: str, began: float, ended: float) -> None:
        """Add a stretch, in seconds of time.monotonic()."""
        self._counts[name] += 1
        if self._counts[name] <= _MOST:
            self._stretches.append(Stretch(name, began, ended))

    def add_last(self, name: str, seconds: float) -> None:
        """Add a stretch that ends now. If the last one has this name too and has just ended, it
        becomes longer instead."""
        now = time.monotonic()
        began = now - seconds
        last = self._stretches[-1] if self._stretches else None
        if last and last.name == name and began - last.ended < _SAME_S:
            self._stretches[-1] = last._replace(ended=now)
        else:
            self.add(name, began, now)

    def take(self) -> tuple[list[Stretch], int]:
        """Return the stretches, and how many were left out; reset both. Of each name the first 500
        are kept."""
        taken = self._stretches
        left_out = self._counts.total() - len(taken)
        self._stretches = []
        self._counts = Counter()
        return taken, left_out
