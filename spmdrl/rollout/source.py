"""Sources of batches, behind one interface: sampled, recorded, or rows of a dataset.

A source works ahead: `generate(until=k)` makes sure that this rank's share of the batches up
to step k exists, `take(k)` hands one over. Only inference ranks generate; nothing here waits
for another role.
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
    """What the loop asks of a source. Unless it says else, a batch is a function of the step:
    nothing is generated or held, and there is no engine to sample or to compare with."""

    has_rewards = True
    """Whether its sequences are rewarded."""

    def generate(self, engine: EngineProtocol, *, until: int) -> None:
        """Make this rank's share of all batches up to step `until`, with the engine's weights."""

    def take(self, step: int) -> Rollouts:
        """Hand over this rank's share of the batch of `step`."""
        raise NotImplementedError

    def observe(self, batch: Batch, *, step: int) -> None:
        """Take in what the whole batch of `step` came to, for the choice of later prompts."""

    def probe_tokens(self) -> list[TokenIds]:
        """Return a few sequences for engine and trainer to score, the same on every rank."""
        return []

    def evaluate(self, engine: EngineProtocol, *, step: int) -> list[FinishedEpisode]:
        """Return the samples of this rank's share of the held-out problems."""
        return []

    def outcomes(self, samples: Sequence[FinishedEpisode]) -> list[ProblemOutcome]:
        """Return what such samples came to, problem by problem."""
        return []

    def state_dict(self) -> dict[str, Any] | None:
        """Return what was made ahead and not yet taken; None where nothing is held."""
        return None

    def load_state_dict(self, states: list[dict[str, Any]], step: int) -> None:
        """Take up what all ranks had made ahead when a checkpoint of `step` was written."""

    def start(self, step: int) -> None:
        """Take note that the run begins, or goes on, with this step."""

    def close(self) -> None:
        """End worker processes."""
