"""Sequences with an image of noise, for tests of a vision model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.model.blocks import base_of
from spmdrl.model.vision.families import has_vision_tower
from spmdrl.model.vision.layout import make_image
from spmdrl.model.vision.tower import tower_inputs
from spmdrl.model_inputs import MultimodalItem, MultimodalItems, TokenIds, multimodal_of

_AROUND = 4
"""Tokens before and after the image."""


def noise_image_sequence(hf_model: nn.Module, *, longest: int, seed: int = 0) -> TokenIds | None:
    """Return random ids around an image of noise, the same on every rank.

    Args:
        longest: tokens that the sequence may have.
    Returns: None for a model without a tower, or whose smallest image has more tokens.
    """
    if not has_vision_tower(hf_model):
        return None
    generator = torch.Generator().manual_seed(seed)
    image = _noise(hf_model, generator, key=f"noise {seed}")
    if image.num_tokens + 2 * _AROUND > longest:
        return None
    config: Any = hf_model.config
    count = hf_model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    words = torch.randint(count, (2 * _AROUND,), generator=generator)
    words[words == config.image_token_id] = 0
    marks = torch.full((image.num_tokens,), config.image_token_id)
    ids = torch.cat([words[:_AROUND], marks, words[_AROUND:]])
    return TokenIds(
        ids.tolist(), MultimodalItems.at_placeholders(ids == config.image_token_id, [image])
    )


def with_noise_image(hf_model: nn.Module, ids: Sequence[int], *, seed: int) -> TokenIds:
    """Put an image of noise after the first token of a sequence, if the sequence has room for it.

    Args:
        seed: of the noise; the same seed gives the same image.
    """
    if not has_vision_tower(hf_model):
        return TokenIds(ids)
    generator = torch.Generator().manual_seed(seed)
    image = _noise(hf_model, generator, key=f"noise {seed}")
    config = hf_model.config
    count = image.num_tokens  # type: ignore[union-attr]
    mark = config.image_token_id
    if count + 2 > len(ids):
        return TokenIds(ids, MultimodalItems.none(len(ids)))
    tokens = torch.tensor([ids[0], *[mark] * count, *ids[1 + count :]])
    return TokenIds(tokens.tolist(), MultimodalItems.at_placeholders(tokens == mark, [image]))


def num_text_ids(hf_model: nn.Module) -> int:
    """Return how many ids, from 0 on, are not the placeholder of an image."""
    own: Any = hf_model.config
    return min(own.get_text_config().vocab_size, getattr(own, "image_token_id", 2**31))


def _noise(hf_model: nn.Module, generator: torch.Generator, *, key: str) -> MultimodalItem:
    whole = hf_model.get_submodule(base_of(hf_model)[0].rpartition(".")[0])
    draw = partial(torch.randn, generator=generator)
    return make_image(key, hf_model.config, whole, cells=(2, 3), draw=draw)


def image_inputs(
    hf_model: nn.Module, sequence: Sequence[int], device: torch.device
) -> dict[str, Tensor]:
    """Return the arguments of transformers' own forward for the images of one sequence."""
    multimodal = multimodal_of(sequence)
    if multimodal is None or not multimodal.items:
        return {}
    config: Any = hf_model.config
    inputs = tower_inputs(multimodal.repeated, device)
    kinds = (multimodal.places >= 0).int()[None].to(device)
    if "image_grid_thw" in inputs:
        return inputs | {"mm_token_type_ids": kinds}
    return inputs | ({"token_type_ids": kinds} if config.model_type == "gemma3" else {})
