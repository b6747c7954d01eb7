"""The loss tokens of a packed micro-batch, in order, without the other tokens between them.

Returns, discounted sums and positions are computed on loss tokens. So they skip a tool's output
between two turns, and never read its values.
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
    sequence: Tensor  # [N] int64, index of the token's sequence
    position: Tensor  # [N] int64, among the loss tokens of its sequence, from 0
    last: Tensor  # [N] int64, index in [N] of the last loss token of its sequence
    counts: Tensor  # [S] int64, loss tokens of each sequence
    num_tokens: int  # T

    @property
    def turn(self) -> Tensor:
        """Return the turn of each loss token within its sequence: [N] int64, from 0.

        A turn is a run of adjacent loss tokens.
        """
        starts = torch.ones_like(self.position)
        # A turn begins after a token that is not in the loss, and at a new sequence.
        starts[1:] = ((self.index.diff() > 1) | (self.sequence.diff() > 0)).long()
        turns = starts.cumsum(0)
        # These numbers go on from sequence to sequence: subtract that of the sequence's first turn.
        first = self.last - self.counts[self.sequence] + 1
        return turns - turns[first]

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
        """Return [N] values of the next loss token, 0 after the last of a sequence."""
        places = torch.arange(len(self.index), device=self.index.device)
        return torch.where(places < self.last, values.roll(-1), 0.0)


def loss_tokens(loss_mask: Tensor, cu_seqlens: Tensor) -> LossTokens:
    """Find the loss tokens.

    Args:
        loss_mask: [T] bool. cu_seqlens: [S+1] int32.
    """
    index = loss_mask.nonzero()[:, 0]
    sequence = sequence_index(cu_seqlens, num_tokens=loss_mask.numel())[index]
    counts = torch.zeros(cu_seqlens.numel() - 1, dtype=torch.int64, device=index.device)
    counts = counts.index_add(0, sequence, torch.ones_like(sequence))
    ends = counts.cumsum(0)
    places = torch.arange(len(sequence), device=index.device)
    position = places - (ends - counts)[sequence]
    last = ends[sequence] - 1
    return LossTokens(index, sequence, position, last, counts, loss_mask.numel())


def discounted_sums(values: Tensor, *, discounts: Tensor | float, last: Tensor) -> Tensor:
    """Sum this value and the later values of the sequence: x_t = v_t + c x_(t+1).

    After k rounds each entry holds 2^k terms, so this takes log2(longest sequence) rounds.

    Args:
        values: [N] float64.
        discounts: c in [0, 1]: one number, or [N] float64 with one value per sequence.
        last: [N] int64, index in [N] of the last entry of the entry's sequence.
    Returns: [N] float64.
    """
    places = torch.arange(len(values), device=values.device)
    left = last - places  # [N], the number of later entries of the sequence
    longest = int(left.max()) if len(values) else 0
    discounts = torch.as_tensor(discounts, dtype=torch.float64, device=values.device)
    sums = values
    reach = 1
    while reach <= longest:
        ahead = torch.where(left >= reach, sums.roll(-reach), 0.0)
        sums = sums + discounts * ahead
        discounts = discounts.square()
        reach = 2 * reach
    return sums
