"""Which kernel computes the attention of a model."""

from __future__ import annotations

from typing import Any

import torch

from spmdrl.model.attention.kernels import pick_attention
from spmdrl.model.files.reader import instead
from spmdrl.model.vision.families import has_bidirectional_images


def kernel_of(
    hf_model: Any, *, path: str, wanted: str, device: torch.device | str, dtype: torch.dtype
) -> str:
    """Return the kernel of a model's attention: padded, varlen or flash.

    Args:
        path: model.path.
        wanted: model.kernels.attention.
    Raises: Refusal when the one asked for cannot serve this device, dtype or model.
    """
    config = hf_model.config.get_text_config()
    bidirectional_images = has_bidirectional_images(hf_model)
    return pick_attention(
        wanted,
        device=torch.device(device),
        dtype=dtype,
        has_softcap=getattr(config, "attn_logit_softcapping", None) is not None,
        bidirectional_images=bidirectional_images,
        otherwise=instead(path) if bidirectional_images else "",
    )
