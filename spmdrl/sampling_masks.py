"""The set of ids among which each sampled token was drawn, compressed, from engine to loss.

Shape letters: T tokens, V vocabulary, E ids in lists, B sets of bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from spmdrl.columns import AllToAll, TokenColumn, register, to_device

if TYPE_CHECKING:
    import pyarrow as pa


@register
@dataclass(frozen=True, eq=False)
class SamplingMasks(TokenColumn):
    """For each of T tokens, the ids that top_k, top_p and min_p left to draw from, compressed.

    A set is stored as its ids, ascending, 4 bytes each, or as a bit for each id of the vocabulary
    if that takes no more bytes. It takes no bytes if the token was drawn among all ids, or was not
    drawn.
    """

    key = "sampling_masks"

    vocab: int
    """Size of the vocabulary, V."""
    sizes: Tensor  # [T] int32, bytes of each token's set
    data: Tensor  # [sum(sizes)] uint8, the sets one after the other

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def bitmap_bytes(self) -> int:
        """Bytes of a set that has a bit for each id. Every list of ids has fewer."""
        return (self.vocab + 7) // 8

    @classmethod
    def from_allowed(cls, allowed: Tensor) -> SamplingMasks:
        """Return the masks of sets in the form [T, V] bool. The result is on the CPU."""
        vocab = allowed.shape[1]
        width = (vocab + 7) // 8
        counts = allowed.sum(dim=1)
        listed = 4 * counts < width
        whole = counts == vocab
        sizes = torch.where(listed, 4 * counts, width).masked_fill(whole, 0).cpu()
        ids = (allowed & (listed & ~whole)[:, None]).nonzero()[:, 1].int().cpu()
        bits = numpy.packbits(
            allowed[~listed & ~whole].cpu().numpy().view(numpy.uint8), axis=1, bitorder="little"
        )
        of_list = listed.cpu().repeat_interleave(sizes)
        data = torch.empty(len(of_list), dtype=torch.uint8)
        data[of_list] = ids.view(torch.uint8)
        data[~of_list] = torch.from_numpy(bits).flatten()
        return cls(vocab, sizes.int(), data)

    @classmethod
    def from_ids(cls, ids: Sequence[Sequence[int]], *, vocab: int) -> SamplingMasks:
        """Return the masks of sets in the form of lists of ids, ascending."""
        sizes: list[int] = []
        parts: list[Any] = [numpy.empty(0, numpy.uint8)]
        for own in ids:
            row = numpy.asarray(own, dtype=numpy.int32)
            if len(row) == vocab:
                sizes.append(0)
                continue
            part: Any = row.view(numpy.uint8)
            if len(part) >= (vocab + 7) // 8:
                part = numpy.packbits(numpy.isin(numpy.arange(vocab), row), bitorder="little")
            sizes.append(len(part))
            parts.append(part)
        return cls(
            vocab,
            torch.tensor(sizes, dtype=torch.int32),
            torch.from_numpy(numpy.concatenate(parts)),
        )

    def unknown(self, count: int) -> SamplingMasks:
        """Return the masks of `count` tokens that were drawn among all ids, or not drawn."""
        sizes = torch.zeros(count, dtype=torch.int32)
        return SamplingMasks(self.vocab, sizes, torch.empty(0, dtype=torch.uint8))

    @classmethod
    def cat(cls, parts: Sequence[SamplingMasks]) -> SamplingMasks:
        """Join at least one part, in order."""
        vocab = parts[0].vocab
        assert all(part.vocab == vocab for part in parts), "masks of different vocabularies"
        sizes = torch.cat([part.sizes for part in parts])
        return cls(vocab, sizes, torch.cat([part.data for part in parts]))

    def __getitem__(self, order: Tensor) -> SamplingMasks:
        """Return the masks of the tokens at `order` [n] int64."""
        ends = self.sizes.long().cumsum(0)
        sizes = self.sizes[order].long()
        ends = ends[order]
        # Byte i of the result, in set k, is byte i + shift[k] of the data.
        shift = ends - sizes.cumsum(0)
        at = torch.arange(int(sizes.sum()), device=sizes.device) + shift.repeat_interleave(sizes)
        return SamplingMasks(self.vocab, sizes.int(), self.data[at])

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> SamplingMasks:
        """Return the masks on a device."""
        sizes = to_device(self.sizes, device, non_blocking=non_blocking)
        data = to_device(self.data, device, non_blocking=non_blocking)
        return SamplingMasks(self.vocab, sizes, data)

    def numbers(self) -> list[Tensor]:
        """Return the number of bytes of each token's set."""
        return [self.sizes]

    def exchange(self, numbers: Sequence[Tensor], all_to_all: AllToAll) -> SamplingMasks:
        """Send the masks and return the received ones."""
        sizes = numbers[0].contiguous()
        leaving = self.sizes.split([*all_to_all.num_leaving])
        arriving = sizes.split([*all_to_all.num_arriving])
        data = all_to_all.send(
            self.data,
            num_leaving=[int(part.sum()) for part in leaving],
            num_arriving=[int(part.sum()) for part in arriving],
        )
        return SamplingMasks(self.vocab, sizes, data)

    @classmethod
    def arrow_fields(cls) -> tuple[pa.Field, ...]:
        """Return the fields of the masks' sizes, and of their data."""
        import pyarrow as pa

        sizes = pa.field("sampling_mask_bytes", pa.list_(pa.int32()))
        return sizes, pa.field(cls.key, pa.large_binary())

    def arrow_form(self) -> int:
        """Return the size of the vocabulary."""
        return self.vocab

    def to_arrow(self, lengths: Sequence[int], groups: Sequence[int]) -> list[pa.Array]:
        """Return sizes and data of each sequence; null for a sequence without masks."""
        import pyarrow as pa

        sizes = []
        data = []
        start = 0
        for own in self.sizes.split([*lengths]):
            end = start + int(own.sum())
            sizes.append(own.numpy() if end > start else None)
            data.append(self.data[start:end].numpy().tobytes() if end > start else None)
            start = end
        values = zip(self.arrow_fields(), (sizes, data), strict=True)
        return [pa.array(own, type=field.type) for field, own in values]

    @classmethod
    def from_arrow(cls, table: pa.Table, form: Any) -> SamplingMasks:
        """Return the masks of a table's tokens; see `TokenColumn.from_arrow`."""
        if type(form) is not int or form < 1:
            raise ValueError(f"sampling masks of a vocabulary of {form!r:.60}")
        parts = []
        columns = (table[name].to_pylist() for name in ("length", "sampling_mask_bytes", cls.key))
        for length, sizes, data in zip(*columns, strict=True):
            own = numpy.array(sizes or [0] * length, numpy.int32)
            if len(own) != length:
                raise ValueError(f"sampling masks of {len(own)} tokens, where {length} are")
            masks = numpy.frombuffer(data or b"", numpy.uint8).copy()
            parts.append(cls(form, torch.from_numpy(own), torch.from_numpy(masks)))
        column = cls.cat([cls.from_ids([], vocab=form), *parts])
        column.check(torch.tensor(table["tokens"].combine_chunks().flatten().to_numpy()).long())
        return column

    def ids(self) -> tuple[Tensor, Tensor]:
        """Return the (token, id) pairs of sets that are lists: [E] int64 each, on the CPU."""
        is_list = (self.sizes > 0) & (self.sizes < self.bitmap_bytes)
        rows = torch.arange(len(self)).repeat_interleave(self.sizes.long() // 4 * is_list)
        own = self.data[is_list.repeat_interleave(self.sizes.long())]
        return rows, own.clone().view(torch.int32).long()

    def bitmaps(self) -> tuple[Tensor, Tensor]:
        """Return the sets that are bits: their tokens [B] int64 and bytes [B, bitmap_bytes]."""
        is_bitmap = self.sizes == self.bitmap_bytes
        own = self.data[is_bitmap.repeat_interleave(self.sizes.long())]
        return is_bitmap.nonzero()[:, 0], own.view(-1, self.bitmap_bytes)

    def num_ids(self) -> int:
        """Return the total number of ids in all sets, without those of size 0."""
        bits = numpy.unpackbits(self.bitmaps()[1].numpy())
        return len(self.ids()[1]) + int(bits.sum())

    def check(self, tokens: Tensor) -> None:
        """Raise ValueError unless the sets are valid and each has its own token of [T] int64."""
        sizes = self.sizes.long()
        width = self.bitmap_bytes
        is_whole = len(sizes) == len(tokens) and int(sizes.sum()) == len(self.data)
        if not is_whole or bool((sizes < 0).any()):
            raise ValueError(f"sampling masks of {len(sizes)} tokens, where {len(tokens)} are")
        if bool(((sizes > width) | ((sizes < width) & (sizes % 4 > 0))).any()):
            raise ValueError("sampling masks of a size that none has")
        (rows, ids), (owners, bits) = self.ids(), self.bitmaps()
        own = tokens[owners]
        # Whether each set has its token. One of size 0 has all ids.
        has = sizes == 0
        has[rows[ids == tokens[rows]]] = True
        # `inside` keeps the index of the byte in bounds for ids beyond the vocabulary.
        inside = own < self.vocab
        has[owners] = (
            inside & ((bits.gather(1, (own * inside // 8)[:, None])[:, 0] >> (own % 8)) & 1).bool()
        )
        if bool(((ids < 0) | (ids >= self.vocab)).any()) or not bool(has.all()):
            at = int((~has).nonzero()[0]) if not bool(has.all()) else int(rows[0])
            raise ValueError(f"token {at} ({int(tokens[at])}) is not in the set it was drawn among")
