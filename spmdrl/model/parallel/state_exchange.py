"""Layers with a state where each rank has a part of the tokens of a packed row.

The state of a head depends on all tokens before, and on no other head. So ranks exchange tokens for
heads, as `ulysses` does for attention (arXiv 2309.14509): a rank gives its tokens of all heads for
all tokens of some heads. First the tensor-parallel ranks do, which have consecutive parts of a
slice (sequence_parallel.py), then the context-parallel ranks, which have two chunks of the row each
(row_slices.py). Where the ranks do not divide the heads, they gather the row and compute all heads.

Shape letters: T tokens of the row, t of a rank, R ranks of a group, H heads or channels, h those
that a rank computes, D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.model.attention.packing import Packing
from spmdrl.model.parallel.collectives import gather, swap
from spmdrl.model.parallel.context_parallel import by_rank, in_row_order
from spmdrl.model.parallel.row_slices import SlicedPacking


def _joined(parts: Tensor) -> Tensor:
    """Return [H, T, D] of consecutive parts [R, H, t, D]."""
    return parts.transpose(0, 1).flatten(1, 2)


def _parted(whole: Tensor, *, size: int) -> Tensor:
    return whole.unflatten(1, (size, -1)).transpose(0, 1)


@dataclass(frozen=True)
class _Level:
    """One group of ranks, and how their tokens make up those of the group."""

    group: dist.ProcessGroup
    join: Callable[[Tensor], Tensor]
    part: Callable[..., Tensor]

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def to_heads(self, x: Tensor) -> Tensor:
        """Return this rank's heads of all tokens, or all heads; from all heads of its tokens."""
        if x.shape[0] % self.size:
            return self.to_all(x)
        return self.join(swap(x.unflatten(0, (self.size, -1)), self.group))

    def to_all(self, x: Tensor) -> Tensor:
        """Return all heads of all tokens."""
        return self.join(gather(x, self.group))

    def to_tokens(self, x: Tensor, *, heads: int) -> Tensor:
        """Return all of so many heads of this rank's tokens; the inverse of `to_heads`."""
        parts = self.part(x, size=self.size)
        if heads % self.size:
            return parts[self.rank]
        return swap(parts, self.group).flatten(0, 1)

    def own(self, heads: Tensor) -> Tensor:
        """Return which of the heads `to_heads` gives to this rank."""
        return heads if len(heads) % self.size else heads.chunk(self.size)[self.rank]


@dataclass(frozen=True)
class StateRow:
    """A packed row of which this rank has all or a part of the tokens."""

    packing: Packing
    """Of the whole row."""
    levels: tuple[_Level, ...] = ()

    @classmethod
    def of(
        cls, packing: Packing | SlicedPacking, tensor_group: dist.ProcessGroup | None
    ) -> StateRow:
        """Return the row.

        Args:
            tensor_group: the ranks that have consecutive parts of a slice; None: each has all.
        """
        levels = []
        if tensor_group is not None:
            levels.append(_Level(tensor_group, _joined, _parted))
        if isinstance(packing, SlicedPacking):
            levels.append(_Level(packing.group, in_row_order, by_rank))
            packing = packing.whole
        return cls(packing, tuple(levels))

    def to_heads(self, x: Tensor) -> Tensor:
        """Return [h, T, D] of [H, t, D]."""
        for level in self.levels:
            x = level.to_heads(x)
        return x

    def to_all(self, x: Tensor) -> Tensor:
        """Return [H, T, D] of [H, t, D]."""
        for level in self.levels:
            x = level.to_all(x)
        return x

    def to_tokens(self, x: Tensor, *, heads: int) -> Tensor:
        """Return [H, t, D] of [h, T, D]."""
        counts = []
        for level in self.levels:
            counts.append(heads)
            heads = heads if heads % level.size else heads // level.size
        for level, count in zip(self.levels[::-1], counts[::-1]):
            x = level.to_tokens(x, heads=count)
        return x

    def own(self, heads: int, device: torch.device) -> Tensor:
        """Return the h heads that this rank computes, int64."""
        own = torch.arange(heads, device=device)
        for level in self.levels:
            own = level.own(own)
        return own
