"""The one gradient norm over all trainer ranks, by which gradients are clipped, and its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


def square_sums(
    gradients: Mapping[str, Tensor],
    copies_of: Mapping[str, int],
    *,
    layer_of: Mapping[str, str],
    layers: Sequence[str] = (),
) -> Tensor:
    """Return this rank's shares of the squared global gradient norm and of those of layers.

    The shares of all trainer ranks add up to them under any mesh: a part that several ranks
    hold counts once.

    Args:
        gradients: {name: local gradient}; their norms are taken in float32.
        copies_of: {name: ranks that hold the same part}.
        layer_of: {name: layer}.
        layers: none, or all layers of `gradients`.
    Returns: [1 + layers] float64, first that of all gradients.
    """
    names = [name for name, g in gradients.items() if g.numel()]
    if not names:
        return torch.zeros(1 + len(layers), dtype=torch.float64)
    norms = torch.stack(norms_of([gradients[name] for name in names], 2, torch.float32)).double()
    shares = torch.tensor([1.0 / copies_of[name] for name in names], dtype=torch.float64)
    squares = norms.square() * shares.to(norms.device)
    whole = squares.sum()[None]
    if not layers:
        return whole
    places = torch.tensor([layers.index(layer_of[name]) for name in names])
    parts = squares.new_zeros(len(layers)).index_add_(0, places.to(squares.device), squares)
    return torch.cat([whole, parts])
