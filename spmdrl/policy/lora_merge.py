"""What adapters add to the weights: W + scale * B A, computed where W is sent or exported."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from spmdrl.policy.lora import Adapters
from spmdrl.shards import Box, Delta, held_boxes, narrow

_Parts = list[tuple[Box, Tensor]]


def low_rank_product(b: Tensor, a: Tensor, *, scale: float) -> Tensor:
    """Return scale * B A: [out, in] float32.

    A sum of outer products in the order of the rank, so that an element has the same bits
    whatever else is computed beside it, which no matrix product promises: engines get the same
    weights from every layout.

    Args:
        b: [out, r] float32. a: [r, in] float32.
    """
    scaled, total = b * scale, b.new_zeros(b.shape[0], a.shape[1])
    for column, row in zip(scaled.unbind(1), a.unbind(0)):
        total += column[:, None] * row
    return total


@torch.no_grad()
def deltas(adapters: Adapters, shards: Mapping[str, Tensor]) -> dict[str, Delta]:
    """Return {name of a layer's weight: what its adapter adds to a box of it that this rank holds}.

    Every rank of the adapters' mesh must call it: the rows of A, which FSDP shards, are gathered.
    The rows of B that a box of W needs are here, since both are sharded alike.

    Args:
        adapters: of the model.
        shards: its `named_shards`.
    """
    found: dict[str, Delta] = {}
    for name in adapters.modules:
        a, b = (shards[f"{name}.{part}.weight"].detach() for part in ("lora_A", "lora_B"))
        found[f"{name}.weight"] = partial(
            _delta, name, held_boxes(name, _with_all_rows(a)), held_boxes(name, b),
            scale=adapters.form.scale)
    return found


def _with_all_rows(a: Tensor) -> Tensor:
    """Gather [r, in] over the mesh axes that shard its rows, not over tp of a row-wise layer."""
    if not isinstance(a, DTensor):
        return a
    columns = [p if isinstance(p, Shard) and p.dim == 1 else Replicate() for p in a.placements]
    return a.redistribute(placements=columns)


def _delta(name: str, a: _Parts, b: _Parts, box: Box, *, scale: float) -> Tensor:
    rank = a[0][0].shape[0]
    rows = Box((box.start[0], 0), (box.shape[0], rank))
    columns = Box((0, box.start[1]), (rank, box.shape[1]))
    return low_rank_product(_part(b, rows, name), _part(a, columns, name), scale=scale)


def _part(held: _Parts, part: Box, name: str) -> Tensor:
    for box, view in held:
        if box.intersect(part) == part:
            return narrow(view, outer=box, part=part)
    raise AssertionError(f"{name}: the adapter is not sharded like its layer; {part} is not here")
