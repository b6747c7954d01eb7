"""The vision tower and projector of a model, as a part of the module that scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.model.blocks import base_of
from spmdrl.model.vision.families import has_vision_tower, vision_modules
from spmdrl.model.vision.layout import SliceImages
from spmdrl.model_inputs import MultimodalItem


class VisionTower(nn.Module):
    """Replaces the embeddings of placeholder tokens by image features.

    Args:
        hf_model: a vision model; its tower and projector become children of this module.
    """

    def __init__(self, hf_model: nn.Module):
        super().__init__()
        for name, child in vision_modules(hf_model).items():
            self.add_module(name.rpartition(".")[2], child)
        # In a tuple: as a child it would bring the language model along.
        self._whole: Any = (hf_model.get_submodule(base_of(hf_model)[0].rpartition(".")[0]),)

    def forward(self, embeddings: Tensor, images: SliceImages) -> dict[str, Any]:
        """Return the arguments that the language model takes instead of ids.

        Args:
            embeddings: [1, n, H] of tokens: the slice's, or those that a tp rank keeps.
            images: of the slice.
        """
        inputs = tower_inputs(images.items, embeddings.device)
        features = self._whole[0].get_image_features(**inputs, return_dict=True)
        own = images.among(embeddings.shape[1])
        rows = _joined(features.pooler_output).index_select(0, own.rows).to(embeddings.dtype)
        arguments: dict[str, Any] = {"inputs_embeds": embeddings.index_copy(1, own.at, rows[None])}
        layers = getattr(features, "deepstack_features", None)
        if layers:
            mask = torch.zeros(embeddings.shape[:2], dtype=torch.bool, device=embeddings.device)
            arguments["visual_pos_masks"] = mask.index_fill_(1, own.at, True)
            arguments["deepstack_visual_embeds"] = [
                _joined(layer).index_select(0, own.rows) for layer in layers
            ]
        return arguments


def vision_tower_of(hf_model: nn.Module) -> VisionTower | None:
    """Return the vision tower of a model for the module that scores; None for a model without."""
    return VisionTower(hf_model) if has_vision_tower(hf_model) else None


def tower_inputs(items: Sequence[MultimodalItem], device: torch.device) -> dict[str, Tensor]:
    """Return {argument of the tower: rows of all images, one after the other} on a device.

    Every call copies: between two calls the row takes no room on the device.
    """
    # From memory that is not pinned, so that the host waits. It waits in the tower anyway, which
    # reads the numbers of its grids.
    names = items[0].features
    return {name: torch.cat([item.features[name].to(device) for item in items]) for name in names}


def _joined(parts: Iterable[Tensor]) -> Tensor:
    """Return the features [E, H] of images, [.., H] each, one after the other."""
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
