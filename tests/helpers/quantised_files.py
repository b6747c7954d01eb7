"""Folders whose weights are quantised as released ones are, made of plain ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LINEAR = r"layers\.\d+\..*(proj|proj_with_mqa|w\d)\.weight$"
"""Names of the weights that are quantised."""
_LARGEST = 448.0  # of float8_e4m3fn
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def fp8(weight: Tensor, block: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """Return 8-bit floats and float32 scales of blocks, a block at the end being smaller; of the
    whole tensor without `block`."""
    rows, columns = block or weight.shape
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    values = torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            own = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[own].abs().max() / _LARGEST
            values[own] = weight[own] / scales[i, j]
    return values.to(torch.float8_e4m3fn), scales


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return blocks [..., O, I / 32, 16] and scales [..., O, I / 32] of a weight [..., I, O]."""
    groups = weight.transpose(-1, -2).unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil()
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled.abs()[..., None] - _E2M1).abs().argmin(-1) + 8 * (scaled < 0)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return packed.to(torch.uint8), (exponents + 127).to(torch.uint8)


def quantise(folder: Path, *, kind: str, block: tuple[int, int] | None = None) -> Path:
    """Rewrite a folder: fp8 with `weight_scale_inv` of blocks or of whole tensors, compressed (by
    rows, as compressed-tensors has it), or mxfp4 for fused experts."""
    file, text = folder / "model.safetensors", folder / "config.json"
    made: dict[str, Tensor] = {}
    for name, weight in load_file(file).items():
        if kind == "mxfp4" and re.search(r"experts\.(gate_up|down)_proj$", name):
            made[f"{name}_blocks"], made[f"{name}_scales"] = mxfp4(weight)
        elif kind == "fp8" and re.search(LINEAR, name):
            made[name], scales = fp8(weight, block)
            made[f"{name}_scale_inv"] = scales if block else scales.reshape(())
            made[name.replace(".weight", ".activation_scale")] = torch.ones(())
        elif kind == "compressed" and re.search(LINEAR, name):
            made[name], made[f"{name}_scale"] = fp8(weight, (1, weight.shape[1]))
        else:
            made[name] = weight
    save_file(made, file, metadata={"format": "pt"})
    config = json.loads(text.read_text()) | {"quantization_config": _said(kind, block)}
    text.write_text(json.dumps(config))
    return folder


def _said(kind: str, block: tuple[int, int] | None) -> dict[str, Any]:
    if kind == "mxfp4":
        return {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    if kind == "fp8":
        said = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        return said | {"weight_block_size": block and list(block)}
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
