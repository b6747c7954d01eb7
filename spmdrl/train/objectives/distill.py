"""Distillation, on the rows' own tokens or on sampled ones: a divergence of whole distributions.

Logits of policy and teacher exist for one chunk of positions at a time, in the backward pass
too, so memory is that of the two models' states. Tensor-parallel ranks, which each have a part
of the vocabulary, gather a chunk's logits and compute the same divergence.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spmdrl.algorithms import registry
from spmdrl.algorithms.registry import Method
from spmdrl.config import Config
from spmdrl.errors import Refusal
from spmdrl.model.head import HeadOptions, scaled_logits
from spmdrl.model.load import hf_config_of
from spmdrl.model.logit_passes import chunks
from spmdrl.model.parallel.tensor_parallel import enter, gather_last
from spmdrl.model.sharded_model import ShardedModel
from spmdrl.train.coefficients import Coefficients
from spmdrl.train.microbatches import PreparedMicrobatch, Stats
from spmdrl.train.objectives.objective_loss import Known, ObjectiveLoss
from spmdrl.world.world import World

HeadInputs = tuple[Tensor, Tensor, Tensor | None]
"""What a head gets: states before the scored tokens [n, H], and rows of the vocabulary, [V, H] with
a bias [V] or None."""


class DistillationLoss(ObjectiveLoss):
    """The distillation loss that a config names, with its teacher in the policy's sharding.

    On sampled responses it is the divergence at each state that the policy came to, its gradient
    not through the sampling. Both distributions are at the temperature of sampling.

    Source: arXiv 2306.13649 (GKD), algorithm 1 with lambda 1 for sampled responses.
    Raises: Refusal for a teacher that cannot be loaded or has another vocabulary.
    """

    def __init__(self, cfg: Config, world: World, *, loss_fn: Method, coefficients: Coefficients):
        super().__init__(cfg, world, loss_fn=loss_fn, coefficients=coefficients)
        check_teacher(cfg)
        self._teacher = ShardedModel(cfg, world, path=cfg.model.teacher, is_trained=False).scorer

    def __call__(
        self, model: ShardedModel, microbatch: PreparedMicrobatch, *, known: Known
    ) -> tuple[Tensor, Stats]:
        """See ObjectiveLoss. Both models run forward."""
        row = microbatch.row
        with torch.no_grad():
            # The teacher routes tokens itself; replayed routes are the policy's. Its head returns
            # its inputs, since `_terms` makes logits chunk by chunk.
            taught = self._teacher(row.without_routes(), lambda *given, targets: given)
        terms, stats = model.forward(row, partial(self._terms, taught, model.scorer.head_options))
        return (row.spread(terms).double() * microbatch.weights).sum(), stats

    def _terms(
        self,
        taught: HeadInputs,
        options: HeadOptions,
        hidden: Tensor,
        *rows: Tensor | None,
        targets: Tensor,
    ) -> tuple[Tensor, Stats]:
        """Return the divergence at each scored token, [n] float32 nats, and its metrics."""
        terms = []
        stats = []
        # One chunk without positions, if there is none: parameters must be in the graph and
        # metrics in the totals of every rank, so that collectives match.
        for part in chunks(len(hidden), options.chunk_tokens) or [slice(0, 0)]:
            found, own = checkpoint(
                self._chunk,
                (hidden[part], *rows),
                (taught[0][part], *taught[1:]),
                options,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            terms.append(found)
            stats.append(own)
        total = {
            name: (sum(own[name][0] for own in stats), sum(own[name][1] for own in stats))
            for name in stats[0]
        }
        return torch.cat(terms), total

    def _chunk(
        self, own: HeadInputs, taught: HeadInputs, options: HeadOptions
    ) -> tuple[Tensor, Stats]:
        with torch.no_grad():
            teacher = _whole_logits(*taught, self._teacher.head_options)
        inputs = {
            "student_logits": _whole_logits(*own, options),
            "teacher_logits": teacher,
            "loss_mask": torch.ones(len(own[0]), dtype=torch.bool, device=own[0].device),
        }
        return registry.call(self._loss, inputs, self.cfg.algorithm.loss_options)


def check_teacher(cfg: Config) -> None:
    """Refuse a teacher that has other tokens than the policy; config.json of both says it.

    Raises: Refusal.
    """
    own, other = (
        hf_config_of(cfg.model, path=path).get_text_config().vocab_size
        for path in (cfg.model.path, cfg.model.teacher)
    )
    if own != other:
        raise Refusal(
            f"model.teacher: has a vocabulary of {other}, the policy one of {own}; distillation "
            "needs the same tokens on both sides",
            field="model.teacher",
        )


def _whole_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, options: HeadOptions
) -> Tensor:
    """Return [n, V] float32 logits of the whole vocabulary, equal on every rank of the group."""
    if options.group is None:
        return scaled_logits(hidden, weight, options, bias=bias)
    own = scaled_logits(enter(hidden, options.group), weight, options, bias=bias)
    return gather_last(own, options.group)
