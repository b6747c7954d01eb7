"""Small random models that see, and images for them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from torch import Tensor

from spmdrl.data.vision.image_tokens import ImageReader
from spmdrl.model_inputs import MultimodalItems, multimodal_of
from spmdrl.tools.small_models.random_vision import MADE, make_vision_model
from tests.helpers.ranks import forget_imports

FAMILIES = tuple(MADE)
READERS = tuple(family for family in FAMILIES if not family.startswith("qwen3_5"))
"""Those whose tokenizer is the one that their folder has. For Qwen3.5 transformers always takes a
class of its own, which makes other tokens of our characters; its processor is Qwen3-VL's."""
TEXT = dict(
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,  # hidden_size / heads; vLLM's attention takes none below on the CPU
    intermediate_size=96,
    max_position_embeddings=512,
    initializer_range=0.09,
)


def seeing_model(family: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a small random model that sees into a folder, and return the folder."""
    text = TEXT | dict(tie_word_embeddings=family == "gemma3")
    if family in ("qwen3_vl_moe", "qwen3_5_moe"):
        text |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
    if family == "qwen3_5_moe":
        text |= dict(shared_expert_intermediate_size=48)
    make_vision_model(family, folder, text=text, seed=seed)
    return folder


def noise(width: int, height: int, *, seed: int = 0) -> Image.Image:
    """Return an image of random colours."""
    pixels = numpy.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    return Image.fromarray(pixels)


def reader(folder: Path) -> ImageReader:
    """Return what prepares images for a folder's model."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    tokenizer.image_reader = ImageReader(
        str(folder), tokenizer=tokenizer, image_token_id=config.image_token_id
    )
    return tokenizer.image_reader


@contextlib.contextmanager
def torchvision_shown() -> Iterator[None]:
    """Have ranks find torchvision, where vLLM's classes for models that see want it.

    They are forks of a process that has looked for it once: here of another one than elsewhere.
    """
    folder = str(Path(sys.prefix) / "torchvision")
    if not Path(folder).is_dir():
        pytest.skip("torchvision is not there: make .venv/torchvision")
    others = os.environ.get("PYTHONPATH")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)  # of the ranks; and of the children of vLLM in them:
        patch.setenv("PYTHONPATH", os.pathsep.join([folder, *([others] if others else [])]))
        forget_imports()
        yield
        forget_imports()


def plain_logprobs(model: Any, tokens: Sequence[int]) -> Tensor:
    """Return transformers' logprobs of the token behind each but the last, [T - 1, V] float32.

    Args:
        model: of AutoModelForImageTextToText.
    """
    pictures = multimodal_of(tokens)
    ids, family = torch.tensor([list(tokens)]), model.config.model_type
    given, shown = {}, torch.zeros_like(ids)
    if pictures is not None and pictures.items:
        items = [pictures.items[i] for i in _in_order(pictures)]
        given = {k: torch.cat([item.features[k] for item in items]) for k in items[0].features}
        shown[0, : len(pictures)] = pictures.places >= 0
    if family != "internvl":
        given["token_type_ids" if family == "gemma3" else "mm_token_type_ids"] = shown
    # A placeholder that was drawn shows nothing: transformers would look for its picture.
    model.model.get_placeholder_mask = _Mask(shown, is_one=family in ("gemma3", "internvl"))
    with torch.no_grad():
        logits = model(ids, attention_mask=torch.ones_like(ids), **given).logits[0]
    return logits.float().log_softmax(-1)[:-1]


def _in_order(pictures: MultimodalItems) -> list[int]:
    """Return the index of the item of each image of a text, repeated ones too."""
    starts = pictures.starts[:-1].tolist()
    return [starts.index(place) for place in pictures.places.tolist() if place in starts]


class _Mask:
    """Says which embeddings are of pictures, in transformers' place."""

    def __init__(self, shown: Tensor, *, is_one: bool):
        self._shown, self._is_one = shown.bool(), is_one

    def __call__(self, ids: Tensor, inputs_embeds: Tensor, **others: Any) -> Any:
        mask = self._shown[..., None].expand_as(inputs_embeds)
        return mask if self._is_one else (mask, torch.zeros_like(mask))
