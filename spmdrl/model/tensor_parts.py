"""Rectangular parts of tensors: which ones a rank holds, and where in its memory.

There are two kinds of tensors. A live tensor is a parameter or persistent buffer of the model, by
its name in the model: the optimizer and checkpoints use these. A file tensor is a tensor of the
safetensors files, by its name there: loading, the weight stream and export use those. A file tensor
is a part of one live tensor: all of it or, for example, one expert's projection, where transformers
keeps the projections of all experts in one parameter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spmdrl.errors import Refusal
from spmdrl.model.cuts import cut_of
from spmdrl.world.torch_internals import sharded_like


@dataclass(frozen=True, order=True)
class Box:
    """A rectangular part of a tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return all of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Elements inside."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Return the common part, or None when there is none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.start, self.shape, other.start, other.shape)
        )
        shape = tuple(e - s for s, e in zip(start, stop))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def minus(self, hole: Box) -> list[Box]:
        """Return disjoint boxes that cover this one except `hole`."""
        common = self.intersect(hole)
        if common is None:
            return [self]
        rest = []
        start = list(self.start)
        shape = list(self.shape)
        for dim in range(len(shape)):
            first = common.start[dim]
            count = common.shape[dim]
            below = first - start[dim]
            above = start[dim] + shape[dim] - first - count
            for at, size in ((start[dim], below), (first + count, above)):
                if size:
                    rest.append(
                        Box(
                            (*start[:dim], at, *start[dim + 1 :]),
                            (*shape[:dim], size, *shape[dim + 1 :]),
                        )
                    )
            # The next dims are cut only where this dim overlaps the hole.
            start[dim], shape[dim] = first, count
        return rest

    def span(self, first: int, last: int) -> Iterator[Box]:
        """Yield boxes that make up elements [first, last) in row-major order, in that order."""
        if first >= last:
            return
        if last - first == self.numel:
            yield self
            return
        row = math.prod(self.shape[1:])
        low = first // row
        high = (last - 1) // row
        if low == high:
            yield from self._row(low, first=first - low * row, last=last - low * row)
            return
        if first % row:
            yield from self._row(low, first=first - low * row, last=row)
        full = -(-first // row)
        end = last // row
        if end > full:
            yield Box((self.start[0] + full, *self.start[1:]), (end - full, *self.shape[1:]))
        if last % row:
            yield from self._row(end, first=0, last=last - end * row)

    def _row(self, index: int, *, first: int, last: int) -> Iterator[Box]:
        for part in Box(self.start[1:], self.shape[1:]).span(first, last):
            yield Box((self.start[0] + index, *part.start), (1, *part.shape))


def held_boxes(name: str, tensor: Tensor) -> list[tuple[Box, Tensor]]:
    """Return this rank's boxes of a tensor, each with the live view that holds it.

    Args:
        name: of the checkpoint tensor, for messages.
        tensor: a DTensor of any mesh, replicated and sharded in any order (FSDP2's strided
            shards included), or a plain tensor, which this rank then holds whole.
    Returns: boxes, each with a view of its shape; several if the shard has gaps, none if it is
        empty.
    Raises: Refusal for a placement that is not a part of the value (partial sums).
    """
    cut = cut_of(name, tensor)
    if not isinstance(tensor, DTensor):
        return [(Box.whole(tensor.shape), tensor.detach())]
    local = tensor.to_local().detach()
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, f"{name} lives on a mesh that this rank is not part of"
    runs = []
    for dim in range(tensor.dim()):
        own = cut.runs(dim)[cut.position(dim, coordinate)]
        offsets = itertools.accumulate((length for _, length in own), initial=0)
        runs.append([(start, at, length) for (start, length), at in zip(own, offsets)])
    boxes = []
    for combination in itertools.product(*runs):
        view = local
        for dim, (_, inside, length) in enumerate(combination):
            view = view.narrow(dim, inside, length)
        boxes.append(
            (Box(tuple(r[0] for r in combination), tuple(r[2] for r in combination)), view)
        )
    held = sum(box.numel for box, _ in boxes)
    assert held == local.numel(), (
        f"{name}: placements {tensor.placements} say {held} elements, the shard has {local.numel()}"
    )
    return boxes


def like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a local tensor in the layout of a parameter: a DTensor if the parameter is one."""
    return sharded_like(parameter, local) if isinstance(parameter, DTensor) else local


@dataclass(frozen=True)
class BlockValues:
    """A tensor of which this rank keeps one value per block of consecutive local elements.

    `tensor` is a copy with one value per element, which any layout can read.
    """

    name: str  # of the parameter, for messages
    parameter: Tensor  # whose layout the tensor has
    values: Tensor  # [blocks], live
    size: int  # elements of a block; the last one may have fewer

    @cached_property
    def tensor(self) -> Tensor:
        """Return the value of each element, on the CPU, in the layout of the parameter."""
        local = local_part(self.parameter)
        # Three times as fast as repeat_interleave. The reshape copies.
        each = self.values.cpu()[:, None].expand(-1, self.size).reshape(-1)
        return like(self.parameter, each[: local.numel()].view(local.shape))

    def places(self, begin: int, end: int) -> Tensor:
        """Return [end - begin] int64, the place of each block's first element in the whole tensor.

        Args:
            begin, end: of the blocks. A place is the index in row-major order.
        """
        device = self.values.device
        rest = torch.arange(begin, end, device=device) * self.size
        places = torch.zeros_like(rest)
        step = 1
        for dim in reversed(range(self.parameter.dim())):
            own = _indices(self.name, self.parameter, dim).to(device)
            places += own[rest % len(own)] * step
            rest = rest // len(own)
            step *= self.parameter.shape[dim]
        return places


def _indices(name: str, tensor: Tensor, dim: int) -> Tensor:
    """Return [n] int64, the indices of a dim of the whole tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return torch.arange(tensor.shape[dim])
    cut = cut_of(name, tensor)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, f"{name} lives on a mesh that this rank is not part of"
    runs = cut.runs(dim)[cut.position(dim, coordinate)]
    return torch.cat([torch.arange(start, start + length) for start, length in runs])


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, detached, sharing its storage; a plain tensor too."""
    return to_local(tensor.detach())


def write(target: Tensor, source: Tensor) -> None:
    """Copy into live memory, unless the source is this very memory."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def to_local(tensor: Any) -> Any:
    """Return this rank's part of a DTensor, with its gradient; anything else as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Part:
    """The part of a live tensor that a file tensor is."""

    tensor: str  # name of the live tensor
    box: Box  # of it
    dims: tuple[int, ...]  # the live dim of each dim of the file; the box has size 1 in the others

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> Part:
        """Return all of a live tensor, as it is."""
        return cls(name, Box.whole(shape), tuple(range(len(shape))))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the file tensor."""
        return tuple(self.box.shape[dim] for dim in self.dims)

    def in_file(self, held: Box) -> Box | None:
        """Return the part of the file tensor that a box of the live tensor holds, if any."""
        common = self.box.intersect(held)
        if common is None:
            return None
        return Box(
            tuple(common.start[d] - self.box.start[d] for d in self.dims),
            tuple(common.shape[d] for d in self.dims),
        )

    def in_tensor(self, part: Box) -> Box:
        """Return where a box of the file tensor lies in the live tensor."""
        start = list(self.box.start)
        shape = [1] * len(self.box.shape)
        for dim, at, size in zip(self.dims, part.start, part.shape):
            start[dim] += at
            shape[dim] = size
        return Box(tuple(start), tuple(shape))

    def as_in_file(self, values: Tensor) -> Tensor:
        """Return a view of a box of the live tensor with the dims of the file tensor."""
        others = [d for d in range(values.dim()) if d not in self.dims]
        return values.permute((*self.dims, *others))[(..., *[0] * len(others))]


Delta = Callable[[Box], Tensor]
"""Computes what is added to a box of a live tensor when it is sent: [box.shape]."""


@dataclass(frozen=True)
class Value:
    """The value of a box of a file tensor: live memory, with a sum or a factor."""

    live: Tensor  # a view of the live memory, with the dims of the file tensor
    added: Callable[[], Tensor] | None = None  # of the same shape
    factor: float = 1.0

    @property
    def is_live(self) -> bool:
        """Whether the live memory itself is the value."""
        return self.added is None and self.factor == 1

    def read(self) -> Tensor:
        """Return the value: the live memory itself if `is_live`."""
        value = self.live if self.added is None else self.live + self.added()
        return value if self.factor == 1 else value * self.factor


class Held:
    """A rank's boxes of file tensors, from which values of parts can be read.

    Args:
        shards: {live name: this rank's shard}.
        parts: {file name: the part of a live tensor that it is}.
        deltas: {live name: what to add to it on reading}; the mapping may be replaced.
        factors: {live name: what to multiply it with on reading}; 1 where it is not named.
    """

    def __init__(
        self,
        shards: Mapping[str, Tensor],
        parts: Mapping[str, Part],
        deltas: Mapping[str, Delta] | None = None,
        factors: Mapping[str, float] | None = None,
    ):
        self._views = {name: held_boxes(name, tensor) for name, tensor in shards.items()}
        self._parts = {name: part for name, part in parts.items() if part.tensor in shards}
        self.deltas = dict(deltas or {})
        self._factors = dict(factors or {})

    def boxes(self) -> dict[str, tuple[Box, ...]]:
        """Return {file name: boxes of it that this rank holds}."""
        return {
            name: tuple(
                found
                for box, _ in self._views[part.tensor]
                if (found := part.in_file(box)) is not None and found.numel
            )
            for name, part in self._parts.items()
        }

    def value(self, name: str, box: Box) -> Value:
        """Return the value of `box`, which is inside one of this rank's boxes of `name`."""
        part = self._parts[name]
        inside = part.in_tensor(box)
        added = partial(self._added, part, inside) if part.tensor in self.deltas else None
        live = part.as_in_file(view_of(inside, self._views[part.tensor], name=name))
        return Value(live, added, self._factors.get(part.tensor, 1.0))

    @torch.no_grad()
    def write(self, weights: Iterable[tuple[str, Tensor]], *, model: nn.Module) -> set[str]:
        """Write whole file tensors into the live ones, all of which this rank holds whole.

        Args:
            weights: (file name, tensor).
            model: whose tensors these are, for messages.
        Returns: the names of all file tensors.
        Raises: Refusal for a name that the model does not have.
        """
        boxes = self.boxes()
        for name, tensor in weights:
            if name not in boxes:
                raise Refusal(f"{type(model).__name__} has no tensor {name}")
            (whole,) = boxes[name]
            self.value(name, whole).live.copy_(tensor)
        return set(boxes)

    def _added(self, part: Part, inside: Box) -> Tensor:
        return part.as_in_file(self.deltas[part.tensor](inside))


@torch.no_grad()
def addresses(shards: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Return the addresses of this rank's shards, by which a shard that moved is found."""
    return tuple(to_local(tensor).data_ptr() for tensor in shards.values())


def view_of(part: Box, held: Sequence[tuple[Box, Tensor]], *, name: str) -> Tensor:
    """Return a view of `part`, which must be inside one of the boxes that a rank holds."""
    for box, view in held:
        if box.intersect(part) == part:
            return narrow(view, outer=box, part=part)
    raise AssertionError(f"{name}: {part} is not held here")


def narrow(view: Tensor, *, outer: Box, part: Box) -> Tensor:
    """Return the view of `part` in `view`, which is the view of `outer`."""
    for dim, (at, begin, length) in enumerate(zip(part.start, outer.start, part.shape)):
        if length != view.shape[dim]:
            view = view.narrow(dim, at - begin, length)
    return view


def extent(tensor: Tensor) -> int:
    """Return the elements of storage between a tensor's first and its last."""
    return sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))


def box_within(view: Tensor, base: Tensor) -> Box | None:
    """Return the box of `base` that `view` is; None if it is no box of it.

    Args:
        view: shares its storage with `base`; its dims may be permuted, merged or split.
        base: a dense tensor (its dims in any memory order).
    """
    if view.numel() == 0 or base.numel() == 0:
        return None
    order = sorted(
        (d for d in range(base.dim()) if base.shape[d] > 1), key=lambda d: -base.stride(d)
    )
    first = view.storage_offset() - base.storage_offset()
    start = [0] * base.dim()
    stop = [1] * base.dim()
    low = first
    high = first + extent(view)
    for dim in order:
        start[dim], low = divmod(low, base.stride(dim))
        last, high = divmod(high, base.stride(dim))
        stop[dim] = last + 1
    shape = tuple(b - a for a, b in zip(start, stop))
    if min(shape, default=1) < 1 or math.prod(shape) != view.numel():
        return None
    # Equal extents are not enough: both must also walk through memory in the same steps.
    mine = _merged((view.shape[d], view.stride(d)) for d in range(view.dim()))
    its = _merged((shape[d], base.stride(d)) for d in order)
    return Box(tuple(start), shape) if mine == its else None


def _merged(dims: Any) -> list[tuple[int, int]]:
    """Return (size, stride) pairs, widest first, adjacent ones merged: how memory is walked."""
    merged: list[tuple[int, int]] = []
    for size, stride in sorted((d for d in dims if d[0] > 1), key=lambda d: -d[1]):
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged
