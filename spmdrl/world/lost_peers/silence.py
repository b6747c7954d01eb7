"""For how long other ranks have been silent, whatever the clocks of their hosts show."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


class Silence:
    """Compares beats with this rank's clock.

    A beat is the writer's `time.monotonic()`. The clocks of two hosts differ by a constant. A rank
    takes the least difference that it has seen as that constant, so it may count up to one beat too
    little, and never too much.

    Args:
        machine: of this rank, see `own_process`; empty if it is not known.
    """

    def __init__(self, machine: str):
        self._machine = machine
        self._least: dict[int, float] = {}

    def seconds(self, rank: int, state: Mapping[str, Any]) -> float:
        """Return the seconds since a rank's last beat, 0 for the first one that is seen.

        Args:
            state: what the rank wrote last.
        """
        difference = time.monotonic() - state["beat"]
        if self._machine and state.get("machine") == self._machine:
            return difference  # ranks of one machine have one clock
        self._least[rank] = min(difference, self._least.get(rank, difference))
        return difference - self._least[rank]
