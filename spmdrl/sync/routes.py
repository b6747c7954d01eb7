"""Which rank holds which cell of which live tensor.

A tensor that is cut over a mesh is a grid: each of its dims is cut into intervals by the axes that
shard it, and a cell, one interval of each dim, lies on the ranks at those positions. So where a
box comes from is found by bisection, dim by dim, for thousands of boxes at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy

from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.model.cuts import TensorCut
from spmdrl.sync.tables import ITEMSIZES, Array, Columns, FileTable, Wants

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


_LEAST_SHARE = 16 * 2**10  # bytes; ranks that hold the same do not share less


@dataclass(frozen=True)
class Cells(Columns):
    """What one rank, or several alike, have of what is wanted: a row each."""

    want: Array  # [N] int64: row of the wants
    file: Array  # [N] int32
    dtype: Array  # [N] int8: index in DTYPES, of the engine
    start: Array  # [N, depth] int64: of the cell in the file tensor
    shape: Array  # [N, depth] int64
    first: Array  # [N] int64: the elements [first, last) of the cell, row-major, are meant
    last: Array  # [N] int64
    source: Array  # [N] int64: who sends it; in a step before, whose line it is on

    @property
    def nbytes(self) -> Array:
        """[N] int64: as the engine has it."""
        return (self.last - self.first) * ITEMSIZES[self.dtype]


@dataclass(frozen=True)
class OwnRoutes:
    """What one rank has to do with one push, before it is cut into buckets."""

    sent: list[Cells]  # to each receiver, by this rank
    taken: Cells | None  # all that comes to the receiver that this rank is of


def routes_to(
    wants: Wants, ranks: Sequence[int], *, holders: Holders, turn: int, source: int | None = None
) -> Cells:
    """Return who sends what to a receiver, in the order of lines: by source, wider dtypes first.

    Args:
        wants: of the receiver.
        ranks: of the receiver, ascending. Those among them that hold a cell keep it from others.
        holders: of all tensors.
        turn: index of the receiver, so that small things are dealt to other ranks each time.
        source: return what this rank sends alone.
    """
    found, sharers = _found(wants, ranks, holders=holders, source=source)
    order = (*found.start.T[::-1], found.want, found.source)
    found = found.rows(numpy.lexsort(order))
    sizes = numpy.array([len(own) for own in sharers], numpy.int64)
    nbytes = numpy.bincount(found.source, found.nbytes, len(sharers)).astype(numpy.int64)
    shares = numpy.clip(nbytes // _LEAST_SHARE, 1, sizes)
    pieces, share = dealt(found, shares[found.source])
    line = pieces.source
    flat = numpy.array([rank for own in sharers for rank in own], numpy.int64)
    who = (share + turn * shares[line]) % sizes[line]
    pieces.source[:] = flat[(sizes.cumsum() - sizes)[line] + who]
    if source is not None:
        pieces = pieces.rows(pieces.source == source)
    order = (pieces.first, *pieces.start.T[::-1], pieces.want)
    return pieces.rows(numpy.lexsort((*order, -ITEMSIZES[pieces.dtype], pieces.source)))


def _found(
    wants: Wants, ranks: Sequence[int], *, holders: Holders, source: int | None
) -> tuple[Cells, list[tuple[int, ...]]]:
    """Return the cells of the wants, and who shares them: `source` is an index in the latter."""
    table = holders.table
    start, stop = _in_tensors(wants, table)
    grid_of, near = holders.grid_of[table.tensor[wants.file]], frozenset(ranks)
    found = [_cells(wants, table, start[:0, 0], box=(start[:0], stop[:0]), line=start[:0, 0])]
    lines: dict[tuple[int, ...], int] = {}
    for number, grid in enumerate(holders.grids):
        dims = grid.dims if source is None else grid.held_by(source)
        own = numpy.flatnonzero(grid_of == number)
        if dims is None or not len(own):
            continue
        box, position, low, high = grid.cells(start[own], stop[own], dims=dims)
        copies = grid.ranks.reshape(-1, grid.ranks.shape[-1])
        line_of = numpy.full(len(copies), -1)
        for at in numpy.unique(position):
            sharers = tuple(copies[at].tolist())
            sharers = tuple(rank for rank in sharers if rank in near) or sharers
            line_of[at] = lines.setdefault(sharers, len(lines))
        found.append(_cells(wants, table, own[box], box=(low, high), line=line_of[position]))
    return Cells.join(found), list(lines)


def _in_tensors(wants: Wants, table: FileTable) -> tuple[Array, Array]:
    """Return where the wants start and stop in live tensors."""
    first = numpy.zeros_like(wants.start)
    shape = numpy.zeros_like(wants.shape)
    dims = table.dims[wants.file]
    numpy.put_along_axis(first, dims, wants.start, axis=1)
    numpy.put_along_axis(shape, dims, wants.shape, axis=1)
    first += table.start[wants.file]
    return first, first + shape


def _cells(
    wants: Wants, table: FileTable, want: Array, *, box: tuple[Array, Array], line: Array
) -> Cells:
    want = want.astype(numpy.int64)
    file, (low, high) = wants.file[want], box
    dims = table.dims[file]
    start = numpy.take_along_axis(low - table.start[file], dims, axis=1)
    shape = numpy.take_along_axis(high - low, dims, axis=1)
    numel = shape.prod(axis=1)
    none = numpy.zeros_like(numel)
    return Cells(want, file, wants.dtype[want], start, shape, none, numel, line.astype(numpy.int64))


def dealt(cells: Cells, parts: Array, *, slack: Array | int = 0) -> tuple[Cells, Array]:
    """Cut the line of each source into equal parts, at elements.

    Args:
        cells: ordered by source; the cells of a source make up its line.
        parts: [N] int64, of the line that a cell is on.
        slack: [N] int64, bytes: a cut within a row of less is made before the row, so that both
            parts are boxes.
    Returns: the cells, those that a cut falls into several times, and the part of each.
    """
    nbytes, size = cells.nbytes, ITEMSIZES[cells.dtype]
    lines = numpy.bincount(cells.source, nbytes).astype(numpy.int64)
    before = lines.cumsum() - lines
    begin, whole = nbytes.cumsum() - nbytes - before[cells.source], lines[cells.source]
    # Part p begins at byte whole * p // parts: these are the parts of the first and last byte.
    some = nbytes > 0
    low = numpy.where(some, ((begin + 1) * parts - 1) // numpy.maximum(whole, 1), 0)
    high = numpy.where(some, ((begin + nbytes) * parts - 1) // numpy.maximum(whole, 1), -1)
    number = high - low + 1
    row: Array = numpy.repeat(numpy.arange(len(low)), number)
    part = numpy.arange(len(row)) - numpy.repeat(number.cumsum() - number - low, number)
    pieces, width = cells.rows(row), _row_elements(cells)
    width = numpy.where(width * size <= slack, width, 1)[row]

    def cut(part: Array) -> Array:
        byte = numpy.maximum(whole[row] * part // parts[row] - begin[row], 0)
        at = cells.first[row] + byte // size[row]
        at = numpy.where(at < cells.last[row], at - at % width, cells.last[row])
        return numpy.maximum(at, cells.first[row])

    pieces.first[:], pieces.last[:] = cut(part), cut(part + 1)
    some = pieces.first < pieces.last
    return pieces.rows(some), part[some]


def _row_elements(cells: Cells) -> Array:
    """Return [N] int64: the elements of a cell at one index of its first dim of more than 1."""
    first = (cells.shape > 1).argmax(axis=1)
    return cells.shape.prod(axis=1) // numpy.take_along_axis(cells.shape, first[:, None], 1)[:, 0]


def uncovered(pieces: Cells, wants: Wants) -> Array:
    """Return [wants] int64: the elements of each want that no piece of any source is."""
    moved: Array = numpy.zeros(len(wants.file), numpy.int64)
    numpy.add.at(moved, pieces.want, pieces.last - pieces.first)
    return wants.shape.prod(axis=1) - moved


def route_sums(pieces: Cells, key: Array, number: int) -> Array:
    """Return [number, 2] int64 of routes 0 .. number - 1: bytes, and a hash of the pieces in order.

    Args:
        key: [N], ascending: the route of each piece.
    """
    sums: Array = numpy.zeros((number, 2), numpy.int64)
    columns = (pieces.want, pieces.start, pieces.shape, pieces.first, pieces.last)
    rows, nbytes = numpy.column_stack(columns).astype("<i8"), pieces.nbytes
    edges = key.searchsorted(numpy.arange(number + 1))
    for route in numpy.unique(key):
        own = slice(edges[route], edges[route + 1])
        digest = hashlib.blake2b(rows[own].tobytes(), digest_size=8).digest()
        sums[route] = nbytes[own].sum(), int.from_bytes(digest, "little", signed=True)
    return sums
