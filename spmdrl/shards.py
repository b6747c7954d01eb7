"""Rectangular parts of checkpoint tensors: which ones a rank holds, and where in its memory.

Loading reads them from files, the weight stream sends them to engines.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


@dataclass(frozen=True, order=True)
class Box:
    """A rectangular part of a tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements inside."""
        return math.prod(self.shape)

    def intersect(self, other: "Box") -> "Box | None":
        """Return the common part, or None when there is none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.start, self.shape, other.start, other.shape)
        )
        shape = tuple(e - s for s, e in zip(start, stop))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def minus(self, hole: "Box") -> list["Box"]:
        """Return disjoint boxes that cover this one except `hole`."""
        hole = self.intersect(hole)
        if hole is None:
            return [self]
        rest, start, shape = [], list(self.start), list(self.shape)
        for dim in range(len(shape)):
            below = hole.start[dim] - start[dim]
            above = start[dim] + shape[dim] - hole.start[dim] - hole.shape[dim]
            for at, size in ((start[dim], below),
                             (hole.start[dim] + hole.shape[dim], above)):
                if size:
                    rest.append(Box((*start[:dim], at, *start[dim + 1:]),
                                    (*shape[:dim], size, *shape[dim + 1:])))
            start[dim], shape[dim] = hole.start[dim], hole.shape[dim]
        return rest

    def span(self, first: int, last: int) -> Iterator["Box"]:
        """Yield boxes that make up elements [first, last) in row-major order, in that order."""
        if first >= last:
            return
        if last - first == self.numel:
            yield self
            return
        row = math.prod(self.shape[1:])
        low, high = first // row, (last - 1) // row
        if low == high:
            yield from self._row(low, first=first - low * row, last=last - low * row)
            return
        if first % row:
            yield from self._row(low, first=first - low * row, last=row)
        full, end = -(-first // row), last // row
        if end > full:
            yield Box((self.start[0] + full, *self.start[1:]), (end - full, *self.shape[1:]))
        if last % row:
            yield from self._row(end, first=0, last=last - end * row)

    def _row(self, index: int, *, first: int, last: int) -> Iterator["Box"]:
        for part in Box(self.start[1:], self.shape[1:]).span(first, last):
            yield Box((self.start[0] + index, *part.start), (1, *part.shape))


def held_boxes(name: str, tensor: Tensor) -> list[tuple[Box, Tensor]]:
    """Return this rank's boxes of a tensor, each with the live view that holds it.

    Args:
        name: of the checkpoint tensor, for messages.
        tensor: a DTensor of any mesh, replicated and sharded in any order (FSDP2's strided
            shards included), or a plain tensor, which this rank then holds whole.
    Returns: boxes with views of the same shapes; several when the shard has gaps, none when
        this rank's shard is empty.
    Raises: ValueError for a placement that is not a part of the value (partial sums).
    """
    if not isinstance(tensor, DTensor):
        return [(Box((0,) * tensor.dim(), tuple(tensor.shape)), tensor.detach())]
    local = tensor.to_local().detach()
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, f"{name} lives on a mesh that this rank is not part of"
    kept: dict[int, Tensor] = {}  # dim -> global indices that this rank keeps, ascending
    for at, size, placement in zip(coordinate, tensor.device_mesh.shape, tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, (Shard, _StridedShard)):
            raise ValueError(f"{name} has placement {placement}; only sharded and replicated "
                             "parameters can be streamed")
        indices = kept.get(placement.dim, torch.arange(tensor.shape[placement.dim]))
        # A strided shard is taken from each of `split_factor` parts: FSDP2 lists its axis
        # first, but shards what tensor parallelism left.
        parts = _chunks(indices, getattr(placement, "split_factor", 1))
        kept[placement.dim] = torch.cat([_chunks(part, size)[at] for part in parts])
    runs = [_runs(kept[d]) if d in kept else [(0, 0, n)] for d, n in enumerate(tensor.shape)]
    boxes = []
    for combination in itertools.product(*runs):
        view = local
        for dim, (_, inside, length) in enumerate(combination):
            view = view.narrow(dim, inside, length)
        boxes.append((Box(tuple(r[0] for r in combination), tuple(r[2] for r in combination)),
                      view))
    held = sum(box.numel for box, _ in boxes)
    assert held == local.numel(), (
        f"{name}: placements {tensor.placements} say {held} elements, the shard has "
        f"{local.numel()}")
    return boxes


def _chunks(indices: Tensor, number: int) -> list[Tensor]:
    """Cut as torch.chunk does, but always into `number` parts, the last ones empty."""
    parts = list(torch.chunk(indices, number))
    return parts + [indices[:0]] * (number - len(parts))


def _runs(indices: Tensor) -> list[tuple[int, int, int]]:
    """Return (global start, local start, length) of each run of consecutive indices."""
    if not len(indices):
        return []
    breaks = (torch.nonzero(torch.diff(indices) != 1).flatten() + 1).tolist()
    edges = [0, *breaks, len(indices)]
    return [(int(indices[a]), a, b - a) for a, b in zip(edges, edges[1:])]


class Held:
    """A rank's boxes by checkpoint name, with lookup of the view that shows a given part."""

    def __init__(self, shards: Mapping[str, Tensor]):
        self._views = {name: held_boxes(name, tensor) for name, tensor in shards.items()}

    def boxes(self) -> dict[str, tuple[Box, ...]]:
        """Return what to tell the other ranks."""
        return {name: tuple(box for box, _ in held if box.numel)
                for name, held in self._views.items()}

    def view(self, name: str, part: Box) -> Tensor:
        """Return the live view of `part`, which lies within one of this rank's boxes."""
        for box, view in self._views[name]:
            if box.intersect(part) == part:
                return narrow(view, outer=box, part=part)
        raise AssertionError(f"{name} {part} is not held here")


@torch.no_grad()
def addresses(shards: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Return where this rank's shards lie, to notice cheaply that one has moved."""
    return tuple(
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()
        for tensor in shards.values())


def narrow(view: Tensor, *, outer: Box, part: Box) -> Tensor:
    """Return the part of `view` (which shows `outer`) that shows `part`."""
    for dim, (at, begin, length) in enumerate(zip(part.start, outer.start, part.shape)):
        if length != view.shape[dim]:
            view = view.narrow(dim, at - begin, length)
    return view
