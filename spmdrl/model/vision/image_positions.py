"""How tokens stand for pictures: their rotary positions, and which of them see each other.

Letters: T tokens of a row, P pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.model.blocks import base_of
from spmdrl.model.multimodal_rows import Places, RowSight, SliceItems
from spmdrl.model.vision_families import has_bidirectional_images
from spmdrl.model_inputs import MultimodalItem, MultimodalItems


class PictureSight:
    """How a family's tokens stand for pictures.

    Args:
        hf_model: a model that sees, on any device; only its functions are called.
        device: of the places among a slice's tokens.
    """

    def __init__(self, hf_model: nn.Module, *, device: torch.device | str):
        self._config: Any = hf_model.config
        self._whole: Any = hf_model.get_submodule(base_of(hf_model)[0].rpartition(".")[0])
        self._both_ways = has_bidirectional_images(hf_model)
        self._device = device

    def row(self, tokens: Tensor, lengths: Sequence[int], multimodal: MultimodalItems) -> RowSight:
        """Return what a packed row shows, see Sight."""
        missing = torch.full((len(tokens) - len(multimodal),), -1)
        places = torch.cat([multimodal.places, missing])
        starts = multimodal.starts
        parts = list(zip(tokens.split(list(lengths)), places.split(list(lengths))))
        positions = [self._positions(*part, pictures=multimodal, starts=starts) for part in parts]
        items = multimodal.items or (self.blank,)

        def of_slice(rows: Tensor, kept: Tensor) -> SliceItems:
            return SliceItems(items, (self._places(places[rows]), self._places(places[kept])))

        spans = _spans(places, lengths) if self._both_ways else None
        return RowSight(torch.cat(positions, dim=-1), spans, of_slice)

    def _places(self, places: Tensor) -> Places:
        at = (places >= 0).nonzero()[:, 0]
        return Places(at.to(self._device), places[at].to(self._device), len(places))

    def _positions(
        self, tokens: Tensor, places: Tensor, *, pictures: MultimodalItems, starts: Tensor
    ) -> Tensor:
        """Return the rotary positions of one sequence: [n], or [3, n] by the model's own rule."""
        plain = torch.arange(len(tokens))
        if not hasattr(self._whole, "get_rope_index"):
            return plain
        is_placeholder = places >= 0
        if not is_placeholder.any():
            return plain.expand(3, -1)
        is_first = torch.isin(places, starts[:-1]) & is_placeholder
        grids = [
            pictures.items[i].features["image_grid_thw"]
            for i in torch.bucketize(places[is_first], starts[1:], right=True).tolist()
        ]
        # Of a picture that the sequence ends within, the rule wants all tokens.
        cut = int(starts[starts > places[-1]].min() - 1 - places[-1]) if is_placeholder[-1] else 0
        kinds = torch.nn.functional.pad(is_placeholder.int(), (0, cut), value=1)
        found, _ = self._whole.get_rope_index(
            torch.nn.functional.pad(tokens, (0, cut))[None],
            mm_token_type_ids=kinds[None],
            image_grid_thw=torch.cat(grids),
        )
        return found[:, 0, : len(tokens)]

    @cached_property
    def blank(self) -> MultimodalItem:
        """Return a small picture of which nothing is used."""
        return made_picture("", self._config, self._whole, cells=(1, 1), draw=torch.zeros)


def made_picture(
    key: str, config: Any, whole: nn.Module, *, cells: tuple[int, int], draw: Callable[..., Tensor]
) -> MultimodalItem:
    """Return a picture of pixels that are drawn, given their shape.

    Args:
        config: of a model that sees.
        whole: its tower, projector and language model.
        cells: rows and columns of its tokens, in a model that takes pictures of any size.
    """
    vision, (rows, columns) = config.vision_config, cells
    if hasattr(whole, "get_rope_index"):
        side = vision.spatial_merge_size
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        grid = torch.tensor([[1, rows * side, columns * side]])
        pixels = draw(rows * columns * side**2, width)
        return MultimodalItem(key, rows * columns, {"pixel_values": pixels, "image_grid_thw": grid})
    side = vision.image_size
    size = (side, side) if isinstance(side, int) else tuple(side)
    names = ("mm_tokens_per_image", "image_seq_length")
    count = next(getattr(config, name) for name in names if hasattr(config, name))
    return MultimodalItem(key, count, {"pixel_values": draw(1, vision.num_channels, *size)})


def _spans(places: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return [T] the number of the run of shown tokens that each token is in; -1 for none.

    Source: transformers' Gemma 3, whose pictures are told apart by what is between them.
    """
    is_placeholder = places >= 0
    before = torch.nn.functional.pad(is_placeholder[:-1], (1, 0))
    before[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = False  # of another sequence
    return torch.where(is_placeholder, (is_placeholder & ~before).cumsum(0) - 1, -1)
