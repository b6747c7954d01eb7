"""The interface of a model beside the policy. The base class neither learns nor keeps state.

All are sharded like the policy and run on the trainer ranks, which walk through them in the
same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from spmdrl.model.sharded_model import ShardedModel
from spmdrl.train.microbatches import PreparedMicrobatch
from spmdrl.types import Sums


class Companion:
    """A model beside the policy."""

    is_trained = False
    """Whether it has an optimizer, and config.critic says how it learns."""

    def columns(self, microbatches: Sequence[PreparedMicrobatch]) -> list[dict[str, Tensor]]:
        """Return, per micro-batch, per-token columns by name: [T] float32, 0 off the scored."""
        raise NotImplementedError

    def update(self, updates: Sequence[Sequence[PreparedMicrobatch]], *, step: int) -> Sums:
        """Train on a step's batch, before the policy does; return sums over all trainers."""
        return {}

    def rehearse(self, microbatches: Sequence[PreparedMicrobatch]) -> None:
        """Run the micro-batches of an update and discard the result."""

    def follow(self, policy: ShardedModel, *, step: int) -> None:
        """Copy or mix in weights of the policy after its update, where the model follows it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as TrainedModel does; {} if it never changes."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, after it was loaded onto this layout."""
