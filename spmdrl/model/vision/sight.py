"""What a packed row shows, made ready for one rank's slice of it.

Letters: T tokens of the row, t of a slice, R tensor-parallel ranks, k tokens that show something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.model.blocks import base_of
from spmdrl.model.vision.towers import attends_both_ways, sees
from spmdrl.pictures import Picture, Pictures


@dataclass(frozen=True)
class Places:
    """Which of some tokens show what."""

    at: Tensor  # [k] int64, places among these tokens
    rows: Tensor  # [k] int64, rows of the pictures' embeddings
    count: int  # of these tokens


@dataclass(frozen=True)
class Shown:
    """What the tokens of a rank's slice show."""

    items: Sequence[Picture]
    """Of the row, on the host; a blank one where it has none, so that the tower runs on every rank
    alike."""
    places: tuple[Places, Places]
    """Of the slice's t tokens, and of those that a tp rank keeps between layers, t / R."""

    def among(self, count: int) -> Places:
        """Return the places among `count` tokens: the slice's, or those kept."""
        return next(own for own in self.places if own.count == count)


def features_of(items: Sequence[Picture], device: torch.device) -> dict[str, Tensor]:
    """Return {argument of the tower: rows of all pictures, one after the other} on a device.

    Every call copies: between two of them the pixels of a row take no room there.
    """
    # From memory that is not pinned, so that the host waits: it does in towers anyway, which ask
    # grids for their numbers.
    names = items[0].features
    return {name: torch.cat([item.features[name].to(device) for item in items]) for name in names}


@dataclass(frozen=True)
class RowSight:
    """What a row of T tokens shows, on the CPU."""

    position_ids: Tensor  # [T] int64, or [3, T] of a model with rotary positions of three axes
    images: Tensor | None
    """[T] int64, number of the picture that each token shows, -1 for none; None of a model whose
    tokens all look back alone."""
    shown: Callable[[Tensor, Tensor], Shown]
    """From the row's places of a slice's tokens, and of those kept, to what they show there."""


class Sight:
    """How a family's tokens stand for pictures.

    Args:
        hf_model: a model that sees, on any device; only its functions are called.
        device: of the places among a slice's tokens.
    """

    def __init__(self, hf_model: nn.Module, *, device: torch.device | str):
        self._config: Any = hf_model.config
        self._whole: Any = hf_model.get_submodule(base_of(hf_model)[0].rpartition(".")[0])
        self._both_ways, self._device = attends_both_ways(hf_model), device

    def row(self, tokens: Tensor, lengths: Sequence[int], pictures: Pictures) -> RowSight:
        """Return what a packed row shows.

        Args:
            tokens: [T] int64. lengths: tokens per sequence.
            pictures: of the first of these tokens, on the CPU; what pads the row shows nothing.
        """
        missing = torch.full((len(tokens) - len(pictures),), -1)
        places = torch.cat([pictures.places, missing])
        starts = pictures.starts
        parts = list(zip(tokens.split(list(lengths)), places.split(list(lengths))))
        positions = [self._positions(*part, pictures=pictures, starts=starts) for part in parts]
        items = pictures.items or (self.blank,)

        def shown(rows: Tensor, kept: Tensor) -> Shown:
            return Shown(items, (self._places(places[rows]), self._places(places[kept])))

        images = _images(places, lengths) if self._both_ways else None
        return RowSight(torch.cat(positions, dim=-1), images, shown)

    def _places(self, places: Tensor) -> Places:
        at = (places >= 0).nonzero()[:, 0]
        return Places(at.to(self._device), places[at].to(self._device), len(places))

    def _positions(
        self, tokens: Tensor, places: Tensor, *, pictures: Pictures, starts: Tensor
    ) -> Tensor:
        """Return the rotary positions of one sequence: [n], or [3, n] by the model's own rule."""
        plain = torch.arange(len(tokens))
        if not hasattr(self._whole, "get_rope_index"):
            return plain
        is_shown = places >= 0
        if not is_shown.any():
            return plain.expand(3, -1)
        is_first = torch.isin(places, starts[:-1]) & is_shown
        grids = [
            pictures.items[i].features["image_grid_thw"]
            for i in torch.bucketize(places[is_first], starts[1:], right=True).tolist()
        ]
        # Of a picture that the sequence ends within, the rule wants all tokens.
        cut = int(starts[starts > places[-1]].min() - 1 - places[-1]) if is_shown[-1] else 0
        kinds = torch.nn.functional.pad(is_shown.int(), (0, cut), value=1)
        found, _ = self._whole.get_rope_index(
            torch.nn.functional.pad(tokens, (0, cut))[None],
            mm_token_type_ids=kinds[None],
            image_grid_thw=torch.cat(grids),
        )
        return found[:, 0, : len(tokens)]

    @cached_property
    def blank(self) -> Picture:
        """Return a small picture of which nothing is used."""
        vision = self._config.vision_config
        if hasattr(self._whole, "get_rope_index"):
            merge, channels = vision.spatial_merge_size, vision.in_channels
            width = channels * vision.temporal_patch_size * vision.patch_size**2
            grid = torch.tensor([[1, merge, merge]])
            features = {"pixel_values": torch.zeros(merge**2, width), "image_grid_thw": grid}
            return Picture("", 1, features)
        side = vision.image_size
        size = (side, side) if isinstance(side, int) else tuple(side)
        return Picture("", 0, {"pixel_values": torch.zeros(1, vision.num_channels, *size)})


def _images(places: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return [T] the number of the run of shown tokens that each token is in; -1 for none.

    Source: transformers' Gemma 3, whose pictures are told apart by what is between them.
    """
    is_shown = places >= 0
    before = torch.nn.functional.pad(is_shown[:-1], (1, 0))
    before[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = False  # of another sequence
    return torch.where(is_shown, (is_shown & ~before).cumsum(0) - 1, -1)


def sight_of(hf_model: nn.Module, *, device: torch.device | str) -> Sight | None:
    """Return how a model's tokens stand for pictures; None of one that does not see."""
    return Sight(hf_model, device=device) if sees(hf_model) else None
