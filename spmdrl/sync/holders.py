"""Which rank holds which cell of which live tensor.

A tensor that is cut over a mesh is a grid: each of its dims is cut into intervals by the axes that
shard it, and a cell, one interval of each dim, lies on the ranks at those positions. So where a
box comes from is found by bisection, dim by dim, for thousands of boxes at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy

from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.model.cuts import TensorCut
from spmdrl.sync.tables import Array, FileTable

Description = Mapping[str, TensorCut]
"""What a rank holds: {live name: how it is cut}."""


@dataclass(frozen=True)
class Interval:
    """The intervals of one dim, ascending."""

    starts: Array  # [I] int64
    stops: Array  # [I] int64
    owners: Array  # [I] int64: position on the axes that shard the dim

    def of(self, owner: int) -> Interval:
        """Return those of one position."""
        own = self.owners == owner
        return Interval(self.starts[own], self.stops[own], self.owners[own])

    def is_like(self, other: Interval) -> bool:
        """Whether the dim is cut and dealt alike."""
        pairs = zip(vars(self).values(), vars(other).values())
        return all(numpy.array_equal(a, b) for a, b in pairs)


class Grid:
    """Cells of a live tensor and the ranks that have them.

    Args:
        cuts: how the tensor lies on one mesh of ranks or several, whose ranks have it alike.
        depth: dims that boxes have, see tables.py.
    Raises: Refusal when they do not cut it alike.
    """

    def __init__(self, cuts: Sequence[TensorCut], depth: int):
        self.dims = _intervals(cuts[0], depth)
        for cut in cuts[1:]:
            if not all(a.is_like(b) for a, b in zip(self.dims, _intervals(cut, depth))):
                raise Refusal("some ranks cut it otherwise than others")
        holders = numpy.concatenate([_holders(cut, depth) for cut in cuts], axis=-1)
        self.ranks = numpy.sort(holders, axis=-1)
        """[positions of dim 0, .., of the last dim, copies] int32: who has a cell, ascending."""

    def held_by(self, rank: int) -> list[Interval] | None:
        """Return the intervals of the cells that a rank has, None for a rank that has none."""
        found = numpy.argwhere(self.ranks == rank)
        if not len(found):
            return None
        return [dim.of(owner) for dim, owner in zip(self.dims, found[0])]

    def cells(
        self, start: Array, stop: Array, *, dims: Sequence[Interval]
    ) -> tuple[Array, Array, Array, Array]:
        """TensorCut boxes at the edges of cells.

        Args:
            start, stop: [N, depth] int64, of boxes in the live tensor.
            dims: the intervals to look at: all, or those of a rank.
        Returns: index of the box, position in `ranks` without its last dim (flat), start and
            stop, of M cells: [M], [M], [M, depth], [M, depth]; in order of boxes.
        """
        low = [dim.stops.searchsorted(start[:, d], "right") for d, dim in enumerate(dims)]
        high = [dim.starts.searchsorted(stop[:, d], "left") for d, dim in enumerate(dims)]
        counts = [numpy.maximum(b - a, 0) for a, b in zip(low, high)]
        number = numpy.prod(counts, axis=0)
        box: Array = numpy.repeat(numpy.arange(len(start)), number)
        within = numpy.arange(len(box)) - numpy.repeat(number.cumsum() - number, number)
        first, last = start[box], stop[box]
        position, stride = numpy.zeros_like(box), 1
        for d in reversed(range(len(dims))):
            within, at = numpy.divmod(within, counts[d][box])
            at = at + low[d][box]
            first[:, d] = numpy.maximum(first[:, d], dims[d].starts[at])
            last[:, d] = numpy.minimum(last[:, d], dims[d].stops[at])
            position += dims[d].owners[at] * stride
            stride *= self.ranks.shape[d]
        return box, position, first, last


class Holders:
    """Who holds what.

    Args:
        said: (ranks, what each of them says that it holds), of all ranks.
        table: of the file tensors.
    Raises: Refusal naming a tensor that ranks do not hold alike.
    """

    def __init__(self, said: Sequence[tuple[Sequence[int], Description]], table: FileTable):
        grids: dict[tuple[tuple[TensorCut, int], ...], int] = {}
        self.table = table
        self.grids: list[Grid] = []
        self.grid_of = numpy.full(len(table.tensors), -1)
        """[live tensors]: index in `grids`, -1 where nobody holds it."""
        for number, name in enumerate(table.tensors):
            key = tuple((own[name], i) for i, (_, own) in enumerate(said) if name in own)
            if key and key not in grids:
                by_cut: dict[TensorCut, list[int]] = {}
                for cut, i in key:
                    by_cut.setdefault(cut, []).extend(said[i][0])
                with refusing(f"weight stream: {name}", Refusal):
                    self.grids.append(Grid(list(_on_ranks(by_cut)), table.depth))
                grids[key] = len(grids)
            if key:
                self.grid_of[number] = grids[key]


def _on_ranks(by_cut: Mapping[TensorCut, Sequence[int]]) -> Iterator[TensorCut]:
    """Yield each cut once, with its ranks named, who must all have said so."""
    for cut, ranks in by_cut.items():
        if not cut.ranks:
            yield from (TensorCut(cut.shape, (rank,)) for rank in ranks)
        elif missing := set(cut.ranks) - set(ranks):
            raise Refusal(f"rank {min(missing)} does not hold the part that rank {ranks[0]} says")
        else:
            yield cut


def _intervals(cut: TensorCut, depth: int) -> list[Interval]:
    one = numpy.array([0])
    dims = [Interval(one, one + 1, one)] * (depth - len(cut.shape))
    for dim in range(len(cut.shape)):
        runs = [
            (start, start + length, owner)
            for owner, own in enumerate(cut.runs(dim))
            for start, length in own
            if length
        ]
        dims.append(Interval(*numpy.array(sorted(runs), numpy.int64).reshape(-1, 3).T))
    return dims


def _holders(cut: TensorCut, depth: int) -> Array:
    """Return [positions of dim 0, .., of the last dim, copies] int32: the ranks of each cell."""
    sharding = [
        [i for i, axis in enumerate(cut.axes) if axis.dim == dim] for dim in range(len(cut.shape))
    ]
    copying = [i for i, axis in enumerate(cut.axes) if axis.dim is None]
    mesh = numpy.array(cut.ranks, numpy.int32).reshape([axis.size for axis in cut.axes])
    order = [i for own in (*sharding, copying) for i in own]
    sizes = [len(cut.runs(dim)) for dim in range(len(cut.shape))]
    return mesh.transpose(order).reshape([1] * (depth - len(sizes)) + sizes + [-1])
