"""AdamW's moments in 8 bits: torchao's block-wise quantisation, around an update in float32.

256 consecutive elements of a rank's shard are a block. A block has one float32 scale, its largest
magnitude. Each element is an 8-bit code of torchao's dynamic map. An element takes 1 1/64 bytes.

Source: arXiv 2110.02861, section 2; torchao.optim.quant_utils, whose functions these are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

BLOCK = 256
"""Elements that share a scale; as torchao's AdamW8bit."""
LEAST = 4096
"""A whole tensor of fewer elements has float32 moments, as in torchao: they take little memory."""


@lru_cache(maxsize=8)
def _map(is_signed: bool, device: torch.device) -> Tensor:
    """Return the values of the 256 codes, ascending, float32."""
    from torchao.optim.quant_utils import create_dynamic_map

    return torch.tensor(create_dynamic_map(is_signed), device=device)


def quantise(values: Tensor, *, is_signed: bool) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of flat float32 values, whose last block may be shorter.

    Returns: [blocks * BLOCK] uint8, and [blocks] float32. A function of the values alone.
    """
    from torchao.optim.quant_utils import quantize_8bit_with_qmap, scale_tensor

    padded = torch.nn.functional.pad(values, (0, -len(values) % BLOCK))
    # A rank may hold no element of a tensor.
    if not len(padded):
        return padded.to(torch.uint8), padded
    scaled, scales = scale_tensor(padded, BLOCK)
    return quantize_8bit_with_qmap(scaled, _map(is_signed, values.device)), scales


@dataclass(frozen=True)
class Quantised:
    """A range of a moment's local elements; shares the storage of its codes and scales."""

    codes: Tensor  # [blocks * BLOCK] uint8
    scales: Tensor  # [blocks] float32
    count: int  # elements; the rest of the last block is padding
    is_signed: bool

    # Of the values that `to` returns and `copy_` takes. AdamW compares it as a tensor's dtype, and
    # so does not round stochastically here.
    dtype = torch.float32

    @classmethod
    def zeros(cls, count: int, *, is_signed: bool, **place: object) -> Quantised:
        """Return `count` zeros."""
        blocks = math.ceil(count / BLOCK)
        return cls(
            torch.zeros(blocks * BLOCK, dtype=torch.uint8, **place),
            torch.zeros(blocks, dtype=torch.float32, **place),
            count,
            is_signed,
        )

    def part(self, begin: int, count: int) -> Quantised:
        """Return a run of the elements; `begin` is a multiple of BLOCK."""
        count = min(count, self.count - begin)
        first = begin // BLOCK
        last = math.ceil((begin + count) / BLOCK)
        return Quantised(
            self.codes[first * BLOCK : last * BLOCK], self.scales[first:last], count, self.is_signed
        )

    def to(self, device: torch.device, dtype: torch.dtype, *, non_blocking: bool = False) -> Tensor:
        """Return the values, [count] of dtype, on a device."""
        codes, scales = (t.to(device, non_blocking=non_blocking) for t in (self.codes, self.scales))
        return _values(codes, scales.repeat_interleave(BLOCK), is_signed=self.is_signed)[
            : self.count
        ].to(dtype)

    def copy_(self, values: Tensor, *, non_blocking: bool = False) -> None:
        """Take flat values, on any device."""
        codes, scales = quantise(values.float(), is_signed=self.is_signed)
        self.codes.copy_(codes, non_blocking=non_blocking)
        self.scales.copy_(scales, non_blocking=non_blocking)

    def take_scales(self, each: Tensor) -> None:
        """Take the scales of elements whose codes are there already, [count] on the CPU.

        On the layout that wrote them, blocks get back their codes and scales, bit for bit. If a
        block has other bounds here, its values are quantised again.
        """
        codes = self.codes.cpu()
        size = len(codes)
        padded = torch.cat([each, each[-1:].expand(size - len(each))])  # as the block's last one
        blocks = padded.view(-1, BLOCK)
        is_same = (blocks == blocks[:, :1]).all(dim=1)
        values = _values(codes, padded, is_signed=self.is_signed)[: self.count]
        again, scales = quantise(values, is_signed=self.is_signed)
        kept = is_same[:, None].expand(-1, BLOCK).reshape(-1)
        self.codes.copy_(torch.where(kept, codes, again))
        self.scales.copy_(torch.where(is_same, blocks[:, 0], scales))


def _values(codes: Tensor, scales: Tensor, *, is_signed: bool) -> Tensor:
    """Return the values of codes [n] with a scale for each, [n] float32."""
    return _map(is_signed, codes.device)[codes.int()] * scales
