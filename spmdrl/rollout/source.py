"""The interface of sources of batches: sampled, recorded, or rows of a dataset.

A source works ahead: `generate(until=k)` generates this rank's share of the batches up to step k,
and `take(k)` returns the share of step k. Only inference ranks generate. No method waits for
another role.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmdrl.engine.protocol import EngineProtocol
from spmdrl.model_inputs import TokenIds
from spmdrl.rollout.episode import FinishedEpisode
from spmdrl.rollout.outcomes import ProblemOutcome
from spmdrl.types import Batch, Rollouts


class Source:
    """The methods that the training loop calls.

    The defaults suit a source whose batch depends on the step alone: it generates nothing ahead,
    holds no state and uses no engine.
    """

    has_rewards = True
    """Whether the sequences have rewards."""

    def generate(self, engine: EngineProtocol, *, until: int) -> None:
        """Generate this rank's share of each batch up to step `until` with the engine's weights."""

    def take(self, step: int) -> Rollouts:
        """Return this rank's share of the batch of `step`."""
        raise NotImplementedError

    def observe(self, batch: Batch, *, step: int) -> None:
        """Record the results of the whole batch of `step`, which may decide later prompts."""

    def probe_tokens(self) -> list[TokenIds]:
        """Return a few sequences that engine and trainer both score; the same on every rank."""
        return []

    def evaluate(self, engine: EngineProtocol, *, step: int) -> list[FinishedEpisode]:
        """Return the samples of this rank's share of the held-out problems."""
        return []

    def outcomes(self, samples: Sequence[FinishedEpisode]) -> list[ProblemOutcome]:
        """Return the outcome of each held-out problem."""
        return []

    def state_dict(self) -> dict[str, Any] | None:
        """Return what was generated and not taken yet; None if there is nothing to save."""
        return None

    def load_state_dict(self, states: list[dict[str, Any]], step: int) -> None:
        """Restore what all ranks saved in a checkpoint of `step`."""

    def start(self, step: int) -> None:
        """Prepare to begin, or to continue after a checkpoint, with this step."""

    def close(self) -> None:
        """End worker processes."""
