"""What a packed row shows, made ready for one rank's slice of it.

Letters: T tokens of the row, t of a slice, R tensor-parallel ranks, k tokens that show something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spmdrl.model_inputs import MultimodalItem, MultimodalItems


@dataclass(frozen=True)
class Places:
    """Which of some tokens show what."""

    at: Tensor  # [k] int64, places among these tokens
    rows: Tensor  # [k] int64, rows of the items' embeddings
    count: int  # of these tokens


@dataclass(frozen=True)
class SliceItems:
    """What the tokens of a rank's slice show."""

    items: Sequence[MultimodalItem]
    """Of the row, on the host; a blank one where it has none, so that the tower runs on every rank
    alike."""
    places: tuple[Places, Places]
    """Of the slice's t tokens, and of those that a tp rank keeps between layers, t / R."""

    def among(self, count: int) -> Places:
        """Return the places among `count` tokens: the slice's, or those kept."""
        return next(own for own in self.places if own.count == count)


def features_of(items: Sequence[MultimodalItem], device: torch.device) -> dict[str, Tensor]:
    """Return {argument of the tower: rows of all items, one after the other} on a device.

    Every call copies: between two of them the features of a row take no room there.
    """
    # From memory that is not pinned, so that the host waits: it does in towers anyway, which ask
    # grids for their numbers.
    names = items[0].features
    return {name: torch.cat([item.features[name].to(device) for item in items]) for name in names}


@dataclass(frozen=True)
class RowSight:
    """What a row of T tokens shows, on the CPU."""

    position_ids: Tensor  # [T] int64, or [3, T] of a model with rotary positions of three axes
    spans: Tensor | None
    """[T] int64, number of the span of tokens that see each other which each token is in, -1 for
    none; None of a model whose tokens all look back alone."""
    of_slice: Callable[[Tensor, Tensor], SliceItems]
    """From the row's places of a slice's tokens, and of those kept, to what they show there."""


class Sight(Protocol):
    """How the tokens of a family of models stand for what they show."""

    def row(self, tokens: Tensor, lengths: Sequence[int], multimodal: MultimodalItems) -> RowSight:
        """Return what a packed row shows.

        Args:
            tokens: [T] int64. lengths: tokens per sequence.
            multimodal: items of the first of these tokens, on the CPU; padding has none.
        """
