"""Where the images of a packed row are: their placeholder tokens, rotary positions and spans.

Letters: T tokens of a row, t of a rank's slice, R tensor-parallel ranks, k placeholder tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.model.blocks import base_of
from spmdrl.model.vision.families import has_bidirectional_images, has_vision_tower
from spmdrl.model_inputs import MultimodalItem, MultimodalItems


@dataclass(frozen=True)
class Placeholders:
    """The placeholder tokens among some tokens."""

    at: Tensor  # [k] int64, their indices among these tokens
    rows: Tensor  # [k] int64, the row of the image features that replaces each
    count: int  # of these tokens


@dataclass(frozen=True)
class SliceImages:
    """The images of a row, and where a rank's slice has their placeholders."""

    items: Sequence[MultimodalItem]
    """On the host; a blank image where the row has none, so that every rank runs the tower."""
    placeholders: tuple[Placeholders, Placeholders]
    """Among the slice's t tokens, and among those that a tp rank keeps between layers, t / R."""

    def among(self, count: int) -> Placeholders:
        """Return the placeholders among `count` tokens: the slice's, or the tp rank's."""
        # With one tp rank both are the same.
        return next(own for own in self.placeholders if own.count == count)


@dataclass(frozen=True)
class RowLayout:
    """Where the images of a row of T tokens are, on the CPU."""

    position_ids: Tensor  # [T] int64, or [3, T] for a model with three axes of rotary positions
    spans: Tensor | None
    """[T] int64, which image a token belongs to, -1 for none, where the tokens of an image attend
    to each other in both directions; None where all attention is causal."""
    of_slice: Callable[[Tensor, Tensor], SliceImages]
    """From the row indices of a slice's tokens, and of those that a tp rank keeps."""


class VisionLayout:
    """How the rows of a vision model are laid out.

    Args:
        hf_model: on any device; only its functions are called.
        device: of the indices of a slice's placeholders.
    """

    def __init__(self, hf_model: nn.Module, *, device: torch.device | str):
        self._config: Any = hf_model.config
        self._whole: Any = hf_model.get_submodule(base_of(hf_model)[0].rpartition(".")[0])
        self._has_bidirectional_images = has_bidirectional_images(hf_model)
        self._device = device

    def row(self, tokens: Tensor, lengths: Sequence[int], images: MultimodalItems) -> RowLayout:
        """Return the layout of a packed row.

        Args:
            tokens: [T] int64. lengths: tokens per sequence.
            images: of the first of these tokens, on the CPU; padding has none.
        """
        padding = torch.full((len(tokens) - len(images),), -1)
        rows = torch.cat([images.places, padding])
        sequences = zip(tokens.split(list(lengths)), rows.split(list(lengths)))
        positions = [self._positions(*sequence, images=images) for sequence in sequences]
        items = images.items or (self.blank,)

        def of_slice(slice_at: Tensor, kept_at: Tensor) -> SliceImages:
            placeholders = (self._placeholders(rows[slice_at]), self._placeholders(rows[kept_at]))
            return SliceImages(items, placeholders)

        spans = _spans(rows, lengths) if self._has_bidirectional_images else None
        return RowLayout(torch.cat(positions, dim=-1), spans, of_slice)

    def _placeholders(self, rows: Tensor) -> Placeholders:
        at = (rows >= 0).nonzero()[:, 0]
        return Placeholders(at.to(self._device), rows[at].to(self._device), len(rows))

    def _positions(self, tokens: Tensor, rows: Tensor, *, images: MultimodalItems) -> Tensor:
        """Return the rotary positions of one sequence: [n], or [3, n] by the model's own rule."""
        plain = torch.arange(len(tokens))
        if not hasattr(self._whole, "get_rope_index"):
            return plain
        is_placeholder = rows >= 0
        if not is_placeholder.any():
            return plain.expand(3, -1)
        starts = images.starts
        is_first = torch.isin(rows, starts[:-1]) & is_placeholder
        grids = [
            images.items[i].features["image_grid_thw"]
            for i in torch.bucketize(rows[is_first], starts[1:], right=True).tolist()
        ]
        # Where the sequence ends within an image, the model's rule still needs all its tokens.
        missing = 0
        if is_placeholder[-1]:
            missing = int(starts[starts > rows[-1]].min() - 1 - rows[-1])
        kinds = torch.nn.functional.pad(is_placeholder.int(), (0, missing), value=1)
        positions, _ = self._whole.get_rope_index(
            torch.nn.functional.pad(tokens, (0, missing))[None],
            mm_token_type_ids=kinds[None],
            image_grid_thw=torch.cat(grids),
        )
        return positions[:, 0, : len(tokens)]

    @cached_property
    def blank(self) -> MultimodalItem:
        """A small image whose features are used nowhere."""
        return make_image("", self._config, self._whole, cells=(1, 1), draw=torch.zeros)


def vision_layout_of(hf_model: nn.Module, *, device: torch.device | str) -> VisionLayout | None:
    """Return how a model's rows are laid out; None for a model without a vision tower."""
    return VisionLayout(hf_model, device=device) if has_vision_tower(hf_model) else None


def make_image(
    key: str, config: Any, whole: nn.Module, *, cells: tuple[int, int], draw: Callable[..., Tensor]
) -> MultimodalItem:
    """Return an image as the model's processor would prepare it.

    Args:
        config: of a vision model.
        whole: its tower, projector and language model.
        cells: rows and columns of its tokens, for a model that takes images of any size.
        draw: makes pixels of a shape.
    """
    vision = config.vision_config
    if hasattr(whole, "get_rope_index"):
        rows, columns = cells
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


def _spans(rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return [T] the number of the run of placeholders that each token is in; -1 for none.

    Source: transformers' Gemma 3, which separates images by the text between them.
    """
    is_placeholder = rows >= 0
    follows = torch.nn.functional.pad(is_placeholder[:-1], (1, 0))
    follows[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = False  # the previous sequence's token
    return torch.where(is_placeholder, (is_placeholder & ~follows).cumsum(0) - 1, -1)
