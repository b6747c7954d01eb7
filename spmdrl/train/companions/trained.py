"""What the models of the section `critic` share: trained beside the policy, on its own rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from spmdrl.config import Config
from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.model.sharded_model import ShardedModel
from spmdrl.train.companions.companion import Companion
from spmdrl.train.microbatches import PreparedMicrobatch, Stats
from spmdrl.train.trained_model import TrainedModel
from spmdrl.types import Sums
from spmdrl.world.world import World


class TrainedCompanion(Companion):
    """A companion with its optimizer, on the trainer ranks.

    Args:
        cfg, world: the config and this rank's view of the job.
        policy: whose packed rows it reads.
        name: first part of its metrics' names. what: the kind of model, for messages.
        is_scalar: with a head of one output per token.
    Raises: Refusal when the model cannot be loaded or laid out, or cannot read those rows.
    """

    is_trained = True

    def __init__(
        self,
        cfg: Config,
        world: World,
        *,
        policy: ShardedModel,
        name: str,
        what: str,
        is_scalar: bool,
    ):
        path = cfg.critic.path or cfg.model.path
        with refusing(f"critic.path: the {what} cannot be made", Refusal):
            self.model = ShardedModel(cfg, world, path=path, is_trained=True, is_scalar=is_scalar)
        _check_fit(self.model, policy)
        options = replace(cfg.optimizer, lr=cfg.critic.lr)
        self.trained = TrainedModel(self.model, options, name=name)

    def update(self, updates: Sequence[Sequence[PreparedMicrobatch]], *, step: int) -> Sums:
        """Take an optimizer step for each of the batch's updates; see TrainedModel.

        Args:
            updates: [updates of all epochs][micro-batches], with the columns that the loss reads.
            step: training step, for the schedule.
        Returns: sums over all trainer ranks, equal on each of them.
        """
        return self.trained.update(updates, self._loss, step=step)

    def rehearse(self, microbatches: Sequence[PreparedMicrobatch]) -> None:
        """Run the micro-batches of an update and discard the result; see TrainedModel."""
        self.trained.rehearse(microbatches, self._loss)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, by name, sharing live storage; see TrainedModel."""
        return self.trained.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, after it was loaded onto this layout."""
        self.trained.load_state_dict(state)

    def _loss(self, microbatch: PreparedMicrobatch) -> tuple[Tensor, Stats]:
        raise NotImplementedError


def _check_fit(model: ShardedModel, policy: ShardedModel) -> None:
    rows, needed = (m.hf_model.get_input_embeddings().weight.shape[0] for m in (model, policy))
    if rows < needed:
        raise Refusal(
            f"critic.path: the model embeds {rows} tokens, fewer than the "
            f"policy's {needed}; take one with the policy's tokenizer"
        )
    if model.slicing.is_padded != policy.slicing.is_padded:
        raise Refusal(
            "critic.path: it and the policy need different attention (one has "
            "a softcap); set model.kernels.attention to padded"
        )
