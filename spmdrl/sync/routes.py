"""Which rank sends which piece of what engines want: a pure function of who holds and who wants.

The words:
- a receiver is a set of ranks with the same wants (the replicas of one tensor-parallel rank): each
  byte leaves the trainers once for all of them, a part to each, and they gather the parts;
- a route is everything that one source sends to one receiver, as an ordered line of pieces;
- ranks that have the same cells share them: those that a receiver wants are laid in one line,
  which is cut into equal parts.

A source computes its own routes, a rank of a receiver all routes to it; nobody the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from spmdrl.sync.holders import Holders
from spmdrl.sync.tables import ITEMSIZES, Array, Columns, FileTable, Wants

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
