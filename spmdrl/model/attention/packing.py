"""Where sequences begin in a packed row, and how attention pads them.

Shape letters: T packed tokens, R padded rows, S sequences, L tokens of the longest of a padded
group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.model.parallel.collectives import with_gradient

S = TypeVar("S")
SHORT = 64
"""Up to this length plain matmuls beat the CPU's SDPA kernel (14 against 21 ms forward and
backward for 512 sequences of 16 tokens), and one padded group wastes little."""


@dataclass(frozen=True)
class PaddedGroup:
    """`count` sequences: rows [start, start + count * length) of the padded queries, and the same
    for their keys. Where keys are longer, the queries are the last tokens of the sequence."""

    count: int
    start: int
    length: int
    key_start: int
    key_length: int


@dataclass(frozen=True)
class Packing:
    """Where sequences begin in a packed row, and how attention pads them."""

    cu_seqlens: Tensor  # [S+1] int32
    max_seqlen: int  # tokens
    pad_index: Tensor  # [R] int64, packed position of each padded row
    unpad_index: Tensor  # [T] int64, padded row of each packed position
    groups: tuple[PaddedGroup, ...]
    keys: Packing | None = None
    """Of the keys, where they are not the queries' own tokens. Its groups are not used."""
    chunked: Packing | None = None
    """The same tokens, with each chunk as a sequence."""
    spans: Tensor | None = None
    """[R] int64, for each padded row the number of its span, whose tokens attend to each other in
    both directions; -1 for no span and for padding. None: all attention is causal."""

    @property
    def of_keys(self) -> Packing:
        """Where sequences begin among the keys."""
        return self.keys or self

    def places(self, count: int) -> Tensor:
        """Return the position of each of the T = count tokens in its sequence, [T] int64."""
        assert self.keys is None, "positions of a slice are not known"
        lengths = self.cu_seqlens.diff()
        starts = self.cu_seqlens[:-1].repeat_interleave(lengths, output_size=count)
        return torch.arange(count, device=starts.device) - starts

    @property
    def in_chunks(self) -> Packing:
        """The same tokens for layers that attend within chunks."""
        assert self.chunked is not None, "make_packing was called without the model's chunk"
        return self.chunked


def make_packing(
    lengths: Sequence[int],
    device: torch.device,
    *,
    padded: bool,
    key_lengths: Sequence[int] | None = None,
    chunk: int | None = None,
    spans: Tensor | None = None,
) -> Packing:
    """Return the packing of sequences that lie one after another.

    Args:
        lengths: tokens per sequence, in packed order; each at least 1.
        device: of the index tensors.
        padded: make the padded layout, which varlen kernels do not need.
        key_lengths: tokens of each sequence's keys, the last of which are its queries; None where
            keys and queries are the same tokens.
        chunk: length of the chunks that some layers attend within, in tokens; None: no chunks.
        spans: [T] int64 on the CPU, see Packing.spans; only with `padded`.
    """
    assert spans is None or (padded and key_lengths is None), "only padded attention has spans"
    assert chunk is None or key_lengths is None, "slices of chunks are refused"
    chunked = None
    if chunk is not None:
        parts = [min(chunk, length - at) for length in lengths for at in range(0, length, chunk)]
        chunked = make_packing(parts, device, padded=padded)
    count = torch.tensor(lengths, dtype=torch.int64)
    others = count if key_lengths is None else torch.tensor(key_lengths, dtype=torch.int64)
    members = _alike(count, others) if padded else []
    starts, packing = _pack(count, members, device=device)
    key_starts, keys = (
        (starts, None) if key_lengths is None else _pack(others, members, device=device)
    )
    groups = tuple(
        PaddedGroup(
            len(own),
            start=start,
            length=int(count[own].max()),
            key_start=key_start,
            key_length=int(others[own].max()),
        )
        for own, start, key_start in zip(members, starts, key_starts)
    )
    if spans is not None:
        spans = spans.to(device)
        none = torch.full_like(packing.pad_index, -1)
        spans = none.index_copy(0, packing.unpad_index, spans)
    return replace(packing, groups=groups, keys=keys, chunked=chunked, spans=spans)


def _alike(lengths: Tensor, key_lengths: Tensor) -> list[Tensor]:
    """Return groups of sequences of similar length. One with longer keys is a group of its own."""
    order = torch.argsort(lengths, descending=True, stable=True)
    is_own = (lengths == key_lengths)[order]
    groups = [*order[~is_own][:, None]]
    order = order[is_own]
    begin = 0
    ordered = lengths[order].tolist()
    while begin < len(ordered):
        # Padding adds at most a third to a sequence, but short ones all share a group; see SHORT.
        shortest = 1 if ordered[begin] <= SHORT // 2 else 0.75 * ordered[begin]
        end = begin
        while end < len(ordered) and ordered[end] >= shortest:
            end += 1
        groups.append(order[begin:end])
        begin = end
    return groups


def _pack(
    lengths: Tensor, groups: Sequence[Tensor], *, device: torch.device
) -> tuple[list[int], Packing]:
    """Return where each group's padded rows start, and the packing without its groups."""
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
    starts = []
    row = 0
    empty = torch.empty(0, dtype=torch.int64)
    pads = [empty]
    rows_of = torch.empty(int(cu_seqlens[-1]) if groups else 0, dtype=torch.int64)
    for members in groups:
        columns = torch.arange(int(lengths[members].max()))
        # Padding repeats the sequence's last token. Under a causal mask no real query sees a
        # later row, so no further mask is needed and padded rows get a zero gradient.
        inside = torch.minimum(columns[None], lengths[members][:, None] - 1)
        packed = cu_seqlens[members][:, None] + inside
        padded_rows = row + torch.arange(packed.numel()).view(packed.shape)
        is_real = columns[None] < lengths[members][:, None]
        rows_of[packed[is_real]] = padded_rows[is_real]
        pads.append(packed.reshape(-1))
        starts.append(row)
        row += packed.numel()
    return starts, Packing(
        cu_seqlens=cu_seqlens.to(torch.int32).to(device),
        max_seqlen=int(lengths.max()),
        pad_index=torch.cat(pads).to(device),
        unpad_index=rows_of.to(device),
        groups=(),
    )


def _padded(x: Tensor, packing: Packing) -> Tensor:
    return x.index_select(0, packing.pad_index)


def _packed(x: Tensor, packing: Packing) -> Tensor:
    return x.index_select(0, packing.unpad_index)


def _with_zeros(x: Tensor, packing: Packing) -> Tensor:
    """Return packed rows in padded order, and zeros in the place of padding."""
    padded = x.new_zeros(packing.pad_index.numel(), *x.shape[1:])
    return padded.index_copy_(0, packing.unpad_index, x.contiguous())


pad = with_gradient(_padded, _packed)
"""Rows of a packed tensor in padded order. Both directions gather rows, which is deterministic and
about twice as fast as the index_add backward of index_select."""
unpad = with_gradient(_packed, _with_zeros)
"""Padded rows back in packed order; padding rows get a zero gradient."""


def packs(items: Iterable[S], budget: int, *, size: Callable[[Any], int] = len) -> list[list[S]]:
    """Split items, such as sequences, into lists of at most `budget` tokens and at least one item.

    Args:
        size: tokens of an item.
    """
    packs: list[list[S]] = []
    room = 0
    for item in items:
        if not packs or size(item) > room:
            packs.append([])
            room = budget
        packs[-1].append(item)
        room -= size(item)
    return packs
