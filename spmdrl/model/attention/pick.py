"""Which kernel computes the attention of a model."""

from __future__ import annotations

from typing import Any

import torch

from spmdrl.model.attention.kernels import pick_attention
from spmdrl.model.files.reader import instead
from spmdrl.model.vision_families import attends_both_ways


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
    both_ways = attends_both_ways(hf_model)
    return pick_attention(
        wanted,
        device=torch.device(device),
        dtype=dtype,
        has_softcap=getattr(config, "attn_logit_softcapping", None) is not None,
        both_ways=both_ways,
        otherwise=instead(path) if both_ways else "",
    )
