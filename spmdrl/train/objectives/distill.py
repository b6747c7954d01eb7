"""Distillation, on the rows' own tokens or on sampled ones: a divergence of whole distributions.

Logits of policy and teacher exist for one chunk of positions at a time, in the backward pass
too, so memory is that of the two models' states. Tensor-parallel ranks, which each have a part
of the vocabulary, gather a chunk's logits and compute the same divergence.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spmdrl.algorithms import registry
from spmdrl.config import Config
from spmdrl.model.head import HeadOptions, scaled_logits
from spmdrl.model.logit_passes import NEVER, chunks
from spmdrl.model.parallel.tensor_parallel import enter, gather_last
from spmdrl.model.sharded_model import ShardedModel
from spmdrl.train.companions.teachers import Taught, Teachers
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

    Where ids were left out of a draw, student and teacher are compared on the ids that were left,
    each scaled to sum 1 over these. Where a model has more rows of the vocabulary than the other,
    they are compared on the ids of both.

    Source: arXiv 2306.13649 (GKD), algorithm 1 with lambda 1 for sampled responses.
    """

    def __init__(self, cfg: Config, world: World, **given: Any):
        super().__init__(cfg, world, **given)
        teachers = given["companions"]["teacher"]
        assert isinstance(teachers, Teachers)
        self._teachers = teachers

    def __call__(
        self, model: ShardedModel, microbatch: PreparedMicrobatch, *, known: Known
    ) -> tuple[Tensor, Stats]:
        """See ObjectiveLoss. Policy and teachers run forward."""
        taught = self._teachers.read(microbatch)
        head = partial(self._terms, taught, model.scorer.head_options)
        row = microbatch.row
        terms, stats = model.forward(row, head)
        return (row.spread(terms).double() * microbatch.weights).sum(), stats

    def _terms(
        self,
        taught: Sequence[Taught],
        options: HeadOptions,
        hidden: Tensor,
        *rows: Tensor | None,
        targets: Tensor,
    ) -> tuple[Tensor, Stats]:
        """Return the divergence at each scored token, [n] float32 nats, and its metrics."""
        terms = []
        orders = []
        stats = []
        for one in taught:
            own = hidden
            order = torch.arange(len(hidden), device=hidden.device)
            if one.places is not None:
                order = one.places.at
                own = hidden[order]
            orders.append(order)
            # One chunk without positions, if there is none: parameters must be in the graph and
            # metrics in the totals of every rank, so that collectives match.
            for part in chunks(len(own), options.chunk_tokens) or [slice(0, 0)]:
                found, counted = checkpoint(
                    self._chunk,
                    (own[part], *rows),
                    one,
                    part,
                    options,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
                terms.append(found)
                stats.append(counted)
        total = {
            name: (sum(own[name][0] for own in stats), sum(own[name][1] for own in stats))
            for name in stats[0]
        }
        joined = torch.cat(terms)
        if len(taught) > 1:
            joined = joined.new_zeros(len(hidden)).index_copy(0, torch.cat(orders), joined)
        return joined, total

    def _chunk(
        self, own: HeadInputs, taught: Taught, part: slice, options: HeadOptions
    ) -> tuple[Tensor, Stats]:
        with torch.no_grad():
            given = (taught.states[part], taught.weight, taught.bias)
            teacher = _whole_logits(*given, taught.options)
        student = _whole_logits(*own, options)
        shared = min(student.shape[1], teacher.shape[1])
        student = student[:, :shared]
        teacher = teacher[:, :shared]
        if taught.rules is not None and part.stop > part.start:
            dropped = taught.rules.dropped(part, first=0, width=shared)
            assert dropped is not None, "refused: penalties without sampling masks"
            student = student.masked_fill(dropped, NEVER)
            teacher = teacher.masked_fill(dropped, NEVER)
        inputs = {
            "student_logits": student,
            "teacher_logits": teacher,
            "loss_mask": torch.ones(len(own[0]), dtype=torch.bool, device=own[0].device),
        }
        return registry.call(self._loss, inputs, self.cfg.algorithm.loss_options)


def _whole_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, options: HeadOptions
) -> Tensor:
    """Return [n, V] float32 logits of the whole vocabulary, equal on every rank of the group."""
    if options.group is None:
        return scaled_logits(hidden, weight, options, bias=bias)
    own = scaled_logits(enter(hidden, options.group), weight, options, bias=bias)
    return gather_last(own, options.group)
