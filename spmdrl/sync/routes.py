"""Which rank sends which piece: a pure function of what ranks hold and what engines want.

- A cell is a part of a live tensor that one set of ranks holds, and no other rank. A tensor that
  is sharded over a mesh is a grid of cells: each of its dims is cut into intervals by the mesh axes
  that shard it, and a cell is one interval of each dim. So the holders of a box are found by
  bisection, dim by dim, for thousands of boxes at once.
- A receiver is a set of ranks with the same wants (the replicas of one tensor-parallel rank).
  Each byte leaves the trainers once for all of them: each replica takes a part, and the replicas
  gather the parts.
- Ranks that hold the same cells share the work: the cells that a receiver wants of them form a
  line, which is cut into equal parts, one for each of these ranks.
- A route is everything that one source sends to one receiver, as an ordered line of pieces.

A source computes only the routes that it sends, and a rank of a receiver only those to its
receiver.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy

from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.model.cuts import Runs, TensorCut
from spmdrl.sync.tables import ITEMSIZES, Array, Columns, FileTable, Wants

_LEAST_SHARE = 16 * 2**10  # bytes; sharing less would only make more messages

Cuts = Mapping[str, TensorCut]
"""What a rank holds: {live name: how it is cut}."""


# --------------------------------------------------------------------------- who holds what


@dataclass(frozen=True)
class Intervals:
    """The intervals of one dim, ascending."""

    starts: Array  # [I] int64
    stops: Array  # [I] int64
    owners: Array  # [I] int64: position on the mesh axes that shard the dim

    def owned_by(self, owner: int) -> Intervals:
        """Return the intervals of one position."""
        mask = self.owners == owner
        return Intervals(self.starts[mask], self.stops[mask], self.owners[mask])

    def equals(self, other: Intervals) -> bool:
        """Return whether both cut the dim at the same places and give it to the same positions."""
        return (
            numpy.array_equal(self.starts, other.starts)
            and numpy.array_equal(self.stops, other.stops)
            and numpy.array_equal(self.owners, other.owners)
        )


class Grid:
    """The cells of a live tensor, and the ranks that hold them.

    Args:
        cuts: how the tensor lies on a mesh of ranks, or on several meshes that cut it equally.
        depth: number of dims of a box, see tables.py.
    Raises: Refusal when the meshes cut it differently.
    """

    def __init__(self, cuts: Sequence[TensorCut], depth: int):
        self.dims = _intervals(cuts[0], depth)
        for cut in cuts[1:]:
            for dim, other in zip(self.dims, _intervals(cut, depth)):
                if not dim.equals(other):
                    raise Refusal("some ranks cut it differently from others")
        holders = numpy.concatenate([_cell_ranks(cut, depth) for cut in cuts], axis=-1)
        self.ranks = numpy.sort(holders, axis=-1)
        """[positions of dim 0, .., of the last dim, copies] int32: holders of a cell, ascending."""

    def held_by(self, rank: int) -> list[Intervals] | None:
        """Return the intervals, dim by dim, of the cells that a rank holds; None if it has none."""
        places = numpy.argwhere(self.ranks == rank)
        if not len(places):
            return None
        return [dim.owned_by(owner) for dim, owner in zip(self.dims, places[0])]

    def cells(
        self, start: Array, stop: Array, *, dims: Sequence[Intervals]
    ) -> tuple[Array, Array, Array, Array]:
        """Cut boxes at the edges of cells.

        Args:
            start, stop: [N, depth] int64, of boxes in the live tensor.
            dims: the intervals to look at: all of them, or those of one rank.
        Returns: of M cells, in the order of the boxes: the index of the box [M], the index of the
            cell in `ranks` with all but its last dim flattened [M], start [M, depth] and stop
            [M, depth], all int64.
        """
        # A box touches the intervals low .. low + count - 1 of each dim.
        lows = []
        counts = []
        for d, dim in enumerate(dims):
            low = dim.stops.searchsorted(start[:, d], "right")
            high = dim.starts.searchsorted(stop[:, d], "left")
            lows.append(low)
            counts.append(numpy.maximum(high - low, 0))
        num_cells = numpy.prod(counts, axis=0)
        box: Array = numpy.repeat(numpy.arange(len(start)), num_cells)
        # The number of a cell within its box; its digits are the indices of its intervals.
        first_cell = num_cells.cumsum() - num_cells
        within = numpy.arange(len(box)) - numpy.repeat(first_cell, num_cells)
        first = start[box]
        last = stop[box]
        position = numpy.zeros_like(box)
        stride = 1
        for d in reversed(range(len(dims))):
            dim = dims[d]
            within, digit = numpy.divmod(within, counts[d][box])
            interval = digit + lows[d][box]
            first[:, d] = numpy.maximum(first[:, d], dim.starts[interval])
            last[:, d] = numpy.minimum(last[:, d], dim.stops[interval])
            position += dim.owners[interval] * stride
            stride *= self.ranks.shape[d]
        return box, position, first, last


class Holders:
    """Which ranks hold which cells, of all live tensors.

    Args:
        described: (ranks, what each of these ranks holds), of all ranks.
        table: of the file tensors.
    Raises: Refusal naming a tensor that some ranks cut differently from others.
    """

    def __init__(self, described: Sequence[tuple[Sequence[int], Cuts]], table: FileTable):
        self.table = table
        self.grids: list[Grid] = []
        self.grid_of = numpy.full(len(table.tensors), -1)
        """[live tensors] int64: index in `grids`, -1 where no rank holds the tensor."""
        # Tensors that are cut alike share a grid: layers repeat.
        grid_of_cuts: dict[tuple[tuple[TensorCut, int], ...], int] = {}
        for number, name in enumerate(table.tensors):
            own = tuple((cuts[name], i) for i, (_, cuts) in enumerate(described) if name in cuts)
            if not own:
                continue
            if own not in grid_of_cuts:
                ranks_of: dict[TensorCut, list[int]] = {}
                for cut, i in own:
                    ranks_of.setdefault(cut, []).extend(described[i][0])
                with refusing(f"weight stream: {name}", Refusal):
                    self.grids.append(Grid(list(_with_ranks(ranks_of)), table.depth))
                grid_of_cuts[own] = len(grid_of_cuts)
            self.grid_of[number] = grid_of_cuts[own]


def _with_ranks(ranks_of: Mapping[TensorCut, Sequence[int]]) -> Iterator[TensorCut]:
    """Yield each cut with the ranks of its mesh.

    Args:
        ranks_of: {cut: the ranks that describe themselves with it}.
    Raises: Refusal when a rank of a mesh does not describe itself so.
    """
    for cut, ranks in ranks_of.items():
        if not cut.ranks:
            # A plain tensor: each of these ranks has all of it.
            for rank in ranks:
                yield TensorCut(cut.shape, (rank,))
            continue
        missing = set(cut.ranks) - set(ranks)
        if missing:
            raise Refusal(f"rank {min(missing)} does not hold the part that rank {ranks[0]} says")
        yield cut


def _intervals(cut: TensorCut, depth: int) -> list[Intervals]:
    """Return the intervals of each of `depth` dims."""
    zero = numpy.array([0])
    whole = Intervals(zero, zero + 1, zero)
    dims = [whole] * (depth - len(cut.shape))
    for dim in range(len(cut.shape)):
        dims.append(_intervals_of(cut.runs(dim)))
    return dims


def _intervals_of(runs_of_owners: Sequence[Runs]) -> Intervals:
    """Return the intervals of one dim.

    Args:
        runs_of_owners: what each position on the mesh axes that shard the dim has of it.
    """
    found = []
    for owner, runs in enumerate(runs_of_owners):
        for start, length in runs:
            if length:
                found.append((start, start + length, owner))
    rows = numpy.array(sorted(found), numpy.int64).reshape(-1, 3)
    return Intervals(rows[:, 0], rows[:, 1], rows[:, 2])


def _cell_ranks(cut: TensorCut, depth: int) -> Array:
    """Return [positions of dim 0, .., of the last dim, copies] int32: the ranks of each cell."""
    order = []  # mesh axes: those that shard dim 0, dim 1, .., and last those that replicate
    for dim in (*range(len(cut.shape)), None):
        order += [i for i, axis in enumerate(cut.axes) if axis.dim == dim]
    sizes = [axis.size for axis in cut.axes]
    mesh = numpy.array(cut.ranks, numpy.int32).reshape(sizes)
    positions = [len(cut.runs(dim)) for dim in range(len(cut.shape))]
    pad = [1] * (depth - len(positions))
    return mesh.transpose(order).reshape([*pad, *positions, -1])


# --------------------------------------------------------------------------- who sends what


@dataclass(frozen=True)
class Cells(Columns):
    """Pieces of what is wanted: a range of the elements of a cell each."""

    want: Array  # [N] int64: row of the wants
    file: Array  # [N] int32: index of the file tensor
    dtype: Array  # [N] int8: index in DTYPES, of the engine
    start: Array  # [N, depth] int64: of the cell in the file tensor
    shape: Array  # [N, depth] int64
    first: Array  # [N] int64: the piece is the elements [first, last) of the cell, row-major
    last: Array  # [N] int64
    source: Array  # [N] int64: the rank that sends it; before that is decided, its line

    @property
    def nbytes(self) -> Array:
        """[N] int64: bytes in the engine's dtype."""
        return (self.last - self.first) * ITEMSIZES[self.dtype]


@dataclass(frozen=True)
class RankRoutes:
    """One rank's routes in one push, before they are cut into buckets."""

    sent: list[Cells]  # by this rank, to each receiver
    received: Cells | None  # by the receiver that this rank belongs to, of all sources


def routes_to(
    wants: Wants,
    ranks: Sequence[int],
    *,
    holders: Holders,
    receiver: int,
    source: int | None = None,
) -> Cells:
    """Return the routes to a receiver, ordered by source, wider dtypes first.

    Args:
        wants: of the receiver.
        ranks: of the receiver, ascending. Where some of them hold a cell, only these send it.
        holders: of all tensors.
        receiver: its index. The first part of a line goes to another rank for each receiver, so
            that small lines do not all fall to the same rank.
        source: if given, return only what this rank sends.
    """
    cells, sharers = _wanted_cells(wants, ranks, holders=holders, source=source)
    # lexsort sorts by its last key first.
    order = numpy.lexsort((*cells.start.T[::-1], cells.want, cells.source))
    cells = cells.rows(order)
    num_sharers = numpy.array([len(line) for line in sharers], numpy.int64)
    nbytes = numpy.bincount(cells.source, cells.nbytes, len(sharers)).astype(numpy.int64)
    num_shares = numpy.clip(nbytes // _LEAST_SHARE, 1, num_sharers)
    pieces, share = split_lines(cells, num_shares[cells.source])
    # Replace the line of each piece by the rank that sends its share.
    line = pieces.source
    flat = numpy.array([rank for line_ranks in sharers for rank in line_ranks], numpy.int64)
    line_begins = num_sharers.cumsum() - num_sharers
    sharer = (share + receiver * num_shares[line]) % num_sharers[line]
    pieces.source[:] = flat[line_begins[line] + sharer]
    if source is not None:
        pieces = pieces.rows(pieces.source == source)
    narrowness = -ITEMSIZES[pieces.dtype]
    keys = (pieces.first, *pieces.start.T[::-1], pieces.want, narrowness, pieces.source)
    return pieces.rows(numpy.lexsort(keys))


def _wanted_cells(
    wants: Wants, ranks: Sequence[int], *, holders: Holders, source: int | None
) -> tuple[Cells, list[tuple[int, ...]]]:
    """Return the cells of the wants, whole, and the ranks that share each line.

    The `source` column of the cells is the index of their line in the second value.
    """
    table = holders.table
    start, stop = _live_boxes(wants, table)
    grid_of_want = holders.grid_of[table.tensor[wants.file]]
    receiver_ranks = frozenset(ranks)
    nothing = start[:0]
    tables = [
        _cells(wants, table, nothing[:, 0], low=nothing, high=nothing, line=nothing[:, 0])
    ]  # gives the columns their dtypes where nothing is found
    lines: dict[tuple[int, ...], int] = {}
    for number, grid in enumerate(holders.grids):
        dims = grid.dims if source is None else grid.held_by(source)
        of_grid = numpy.flatnonzero(grid_of_want == number)
        if dims is None or not len(of_grid):
            continue
        box, position, low, high = grid.cells(start[of_grid], stop[of_grid], dims=dims)
        holders_of_cell = grid.ranks.reshape(-1, grid.ranks.shape[-1])
        line_of_cell = numpy.full(len(holders_of_cell), -1)
        for cell in numpy.unique(position):
            all_holders = tuple(holders_of_cell[cell].tolist())
            local = tuple(rank for rank in all_holders if rank in receiver_ranks)
            line_of_cell[cell] = lines.setdefault(local or all_holders, len(lines))
        line = line_of_cell[position]
        tables.append(_cells(wants, table, of_grid[box], low=low, high=high, line=line))
    return Cells.join(tables), list(lines)


def _live_boxes(wants: Wants, table: FileTable) -> tuple[Array, Array]:
    """Return where the wants start and stop in live tensors, [N, depth] int64 each."""
    dims = table.dims[wants.file]
    start = numpy.zeros_like(wants.start)
    shape = numpy.zeros_like(wants.shape)
    numpy.put_along_axis(start, dims, wants.start, axis=1)
    numpy.put_along_axis(shape, dims, wants.shape, axis=1)
    start += table.start[wants.file]
    return start, start + shape


def _cells(
    wants: Wants, table: FileTable, want: Array, *, low: Array, high: Array, line: Array
) -> Cells:
    """Return boxes of live tensors as whole cells of file tensors.

    Args:
        want: [N], row of the wants that each box belongs to.
        low, high: [N, depth], start and stop in the live tensor.
        line: [N].
    """
    want = want.astype(numpy.int64)
    file = wants.file[want]
    dims = table.dims[file]
    shape = numpy.take_along_axis(high - low, dims, axis=1)
    numel = shape.prod(axis=1)
    return Cells(
        want=want,
        file=file,
        dtype=wants.dtype[want],
        start=numpy.take_along_axis(low - table.start[file], dims, axis=1),
        shape=shape,
        first=numpy.zeros_like(numel),
        last=numel,
        source=line.astype(numpy.int64),
    )


def split_lines(cells: Cells, num_parts: Array, *, slack: Array | int = 0) -> tuple[Cells, Array]:
    """Cut each line of cells into parts of equal bytes.

    Args:
        cells: ordered by `source`; the cells with one `source` are a line.
        num_parts: [N] int64, of the line that a cell is on.
        slack: [N] int64, bytes: a cut that falls into a row of at most so many bytes moves to the
            start of the row, so that both parts are boxes.
    Returns: the pieces (a cell once for each part that it is in), and the part of each, [M] int64.
    """
    nbytes = cells.nbytes
    itemsize = ITEMSIZES[cells.dtype]
    bytes_of_line = numpy.bincount(cells.source, nbytes).astype(numpy.int64)
    line_begins = bytes_of_line.cumsum() - bytes_of_line
    begin = nbytes.cumsum() - nbytes - line_begins[cells.source]  # bytes of the line before a cell
    line_bytes = bytes_of_line[cells.source]
    # Part p begins at byte line_bytes * p // num_parts: low and high are the parts of the first
    # and the last byte of a cell.
    divisor = numpy.maximum(line_bytes, 1)
    low = ((begin + 1) * num_parts - 1) // divisor
    high = ((begin + nbytes) * num_parts - 1) // divisor
    count = numpy.where(nbytes > 0, high - low + 1, 0)
    row: Array = numpy.repeat(numpy.arange(len(count)), count)
    first_piece = count.cumsum() - count
    part = numpy.arange(len(row)) - numpy.repeat(first_piece - low, count)
    row_numel = _row_numel(cells)
    step = numpy.where(row_numel * itemsize <= slack, row_numel, 1)[row]
    pieces = cells.rows(row)

    def cut(part: Array) -> Array:
        """Return the element of each piece's cell at which a part begins."""
        byte = line_bytes[row] * part // num_parts[row] - begin[row]
        element = cells.first[row] + numpy.maximum(byte, 0) // itemsize[row]
        is_inside = element < cells.last[row]
        element = numpy.where(is_inside, element - element % step, cells.last[row])
        return numpy.maximum(element, cells.first[row])

    first = cut(part)
    last = cut(part + 1)
    pieces.first[:] = first
    pieces.last[:] = last
    is_some = first < last
    return pieces.rows(is_some), part[is_some]


def _row_numel(cells: Cells) -> Array:
    """Return [N] int64: the elements of a cell at one index of its first dim of more than 1."""
    first = (cells.shape > 1).argmax(axis=1)
    size = numpy.take_along_axis(cells.shape, first[:, None], axis=1)[:, 0]
    return cells.shape.prod(axis=1) // size


def missing_elements(pieces: Cells, wants: Wants) -> Array:
    """Return [wants] int64: how many elements of each want no source sends."""
    arriving: Array = numpy.zeros(len(wants.file), numpy.int64)
    numpy.add.at(arriving, pieces.want, pieces.last - pieces.first)
    return wants.shape.prod(axis=1) - arriving


def route_sums(pieces: Cells, route: Array, num_routes: int) -> Array:
    """Return [num_routes, 2] int64: the bytes of each route, and a hash of its pieces in order.

    Args:
        route: [N], ascending: the number of the route that each piece is on.
    """
    columns = (pieces.want, pieces.start, pieces.shape, pieces.first, pieces.last)
    rows = numpy.column_stack(columns).astype("<i8")
    nbytes = pieces.nbytes
    edges = route.searchsorted(numpy.arange(num_routes + 1))
    sums: Array = numpy.zeros((num_routes, 2), numpy.int64)
    for number in numpy.unique(route):
        of_route = slice(edges[number], edges[number + 1])
        digest = hashlib.blake2b(rows[of_route].tobytes(), digest_size=8).digest()
        sums[number, 0] = nbytes[of_route].sum()
        sums[number, 1] = int.from_bytes(digest, "little", signed=True)
    return sums
