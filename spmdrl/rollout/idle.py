"""Why an engine did not sample, or not as much as it could: seconds by cause.

Of the time in which a step's share comes about, an engine is idle by as much as it is empty: a
second with a quarter of its places taken counts 0.75 s. Its places are those that the share can
fill, at most engine.max_num_seqs.
"""

from __future__ import annotations

from collections.abc import Mapping

from spmdrl.types import Sums

CAUSES = ("tail", "reward", "environment", "replicas", "exchange", "update", "push")
"""Inside time/generate: the last sequences are long; nothing is left but to score; an environment
is to answer; another replica has what is missing. Outside: _PHASES."""
_PHASES = {
    "replicas": ("await rollouts",),
    "exchange": ("exchange scalars", "exchange tokens"),
    "update": ("annotate", "advantages", "update", "await peers", "agree to stop"),
    "push": ("push", "verify push"),
}
"""The named waits of an inference rank between two stretches of generation. Trainers come to
`await rollouts` right after a push, so an engine that waits there waits for another replica."""


def empty_shares(width: int, *, drawing: int, playing: int) -> dict[str, float]:
    """Return which share of an engine's places is empty, by cause, while it steps.

    Args:
        width: places. drawing: sequences that are in the engine. playing: episodes that will
            come back to it, when their environment has answered.
    """
    empty = max(0, width - drawing)
    waiting = min(empty, playing)
    return {"environment": waiting / width, "tail": (empty - waiting) / width}


class Idle:
    """Adds up the idle seconds of one replica's engine; its leader has one.

    Args:
        width: places of the engine that the replica's share can fill, sequences.
    """

    def __init__(self, width: int = 1):
        self.width = max(1, width)
        self._seconds: dict[str, float] = {}
        self._left_at: dict[str, float] | None = None  # not before the first step

    def add(self, cause: str, seconds: float) -> None:
        """Count seconds in which the engine stood still."""
        self._seconds[cause] = self._seconds.get(cause, 0.0) + seconds

    def stepped(self, seconds: float, *, drawing: int, playing: int) -> None:
        """Count what an engine step left empty."""
        shares = empty_shares(self.width, drawing=drawing, playing=playing)
        for cause, share in shares.items():
            self.add(cause, share * seconds)

    def left(self, totals: Mapping[str, float]) -> None:
        """Note that generation ends; `totals` are the watch's seconds by phase."""
        self._left_at = dict(totals)

    def came_back(self, totals: Mapping[str, float]) -> None:
        """Count what kept the engine since `left`."""
        if self._left_at is None:
            return
        for cause, phases in _PHASES.items():
            self.add(
                cause, sum(totals.get(name, 0.0) - self._left_at.get(name, 0.0) for name in phases)
            )

    def take(self) -> Sums:
        """Return the metrics since the last call, as means over replicas, and start anew."""
        seconds = self._seconds
        self._seconds = {}
        sums: Sums = {f"time/engine_idle_{cause}": (seconds.get(cause, 0.0), 1) for cause in CAUSES}
        return {"time/engine_idle": (sum(seconds.values()), 1)} | sums


def trainer_wait(await_s: float, generate_s: float, sums: Sums) -> Sums:
    """Split the trainers' wait for rollouts by what engines did in their time of generation.

    Args:
        await_s: seconds in `await rollouts`. generate_s: mean time/generate of the replicas.
        sums: with those of `Idle.take`.
    Returns: time/await_rollouts_<cause>, and _sampling for the rest: they add up to await_s.
    """
    found: Sums = {}
    left = 1.0
    for cause in ("tail", "reward", "environment"):
        seconds, count = sums[f"time/engine_idle_{cause}"]
        share = min(left, seconds / max(count, 1) / generate_s) if generate_s > 0 else 0.0
        found[f"time/await_rollouts_{cause}"] = (await_s * share, 1)
        left -= share
    return {"time/await_rollouts_sampling": (await_s * left, 1)} | found
