"""Which ranks are gone: as those beside them have said, or since nothing is heard of them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from spmdrl.world.lost_peers.watch import Watch

_SILENT_S = 6.0
"""Of a rank whose machine is gone with all that could tell of it; others' beats are 1 s apart."""


class Absent:
    """What one rank knows of it.

    Args:
        watch: of this rank.
    """

    def __init__(self, watch: Watch):
        self._watch = watch
        self._beats: dict[int, tuple[float, float]] = {}  # by rank its last, and when it was new

    def among(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return {rank: what is known of its end} of those among some ranks that are gone."""
        self._watch.look_beside()
        return self._watch.board.lost(ranks) | self._silent(ranks)

    def _silent(self, ranks: Sequence[int]) -> dict[int, str]:
        # Clocks of machines differ: what counts is for how long nothing new is seen here.
        now, found = time.monotonic(), dict[int, str]()
        away = [rank for rank in ranks if not self._watch.neighbours.knows(rank)]
        states = self._watch.board.read(away) if away else []
        for rank, state in zip(away, states):
            if not state:
                continue
            beat = state["beat"]
            before, since = self._beats.get(rank, (None, now))
            if beat != before:
                self._beats[rank] = beat, now
            elif now - since > _SILENT_S:
                found[rank] = f"rank {rank} is missing: no sign of life for {now - since:.0f} s"
        return found
