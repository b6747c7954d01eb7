"""The value model of PPO: a second sharded model, trained beside the policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from spmdrl.algorithms.values import explained_variance, value_loss
from spmdrl.config import Config
from spmdrl.policy.objective import Job, Stats, spread
from spmdrl.policy.parallelize import reshard
from spmdrl.policy.scorer import Scoring
from spmdrl.policy.sharded import ShardedModel
from spmdrl.policy.trainee import Trainee
from spmdrl.types import Sums, add_sums
from spmdrl.world import World


class Critic:
    """A value model and its optimizer, on the trainer ranks.

    Args:
        cfg, world: the config and this rank's view of the job.
        policy: whose packed rows it reads.
    Raises: ValueError when the model cannot be loaded or laid out, or cannot read those rows.
    """

    def __init__(self, cfg: Config, world: World, *, policy: ShardedModel):
        try:
            self.model = ShardedModel(cfg, world, path=cfg.critic.path or cfg.model.path,
                                      is_trained=True, is_scalar=True)
        except ValueError as error:
            raise ValueError(f"critic.path: the value model cannot be made: {error}") from error
        check_fit(self.model, policy)
        self.trainee = Trainee(self.model, cfg=cfg, world=world, name="value",
                               options=replace(cfg.optimizer, lr=cfg.critic.lr))
        self._clip = cfg.critic.clip

    @torch.no_grad()
    def columns(self, works: Sequence[Scoring]) -> list[dict[str, Tensor]]:
        """Value packed rows without gradients.

        Returns: per row, `values` [T] float32 task units: the value of the state before each
            scored token, 0 elsewhere.
        """
        found = [{"values": self._values(work)} for work in works]
        reshard(self.model.scorer)
        return found

    def update(self, jobs: Sequence[Sequence[Job]], *, step: int) -> Sums:
        """Take an optimizer step for each of the batch's updates.

        Args:
            jobs: [updates][micro-batches], with the columns `values` (as `columns` gave them)
                and `returns`.
            step: training step, for the schedule.
        Returns: value/ sums over all trainer ranks, equal on each of them.
        """
        sums = add_sums(*[self.trainee.take_step(update, self._loss, step=step, number=number)
                          for number, update in enumerate(jobs)])
        if "value/returns" in sums:  # not if every update was skipped
            # Of the totals, since a ratio of variances does not add up over ranks.
            explained = explained_variance(sums)
            if math.isfinite(explained):
                sums["value/explained_variance"] = (explained, 1.0)
        return sums

    def follow(self, policy: ShardedModel, *, step: int) -> None:
        """Do nothing: the value model learns by itself."""

    def state_dict(self) -> dict[str, object]:
        """Return what a checkpoint keeps, by name, sharing live storage; see Trainee."""
        return self.trainee.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what `state_dict` returned, after it was loaded onto this layout."""
        self.trainee.load_state_dict(state)

    def _loss(self, job: Job) -> tuple[Tensor, Stats]:
        # Every state counts the same, whatever the policy's aggregation: its weights would give
        # the regression another scale, or long responses less say in it.
        terms, stats = value_loss(
            self._values(job.scoring), job.columns["values"], returns=job.columns["returns"],
            loss_mask=job.loss_mask, clip=self._clip)
        return terms.double().sum() * job.token_weight, stats

    def _values(self, work: Scoring) -> Tensor:
        """Return [T] float32, the value before each scored token; with a graph, if enabled."""
        after = self.model.values(work)  # [T], of the state after each token
        return spread(after.index_select(0, work.scored - 1), work)


def check_fit(model: ShardedModel, policy: ShardedModel) -> None:
    """Raise ValueError for a model of the section `critic` that cannot read the policy's rows."""
    rows, needed = (m.hf_model.get_input_embeddings().weight.shape[0] for m in (model, policy))
    if rows < needed:
        raise ValueError(f"critic.path: the model embeds {rows} tokens, fewer than the "
                         f"policy's {needed}; take one with the policy's tokenizer")
    if model.is_padded != policy.is_padded:
        raise ValueError("critic.path: it and the policy need different attention (one has "
                         "a softcap); set model.attention to padded")
