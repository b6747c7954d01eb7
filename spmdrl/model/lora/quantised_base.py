"""A frozen base under adapters in 4 or 8 bits.

The weights of all linear layers and experts of the language model's blocks are stored in blocks of
64 elements of a row: codes and one float32 scale. A parameter has the same name as before and is
uint8, so that it is sharded and gathered as it is. A layer dequantises it to the compute dtype in
the forward pass and again in the backward pass. Embedding, norms and head stay in the compute
dtype.

nf4: 4-bit NormalFloat (QLoRA, arXiv 2305.14314, section 3 and appendix E), as bitsandbytes has it
without double quantisation. 4.5 bits per element. int8: the nearest of -127 .. 127 times the scale.
8.5 bits per element.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmdrl.model.blocks import blocks, experts_modules
from spmdrl.model.files.reader import CheckpointReader
from spmdrl.model.load import read_tensors
from spmdrl.model.lora.expert_adapters import adaptable, compute_experts
from spmdrl.model.lora.targets import is_linear
from spmdrl.model.tensor_parts import Box, Delta, Part, held_boxes, local_part, view_of
from spmdrl.model.transformers_internals import grouped_linear
from spmdrl.world.torch_internals import sharded_rows_like

log = logging.getLogger(__name__)

BLOCK = 64
"""Elements of a row that share a scale; the last block of a row is filled up with zeros."""
_SCALE_BYTES = 4
_BITS = {"nf4": 4, "int8": 8}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_AT_ONCE = 2**22  # elements that are quantised together
# Quantiles of the normal distribution, scaled to [-1, 1]: the table of appendix E.
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@lru_cache(maxsize=8)
def _pairs(device: torch.device) -> Tensor:
    """Return the two values of each byte of two codes, [256, 2] float32; the first is the high
    half."""
    values = torch.tensor(NF4)
    return torch.cartesian_prod(values, values).to(device)


@dataclass(frozen=True)
class BaseForm:
    """How weights are stored, and the dtype in which layers compute with them."""

    kind: str  # nf4 or int8
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: its codes, then its scale."""
        return BLOCK * _BITS[self.kind] // 8 + _SCALE_BYTES

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row of so many elements."""
        return math.ceil(columns / BLOCK) * self.block_bytes

    def numbers(self) -> tuple[int, int]:
        """Return the bits of a code and the number of the dtype, for checkpoints."""
        return _BITS[self.kind], _DTYPES.index(self.dtype)

    @classmethod
    def of_numbers(cls, bits: int, dtype: int) -> BaseForm | None:
        """Return the form with these `numbers`; None for 0 bits."""
        kinds = {number: kind for kind, number in _BITS.items()}
        return cls(kinds[bits], _DTYPES[dtype]) if bits else None

    @torch.no_grad()
    def quantise(self, values: Tensor) -> Tensor:
        """Return [.., row_bytes] uint8 for [.., columns] float32; each block by itself."""
        rows = max(1, _AT_ONCE // max(1, values.shape[-1]))
        parts = values.flatten(0, -2).split(rows)
        return torch.cat([self._quantise(part) for part in parts]).view(*values.shape[:-1], -1)

    def _quantise(self, values: Tensor) -> Tensor:
        padded = F.pad(values, (0, -values.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
        scales = padded.abs().amax(dim=-1, keepdim=True)
        if self.kind == "int8":
            scales = scales / 127
        scaled = padded / torch.where(scales == 0, 1.0, scales)
        if self.kind == "int8":
            codes = scaled.round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
        else:
            table = torch.tensor(NF4, device=values.device)
            nearest = torch.bucketize(scaled, (table[1:] + table[:-1]) / 2, out_int32=True)
            first, second = nearest.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
            codes = first * 16 + second
        return torch.cat([codes, scales.view(torch.uint8)], dim=-1).flatten(1)

    def dequantise(self, packed: Tensor, columns: int) -> Tensor:
        """Return [.., columns] of the compute dtype for [.., row_bytes(columns)] uint8.

        Values times scales are float32 and then rounded.
        """
        stored = packed.unflatten(-1, (-1, self.block_bytes))
        codes = stored[..., :-_SCALE_BYTES]
        scales = stored[..., -_SCALE_BYTES:].contiguous().view(torch.float32)
        if self.kind == "int8":
            values = codes.view(torch.int8).float()
        else:
            values = F.embedding(codes.int(), _pairs(packed.device)).flatten(-2)
        values *= scales
        return values.flatten(-2)[..., :columns].to(self.dtype)

    def rounded(self, values: Tensor) -> Tensor:
        """Return what layers compute with in place of [.., columns] float32 values."""
        return self.dequantise(self.quantise(values), values.shape[-1])


def base_weights(hf_model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return {name: (module, its parameter)} of what is quantised: the weights of the linear layers
    and experts of the language model's blocks."""
    inside = {id(m) for block in blocks(hf_model).values() for m in block.modules()}
    found: dict[str, tuple[nn.Module, str]] = {}
    for name, module in hf_model.named_modules():
        if id(module) in inside and is_linear(module):
            found[f"{name}.weight"] = (module, "weight")
    for name, module in experts_modules(hf_model).items():
        found |= {f"{name}.{key}": (module, key) for key in adaptable(module)}
    return found


class QuantisedBase:
    """The linear layers and experts of one model's blocks, with quantised weights.

    Args:
        hf_model: a transformers model on the meta device, before adapters are added: its layers
            compute by quantised weights from now on. `pack` must follow, before it is sharded.
        form: how weights are stored.
    """

    def __init__(self, hf_model: nn.Module, form: BaseForm):
        self.form = form
        self._places = base_weights(hf_model)
        self._columns = {
            name: int(getattr(module, key).shape[-1])
            for name, (module, key) in self._places.items()
        }
        self._stand_ins: dict[str, Tensor] = {}
        for module, key in self._places.values():
            if key == "weight":
                module.product = partial(_product, form)
                module.forward = partial(_forward, module)
            else:
                module.product = partial(_expert_product, form)
                module.forward = partial(compute_experts, module)

    @property
    def names(self) -> list[str]:
        """The names of the quantised weights."""
        return list(self._columns)

    def pack(self) -> None:
        """Replace the weights by uint8 parameters, [.., row_bytes], on the meta device."""
        for module, key in self._places.values():
            *rows, columns = getattr(module, key).shape
            packed = torch.empty(
                *rows, self.form.row_bytes(columns), dtype=torch.uint8, device="meta"
            )
            setattr(module, key, nn.Parameter(packed, requires_grad=False))

    @torch.no_grad()
    def load(
        self,
        reader: CheckpointReader,
        shards: Mapping[str, Tensor],
        parts: Mapping[str, Part],
        *,
        copies: Mapping[str, str],
    ) -> None:
        """Quantise this rank's rows of each weight as they are read.

        Args:
            reader, parts, copies: as of load.read_tensors.
            shards: the model's `named_shards`.
        Raises: Refusal as `read_tensors`.
        """
        error = torch.zeros((), dtype=torch.float64)
        total = torch.zeros((), dtype=torch.float64)
        for name, columns in self._columns.items():
            packed = local_part(shards[name])
            here = self._columns_here(name, packed)
            values = torch.empty(*packed.shape[:-1], here, device=packed.device)
            sharded = sharded_rows_like(shards[name], values, columns=columns)
            read_tensors(reader, {name: sharded}, parts, copies=copies)
            packed.copy_(self.form.quantise(values))
            wrong = self.form.dequantise(packed, here).float() - values
            error += wrong.square().sum(dtype=torch.float64).cpu()
            total += values.square().sum(dtype=torch.float64).cpu()
        log.info(
            "lora: the weights of %d layers are %s; root mean square of the error, by that "
            "of this rank's weights: %.4f",
            len(self._columns),
            self.form.kind,
            float((error / total).sqrt()) if total else 0.0,
        )

    def _columns_here(self, name: str, packed: Tensor) -> int:
        """Return this rank's columns: tp splits rows of a multiple of its ranks' blocks alone."""
        return min(self._columns[name], packed.shape[-1] // self.form.block_bytes * BLOCK)

    def stand_ins(self, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return {name: zeros in a weight's shape and sharding, in no memory}.

        The sum of such a tensor and of what `values` returns is the value of the weight.

        Args:
            shards: the model's `named_shards`.
        """
        if not self._stand_ins:
            for name, columns in self._columns.items():
                local = local_part(shards[name])
                zero = torch.zeros((), dtype=self.form.dtype, device=local.device)
                zeros = zero.expand(*local.shape[:-1], self._columns_here(name, local))
                self._stand_ins[name] = sharded_rows_like(shards[name], zeros, columns=columns)
        return self._stand_ins

    def values(self, shards: Mapping[str, Tensor], deltas: Mapping[str, Delta]) -> dict[str, Delta]:
        """Return {name of a weight: a box of its value, with what `deltas` add to it}."""
        return {
            name: partial(self._value, name, held_boxes(name, shards[name]), deltas.get(name))
            for name in self._columns
        }

    @torch.no_grad()
    def _value(
        self, name: str, held: Sequence[tuple[Box, Tensor]], delta: Delta | None, box: Box
    ) -> Tensor:
        *rows, start = box.start
        *sizes, length = box.shape
        first = start // BLOCK
        end = math.ceil((start + length) / BLOCK)
        size = self.form.block_bytes
        stored = Box((*rows, first * size), (*sizes, (end - first) * size))
        whole = self.form.dequantise(view_of(stored, held, name=name), (end - first) * BLOCK)
        value = whole.narrow(-1, start - first * BLOCK, length)
        return value if delta is None else value + delta(box)


class _DequantisedProduct(torch.autograd.Function):
    """W x + b, with W dequantised in each pass, so that only its codes are saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, form: BaseForm) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.form = form
        ctx.columns = x.shape[-1]
        return F.linear(x, form.dequantise(packed, ctx.columns), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (packed,) = ctx.saved_tensors
        return grad @ ctx.form.dequantise(packed, ctx.columns), None, None, None


def _product(form: BaseForm, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return _DequantisedProduct.apply(x, packed, bias, form)


def _forward(layer: Any, x: Tensor) -> Tensor:
    return layer.product(x, layer.weight, layer.bias)


class _DequantisedExperts(torch.autograd.Function):
    """W x of each row's expert, with all W of this rank dequantised in each pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, offsets: Tensor, form: BaseForm) -> Tensor:
        ctx.save_for_backward(packed, offsets)
        ctx.form = form
        ctx.columns = x.shape[-1]
        return grouped_linear(x, form.dequantise(packed, ctx.columns), offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        packed, offsets = ctx.saved_tensors
        weight = ctx.form.dequantise(packed, ctx.columns)
        return grouped_linear(grad.contiguous(), weight.mT, offsets), None, None, None


def _expert_product(
    form: BaseForm, x: Tensor, packed: Tensor, offsets: Tensor, *, bias: Tensor | None
) -> Tensor:
    out = _DequantisedExperts.apply(x, packed, offsets, form)
    return out if bias is None else out + bias
