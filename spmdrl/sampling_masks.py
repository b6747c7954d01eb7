"""Among which ids of the vocabulary each sampled token was drawn, compressed, from engine to loss.

Shape letters: T tokens, V vocabulary, E ids in lists, B sets of bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingMasks:
    """Of each of T tokens, the ids among which it was drawn (by top_k, top_p, min_p), compressed.

    A set is its ids, ascending, 4 bytes each; or a bit for each id of the vocabulary where that
    takes fewer bytes; or nothing where the token was drawn among all, or not drawn.
    """

    vocab: int
    """Ids that there are, V."""
    sizes: Tensor  # [T] int32, bytes of each token's set
    data: Tensor  # [sum(sizes)] uint8, the sets one after the other

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def bitmap_bytes(self) -> int:
        """Bytes of a set that has a bit for each id; no list of ids has as many."""
        return (self.vocab + 7) // 8

    @classmethod
    def of(cls, kept: Tensor) -> SamplingMasks:
        """Return sets given as [T, V] bool, on the CPU."""
        vocab = kept.shape[1]
        width = (vocab + 7) // 8
        counts = kept.sum(dim=1)
        listed = 4 * counts < width
        whole = counts == vocab
        sizes = torch.where(listed, 4 * counts, width).masked_fill(whole, 0).cpu()
        ids = (kept & (listed & ~whole)[:, None]).nonzero()[:, 1].int().cpu()
        bits = numpy.packbits(
            kept[~listed & ~whole].cpu().numpy().view(numpy.uint8), axis=1, bitorder="little"
        )
        of_list = listed.cpu().repeat_interleave(sizes)
        data = torch.empty(len(of_list), dtype=torch.uint8)
        data[of_list] = ids.view(torch.uint8)
        data[~of_list] = torch.from_numpy(bits).flatten()
        return cls(vocab, sizes.int(), data)

    @classmethod
    def listed(cls, ids: Sequence[Sequence[int]], *, vocab: int) -> SamplingMasks:
        """Return sets given by their ids, ascending."""
        sizes: list[int] = []
        parts: list[Any] = [numpy.empty(0, numpy.uint8)]
        for own in ids:
            found = numpy.asarray(own, dtype=numpy.int32)
            if len(found) == vocab:
                sizes.append(0)
                continue
            part: Any = found.view(numpy.uint8)
            if len(part) >= (vocab + 7) // 8:
                part = numpy.packbits(numpy.isin(numpy.arange(vocab), found), bitorder="little")
            sizes.append(len(part))
            parts.append(part)
        return cls(
            vocab,
            torch.tensor(sizes, dtype=torch.int32),
            torch.from_numpy(numpy.concatenate(parts)),
        )

    @staticmethod
    def restored(plain: Mapping[str, Any] | None) -> SamplingMasks | None:
        """Return those whose fields these are; None for none."""
        return None if plain is None else SamplingMasks(**plain)

    @staticmethod
    def concat(
        parts: Sequence[SamplingMasks | None], lengths: Sequence[int]
    ) -> SamplingMasks | None:
        """Join those of consecutive tokens, `lengths` of them each; None says nothing of its own.

        Returns: None where all parts are None.
        """
        known = [part for part in parts if part is not None]
        if not known:
            return None
        sizes = [
            torch.zeros(length, dtype=torch.int32) if part is None else part.sizes
            for part, length in zip(parts, lengths)
        ]
        assert [len(own) for own in sizes] == [*lengths]
        assert len({part.vocab for part in known}) == 1, "sets of different vocabularies"
        return SamplingMasks(
            known[0].vocab, torch.cat(sizes), torch.cat([part.data for part in known])
        )

    def __getitem__(self, order: Tensor) -> SamplingMasks:
        """Return those of the tokens at `order` [n] int64."""
        ends = self.sizes.long().cumsum(0)
        sizes = self.sizes[order].long()
        ends = ends[order]
        shift = ends - sizes.cumsum(0)
        at = torch.arange(int(sizes.sum()), device=sizes.device) + shift.repeat_interleave(sizes)
        return SamplingMasks(self.vocab, sizes.int(), self.data[at])

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> SamplingMasks:
        """Return the same on a device."""
        sizes, data = (t.to(device, non_blocking=non_blocking) for t in (self.sizes, self.data))
        return SamplingMasks(self.vocab, sizes, data)

    def cpu(self) -> SamplingMasks:
        """Return the same on the CPU."""
        return SamplingMasks(self.vocab, self.sizes.cpu(), self.data.cpu())

    def ids(self) -> tuple[Tensor, Tensor]:
        """Return the sets of lists: which token, and which id, [E] int64 each; on the CPU."""
        is_list = (self.sizes > 0) & (self.sizes < self.bitmap_bytes)
        rows = torch.arange(len(self)).repeat_interleave(self.sizes.long() // 4 * is_list)
        own = self.data[is_list.repeat_interleave(self.sizes.long())]
        return rows, own.clone().view(torch.int32).long()

    def bitmaps(self) -> tuple[Tensor, Tensor]:
        """Return the sets of bits: which tokens, [B] int64, and their bytes [B, bitmap_bytes]."""
        is_bitmap = self.sizes == self.bitmap_bytes
        own = self.data[is_bitmap.repeat_interleave(self.sizes.long())]
        return is_bitmap.nonzero()[:, 0], own.view(-1, self.bitmap_bytes)

    def num_ids(self) -> int:
        """Return the ids of all sets together, of tokens that were not drawn among all."""
        bits = numpy.unpackbits(self.bitmaps()[1].numpy())
        return len(self.ids()[1]) + int(bits.sum())

    def check(self, tokens: Tensor) -> None:
        """Raise ValueError unless the sets make sense, each with its own token [T] int64."""
        sizes = self.sizes.long()
        width = self.bitmap_bytes
        is_whole = len(sizes) == len(tokens) and int(sizes.sum()) == len(self.data)
        if not is_whole or bool((sizes < 0).any()):
            raise ValueError(f"sampling masks of {len(sizes)} tokens, where {len(tokens)} are")
        if bool(((sizes > width) | ((sizes < width) & (sizes % 4 > 0))).any()):
            raise ValueError("sampling masks of a size that none has")
        (rows, ids), (owners, bits) = self.ids(), self.bitmaps()
        own = tokens[owners]
        has = sizes == 0
        has[rows[ids == tokens[rows]]] = True
        inside = own < self.vocab
        has[owners] = (
            inside & ((bits.gather(1, (own * inside // 8)[:, None])[:, 0] >> (own % 8)) & 1).bool()
        )
        if bool(((ids < 0) | (ids >= self.vocab)).any()) or not bool(has.all()):
            at = int((~has).nonzero()[0]) if not bool(has.all()) else int(rows[0])
            raise ValueError(f"token {at} ({int(tokens[at])}) is not in the set it was drawn among")
