"""The one door to model/vision: what is asked of a model that takes more than text, and answered
for the kind of things that it is shown. Pictures are all that there is."""

# ruff: noqa: F401  (others import from here what stands behind it)
from __future__ import annotations

from typing import Any

import torch
from torch import nn

from spmdrl.model.multimodal_rows import Sight
from spmdrl.model.vision.for_vllm import (
    missing_for_vision,
    reset_encoder_cache,
    vision_arguments,
    vllm_prompt,
)
from spmdrl.model.vision.image_memory import VisionTowerShape
from spmdrl.model.vision.image_positions import PictureSight
from spmdrl.model.vision.samples import (
    image_inputs,
    noise_image_sequence,
    num_text_ids,
    with_noise_image,
)
from spmdrl.model.vision.vision_tower import VisionTower
from spmdrl.model.vision_families import has_vision_tower


def vision_tower_of(hf_model: nn.Module) -> nn.Module | None:
    """Return tower and projector of a model as a part of the module that scores; None of one that
    does not see."""
    return VisionTower(hf_model) if has_vision_tower(hf_model) else None


def sight_of(hf_model: nn.Module, *, device: torch.device | str) -> Sight | None:
    """Return how a model's tokens stand for what they show; None of one that does not see."""
    return PictureSight(hf_model, device=device) if has_vision_tower(hf_model) else None


def vision_tower_shape(hf_model: Any) -> VisionTowerShape | None:
    """Return a model's tower, as far as memory goes; None of one that does not see."""
    return VisionTowerShape.of(hf_model.config) if has_vision_tower(hf_model) else None
