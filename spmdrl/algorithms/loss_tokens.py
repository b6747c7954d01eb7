"""The loss tokens of a packed micro-batch, each sequence's in order with the holes left out.

Everything that runs along a response (returns, discounted sums, positions) runs over these, so
that a tool's output between two turns is stepped over and whatever stands there is never read.
Shape letters: S sequences, T packed tokens, N loss tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.algorithms.reduce import sequence_index


@dataclass(frozen=True)
class LossTokens:
    """Where the loss tokens are. Build it with `loss_tokens`."""

    index: Tensor  # [N] int64, position in the packed [T], ascending
    sequence: Tensor  # [N] int64, which sequence
    position: Tensor  # [N] int64, 0 for the first loss token of its sequence
    last: Tensor  # [N] int64, place among the N of its sequence's last loss token
    counts: Tensor  # [S] int64, loss tokens of each sequence
    num_tokens: int  # T

    def take(self, values: Tensor) -> Tensor:
        """Return [T] values at the loss tokens: [N] float64, detached."""
        return values.detach()[self.index].double()

    def put(self, values: Tensor) -> Tensor:
        """Return [N] values at their places in [T], exactly 0 elsewhere."""
        return values.new_zeros(self.num_tokens).index_copy(0, self.index, values)

    def spread(self, values: Tensor) -> Tensor:
        """Repeat [S] values for each loss token of the sequence: [N], same dtype."""
        return values[self.sequence]

    def at_last(self, values: Tensor) -> Tensor:
        """Return [S] values at the last loss token of their sequence: [N], 0 elsewhere."""
        places = torch.arange(len(self.index), device=self.index.device)
        return torch.where(places == self.last, self.spread(values), 0.0)

    def next(self, values: Tensor) -> Tensor:
        """Return [N] values of the next loss token, 0 behind the last of a sequence."""
        places = torch.arange(len(self.index), device=self.index.device)
        return torch.where(places < self.last, values.roll(-1), 0.0)


def loss_tokens(loss_mask: Tensor, cu_seqlens: Tensor) -> LossTokens:
    """Find the loss tokens.

    Args:
        loss_mask: [T] bool. cu_seqlens: [S+1] int32.
    """
    index = loss_mask.nonzero()[:, 0]
    sequence = sequence_index(cu_seqlens, num_tokens=loss_mask.numel())[index]
    counts, position, last = _runs(sequence, num_sequences=cu_seqlens.numel() - 1)
    return LossTokens(index=index, sequence=sequence, position=position, last=last, counts=counts,
                      num_tokens=loss_mask.numel())


def _runs(sequence: Tensor, *, num_sequences: int) -> tuple[Tensor, Tensor, Tensor]:
    # sequence [N], ascending -> counts [S], position within and last place of its run [N]
    counts = torch.zeros(num_sequences, dtype=torch.int64, device=sequence.device)
    counts = counts.index_add(0, sequence, torch.ones_like(sequence))
    ends = counts.cumsum(0)
    places = torch.arange(len(sequence), device=sequence.device)
    return counts, places - (ends - counts)[sequence], ends[sequence] - 1


def discounted_sums(values: Tensor, *, discounts: Tensor | float, last: Tensor) -> Tensor:
    """Sum what is to come: x_t = v_t + c x_(t+1), up to the last of the sequence.

    It takes log2 of the longest run rounds: after k of them each entry holds 2^k terms.

    Args:
        values: [N] float64.
        discounts: c in [0, 1]: one number, or [N] float64 with one value per sequence.
        last: [N] int64, place of the last entry of one's sequence.
    Returns: [N] float64.
    """
    places = torch.arange(len(values), device=values.device)
    left = last - places  # [N] entries of the sequence behind this one
    longest = int(left.max()) if len(values) else 0
    discounts = torch.as_tensor(discounts, dtype=torch.float64, device=values.device)
    sums, reach = values, 1
    while reach <= longest:
        ahead = torch.where(left >= reach, sums.roll(-reach), 0.0)
        sums = sums + discounts * ahead
        discounts, reach = discounts.square(), 2 * reach
    return sums


@dataclass(frozen=True)
class Turns:
    """The turns of a micro-batch in order: runs of loss tokens that answer one state. U turns."""

    tokens: LossTokens
    turn: Tensor  # [N] int64, turn of each loss token
    sequence: Tensor  # [U] int64
    anchor_ids: Tensor  # [U] int64, state that the turn answers; -1: none
    returns: Tensor  # [U] float64, discounted reward from this turn on

    def per_token(self, values: Tensor) -> Tensor:
        """Repeat [U] values for each token of their turn: [T], exactly 0 off the loss mask."""
        return self.tokens.put(values[self.turn])


def turn_returns(
    turn_rewards: Tensor, *, anchor_ids: Tensor, loss_mask: Tensor, cu_seqlens: Tensor,
    gamma: float = 0.95,
) -> Turns:
    """Discount the rewards of each sequence's turns: R_k = r_k + gamma R_(k+1).

    A turn is a run of adjacent loss tokens with one anchor.

    Args:
        turn_rewards: [T] float, task units. Reward of a turn, on any one of its loss tokens
            (or shared among them); outcome included, at the last turn. 0 elsewhere.
        anchor_ids: [T] int64, equal for turns that answer the same state; -1: none.
        loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        gamma: discount per turn, in [0, 1].
    Raises: ValueError for gamma out of range.
    Source: arXiv 2505.10978 (GiGPO), the step return.
    Invariant under: micro-batching, packing order.
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma: must be in [0, 1], got {gamma}")
    tokens = loss_tokens(loss_mask, cu_seqlens)
    anchors = anchor_ids[tokens.index]
    starts = tokens.position == 0
    starts[1:] |= (tokens.index.diff() > 1) | (anchors.diff() != 0)
    turn = starts.long().cumsum(0) - 1
    sequence = tokens.sequence[starts]
    rewards = torch.zeros(len(sequence), dtype=torch.float64, device=turn.device)
    rewards = rewards.index_add(0, turn, tokens.take(turn_rewards))
    _, _, last = _runs(sequence, num_sequences=len(tokens.counts))
    returns = discounted_sums(rewards, discounts=gamma, last=last)
    return Turns(tokens=tokens, turn=turn, sequence=sequence, anchor_ids=anchors[starts],
                 returns=returns)
