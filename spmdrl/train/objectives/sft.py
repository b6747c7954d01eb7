"""Supervised fine-tuning: the loss of the rows' own responses."""

from __future__ import annotations

from torch import Tensor

from spmdrl.algorithms import registry
from spmdrl.model.sharded_model import ShardedModel
from spmdrl.train.microbatches import PreparedMicrobatch, Stats
from spmdrl.train.objectives.objective_loss import Known, ObjectiveLoss


class SupervisedLoss(ObjectiveLoss):
    """The policy's surprise at the responses of its rows, less an entropy bonus if there is one."""

    def __call__(
        self, model: ShardedModel, microbatch: PreparedMicrobatch, *, known: Known
    ) -> tuple[Tensor, Stats]:
        """See ObjectiveLoss."""
        logprobs, entropy = map(microbatch.row.spread, model.forward(microbatch.row))
        mask = microbatch.loss_mask
        inputs = {
            "logprobs": logprobs,
            "entropy": entropy,
            "loss_mask": mask,
            "cu_seqlens": microbatch.packed.cu_seqlens,
        }
        terms, stats = registry.call(self._loss, inputs, {})
        if self._coefficients.entropy:
            terms = terms - self._coefficients.entropy * entropy
        stats = stats | {"policy/entropy": (entropy.detach().double().sum(), mask.sum())}
        return (terms.double() * microbatch.weights).sum(), stats
