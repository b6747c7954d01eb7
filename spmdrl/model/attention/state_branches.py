"""Packed rows in which sequences continue others, for layers with a state.

Where sequences have a prefix in common, the row has it once, as a sequence of its own. The others
continue it (Packing.parents): their states begin with the state after it, and convolutions see its
last tokens. The gradient goes the same way back, and is added up over those that continue it.

- Chunked recurrences go on from the chunk that ends a parent (`in_chunks`, state_chunks.py).
- Convolutions, and a kernel that takes no state to begin with, compute a row in which each sequence
  begins with tokens before its own (`with_earlier`).
- Other recurrences and kernels compute sequences after their parents (`by_levels`).

Shape letters: T tokens of the row, E of a row with earlier tokens, S sequences, C chunks, L tokens
of a chunk, h heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from spmdrl.model.attention.packing import Copies, Packing, make_copies, make_packing
from spmdrl.model.parallel.collectives import with_gradient


def _placed(x: Tensor, how: tuple[Tensor, int]) -> Tensor:
    at, count = how
    return x.new_zeros(x.shape[0], count, *x.shape[2:]).index_copy_(1, at, x.contiguous())


def _taken(x: Tensor, how: tuple[Tensor, int]) -> Tensor:
    return x.index_select(1, how[0])


_place = with_gradient(_placed, _taken)
_take = with_gradient(_taken, _placed)


def place(x: Tensor, at: Tensor, *, count: int) -> Tensor:
    """Return [h, count, ...] with [h, T, ...] at the places `at` [T], which differ, and zeros."""
    return _place(x, (at, count))


def take(x: Tensor, at: Tensor) -> Tensor:
    """Return [h, T, ...] of the places `at` [T], which differ; the inverse of `place`."""
    return _take(x, (at, x.shape[1]))


def _sequences(packing: Packing) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    """Return each sequence's span [begin, end) of the row, and its parent or -1."""
    assert packing.parents is not None
    bounds = packing.cu_seqlens.tolist()
    return list(zip(bounds, bounds[1:])), packing.parents


# --------------------------------------------------------------------------- chunks


@dataclass(frozen=True)
class ChunkPlaces:
    """Where tokens are in chunks, if sequences that continue others begin a chunk, and if those
    that are continued end one. Places between have no token, and leave states as they are."""

    at: Tensor  # [T] int64, of each token
    numbers: Tensor  # [C * L] int64, the sequence of each place
    before: dict[int, int]
    """{first chunk of a sequence: last chunk of its parent}; other chunks follow the one before."""


def in_chunks(packing: Packing, size: int) -> ChunkPlaces:
    """Return the places of a row's tokens in chunks of `size`."""
    spans, parents = _sequences(packing)
    continued = {*parents}
    begins: list[int] = []
    ends: list[int] = []
    before = {}
    end = 0
    for number, ((first, last), parent) in enumerate(zip(spans, parents)):
        if parent >= 0 or number - 1 in continued:
            end += -end % size
        if parent >= 0:
            before[end // size] = (ends[parent] - 1) // size
        begins.append(end)
        end += last - first
        ends.append(end)
    end += -end % size
    at = torch.cat([torch.arange(*span) for span in zip(begins, ends)])
    counts = torch.tensor([*begins, end]).diff()
    numbers = torch.arange(len(spans)).repeat_interleave(counts)
    device = packing.cu_seqlens.device
    return ChunkPlaces(at.to(device), numbers.to(device), before)


# --------------------------------------------------------------------------- earlier tokens


@dataclass(frozen=True)
class _Earlier:
    """A row in which each sequence begins with tokens before its own."""

    packing: Packing
    copies: Copies  # [E], of the row's tokens
    own: Tensor  # [T] int64, where the sequences' own tokens are


def _earlier(packing: Packing, count: int | None) -> _Earlier:
    paths: list[Tensor] = []
    own = []
    end = 0
    for (first, last), parent in zip(*_sequences(packing)):
        path = torch.arange(first, last)
        if parent >= 0:
            before = paths[parent]
            most = len(before) if count is None else min(count, len(before))
            path = torch.cat([before[len(before) - most :], path])
        paths.append(path)
        end += len(path)
        own.append(torch.arange(end - (last - first), end))
    device = packing.cu_seqlens.device
    return _Earlier(
        make_packing([len(path) for path in paths], device, padded=False),
        make_copies(torch.cat(paths), device),
        torch.cat(own).to(device),
    )


def with_earlier(
    compute: Callable[..., Tensor], packing: Packing, *inputs: Tensor, count: int | None
) -> Tensor:
    """Return [D, T], from what `compute` returns for sequences that begin with earlier tokens.

    Args:
        compute: from a packing and inputs [D, E] to [D, E].
        inputs: [D, T] each, D may differ.
        count: how many earlier tokens, or as many as there are; None: all.
    """
    if packing.parents is None:
        return compute(packing, *inputs)
    row = packing.once(f"{count} earlier tokens", lambda: _earlier(packing, count))
    return take(compute(row.packing, *(row.copies.of(x.T).T for x in inputs)), row.own)


# --------------------------------------------------------------------------- levels


@dataclass(frozen=True)
class _Generation:
    """Sequences whose parents are in levels before."""

    at: Tensor  # [n] int64, their tokens in the row
    bounds: Tensor  # [S + 1] int64, where each begins among these
    before: list[int]  # [S], their parents, counted level by level; empty: they have none


def _levels(packing: Packing, *, one_by_one: bool) -> tuple[list[_Generation], Tensor]:
    """Return the levels, and where each token of the row is in them, one after another [T]."""
    spans, parents = _sequences(packing)
    device = packing.cu_seqlens.device
    depths: list[int] = []
    for number, parent in enumerate(parents):
        depth = depths[parent] + 1 if parent >= 0 else 0
        depths.append(number if one_by_one else depth)
    order = sorted(range(len(spans)), key=lambda number: depths[number])
    index_of = {number: index for index, number in enumerate(order)}
    levels = []
    for _, members in groupby(order, key=lambda number: depths[number]):
        own = [*members]
        bounds = [0, *accumulate(spans[number][1] - spans[number][0] for number in own)]
        before = [index_of[parents[number]] for number in own if parents[number] >= 0]
        levels.append(
            _Generation(
                torch.cat([torch.arange(*spans[number]) for number in own]).to(device),
                torch.tensor(bounds, device=device),
                before,
            )
        )
    return levels, torch.cat([level.at for level in levels]).argsort()


def by_levels(
    compute: Callable[..., tuple[Tensor, Any]],
    packing: Packing,
    *inputs: Tensor,
    one_by_one: bool = False,
) -> Tensor:
    """Return the output [T, ...] of a recurrence, computed for sequences after their parents.

    Args:
        compute: from inputs [n, ...] of some sequences, `bounds` [S + 1] int64, which say where
            each begins, and the states `before` [S, ...], None for empty ones, to outputs [n, ...]
            and the states after them [S, ...].
        inputs: [T, ...] each.
        one_by_one: compute each sequence alone.
    """
    if packing.parents is None:
        return compute(*inputs, bounds=packing.cu_seqlens.long(), before=None)[0]
    key = f"levels, one by one: {one_by_one}"
    levels, inverse = packing.once(key, lambda: _levels(packing, one_by_one=one_by_one))
    outputs = []
    states: list[Tensor] = []  # after each sequence
    for level in levels:
        before = torch.stack([states[index] for index in level.before]) if level.before else None
        own = (take(x[None], level.at)[0] for x in inputs)
        output, after = compute(*own, bounds=level.bounds, before=before)
        outputs.append(output)
        states += after.unbind()
    return take(torch.cat(outputs)[None], inverse)[0]
