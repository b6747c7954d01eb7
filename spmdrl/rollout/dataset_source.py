"""What sources have in common that need no engine: a batch is a function of the step."""

from __future__ import annotations

from typing import Any

from spmdrl.engine.protocol import EngineProtocol
from spmdrl.rollout.outcomes import Outcome
from spmdrl.types import Batch


class OfflineSource:
    """Generates nothing and holds nothing; `take` and `check_context` are a subclass's own."""

    def generate(self, engine: EngineProtocol, *, until: int) -> None:
        """Do nothing: the batches are at hand."""

    def observe(self, batch: Batch, *, step: int) -> None:
        """Do nothing: no later batch depends on it."""

    def probe_tokens(self) -> list[tuple[int, ...]]:
        """Return nothing: there is no engine to compare with."""
        return []

    def evaluate(self, engine: EngineProtocol, *, step: int) -> list[Outcome]:
        """Return nothing: there is no engine to sample with."""
        return []

    def state_dict(self) -> dict[str, Any] | None:
        """Return None: a batch is a function of the step."""
        return None

    def load_state_dict(self, states: list[dict[str, Any]], step: int) -> None:
        """Do nothing: a batch is a function of the step."""

    def close(self) -> None:
        """Do nothing."""
