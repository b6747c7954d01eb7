"""Where sequences begin in a packed row, and how attention pads them.

Shape letters: T packed tokens, R padded rows, S sequences, L tokens of the longest of a padded
group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
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
class Copies:
    """Rows of a tensor, each possibly several times.

    The backward pass adds up the gradients of a row's copies in float32 and in one order. Unlike
    that of index_select, it is deterministic on every device.
    """

    index: Tensor  # [K] int64, the row that each copy is of
    alike: tuple[tuple[Tensor, Tensor], ...]
    """For each number of copies m: the n rows with so many [n], and their copies [n, m]; int64."""

    def of(self, x: Tensor) -> Tensor:
        """Return [K, ...] of [C, ...]."""
        return _copy(x, (self, len(x)))


def _copied(x: Tensor, how: tuple[Copies, int]) -> Tensor:
    return x.index_select(0, how[0].index)


def _summed(grad: Tensor, how: tuple[Copies, int]) -> Tensor:
    copies, count = how
    total = grad.new_zeros(count, *grad.shape[1:])
    for rows, at in copies.alike:
        own = grad.index_select(0, at.flatten())
        if at.shape[1] > 1:
            own = own.unflatten(0, at.shape).sum(1, dtype=torch.float32).to(grad.dtype)
        total.index_copy_(0, rows, own)
    return total


_copy = with_gradient(_copied, _summed)


def make_copies(index: Tensor, device: torch.device | str, *, real: Tensor | None = None) -> Copies:
    """Return the copies of the rows `index` [K] int64, which is on the CPU.

    Args:
        real: [k] int64, the copies that may have a gradient; None: all.
    """
    at = torch.arange(len(index)) if real is None else real
    rows, order = index[at].sort(stable=True)
    at = at[order]
    found, counts = rows.unique_consecutive(return_counts=True)
    starts = counts.cumsum(0) - counts
    alike = []
    for count in counts.unique().tolist():
        which = counts == count
        places = at[starts[which][:, None] + torch.arange(count)]
        alike.append((found[which].to(device), places.to(device)))
    return Copies(index.to(device), tuple(alike))


@dataclass(frozen=True)
class Packing:
    """Where sequences begin in a packed row, and how attention pads them."""

    cu_seqlens: Tensor  # [S+1] int32
    max_seqlen: int  # tokens
    pad_index: Tensor  # [R] int64, packed position of each padded row
    unpad_index: Tensor  # [T] int64, padded row of each packed position
    groups: tuple[PaddedGroup, ...]
    is_in_order: bool = False
    """Whether padded rows are the packed ones: sequences are of one length."""
    keys: Packing | None = None
    """Of the keys, where they are not the queries' own tokens. Its groups are not used."""
    key_copies: Copies | None = None
    """Where sequences share keys: from the keys to those of each sequence, one after another, or
    in padded order."""
    parents: tuple[int, ...] | None = None
    """For each sequence the one that it continues, an earlier one, or -1; None: none does."""
    chunked: Packing | None = None
    """The same tokens, with each chunk as a sequence."""
    spans: Tensor | None = None
    """[R] int64, for each padded row the number of its span, whose tokens attend to each other in
    both directions; -1 for no span and for padding. None: all attention is causal."""
    computed: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What layers computed of this row alone, for the next layers."""

    def once(self, key: str, compute: Callable[[], Any]) -> Any:
        """Return what is computed of this row once, for all of its layers."""
        if key not in self.computed:
            self.computed[key] = compute()
        return self.computed[key]

    @property
    def of_keys(self) -> Packing:
        """Where sequences begin among the keys."""
        return self.keys or self

    def places(self, count: int) -> Tensor:
        """Return the position of each of the T = count tokens in its sequence, [T] int64."""
        lengths = self.cu_seqlens.diff()
        # Longer keys begin before the queries.
        firsts = self.cu_seqlens[1:] - self.of_keys.cu_seqlens.diff()
        starts = firsts.repeat_interleave(lengths, output_size=count)
        return torch.arange(count, device=starts.device) - starts

    def to(self, device: torch.device | str) -> Packing:
        """Return the packing of one row of queries or keys on a device."""
        return replace(
            self,
            cu_seqlens=self.cu_seqlens.to(device),
            pad_index=self.pad_index.to(device),
            unpad_index=self.unpad_index.to(device),
        )

    def padded_keys(self, x: Tensor) -> Tensor:
        """Return keys or values in padded order."""
        return pad(x, self.of_keys) if self.key_copies is None else self.key_copies.of(x)

    def keys_in_order(self, x: Tensor) -> Tensor:
        """Return keys or values of each sequence, one after another."""
        return x if self.key_copies is None else self.key_copies.of(x)

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
    key_index: Tensor | None = None,
    parents: Sequence[int] | None = None,
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
        key_index: [K] int64 on the CPU, where each sequence's keys are, if sequences share some;
            None: they lie one after another.
        parents: see Packing.parents.
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
    queries = count
    if padded and key_index is not None:
        queries = _with_others_queries(count, others, key_index)
    members = _alike(queries, others - queries) if padded else []
    packing = _pack(queries, members)
    keys = key_copies = None
    if key_lengths is not None:
        keys = _pack(others, members)
    if key_index is not None and keys is not None:
        if queries is not count:
            # The queries of a sequence are all its keys' tokens, or only its own.
            tokens = key_index[_last(others, queries)]
            packing = replace(
                packing,
                cu_seqlens=_bounds(count),
                max_seqlen=int(count.max()),
                pad_index=tokens[packing.pad_index],
                unpad_index=packing.unpad_index[_last(queries, count)],
                is_in_order=False,
            )
        if padded:
            key_copies = make_copies(key_index[keys.pad_index], device, real=keys.unpad_index)
        else:
            key_copies = make_copies(key_index, device)
    packing = packing.to(device)
    if spans is not None:
        spans = spans.to(device)
        none = torch.full_like(packing.pad_index, -1)
        spans = none.index_copy(0, packing.unpad_index, spans)
    keys = None if keys is None else keys.to(device)
    return replace(
        packing,
        groups=_groups(queries, others, members),
        keys=keys,
        key_copies=key_copies,
        parents=None if parents is None else tuple(parents),
        chunked=chunked,
        spans=spans,
    )


def padded_groups(lengths: Sequence[int]) -> tuple[PaddedGroup, ...]:
    """Return the groups of `make_packing` for sequences that share nothing."""
    count = torch.tensor(lengths, dtype=torch.int64)
    return _groups(count, count, _alike(count, torch.zeros_like(count)))


def _groups(
    lengths: Tensor, key_lengths: Tensor, members: Sequence[Tensor]
) -> tuple[PaddedGroup, ...]:
    """Return the groups of these members, one after another."""
    groups = []
    start = 0
    key_start = 0
    for own in members:
        length = int(lengths[own].max())
        key_length = int(key_lengths[own].max())
        groups.append(PaddedGroup(len(own), start, length, key_start, key_length))
        start += len(own) * length
        key_start += len(own) * key_length
    return tuple(groups)


def _with_others_queries(lengths: Tensor, key_lengths: Tensor, key_index: Tensor) -> Tensor:
    """Return the queries that padded attention computes for each sequence: [S] int64.

    With as many queries as keys, a causal kernel skips half of the pairs and needs no mask. So if
    more than half of the keys are a sequence's own, the tokens of the shared prefix are queries
    too. Their outputs are dropped.
    """
    is_better = (2 * lengths > key_lengths) & (key_lengths > SHORT)
    # A slice of context parallelism does not have the queries of all its keys.
    lacks_queries = int(lengths.sum()) <= int(key_index.max())
    if lacks_queries or not is_better.any():
        return lengths
    return torch.where(is_better, key_lengths, lengths)


def _last(lengths: Tensor, counts: Tensor) -> Tensor:
    """Return which tokens are among the last `counts` of their sequence: [T] bool."""
    ends = lengths.cumsum(0).repeat_interleave(lengths)
    left = ends - torch.arange(len(ends))
    return left <= counts.repeat_interleave(lengths)


def _alike(lengths: Tensor, before: Tensor) -> list[Tensor]:
    """Return groups of sequences of similar length that have equally many keys before their own."""
    groups = []
    order = torch.argsort(lengths, descending=True, stable=True)
    for same in before.unique(sorted=True).tolist():
        members = order[before[order] == same]
        ordered = lengths[members].tolist()
        begin = 0
        while begin < len(ordered):
            # Padding adds at most a third to a sequence, but short ones all share a group; see
            # SHORT.
            shortest = 1 if ordered[begin] <= SHORT // 2 else 0.75 * ordered[begin]
            end = begin
            while end < len(ordered) and ordered[end] >= shortest:
                end += 1
            groups.append(members[begin:end])
            begin = end
    return groups


def _pack(lengths: Tensor, groups: Sequence[Tensor]) -> Packing:
    """Return the packing without its groups, on the CPU."""
    cu_seqlens = _bounds(lengths)
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
        row += packed.numel()
    pad_index = torch.cat(pads)
    in_order = torch.arange(int(cu_seqlens[-1]))
    return Packing(
        cu_seqlens=cu_seqlens,
        max_seqlen=int(lengths.max()),
        pad_index=pad_index,
        unpad_index=rows_of,
        groups=(),
        is_in_order=torch.equal(pad_index, in_order) and torch.equal(rows_of, in_order),
    )


def _bounds(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def _padded(x: Tensor, packing: Packing) -> Tensor:
    return x.index_select(0, packing.pad_index)


def _packed(x: Tensor, packing: Packing) -> Tensor:
    return x.index_select(0, packing.unpad_index)


def _with_zeros(x: Tensor, packing: Packing) -> Tensor:
    """Return packed rows in padded order, and zeros in the place of padding."""
    padded = x.new_zeros(packing.pad_index.numel(), *x.shape[1:])
    return padded.index_copy_(0, packing.unpad_index, x.contiguous())


# Both directions of `pad` gather rows, which is deterministic and about twice as fast as the
# index_add backward of index_select.
_pad_rows = with_gradient(_padded, _packed)
_unpad_rows = with_gradient(_packed, _with_zeros)


def pad(x: Tensor, packing: Packing) -> Tensor:
    """Return the rows of a packed tensor in padded order; the tensor itself where that is one."""
    return x if packing.is_in_order else _pad_rows(x, packing)


def unpad(x: Tensor, packing: Packing) -> Tensor:
    """Return padded rows in packed order; padding rows get a zero gradient."""
    return x if packing.is_in_order else _unpad_rows(x, packing)


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
