"""The value model of PPO: a second sharded model, trained beside the policy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from spmdrl.algorithms.values import explained_variance, value_loss
from spmdrl.config import Config
from spmdrl.model.parallel.layout import reshard
from spmdrl.model.scorer import ScoredRow
from spmdrl.model.sharded_model import ShardedModel
from spmdrl.train.companions.trained import TrainedCompanion
from spmdrl.train.microbatches import PreparedMicrobatch, Stats
from spmdrl.types import Sums
from spmdrl.world.world import World


class ValueModel(TrainedCompanion):
    """A value model and its optimizer, on the trainer ranks.

    Args:
        cfg, world: the config and this rank's view of the job.
        policy: whose packed rows it reads.
    Raises: Refusal when the model cannot be loaded or laid out, or cannot read those rows.
    """

    def __init__(self, cfg: Config, world: World, *, policy: ShardedModel):
        super().__init__(
            cfg, world, policy=policy, name="value", what="value model", is_scalar=True
        )
        self._clip = cfg.critic.clip

    @torch.no_grad()
    def columns(self, microbatches: Sequence[PreparedMicrobatch]) -> list[dict[str, Tensor]]:
        """Value micro-batches without gradients.

        Returns: for each, `values` [T] float32 task units: the value of the state before each
            scored token, 0 at all other tokens.
        """
        found = [{"values": self._values(one.row)} for one in microbatches]
        reshard(self.model.scorer)
        return found

    def update(self, updates: Sequence[Sequence[PreparedMicrobatch]], *, step: int) -> Sums:
        """Take an optimizer step for each of the batch's updates; see TrainedCompanion.

        The micro-batches have the columns `values` (as `columns` gave them) and `returns`.
        """
        sums = super().update(updates, step=step)
        if "value/returns" in sums:  # not if every update was skipped
            # Of the totals, since a ratio of variances does not add up over ranks.
            explained = explained_variance(sums)
            if math.isfinite(explained):
                sums["value/explained_variance"] = (explained, 1.0)
        return sums

    def _loss(self, microbatch: PreparedMicrobatch) -> tuple[Tensor, Stats]:
        # Every state counts the same, whatever the policy's aggregation: its weights would give
        # the regression another scale, or long responses less say in it.
        terms, stats = value_loss(
            self._values(microbatch.row),
            microbatch.columns["values"],
            returns=microbatch.columns["returns"],
            loss_mask=microbatch.loss_mask,
            clip=self._clip,
        )
        return terms.double().sum() * microbatch.token_weight, stats

    def _values(self, row: ScoredRow) -> Tensor:
        """Return [T] float32, the value before each scored token; with a graph, if enabled."""
        after = self.model.values(row)  # [T], of the state after each token
        return row.spread(after.index_select(0, row.scored - 1))
