"""From per-token terms to one number: sums in the losses, one global division here.

    loss = sum_s weights[s] * sum_{t in s} terms[t]

The weights come from counts of one update's sequences, which every rank has, so value and gradient
do not depend on dp size, micro-batching or packing order. Shape letters: S sequences,
T packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.errors import Refusal
from spmdrl.types import Scalars

AGGREGATIONS = (
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
    "prompt_mean",
)


def loss_lengths(scalars: Scalars, *, mask_truncated: bool = False) -> Tensor:
    """Count the tokens of each sequence that enter the loss.

    Args:
        scalars: of the whole batch.
        mask_truncated: leave out responses that were cut at max_response_tokens.
    Returns: [S] int64, tokens. Multiply by (update_ids == u) to restrict it to one update.
    """
    kept = scalars.is_valid
    if mask_truncated:
        kept = kept & ~scalars.is_truncated
    return scalars.response_lengths * kept


def sequence_weights(
    scalars: Scalars, loss_lengths: Tensor, *, aggregation: str, max_response_tokens: int
) -> Tensor:
    """Give each sequence the weight that multiplies the sum of its terms.

    A sequence without loss tokens has weight 0 and enters no count, and tokens that a
    correction drops stay in the counts, so that dropping does not inflate the others.

    Args:
        scalars: of the whole batch (all ranks).
        loss_lengths: [S] int64, tokens in the loss; 0 for sequences of other updates.
        aggregation: `token_mean` 1/N; `seq_mean_token_mean` 1/(S |y|); `seq_mean_token_sum`
            1/S; `seq_mean_token_sum_norm` 1/(S max_response_tokens); `prompt_mean`
            1/(P tokens of the prompt's samples), with N, S, P counting tokens, sequences and
            prompts that have loss tokens.
        max_response_tokens: the constant of seq_mean_token_sum_norm, tokens.
    Returns: [S] float64, 1/tokens or 1. All zero when nothing is in the loss.
    Raises: Refusal for an unknown aggregation.
    Source: arXiv 2503.14476 eq. 8 (token_mean), 2402.03300 eq. 3 (seq_mean_token_mean),
        2602.05261 (seq_mean_token_sum), 2503.20783 (its norm), 2510.13786 (prompt_mean).
    Invariant under: permuting sequences; dp size; micro-batching; packing order.
    """
    lengths = loss_lengths.double()
    present = (lengths > 0).double()
    num_sequences = present.sum().clamp(min=1)
    if aggregation == "token_mean":
        return present / lengths.sum().clamp(min=1)
    if aggregation == "seq_mean_token_mean":
        return present / lengths.clamp(min=1) / num_sequences
    if aggregation == "seq_mean_token_sum":
        return present / num_sequences
    if aggregation == "seq_mean_token_sum_norm":
        return present / (num_sequences * max_response_tokens)
    if aggregation == "prompt_mean":
        _, index = torch.unique(scalars.group_ids, return_inverse=True)
        tokens = lengths.new_zeros(int(index.max()) + 1 if len(index) else 0)
        tokens = tokens.index_add(0, index, lengths)
        num_prompts = (tokens > 0).sum().clamp(min=1)
        return present / tokens.clamp(min=1)[index] / num_prompts
    raise Refusal(
        f"algorithm.aggregation: unknown {aggregation!r}; known: {', '.join(AGGREGATIONS)}"
    )


def sequence_index(cu_seqlens: Tensor, *, num_tokens: int) -> Tensor:
    """Return [T] int64, the position of each token's sequence, from cu_seqlens [S+1]."""
    lengths = cu_seqlens.diff().long()
    positions = torch.arange(lengths.numel(), device=cu_seqlens.device)
    # output_size spares a device-to-host copy per call.
    return positions.repeat_interleave(lengths, output_size=num_tokens)


def per_token(values: Tensor, cu_seqlens: Tensor, *, num_tokens: int) -> Tensor:
    """Repeat [S] values for each token of their sequence: [T], same dtype."""
    return values.index_select(0, sequence_index(cu_seqlens, num_tokens=num_tokens))


def sequence_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum [T] values within each sequence: [S] float64. An empty sequence gives 0."""
    index = sequence_index(cu_seqlens, num_tokens=values.numel())
    totals = torch.zeros(cu_seqlens.numel() - 1, dtype=torch.float64, device=values.device)
    return totals.index_add(0, index, values.double())


def sequence_mean(values: Tensor, cu_seqlens: Tensor, *, loss_mask: Tensor) -> Tensor:
    """Average [T] values over each sequence's loss tokens: [S] float64, 0 without any."""
    total = sequence_sum(torch.where(loss_mask, values, 0.0), cu_seqlens)
    return total / sequence_sum(loss_mask, cu_seqlens).clamp(min=1)


def spread_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Give each token the sum of [T] values over its sequence: [T] float64."""
    return per_token(sequence_sum(values, cu_seqlens), cu_seqlens, num_tokens=values.numel())


def spread_mean(values: Tensor, cu_seqlens: Tensor, *, loss_mask: Tensor) -> Tensor:
    """Give each token the mean of [T] values over its sequence's loss tokens: [T] float64."""
    means = sequence_mean(values, cu_seqlens, loss_mask=loss_mask)
    return per_token(means, cu_seqlens, num_tokens=values.numel())
