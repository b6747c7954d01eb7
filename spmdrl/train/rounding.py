"""Stochastic rounding to bfloat16, keyed, so that it is the same when an update is repeated."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def stochastic_round(values: Tensor, *, key: str) -> Tensor:
    """Round float32 to one of the two nearest bfloat16 values, so that the mean is exact.

    A bfloat16 value has 8 significant bits: rounded to nearest, an update below 1/512 of a weight
    is lost, each time. Rounded up with a probability of its distance from the lower neighbour,
    in units of the gap between the two, many small updates add up to what they should.

    Args:
        values: float32, any shape. What is not finite is cast.
        key: of the random bits; one for each tensor of each update.
    Returns: bfloat16, a function of the arguments and of the kind of device alone.
    Source: arXiv 2010.06192, section 3 (stochastic rounding of weight updates).
    """
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1
    generator = torch.Generator(values.device).manual_seed(seed)
    noise = torch.randint(
        0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator
    )
    # The 16 bits that bfloat16 does not have, plus as many random ones, carry into those it has.
    rounded = noise.add_(values.view(torch.int32)).bitwise_and_(-1 << 16).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()
