"""The one door to model/vision: what is asked of a model that takes more than text, and answered
for the kind of things that it is shown. Pictures are all that there is."""

# ruff: noqa: F401  (others import from here what stands behind it)
from __future__ import annotations

from typing import Any

import torch
from torch import nn

from spmdrl.model.shown_rows import Sight
from spmdrl.model.vision.for_vllm import (
    drop_embeddings,
    lacking_to_see,
    prompt_of,
    seeing_arguments,
)
from spmdrl.model.vision.image_memory import TowerShape
from spmdrl.model.vision.image_positions import PictureSight
from spmdrl.model.vision.samples import noisy_sequence, num_plain_ids, plain_inputs, shown_in
from spmdrl.model.vision.vision_tower import VisionTower
from spmdrl.model.vision_families import sees


def vision_tower_of(hf_model: nn.Module) -> nn.Module | None:
    """Return tower and projector of a model as a part of the module that scores; None of one that
    does not see."""
    return VisionTower(hf_model) if sees(hf_model) else None


def sight_of(hf_model: nn.Module, *, device: torch.device | str) -> Sight | None:
    """Return how a model's tokens stand for what they show; None of one that does not see."""
    return PictureSight(hf_model, device=device) if sees(hf_model) else None


def shape_of_tower(hf_model: Any) -> TowerShape | None:
    """Return a model's tower, as far as memory goes; None of one that does not see."""
    return TowerShape.of(hf_model.config) if sees(hf_model) else None
