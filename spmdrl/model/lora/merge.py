"""Merge adapters: W + scale * B A, computed where W is sent or exported."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

from spmdrl.model.lora.layers import Adapters
from spmdrl.model.lora.targets import pair_names
from spmdrl.model.tensor_parts import Box, Delta, held_boxes, view_of

_Parts = list[tuple[Box, Tensor]]


def low_rank_product(b: Tensor, a: Tensor, *, scale: float) -> Tensor:
    """Return scale * B A: [.., out, in] float32.

    This is a sum of outer products in the order of the rank, so that an element has the same bits
    on every layout. A matrix product does not guarantee that.

    Args:
        b: [.., out, r] float32. a: [.., r, in] float32. The leading dim is the expert, if any.
    """
    scaled = b * scale
    total = b.new_zeros(*b.shape[:-1], a.shape[-1])
    for column, row in zip(scaled.unbind(-1), a.unbind(-2)):
        total += column[..., None] * row[..., None, :]
    return total


@torch.no_grad()
def deltas(adapters: Adapters, shards: Mapping[str, Tensor]) -> dict[str, Delta]:
    """Return {name of a weight: what its adapter adds to a box of it that this rank holds}.

    Every rank of the adapters' mesh must call it: the parts of A that FSDP does not shard like W
    are gathered. B is sharded like W, so that a rank has the rows that its boxes of W need.

    Args:
        adapters: of the model.
        shards: its `named_shards`.
    """
    found: dict[str, Delta] = {}
    for name in adapters.weights:
        a, b = (shards[part].detach() for part in pair_names(name))
        found[name] = partial(
            _delta,
            name,
            held_boxes(name, _needed_rows(a, shards[name])),
            held_boxes(name, b),
            scale=adapters.form.scale,
        )
    return found


def _needed_rows(a: Tensor, weight: Tensor) -> Tensor:
    """Gather A, [r, in] or [E, r, in], over the mesh axes that shard its rows.

    It is not gathered over tp of a row-wise layer, nor over axes that shard A and W by expert.
    """
    if not isinstance(a, DTensor):
        return a
    # By name: A may be whole on the ranks of tp, and then has no such axis.
    of_weight = dict(zip(weight.device_mesh.mesh_dim_names, weight.placements))

    def kept(axis: str, own: Placement) -> Placement:
        dim = getattr(own, "dim", None)
        is_alike = dim == 0 and a.dim() > 2 and own == of_weight.get(axis)
        return own if dim == a.dim() - 1 or is_alike else Replicate()

    placements = [kept(*both) for both in zip(a.device_mesh.mesh_dim_names, a.placements)]
    return a if placements == list(a.placements) else a.redistribute(placements=placements)


def _delta(name: str, a: _Parts, b: _Parts, box: Box, *, scale: float) -> Tensor:
    rank = a[0][0].shape[-2]
    experts = box.start[:-2]  # empty for a linear layer
    sizes = box.shape[:-2]
    rows = Box((*experts, box.start[-2], 0), (*sizes, box.shape[-2], rank))
    columns = Box((*experts, 0, box.start[-1]), (*sizes, rank, box.shape[-1]))
    own = "the adapter, not sharded like its layer, of " + name
    return low_rank_product(view_of(rows, b, name=own), view_of(columns, a, name=own), scale=scale)
