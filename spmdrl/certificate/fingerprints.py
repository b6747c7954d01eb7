"""Fingerprints: what a tensor holds, the same however its elements lie on ranks.

An element's bits are a number, its place in the whole tensor gives two odd 64-bit ones, and the
digest is the sum of their products modulo 2**64: exact, so that neither order nor layout changes
it. One flipped bit always changes it; anything else goes unseen by chance in 1 of 2**64 cases or
less. It finds accidents: who may choose the elements could make two tensors of one digest.

Beside it stand the norm and a few sums with random signs, float64, in which layouts differ by
rounding alone: from those of two tensors follows how far these are apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from spmdrl.model.cuts import cut_of
from spmdrl.model.shards import Box, held_boxes, narrow
from spmdrl.world import World

SKETCHES = 4
"""Sums with random signs. Of a difference in one element each gives the very size; of one in many,
their mean square is that of the difference's norm, to half of it."""
_CHUNK = {"cpu": 2**15, "cuda": 2**22}
"""Elements at a time. On a CPU all temporaries then stay in its cache: an element takes 50 ns, and
400 ns by 2**20 at a time."""
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_TOKEN_BITS = 32  # of a token's place within its sequence

Row = list[str | float | None]
"""As lines have it: hexadecimal digest, norm, sketches; None for what is not finite."""


class Positions:
    """Elements' places in a tensor, and what they make of its elements.

    Args:
        positions: [n] int64, of each element.
    """

    def __init__(self, positions: Tensor):
        self._first = _mixed(positions)
        self._factors = torch.stack([self._first, _mixed(self._first)]).bitwise_or_(1)

    @cached_property
    def _signs(self) -> Tensor:
        bits = torch.arange(SKETCHES, device=self._first.device)[:, None] + 40
        return (self._first >> bits).bitwise_and_(1).double().mul_(2).sub_(1)

    def exact(self, values: Tensor) -> Tensor:
        """Return [3] int64 of the elements [n], of any dtype."""
        bits = values.to(torch.int8) if values.dtype == torch.bool else values.contiguous()
        bits = bits.view(_BITS[bits.element_size()]).long()
        return torch.cat([(self._factors * bits).sum(1), bits.new_full((1,), bits.numel())])

    def near(self, values: Tensor) -> Tensor:
        """Return [1 + SKETCHES] float64 of the elements [n], of any dtype."""
        values = values.double()
        return torch.cat([values.dot(values)[None], self._signs @ values])


@dataclass
class _Share:
    """What this rank adds to one fingerprint, and how."""

    exact: Tensor  # [3] int64: two sums, and the number of elements
    near: Tensor  # [1 + SKETCHES] float64: the sum of squares, and the signed sums
    copies: int  # ranks that add the same
    speaks: bool  # whether this is the one of them that counts

    def add(
        self, places: Positions, values: Tensor, *, number: int = 0, is_near: bool = True
    ) -> None:
        """Add elements [n]."""
        factor = int(_mixed(torch.tensor(number))) | 1 if number else 1
        self.exact += places.exact(values).cpu() * factor
        if is_near:
            self.near += places.near(values).cpu()


def _mixed(values: Tensor) -> Tensor:
    """Return 64 bits that look drawn of each int64.

    Source: Steele, Lea, Flood 2014, Fast splittable pseudorandom number generators (splitmix64).
    """
    z = values + _GAMMA
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        # Of int64 a shift brings in the sign, which the mask takes out again.
        z ^= (z >> shift).bitwise_and_(2 ** (64 - shift) - 1)
        z *= factor
    return z


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


_GAMMA = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


class Tally:
    """The fingerprints of one step, as far as this trainer rank knows them.

    Add under the same names, in the same order, on all trainer ranks.
    """

    def __init__(self, world: World):
        self._world, self._shares = world, dict[str, _Share]()

    def add(self, tensors: Mapping[str, Tensor], *, number: int = 0, is_near: bool = True) -> None:
        """Add tensors that lie alike: this rank's parts of DTensors of any mesh, or plain ones, of
        which all have the whole.

        Args:
            number: of tensors that share a name: each is added with a factor of its own, so that
                it matters which was which.
            is_near: take the float sums too.
        """
        world, (one, *_) = self._world, tensors.values()
        cut, device = cut_of("", one), world.device
        parts = math.prod(axis.size for axis in cut.axes if axis.dim is not None)
        copies, speaks = len(world.trainer_ranks) // parts, self._is_first(one)
        size = _CHUNK[device.type]
        chunks = [held_chunks(name, tensor, size=size) for name, tensor in tensors.items()]
        shares = [self._share(name, copies=copies, speaks=speaks) for name in tensors]
        for pieces in zip(*chunks, strict=True):
            places = Positions(_positions(pieces[0][1], one.shape, device=device))
            for share, (view, _) in zip(shares, pieces):
                own = view.to(device).flatten()
                share.add(places, own, number=number, is_near=is_near)

    def add_tokens(
        self, columns: Mapping[str, Tensor], *, sequences: Tensor, starts: Tensor
    ) -> None:
        """Add columns [T, ...] of a micro-batch, {name: column}; the same on ranks of a dp index.

        Args:
            sequences: [S] int64, row of each sequence in the whole batch; -1: none, left out.
            starts: [S+1] integers, where sequences begin among the tokens.
        """
        lengths = starts.diff().long()
        rows = sequences.repeat_interleave(lengths)
        inside = torch.arange(len(rows), device=rows.device)
        inside = inside - starts[:-1].long().repeat_interleave(lengths)
        kept, at = rows >= 0, (rows << _TOKEN_BITS) + inside
        world, of_width = self._world, dict[int, Positions]()
        for name, column in columns.items():
            own = column[kept].flatten(1) if column.dim() > 1 else column[kept][:, None]
            width = own.shape[1]
            if width not in of_width:
                across = torch.arange(width, device=own.device)
                of_width[width] = Positions((at[kept][:, None] * width + across).flatten())
            share = self._share(name, copies=world.ranks_per_dp, speaks=world.speaks_for_dp)
            share.add(of_width[width], own.flatten())

    def _is_first(self, tensor: Tensor) -> bool:
        """Return whether this is the first of the ranks that hold the same part."""
        rank, first = self._world.rank, self._world.trainer_ranks[0]
        if not isinstance(tensor, DTensor):
            return rank == first
        cut, here = cut_of("", tensor), tensor.device_mesh.get_coordinate()
        assert here is not None
        copied = [at for axis, at in zip(cut.axes, here) if axis.dim is None]
        # Of meshes over some axes of the trainers there are several: one has the first rank.
        return first in cut.ranks and not any(copied)

    def _share(self, name: str, *, copies: int, speaks: bool) -> _Share:
        if name not in self._shares:
            exact, near = torch.zeros(3).long(), torch.zeros(1 + SKETCHES).double()
            self._shares[name] = _Share(exact, near, copies, speaks)
        return self._shares[name]

    def total(self) -> tuple[dict[str, Row], list[str]]:
        """Return the rows of all names, the same on all trainers, who meet; and the names of what
        ranks hold copies of that differ."""
        shares = list(self._shares.values())
        none = torch.zeros_like
        exact = torch.stack([s.exact for s in shares] + [s.exact * s.speaks for s in shares])
        near = torch.stack([s.near if s.speaks else none(s.near) for s in shares])
        for sums in (exact, near):  # int64 wraps: sums modulo 2**64, in any order
            dist.all_reduce(sums, group=self._world.trainer_control)
        every, counted = exact.chunk(2)
        copies = torch.tensor([share.copies for share in shares])[:, None]
        differ = (every != counted * copies).any(1).tolist()
        rows = {name: _row(*both) for name, both in zip(self._shares, zip(counted, near))}
        return rows, [name for name, is_other in zip(self._shares, differ) if is_other]


def _row(exact: Tensor, near: Tensor) -> Row:
    first, second, count = exact.tolist()
    digest = f"{(first + count) % 2**64:016x}{(second ^ count) % 2**64:016x}"
    square, *signed = near.tolist()
    return [digest, *(_short(value) for value in (square**0.5, *signed))]


def _short(value: float) -> float | None:
    return float(f"{value:.10g}") if math.isfinite(value) else None


def deviation(a: Row, b: Row) -> float:
    """Return how far two tensors are apart, as a share of the larger one's norm: an estimate from
    their rows. 0 for rows that are alike; inf where a norm is not finite."""
    if a == b:
        return 0.0
    numbers = [[math.nan if v is None else float(v) for v in row[1:]] for row in (a, b)]
    (norm, *own), (other, *its) = numbers
    apart = math.sqrt(sum((x - y) ** 2 for x, y in zip(own, its)) / SKETCHES)
    if apart == 0:
        return 0.0
    largest = max(norm, other)
    return apart / largest if math.isfinite(apart) and largest > 0 else math.inf


def held_chunks(name: str, tensor: Tensor, *, size: int) -> Iterator[tuple[Tensor, Box]]:
    """Yield what this rank holds of a tensor in pieces of at most `size` elements: views, and the
    boxes that they show."""
    for box, view in held_boxes(name, tensor):
        for begin in range(0, box.numel, size):
            for part in box.span(begin, min(begin + size, box.numel)):
                yield narrow(view, outer=box, part=part), part


def _positions(box: Box, shape: torch.Size, *, device: torch.device) -> Tensor:
    """Return the place of each element of a box in the whole tensor, row-major: [n] int64."""
    found = torch.zeros((), dtype=torch.int64, device=device)
    for at, length, size in zip(box.start, box.shape, shape):
        own = torch.arange(at, at + length, device=device)
        found = found[..., None] * size + own
    return found.flatten()
