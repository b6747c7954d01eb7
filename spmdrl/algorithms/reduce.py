"""The reduction of per-token terms to one loss: a sum with one weight per sequence.

    loss = sum_s weights[s] * sum_{t in s} terms[t]

Every rank knows the token counts of all sequences of an update, and computes the weights from
them. So value and gradient do not depend on dp size, micro-batching or packing order.
Shape letters: S sequences, T packed tokens.
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
    """Count the tokens of each sequence that are in the loss.

    Args:
        scalars: of the whole batch.
        mask_truncated: leave out episodes with a response that was cut at its length limit.
    Returns: [S] int64, tokens. Multiply by (update_ids == u) for those of one update.
    """
    in_loss = scalars.is_valid
    if mask_truncated:
        episodes = scalars.episodes()
        in_loss = in_loss & ~episodes.spread(episodes.scalars.is_truncated)
    return scalars.response_lengths * in_loss


def sequence_weights(
    scalars: Scalars, loss_lengths: Tensor, *, aggregation: str, max_response_tokens: int
) -> Tensor:
    """Return the weight of each sequence, which multiplies the sum of its terms.

    The unit is the episode: an episode of several traces weighs as much as one of a single trace,
    and its tokens are those of all its traces. One without loss tokens has weight 0 and is not
    counted. Tokens that a correction drops are still counted, so that dropping them does not raise
    the weight of the others.

    Args:
        scalars: of the whole batch (all ranks).
        loss_lengths: [S] int64, tokens in the loss; 0 for sequences of other updates.
        aggregation: the weight is 1/N for `token_mean`, 1/(E |y|) for `seq_mean_token_mean`, 1/E
            for `seq_mean_token_sum`, 1/(E max_response_tokens) for `seq_mean_token_sum_norm`, and
            1/(P tokens of the prompt's samples) for `prompt_mean`. N, E, P are the numbers of loss
            tokens, and of episodes and prompts that have some; |y| is an episode's.
        max_response_tokens: the constant of seq_mean_token_sum_norm, tokens.
    Returns: [S] float64, 1/tokens or 1. All are 0 if there are no loss tokens.
    Raises: Refusal for an unknown aggregation.
    Source: arXiv 2503.14476 eq. 8 (token_mean), 2402.03300 eq. 3 (seq_mean_token_mean),
        2602.05261 (seq_mean_token_sum), 2503.20783 (its norm), 2510.13786 (prompt_mean).
    Invariant under: permuting sequences; dp size; micro-batching; packing order; which trace of an
        episode a token is trained in.
    """
    episodes = scalars.episodes()
    weights = _episode_weights(
        episodes.scalars.group_ids,
        episodes.sum(loss_lengths.double()),
        aggregation=aggregation,
        max_response_tokens=max_response_tokens,
    )
    return episodes.spread(weights).where(loss_lengths > 0, 0.0)


def _episode_weights(
    group_ids: Tensor, lengths: Tensor, *, aggregation: str, max_response_tokens: int
) -> Tensor:
    """Return [E] float64; group_ids [E], and lengths [E] float64, loss tokens of each episode."""
    present = (lengths > 0).double()
    num_episodes = present.sum().clamp(min=1)
    if aggregation == "token_mean":
        return present / lengths.sum().clamp(min=1)
    if aggregation == "seq_mean_token_mean":
        return present / lengths.clamp(min=1) / num_episodes
    if aggregation == "seq_mean_token_sum":
        return present / num_episodes
    if aggregation == "seq_mean_token_sum_norm":
        return present / (num_episodes * max_response_tokens)
    if aggregation == "prompt_mean":
        _, index = torch.unique(group_ids, return_inverse=True)
        tokens = lengths.new_zeros(int(index.max()) + 1 if len(index) else 0)
        tokens = tokens.index_add(0, index, lengths)
        num_prompts = (tokens > 0).sum().clamp(min=1)
        return present / tokens.clamp(min=1)[index] / num_prompts
    raise Refusal(
        f"algorithm.aggregation: unknown {aggregation!r}; known: {', '.join(AGGREGATIONS)}"
    )


def sequence_index(cu_seqlens: Tensor, *, num_tokens: int) -> Tensor:
    """Return [T] int64, the index of each token's sequence, from cu_seqlens [S+1]."""
    lengths = cu_seqlens.diff().long()
    positions = torch.arange(lengths.numel(), device=cu_seqlens.device)
    # With output_size there is no device-to-host copy per call.
    return positions.repeat_interleave(lengths, output_size=num_tokens)


def per_token(values: Tensor, cu_seqlens: Tensor, *, num_tokens: int) -> Tensor:
    """Return [S] values repeated for each token of their sequence: [T], same dtype."""
    return values.index_select(0, sequence_index(cu_seqlens, num_tokens=num_tokens))


def sequence_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the sum of [T] values over each sequence: [S] float64, 0 for an empty one."""
    index = sequence_index(cu_seqlens, num_tokens=values.numel())
    totals = torch.zeros(cu_seqlens.numel() - 1, dtype=torch.float64, device=values.device)
    return totals.index_add(0, index, values.double())


def sequence_mean(values: Tensor, cu_seqlens: Tensor, *, loss_mask: Tensor) -> Tensor:
    """Return the mean of [T] values over each sequence's loss tokens: [S] float64, 0 for none."""
    total = sequence_sum(torch.where(loss_mask, values, 0.0), cu_seqlens)
    return total / sequence_sum(loss_mask, cu_seqlens).clamp(min=1)


def spread_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return `sequence_sum` for each token of the sequence: [T] float64."""
    return per_token(sequence_sum(values, cu_seqlens), cu_seqlens, num_tokens=values.numel())


def spread_mean(values: Tensor, cu_seqlens: Tensor, *, loss_mask: Tensor) -> Tensor:
    """Return `sequence_mean` for each token of the sequence: [T] float64."""
    means = sequence_mean(values, cu_seqlens, loss_mask=loss_mask)
    return per_token(means, cu_seqlens, num_tokens=values.numel())
