"""Micro-batches ready to run: all that is known of them before a forward pass. T packed tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.algorithms import reduce
from spmdrl.config import Config
from spmdrl.model.scorer import ScoredRow
from spmdrl.model.sharded import ShardedModel
from spmdrl.types import Advantages, Batch, Microbatch

Stats = dict[str, tuple[Tensor, Tensor]]
"""{metric: (numerator, denominator)} of one micro-batch."""


@dataclass(frozen=True)
class PreparedMicrobatch:
    """A micro-batch with its loss mask, its weights and what was found of its tokens."""

    packed: Microbatch
    row: ScoredRow
    loss_mask: Tensor  # [T] bool
    weights: Tensor  # [T] float64, of each token's term in the loss
    num_tokens: int  # 0 for a dummy
    token_weight: float  # 1 / loss tokens of this update on all ranks; 1 without any
    sequence_weight: float  # 1 / sequences of this update that have loss tokens; 1 without any
    columns: Mapping[str, Tensor]  # [T] each: advantages, returns, what annotate found


LossOf = Callable[[PreparedMicrobatch], tuple[Tensor, Stats]]
"""One micro-batch's share of the loss, a [] tensor with a graph, and its metrics."""


def prepare(
    batch: Batch, advantages: Advantages | None, *, cfg: Config, model: ShardedModel
) -> list[list[PreparedMicrobatch]]:
    """Prepare every micro-batch of a step, so that nothing waits for the device later.

    Args:
        batch: as exchanged, and annotated where the methods need it.
        advantages: of its tokens; None for a pass that only scores.
        model: that is to read them.
    Returns: [updates][micro-batches].
    Raises: ValueError when a sequence's first token is marked as a response.
    """
    scalars = batch.scalars
    lengths = reduce.loss_lengths(scalars, mask_truncated=cfg.algorithm.mask_truncated)
    updates = []
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
        updates.append(
            [
                _prepared(
                    microbatch,
                    per_sequence,
                    model=model,
                    token_weight=1.0 / max(1, int(own.sum())),
                    sequence_weight=1.0 / max(1, int((own > 0).sum())),
                    columns=_columns(batch, advantages, at=(number, index)),
                )
                for index, microbatch in enumerate(microbatches)
            ]
        )
    return updates


def _columns(
    batch: Batch, advantages: Advantages | None, *, at: tuple[int, int]
) -> dict[str, Tensor]:
    update, index = at
    columns = dict(batch.columns[update][index]) if batch.columns else {}
    if advantages is not None:
        columns["advantages"] = advantages.tokens[update][index].float()
        if advantages.returns:
            columns["returns"] = advantages.returns[update][index].float()
    return columns


def _prepared(
    microbatch: Microbatch,
    per_sequence: Tensor,
    *,
    model: ShardedModel,
    token_weight: float,
    sequence_weight: float,
    columns: Mapping[str, Tensor],
) -> PreparedMicrobatch:
    host, device = on_host(microbatch), model.world.device
    lengths = host.cu_seqlens.diff().long()
    weights, in_loss = per_sequence[:, host.sequence_ids].repeat_interleave(
        lengths, dim=1, output_size=host.tokens.numel()
    )
    loss_mask = host.response_mask & (in_loss > 0)
    return PreparedMicrobatch(
        packed=microbatch.to(device),
        row=model.row(host.tokens, lengths.tolist(), mask=loss_mask, routes=host.routes),
        loss_mask=loss_mask.to(device),
        weights=weights.to(device),
        num_tokens=int(lengths[host.sequence_ids >= 0].sum()),
        token_weight=token_weight,
        sequence_weight=sequence_weight,
        columns={name: column.to(device) for name, column in columns.items()},
    )


def on_host(microbatch: Microbatch) -> Microbatch:
    """Return a micro-batch on the CPU, its values there when this returns."""
    # Not Microbatch.to: its copies do not block, and from a GPU they may land later.
    parts = vars(microbatch).items()
    return Microbatch(**{name: part if part is None else part.cpu() for name, part in parts})
