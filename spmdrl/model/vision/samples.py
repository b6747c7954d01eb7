"""A sequence with a picture of noise, as it is proved with that a model sees what it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.given import Given, Item, Shown, shown_by
from spmdrl.model.blocks import base_of
from spmdrl.model.shown_rows import features_of
from spmdrl.model.towers import sees

_AROUND = 4
"""Tokens before and behind the picture."""


def noisy_sequence(hf_model: nn.Module, *, longest: int, seed: int = 0) -> Given | None:
    """Return random ids around a picture of noise, the same on every rank.

    Args:
        longest: tokens that the sequence may have.
    Returns: ids and what they show; None of a model that does not see, or one whose smallest
        picture has more tokens than there may be.
    """
    if not sees(hf_model):
        return None
    generator = torch.Generator().manual_seed(seed)
    picture = _noise(hf_model, generator, key=f"noise {seed}")
    if picture.num_tokens + 2 * _AROUND > longest:
        return None
    config: Any = hf_model.config
    count = hf_model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    words = torch.randint(count, (2 * _AROUND,), generator=generator)
    words[words == config.image_token_id] = 0
    marks = torch.full((picture.num_tokens,), config.image_token_id)
    ids = torch.cat([words[:_AROUND], marks, words[_AROUND:]])
    return Given(ids.tolist(), Shown.by(ids == config.image_token_id, [picture]))


def shown_in(hf_model: nn.Module, ids: Sequence[int], *, seed: int) -> Given:
    """Put a picture of noise into a sequence, behind its first token, where it has room for one.

    Args:
        seed: of the noise; two sequences of one seed show the same picture.
    """
    if not sees(hf_model):
        return Given(ids)
    generator = torch.Generator().manual_seed(seed)
    picture, config = _noise(hf_model, generator, key=f"noise {seed}"), hf_model.config
    count, mark = picture.num_tokens, config.image_token_id  # type: ignore[union-attr]
    if count + 2 > len(ids):
        return Given(ids, Shown.none(len(ids)))
    tokens = torch.tensor([ids[0], *[mark] * count, *ids[1 + count :]])
    return Given(tokens.tolist(), Shown.by(tokens == mark, [picture]))


def num_plain_ids(hf_model: nn.Module) -> int:
    """Return how many ids there are, from 0 on, that stand for no picture."""
    own: Any = hf_model.config
    return min(own.get_text_config().vocab_size, getattr(own, "image_token_id", 2**31))


def _noise(hf_model: nn.Module, generator: torch.Generator, *, key: str) -> Item:
    config: Any = hf_model.config
    vision, whole = config.vision_config, base_of(hf_model)[0].rpartition(".")[0]
    if hasattr(hf_model.get_submodule(whole), "get_rope_index"):
        side = vision.spatial_merge_size
        grid = torch.tensor([[1, 2 * side, 3 * side]])
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        pixels = torch.randn(6 * side**2, width, generator=generator)
        return Item(key, 6, {"pixel_values": pixels, "image_grid_thw": grid})
    side = vision.image_size
    size = (side, side) if isinstance(side, int) else tuple(side)
    pixels = torch.randn(1, vision.num_channels, *size, generator=generator)
    names = ("mm_tokens_per_image", "image_seq_length")
    count = next(getattr(config, name) for name in names if hasattr(config, name))
    return Item(key, count, {"pixel_values": pixels})


def plain_inputs(
    hf_model: nn.Module, sequence: Sequence[int], device: torch.device
) -> dict[str, Tensor]:
    """Return what transformers' own forward takes of one sequence's pictures, beside its ids."""
    shown = shown_by(sequence)
    if shown is None or not shown.items:
        return {}
    config: Any = hf_model.config
    given = features_of(shown.repeated, device)
    kinds = (shown.places >= 0).int()[None].to(device)
    if "image_grid_thw" in given:
        return given | {"mm_token_type_ids": kinds}
    return given | ({"token_type_ids": kinds} if config.model_type == "gemma3" else {})
