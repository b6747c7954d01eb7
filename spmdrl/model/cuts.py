"""How a tensor is sharded over a mesh. Ranks exchange this instead of lists of their boxes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from spmdrl.errors import Refusal
from spmdrl.world.torch_internals import StridedShard

Runs = tuple[tuple[int, int], ...]
"""(start, length) of ranges of indices of a dim, ascending, with gaps between them."""


@dataclass(frozen=True)
class CutAxis:
    """How one axis of a mesh shards a tensor."""

    size: int
    dim: int | None = None  # that it shards; None: replicated
    factor: int = 1  # equal parts of the dim; a rank has a piece of each (FSDP2 with tp)


@dataclass(frozen=True)
class TensorCut:
    """How a tensor is sharded; the same on all ranks."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...] = ()  # of the mesh, row-major; (): this rank has all of it
    axes: tuple[CutAxis, ...] = ()

    def runs(self, dim: int) -> tuple[Runs, ...]:
        """Return the ranges of `dim` for each position on the axes that shard it (row-major)."""
        own = tuple((axis.size, axis.factor) for axis in self.axes if axis.dim == dim)
        return _kept(self.shape[dim], own)

    def position(self, dim: int, coordinate: Sequence[int]) -> int:
        """Return the index in `runs` of the rank at a coordinate of the mesh."""
        index = 0
        for axis, at in zip(self.axes, coordinate):
            if axis.dim == dim:
                index = index * axis.size + at
        return index


def cut_of(name: str, tensor: Tensor) -> TensorCut:
    """Describe a DTensor of any mesh, or a plain tensor, which is whole on this rank.

    Args:
        name: for messages.
    Raises: Refusal for a placement that is not a part of the value (partial sums).
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return TensorCut(shape)
    mesh = tensor.device_mesh
    axes = []
    for size, placement in zip(mesh.shape, tensor.placements):
        if isinstance(placement, Replicate):
            axes.append(CutAxis(size))
        elif isinstance(placement, (Shard, StridedShard)):
            # A strided shard is taken from each of `split_factor` parts: FSDP2 lists its axis
            # first, but shards what tensor parallelism left.
            axes.append(CutAxis(size, placement.dim, getattr(placement, "split_factor", 1)))
        else:
            raise Refusal(
                f"{name} has placement {placement}; only sharded and replicated "
                "parameters can be streamed"
            )
    return TensorCut(shape, tuple(mesh.mesh.flatten().tolist()), tuple(axes))


@lru_cache(maxsize=4096)
def _kept(length: int, axes: tuple[tuple[int, int], ...]) -> tuple[Runs, ...]:
    kept: list[Runs] = [((0, length),)]
    for size, factor in axes:
        kept = [part for runs in kept for part in _dealt(runs, size, factor=factor)]
    return tuple(kept)


def _dealt(runs: Runs, size: int, *, factor: int) -> list[Runs]:
    parts = [
        list(_chunks(first, last, size))
        for first, last in _chunks(0, sum(length for _, length in runs), factor)
    ]
    return [_joined(run for own in taken for run in _within(runs, *own)) for taken in zip(*parts)]


def _joined(runs: Iterable[tuple[int, int]]) -> Runs:
    """Join ranges where one begins at the end of the other."""
    joined: list[tuple[int, int]] = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            start = joined[-1][0]
            length = joined.pop()[1] + length
        joined.append((start, length))
    return tuple(joined)


def _chunks(first: int, last: int, number: int) -> Iterator[tuple[int, int]]:
    """Cut as torch.chunk does, but always into `number` parts, the last of which may be empty."""
    step = -(-(last - first) // number)
    for i in range(number):
        yield min(first + i * step, last), min(first + (i + 1) * step, last)


def _within(runs: Runs, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the indices number `low` to `high` of all that the runs list."""
    at = 0
    for start, length in runs:
        first = max(low - at, 0)
        last = min(high - at, length)
        if first < last:
            yield start + first, last - first
        at += length
