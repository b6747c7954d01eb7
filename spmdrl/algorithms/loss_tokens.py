"""The loss tokens of a packed micro-batch, each sequence's in order with the holes left out.

Everything that runs along a response (returns, discounted sums, positions) runs over these, so
that a tool's output between two turns is skipped and its values are never read.
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

    @property
    def turn(self) -> Tensor:
        """Return the number of each loss token's run within its sequence: [N] int64, from 0."""
        starts = torch.ones_like(self.position)
        # A run begins after a hole, and at a new sequence.
        starts[1:] = ((self.index.diff() > 1) | (self.sequence.diff() > 0)).long()
        runs = starts.cumsum(0)
        first = self.last - self.counts[self.sequence] + 1
        # Runs were counted through all sequences.
        return runs - runs[first]

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
    """Sum the values to come: x_t = v_t + c x_(t+1), up to the last of the sequence.

    It takes log2 of the longest run rounds: after k of them each entry holds 2^k terms.

    Args:
        values: [N] float64.
        discounts: c in [0, 1]: one number, or [N] float64 with one value per sequence.
        last: [N] int64, place of the last entry of one's sequence.
    Returns: [N] float64.
    """
    places = torch.arange(len(values), device=values.device)
    left = last - places  # [N] entries of the sequence after this one
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
