"""Why an engine did not sample, or not as much as it could: seconds by cause.

While an engine samples a step's share, each second counts as idle by the fraction of its places
that are empty: with a quarter of the places in use, a second counts 0.75 s. An engine has as many
places as the shares that it samples at once can fill, at most engine.max_num_seqs: one share, or in
flight those of `lag` later steps too.
"""

from __future__ import annotations

from collections.abc import Mapping

from spmdrl.types import Sums
from spmdrl.world.spans import Spans

CAUSES = ("tail", "reward", "environment", "replicas", "exchange", "update", "push")
"""Causes inside time/generate:

- tail: too few sequences are left to fill the engine;
- reward: the workers score the last samples, or the engine draws for their judge alone;
- environment: episodes wait for their environment or agent;
- replicas: another replica samples the missing groups.

The other causes, and more of `replicas`, are outside of time/generate; see _PHASES."""
_PHASES = {
    "replicas": ("await rollouts",),
    "exchange": ("exchange scalars", "exchange tokens"),
    "update": ("annotate", "advantages", "update", "await peers", "agree to stop"),
    "push": ("push", "verify push"),
}
"""{cause: phases of an inference rank between two stretches of generation}. Trainers enter
`await rollouts` right after a push, so an engine that waits there waits for another replica."""


def empty_shares(width: int, *, drawing: int, playing: int) -> dict[str, float]:
    """Return {cause: fraction of the engine's places that are empty} during an engine step.

    Args:
        width: places of the engine.
        drawing: sequences in the engine.
        playing: episodes that wait for their environment and will need a place afterwards.
    """
    empty = max(0, width - drawing)
    waiting = min(empty, playing)
    return {"environment": waiting / width, "tail": (empty - waiting) / width}


class Idle:
    """Adds up the idle seconds of one replica's engine. Only the replica's leader has one.

    Args:
        width: places of the engine, sequences.
        spans: gets the stretches in which the engine did nothing; None: they are not kept.
    """

    def __init__(self, width: int = 1, *, spans: Spans | None = None):
        self.width = max(1, width)
        self._spans = spans
        self._seconds: dict[str, float] = {}
        self._num_steps = 0
        self._paused_at: dict[str, float] | None = None  # None before the first `pause`

    def add(self, cause: str, seconds: float) -> None:
        """Count seconds until now in which the engine did nothing."""
        self._count(cause, seconds)
        if self._spans is not None:
            self._spans.add_last(f"engine idle {cause}", seconds)

    def _count(self, cause: str, seconds: float) -> None:
        self._seconds[cause] = self._seconds.get(cause, 0.0) + seconds

    def count_step(self, seconds: float, *, drawing: int, playing: int, judging: int = 0) -> None:
        """Count an engine step, and the places that it left empty.

        Args:
            judging: sequences in the engine that are a judge's.
        """
        shares = empty_shares(self.width, drawing=drawing, playing=playing)
        is_judges = judging > 0 and judging == drawing
        self._num_steps += not is_judges
        if is_judges:
            shares["reward"] = shares.pop("tail")
        for cause, share in shares.items():
            self._count(cause, share * seconds)

    def pause(self, totals: Mapping[str, float]) -> None:
        """Mark the end of a stretch of generation.

        Args:
            totals: {phase: seconds so far} of the watch.
        """
        self._paused_at = dict(totals)

    def resume(self, totals: Mapping[str, float]) -> None:
        """Count the waits since `pause` by cause.

        Args:
            totals: as for `pause`.
        """
        if self._paused_at is None:
            return
        for cause, phases in _PHASES.items():
            self._count(
                cause,
                sum(totals.get(name, 0.0) - self._paused_at.get(name, 0.0) for name in phases),
            )

    def take(self) -> Sums:
        """Return the metrics since the last call, as means over replicas, and reset them."""
        seconds = self._seconds
        self._seconds = {}
        num_steps = self._num_steps
        self._num_steps = 0
        sums: Sums = {"perf/engine_steps": (num_steps, 1)}
        sums |= {f"time/engine_idle_{cause}": (seconds.get(cause, 0.0), 1) for cause in CAUSES}
        return {"time/engine_idle": (sum(seconds.values()), 1)} | sums


def trainer_wait(await_s: float, generate_s: float, sums: Sums) -> Sums:
    """Split the trainers' wait for rollouts by cause, in the proportions of the engines' time.

    Args:
        await_s: seconds in `await rollouts`.
        generate_s: mean time/generate of the replicas.
        sums: metrics, including those of `Idle.take`.
    Returns: time/await_rollouts_<cause>, and time/await_rollouts_sampling for the rest. They add
        up to await_s.
    """
    sums_by_cause: Sums = {}
    left = 1.0
    for cause in ("tail", "reward", "environment"):
        seconds, count = sums[f"time/engine_idle_{cause}"]
        share = min(left, seconds / max(count, 1) / generate_s) if generate_s > 0 else 0.0
        sums_by_cause[f"time/await_rollouts_{cause}"] = (await_s * share, 1)
        left -= share
    return {"time/await_rollouts_sampling": (await_s * left, 1)} | sums_by_cause
