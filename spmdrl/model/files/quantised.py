"""Quantised weights of a folder's files, dequantised while slices of them are read.

Two formats are known: 8-bit floats with scales for blocks, rows or whole tensors, as in DeepSeek-V3
and compressed-tensors; and mxfp4, as in GPT-OSS's experts. A box of a tensor is computed from the
same box in the file and its scales; no whole tensor is read. Values are returned in float32, in
which they are exact. The caller rounds them once, to its own dtype.

Sources: arXiv 2412.19437, section 3.3.2 (blocks of 128 x 128); OCP Microscaling Formats 1.0,
sections 5.3.3 and 6.3 (E2M1 in blocks of 32 with E8M0 scales).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from spmdrl.errors import Refusal

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_PER_BLOCK = 32  # weights with one scale in mxfp4
QUANTISATION_KEYS = ("quantization_config", "compression_config")
"""Fields of a config.json that say how its weights are quantised."""
_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)
_DTYPES = {
    "weight": ("F8_E4M3", "F8_E5M2"),
    "factors": ("F64", "F32", "F16", "BF16", "U8", "F8_E8M0"),
    "bytes": ("U8",),
}
_NOT_WEIGHTS = (".activation_scale", ".input_scale", ".k_scale", ".v_scale", ".q_scale")
"""Ends of names of scales for activations, which training does not use."""


class Files(Protocol):
    """The tensors of files, as they are stored."""

    def raw_shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""

    def raw_dtype(self, name: str) -> str:
        """Return a tensor's dtype, as safetensors spells it."""

    def raw(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return a box of a tensor."""


def quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the quantization_config of a config.json; {} if the weights are not quantised.

    Raises: Refusal for a format that is not known, naming it.
    """
    own: Mapping[str, Any] = next(
        (found for key in QUANTISATION_KEYS if (found := config.get(key))), {}
    )
    if problem := _unknown(own):
        raise Refusal(
            f"its weights are quantised by {problem}; known are fp8 (float8 weights with scales), "
            "compressed-tensors of 8-bit floats, and mxfp4. Take the plain weights of this model, "
            "or write them by a tool of the format"
        )
    return dict(own)


def _unknown(own: Mapping[str, Any]) -> str:
    method = own.get("quant_method")
    if not own or method in ("mxfp4", "fp8"):
        return ""
    if method != "compressed-tensors":
        return f"quant_method {method}"
    for name, group in (own.get("config_groups") or {}).items():
        weights = group.get("weights") or {}
        scheme = {key: weights.get(key) for key in ("type", "num_bits", "strategy", "symmetric")}
        known = {"type": "float", "num_bits": 8, "symmetric": True}
        is_known = scheme["strategy"] in ("tensor", "channel", "block")
        if not is_known or scheme != scheme | known:
            return f"compressed-tensors, {name} with weights of {scheme}"
    return ""


@dataclass(frozen=True)
class Scaled:
    """A tensor of 8-bit floats with scales."""

    weight: str
    scales: str
    block: tuple[int, int] | None
    """Rows and columns of the last two dims that share a scale; None: by the shape of the
    scales."""

    def shape(self, files: Files) -> tuple[int, ...]:
        """Return the shape of the dequantised tensor."""
        return files.raw_shape(self.weight)

    def misfit(self, files: Files) -> str:
        """Return which tensor has a dtype that it cannot have; empty for none."""
        return _other_dtype(files, {self.weight: "weight", self.scales: "factors"})

    def read(self, files: Files, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return a box of the dequantised tensor, float32.

        Raises: Refusal for a weight that is not of 8-bit floats, or scales that do not fit it.
        """
        values = files.raw(self.weight, start, shape)
        if values.dtype not in _FLOATS:
            raise Refusal(f"{self.weight}, which has scales, is {values.dtype} and no 8-bit float")
        blocks = self._blocks(files)
        if blocks is None:
            every = files.raw_shape(self.scales)
            whole = files.raw(self.scales, [0] * len(every), every)
            return values.float() * _plain_scales(whole).reshape([1] * values.dim())
        first = [a // b for a, b in zip(start, blocks)]
        count = [-(-(a + n) // b) - f for a, n, b, f in zip(start, shape, blocks, first)]
        scales = files.raw(self.scales, first, count)
        scales = _plain_scales(scales).reshape(count)
        for dim, (a, n, b, f) in enumerate(zip(start, shape, blocks, first)):
            scales = scales.index_select(dim, torch.arange(a, a + n) // b - f)
        return values.float() * scales

    def _blocks(self, files: Files) -> tuple[int, ...] | None:
        """Return how many elements of each dim share a scale; None if all share one."""
        whole = files.raw_shape(self.weight)
        scales = files.raw_shape(self.scales)
        if all(size == 1 for size in scales):
            return None
        if self.block is not None and len(whole) >= 2:
            blocks = (*[1] * (len(whole) - 2), *self.block)
        else:
            # Each dim has one scale for all its elements, or one for each.
            blocks = tuple(n if s == 1 else 1 for n, s in zip(whole, scales))
        if scales != tuple(-(-n // b) for n, b in zip(whole, blocks)):
            raise Refusal(
                f"{self.scales} has shape {list(scales)}, which does not fit {list(whole)} of "
                f"{self.weight} in blocks of {list(blocks)}"
            )
        return blocks


def _plain_scales(scales: Tensor) -> Tensor:
    if scales.dtype == torch.uint8:  # E8M0 in a container of bytes
        return (scales.float() - 127).exp2()
    return scales.float()


@dataclass(frozen=True)
class Packed:
    """A tensor [..., I, O] of mxfp4: blocks [..., O, I / 32, 16] and scales [..., O, I / 32]."""

    blocks: str
    scales: str

    def shape(self, files: Files) -> tuple[int, ...]:
        """Return the shape of the dequantised tensor."""
        *outer, rows, groups, _ = files.raw_shape(self.blocks)
        return (*outer, groups * _PER_BLOCK, rows)

    def misfit(self, files: Files) -> str:
        """Return which tensor has a dtype that it cannot have; empty for none."""
        return _other_dtype(files, {self.blocks: "bytes", self.scales: "bytes"})

    def read(self, files: Files, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return a box of the dequantised tensor, float32."""
        *outer, at, row = start
        *sizes, width, rows = shape
        first = at // _PER_BLOCK
        last = -(-(at + width) // _PER_BLOCK)
        begin = [*outer, row, first]
        count = [*sizes, rows, last - first]
        packed = files.raw(self.blocks, [*begin, 0], [*count, _PER_BLOCK // 2])
        exponents = files.raw(self.scales, begin, count).to(torch.int32) - 127
        signed = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
        # A byte has two weights; the one with the lower index is in the low half.
        values = torch.stack([signed[(packed & 15).int()], signed[(packed >> 4).int()]], dim=-1)
        values = torch.ldexp(values.flatten(-2), exponents[..., None]).flatten(-2)
        inside = at - first * _PER_BLOCK
        return values[..., inside : inside + width].transpose(-1, -2).contiguous()


def _other_dtype(files: Files, kinds: Mapping[str, str]) -> str:
    for name, kind in kinds.items():
        if (found := files.raw_dtype(name)) not in _DTYPES[kind]:
            return f"{name} is {found} and none of {', '.join(_DTYPES[kind])}"
    return ""


QuantisedTensor = Scaled | Packed


def quantised_tensors(
    own: Mapping[str, Any], names: Collection[str]
) -> tuple[dict[str, QuantisedTensor], set[str]]:
    """Find the quantised tensors of files, and the names of their parts.

    Args:
        own: what `quantisation` returned.
        names: of all tensors in the files.
    Returns: ({name of a dequantised tensor: how to read it}, names of tensors that only belong to
        others).
    """
    if not own:
        return {}, set()
    block = _block(own)
    found: dict[str, QuantisedTensor] = {}
    for name in names:
        if name.endswith("_blocks") and f"{(base := name[:-7])}_scales" in names:
            found[base] = Packed(name, f"{base}_scales")
        for end in ("_scale_inv", "_scale"):
            if name.endswith(end) and (base := name.removesuffix(end)) in names:
                found[base] = Scaled(base, name, block)
    # An 8-bit weight has the same name before and after it is dequantised.
    used = {name for one in found.values() for name in vars(one).values()} - found.keys()
    return found, used | {name for name in names if name.endswith(_NOT_WEIGHTS)}


def _block(own: Mapping[str, Any]) -> tuple[int, int] | None:
    groups = (own.get("config_groups") or {}).values()
    sizes = [own.get("weight_block_size")]
    sizes += [group["weights"].get("block_structure") for group in groups]
    block = next(filter(None, sizes), None)
    return None if block is None else (int(block[0]), int(block[1]))
