"""Micro-batches ready to run: all that is known of them before a forward pass. T packed tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spmdrl.algorithms import reduce
from spmdrl.columns import to_device
from spmdrl.config import Config
from spmdrl.model.scorer import ScoredRow
from spmdrl.model.sharded_model import ShardedModel
from spmdrl.train.lessons import Lesson, Lessons
from spmdrl.types import Advantages, Batch, Microbatch

Stats = dict[str, tuple[Tensor, Tensor]]
"""{metric: (numerator, denominator)} of one micro-batch."""


@dataclass(frozen=True)
class PreparedMicrobatch:
    """A micro-batch with its loss mask, its weights and its per-token columns."""

    packed: Microbatch
    row: ScoredRow
    loss_mask: Tensor  # [T] bool
    weights: Tensor  # [T] float64, of each token's term in the loss
    num_tokens: int  # 0 for a dummy
    update_counts: tuple[int, int]  # loss tokens of the update on all ranks; sequences with some
    columns: Mapping[str, Tensor]  # [T] each: advantages, returns, what annotate found
    lessons: tuple[Lesson, ...] = ()  # what each teacher reads

    @property
    def token_weight(self) -> float:
        """1 / loss tokens of this update on all ranks; 1 without any."""
        return 1.0 / max(1, self.update_counts[0])

    @property
    def sequence_weight(self) -> float:
        """1 / sequences of this update that have loss tokens; 1 without any."""
        return 1.0 / max(1, self.update_counts[1])


LossOf = Callable[[PreparedMicrobatch], tuple[Tensor, Stats]]
"""One micro-batch's share of the loss, a [] tensor with a graph, and its metrics."""


def prepare(
    batch: Batch,
    advantages: Advantages | None,
    *,
    cfg: Config,
    model: ShardedModel,
    lessons: Lessons | None = None,
) -> list[list[PreparedMicrobatch]]:
    """Prepare every micro-batch of a step, so that nothing waits for the device later.

    Args:
        batch: as exchanged, and annotated where the methods need it.
        advantages: of its tokens; None for a pass that only scores.
        model: the one that computes them.
        lessons: makes what teachers read; None without teachers.
    Returns: [updates][micro-batches].
    Raises: Refusal when a sequence's first token is marked as a response.
    """
    scalars = batch.scalars
    device = model.world.device
    has_penalties = cfg.objective.samples and cfg.sampling.penalties.is_on
    lengths = reduce.loss_lengths(scalars, mask_truncated=cfg.algorithm.mask_truncated)
    updates: list[list[PreparedMicrobatch]] = []
    for number, microbatches in enumerate(batch.updates):
        own = lengths * (batch.update_ids == number)
        weights = reduce.sequence_weights(
            scalars,
            own,
            aggregation=cfg.algorithm.aggregation,
            max_response_tokens=cfg.sampling.max_response_tokens,
        )
        per_sequence = torch.stack([weights.cpu(), own.cpu().double()])
        # A dummy's sequence id is -1: the zeros in the last column.
        per_sequence = torch.cat([per_sequence, per_sequence.new_zeros(2, 1)], dim=1)
        counts = int(own.sum()), int((own > 0).sum())
        updates.append([])
        for index, microbatch in enumerate(microbatches):
            columns = dict(batch.columns[number][index]) if batch.columns else {}
            if advantages is not None:
                columns |= advantages.columns(number, index)
            host = on_host(microbatch)
            sizes = host.cu_seqlens.diff().long()
            weights, in_loss = per_sequence[:, host.sequence_ids].repeat_interleave(
                sizes, dim=1, output_size=host.tokens.numel()
            )
            loss_mask = host.response_mask & (in_loss > 0)
            row = model.row(
                host.tokens,
                sizes.tolist(),
                mask=loss_mask,
                columns=host.extra_columns,
                drawn=host.response_mask if has_penalties else None,
            )
            taught: tuple[Lesson, ...] = ()
            if lessons is not None:
                taught = lessons.of(host, scalars, loss_mask=loss_mask, row=row)
            updates[-1].append(
                PreparedMicrobatch(
                    packed=microbatch.to(device),
                    row=row,
                    loss_mask=to_device(loss_mask, device),
                    weights=to_device(weights, device),
                    num_tokens=int(sizes[host.sequence_ids >= 0].sum()),
                    update_counts=counts,
                    columns={name: to_device(column, device) for name, column in columns.items()},
                    lessons=taught,
                )
            )
    rows = iter(model.give_room([one.row for update in updates for one in update]))
    return [[replace(one, row=next(rows)) for one in update] for update in updates]


def on_host(microbatch: Microbatch) -> Microbatch:
    """Return a micro-batch on the CPU, after its values have arrived."""
    if microbatch.host is not None:
        return microbatch.host
    # A non-blocking copy from a GPU would arrive after this returns.
    return microbatch.to(torch.device("cpu"), non_blocking=False)
