"""The implicit process reward model of PRIME: a second language model, trained on outcomes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from spmdrl.algorithms import registry
from spmdrl.algorithms.outcome_loss import outcome_loss
from spmdrl.algorithms.reduce import sequence_sum
from spmdrl.config import Config
from spmdrl.model.sharded_model import ShardedModel
from spmdrl.train.companions.trained import TrainedCompanion
from spmdrl.train.microbatches import PreparedMicrobatch, Stats
from spmdrl.world.world import World


class ProcessRewardModel(TrainedCompanion):
    """A causal LM, with its optimizer, whose log-ratio to the reference predicts the outcome.

    Its logprobs of a batch come from before its update on that batch, which saves a second
    forward pass: Algorithm 1 of arXiv 2502.01456.

    Args:
        cfg, world: the config and this rank's view of the job. `beta` is the advantage's.
        policy: whose packed rows it reads.
    Raises: Refusal when the model cannot be loaded or laid out, or cannot read those rows.
    """

    def __init__(self, cfg: Config, world: World, *, policy: ShardedModel):
        super().__init__(
            cfg, world, policy=policy, name="prm", what="process reward model", is_scalar=False
        )
        chosen = cfg.algorithm
        known = (
            registry.options_of(outcome_loss)
            | registry.options_of(registry.get("advantage", chosen.advantage))
            | chosen.advantage_options
        )
        self._beta = known["beta"]

    def columns(self, microbatches: Sequence[PreparedMicrobatch]) -> list[dict[str, Tensor]]:
        """Score micro-batches: for each, `prm_logprobs` [T] float32, nats, 0 off the scored."""
        rows = [one.row for one in microbatches]
        return [{"prm_logprobs": logprobs} for logprobs, _ in self.model.columns(rows)]

    def _loss(self, microbatch: PreparedMicrobatch) -> tuple[Tensor, Stats]:
        # The column `returns` has the sequence's outcome, in [0, 1], at each of its loss tokens.
        logprobs, _ = self.model.forward(microbatch.row)
        cu_seqlens = microbatch.packed.cu_seqlens
        counts = sequence_sum(microbatch.loss_mask, cu_seqlens).clamp(min=1)
        outcomes = sequence_sum(microbatch.columns["returns"], cu_seqlens) / counts
        terms, stats = outcome_loss(
            microbatch.row.spread(logprobs),
            microbatch.columns["ref_logprobs"],
            outcomes=outcomes,
            loss_mask=microbatch.loss_mask,
            cu_seqlens=cu_seqlens,
            beta=self._beta,
        )
        # Every sequence counts the same, whatever the policy's aggregation.
        return terms.sum() * microbatch.sequence_weight, stats
