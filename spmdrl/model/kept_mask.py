"""Kept sets as masks of logits, made chunk by chunk.

Shape letters: N scored tokens, n of them in a chunk, V vocabulary, E ids in lists, B sets of bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.kept_sets import KeptSets


@dataclass(frozen=True)
class KeptMask:
    """The ids among which each of N scored tokens was drawn, where the logits are."""

    vocab: int  # V
    is_cut: Tensor  # [N] bool, not drawn among all ids
    rows: Tensor  # [E] int64, which token an id is of, ascending
    ids: Tensor  # [E] int64
    row_ends: tuple[int, ...]  # [N + 1], of each token's part of them
    owners: Tensor  # [B] int64, which token a set of bits is of, ascending
    bits: Tensor  # [B, ceil(V / 8)] uint8
    owner_ends: tuple[int, ...]  # [N + 1], as row_ends

    def dropped(self, part: slice, *, first: int, width: int) -> Tensor:
        """Return the ids of [first, first + width) that are not kept, [n, width] bool.

        Args:
            part: of consecutive tokens.
        """
        # One more column, for ids that are another rank's.
        is_cut = self.is_cut[part]
        dropped = is_cut[:, None].repeat(1, width + 1)
        own = slice(self.row_ends[part.start], self.row_ends[part.stop])
        at = self.ids[own] - first
        at = torch.where((at >= 0) & (at < width), at, width)
        dropped[self.rows[own] - part.start, at] = False
        own = slice(self.owner_ends[part.start], self.owner_ends[part.stop])
        if own.stop > own.start:
            shifts = torch.arange(8, dtype=torch.uint8, device=self.bits.device)
            bits = ((self.bits[own][:, :, None] >> shifts) & 1).flatten(1)[:, : self.vocab]
            bits = F.pad(bits, (0, max(0, first + width - self.vocab)))[:, first : first + width]
            dropped[self.owners[own] - part.start, :width] = bits == 0
        return dropped[:, :width]


def make_kept_mask(sets: KeptSets, device: torch.device | str) -> KeptMask:
    """Return kept sets, on the CPU, ready to be applied on a device."""
    (rows, ids), (owners, bits) = sets.ids(), sets.bitmaps()
    bounds = torch.arange(len(sets) + 1)
    return KeptMask(
        vocab=sets.vocab,
        is_cut=(sets.sizes > 0).to(device),
        rows=rows.to(device),
        ids=ids.to(device),
        row_ends=tuple(torch.searchsorted(rows, bounds).tolist()),
        owners=owners.to(device),
        bits=bits.to(device),
        owner_ends=tuple(torch.searchsorted(owners, bounds).tolist()),
    )
