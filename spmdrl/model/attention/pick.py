"""Choose the kernel of a model's attention."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

import torch

from spmdrl.errors import Refusal
from spmdrl.model.attention.kernels import LARGEST_HEAD
from spmdrl.model.files.reader import instead
from spmdrl.model.vision.families import has_bidirectional_images

_MULTIPLE = 8
"""FlashAttention takes heads of multiples of so many elements."""


def kernel_of(
    hf_model: Any, *, path: str, wanted: str, device: torch.device | str, dtype: torch.dtype
) -> str:
    """Return the kernel of a model's attention: padded, varlen, flash or exact.

    Args:
        path: model.path.
        wanted: model.kernels.attention, or exact.
    Raises: Refusal when the one asked for cannot serve this device, dtype or model.
    """
    config = hf_model.config.get_text_config()
    bidirectional_images = has_bidirectional_images(hf_model)
    return pick_attention(
        wanted,
        device=torch.device(device),
        dtype=dtype,
        has_softcap=getattr(config, "attn_logit_softcapping", None) is not None,
        sizes=head_sizes(config),
        bidirectional_images=bidirectional_images,
        otherwise=instead(path) if bidirectional_images else "",
    )


def head_sizes(config: Any) -> set[int]:
    """Return the sizes of heads of softmax attention, those of single layers too. Latent attention,
    which makes its heads in another way, and models without attention have none.

    Args:
        config: the transformers config of the whole model, or of its text part.
    """
    text = config.get_text_config()
    fields = text.to_dict()
    fields |= {name: fields.get(other) for name, other in text.attribute_map.items()}
    heads = fields.get("num_attention_heads")
    hidden = fields.get("hidden_size")
    if not isinstance(heads, int) or not heads or fields.get("kv_lora_rank"):
        return set()
    sizes = {fields.get("head_dim") or hidden // heads, fields.get("global_head_dim")}
    layers = (fields.get("per_layer_config") or {}).values()
    sizes |= {layer.get("head_dim") for layer in layers}
    return {size for size in sizes if size}


def pick_attention(
    wanted: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    has_softcap: bool,
    sizes: Collection[int] = (),
    bidirectional_images: bool = False,
    otherwise: str = "",
) -> str:
    """Return the kernel for model.kernels.attention: padded, varlen, flash or exact.

    Args:
        sizes: of heads, in elements.
        bidirectional_images: the tokens of an image attend to each other in both directions, which
            only the padded kernel can do.
        otherwise: what a refusal of the model ends with, see files/reader.py:instead.
    Raises: Refusal when the one asked for cannot serve this device, dtype or model.
    """
    if wanted == "exact":
        return wanted
    if bidirectional_images and has_softcap:
        raise Refusal(
            "model: the tokens of an image attend to each other in both directions, and attention "
            "caps its logits (attn_logit_softcapping): no kernel here does both; take another model"
            + otherwise
        )
    if bidirectional_images and wanted != "padded":
        if wanted != "auto":
            raise Refusal(
                f"model.kernels.attention: {wanted} is causal only, and in this model tokens of an "
                "image attend to each other in both directions; set it to auto or padded"
            )
        return "padded"
    fits_kernels = device.type == "cuda" and dtype == torch.bfloat16
    odd = [str(size) for size in sorted(sizes) if size > LARGEST_HEAD or size % _MULTIPLE]
    if fits_kernels and odd and wanted != "padded":
        if wanted != "auto":
            raise Refusal(
                f"model.kernels.attention: {wanted} takes heads of multiples of {_MULTIPLE} "
                f"elements, up to {LARGEST_HEAD}, and this model has heads of "
                f"{' and '.join(odd)}; set it to auto or padded"
            )
        return "padded"
    if wanted == "auto" and fits_kernels and has_softcap and find_spec("flash_attn") is not None:
        return "flash"
    if wanted == "auto":
        return "varlen" if fits_kernels and not has_softcap else "padded"
    if wanted != "padded" and not fits_kernels:
        raise Refusal(
            f"model.kernels.attention: {wanted} needs CUDA and compute_dtype bfloat16, this run "
            f"has {device.type} and {str(dtype).removeprefix('torch.')}; set it to auto or padded"
        )
    if wanted == "varlen" and has_softcap:
        raise Refusal(
            "model.kernels.attention: varlen has no softcap and this model needs it; "
            "set it to flash, padded or auto"
        )
    return wanted
