"""Tower and projector of a model, as a part of the module that scores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.model.blocks import base_of
from spmdrl.model.multimodal_rows import SliceItems, features_of
from spmdrl.model.vision_families import vision_modules


class VisionTower(nn.Module):
    """Puts what pictures show in the place of the embeddings of their tokens.

    Args:
        hf_model: a model that sees; its tower and projector become children of this.
    """

    def __init__(self, hf_model: nn.Module):
        super().__init__()
        for name, child in vision_modules(hf_model).items():
            self.add_module(name.rpartition(".")[2], child)
        # In a tuple: as a child it would bring the language model along.
        self._whole: Any = (hf_model.get_submodule(base_of(hf_model)[0].rpartition(".")[0]),)

    def forward(self, embeddings: Tensor, multimodal: SliceItems) -> dict[str, Any]:
        """Return what the language model is given instead of ids.

        Args:
            embeddings: [1, n, H] of tokens: the slice's, or those that a tp rank keeps.
            multimodal: what the slice shows.
        """
        features = features_of(multimodal.items, embeddings.device)
        seen = self._whole[0].get_image_features(**features, return_dict=True)
        places = multimodal.among(embeddings.shape[1])
        rows = _joined(seen.pooler_output).index_select(0, places.rows).to(embeddings.dtype)
        given: dict[str, Any] = {"inputs_embeds": embeddings.index_copy(1, places.at, rows[None])}
        layers = getattr(seen, "deepstack_features", None)
        if layers:
            mask = torch.zeros(embeddings.shape[:2], dtype=torch.bool, device=embeddings.device)
            given["visual_pos_masks"] = mask.index_fill_(1, places.at, True)
            given["deepstack_visual_embeds"] = [
                _joined(layer).index_select(0, places.rows) for layer in layers
            ]
        return given


def _joined(parts: Iterable[Tensor]) -> Tensor:
    """Return the rows [E, H] of the parts of pictures, [.., H] each, one after the other."""
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
