"""The one gradient norm over all trainer ranks, by which gradients are clipped."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from spmdrl.world.torch_internals import norms_of


def copies(parameter: Tensor, *, num_trainers: int) -> int:
    """Return how many trainer ranks hold the same part of a parameter."""
    parts = 1
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            parts *= 1 if isinstance(placement, Replicate) else mesh.size(axis)
    return num_trainers // parts


def square_sum(gradients: Mapping[str, Tensor], copies_of: Mapping[str, int]) -> Tensor:
    """Return this rank's share of the squared global gradient norm.

    The shares of all trainer ranks add up to it under any mesh: a part that several ranks
    hold counts once.

    Args:
        gradients: {name: local gradient}; their norms are taken in float32.
        copies_of: {name: ranks that hold the same part}.
    Returns: [] float64.
    """
    names = [name for name, g in gradients.items() if g.numel()]
    if not names:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack(norms_of([gradients[name] for name in names], 2, torch.float32)).double()
    shares = torch.tensor([1.0 / copies_of[name] for name in names], dtype=torch.float64)
    return (norms.square() * shares.to(norms.device)).sum()
