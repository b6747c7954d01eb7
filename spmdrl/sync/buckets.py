"""How the routes of a push are cut into buckets, and what one rank sends and takes in each.

A route is cut into slices of equal bytes, `ways` of them in each bucket, wherever that falls in a
cell. So every bucket carries the same traffic from every source: senders stay balanced within
each, block sizes are constants, and the bound on memory is arithmetic. A slice goes to one rank of
the receiver, another one in each bucket; with few sources to many replicas, to several at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy
import torch

from spmdrl.model.shards import Box
from spmdrl.sync.routes import Cells, OwnRoutes, dealt
from spmdrl.sync.tables import DTYPES, ITEMSIZES, Array, FileTable
from spmdrl.world.machine.hardware import LinkCost

_ALIGN = 16  # bytes; blocks start at a multiple of it, so that any dtype can view them
_UNEVEN = 1.1  # the most that replicas, which gather parts of equal size, may pad
_SMALLEST_BLOCK = 2 * _ALIGN  # of a few elements: no bucket count makes it less


@dataclass(frozen=True)
class Traffic:
    """Bytes of every route, and how much room they take in a bucket.

    Equal on every rank.
    """

    receivers: tuple[tuple[int, ...], ...]  # ranks of each, ascending
    nbytes: Array  # [world, receivers] int64: of each route

    @cached_property
    def keeps(self) -> Array:
        """[world, receivers] bool: the source is itself of the receiver, and keeps its share."""
        keeps = numpy.zeros(self.nbytes.shape, bool)
        for index, ranks in enumerate(self.receivers):
            keeps[list(ranks), index] = True
        return keeps & (self.nbytes > 0)

    @cached_property
    def order(self) -> Array:
        """[world, receivers] int64: number of a source among those outside the receiver."""
        outside = (self.nbytes > 0) & ~self.keeps
        return outside.cumsum(axis=0) - outside

    @cached_property
    def ways(self) -> Array:
        """[receivers] int64: targets of a source outside in one bucket. The fewer, the fewer
        messages; targets get as much each, or about."""
        found = []
        for index, ranks in enumerate(self.receivers):
            nbytes = self.nbytes[:, index][~self.keeps[:, index]]
            found.append(_ways(nbytes[nbytes > 0], len(ranks)))
        return numpy.array(found, numpy.int64)

    def slices(self, num_buckets: int) -> Array:
        """Return [world, receivers] int64: the slices of each route."""
        return num_buckets * numpy.where(self.keeps, 1, self.ways)

    def slack(self, num_buckets: int) -> Array:
        """Return [world, receivers] int64: bytes by which a cut may move to the start of a row."""
        slices = self.slices(num_buckets)
        return numpy.where(slices > 1, self.nbytes // slices // 16, 0)

    def blocks(self, num_buckets: int) -> Array:
        """Return [world, receivers] int64: the room that a slice of each route takes, bytes."""
        slices = self.slices(num_buckets)
        # A cut falls on an element: a slice may be up to one 8-byte element longer.
        longest = -(-self.nbytes // slices) + 7 + self.slack(num_buckets)
        room = -(-longest // _ALIGN) * _ALIGN
        return numpy.where(self.nbytes > 0, room, 0)

    def targets(self, receiver: int, bucket: int = 0) -> Array:
        """Return [world, ways] int64: which ranks of a receiver a source outside it sends to."""
        ways = int(self.ways[receiver])
        first = (self.order[:, receiver] + bucket) * ways
        return (first[:, None] + numpy.arange(ways)) % len(self.receivers[receiver])

    def places(self, receiver: int, num_buckets: int) -> tuple[Array, int]:
        """Return where blocks lie in the part of the rank that gets them, and a part's bytes.

        Which blocks meet in a part is the same in every bucket, of another rank each time.

        Returns: [world, ways] int64 (a source that keeps its share has the first), and an int.
        """
        blocks = self.blocks(num_buckets)[:, receiver]
        keeps = self.keeps[:, receiver]
        kept = int(blocks[keeps].max(initial=0))
        targets = self.targets(receiver)
        room = numpy.where(keeps, 0, blocks)[:, None].repeat(targets.shape[1], axis=1)
        places = numpy.zeros_like(room)
        fullest = 0
        for target in range(len(self.receivers[receiver])):
            meet = targets == target
            ends = room[meet].cumsum()
            places[meet] = kept + ends - room[meet]
            fullest = max(fullest, int(ends[-1]) if len(ends) else 0)
        places[keeps] = 0
        return places, kept + fullest

    def bucket_bytes(self, num_buckets: int) -> tuple[Array, Array]:
        """Return [world] int64 each: the bytes of one send bucket and of one receive bucket."""
        blocks = self.blocks(num_buckets)
        sent = (numpy.where(self.keeps, 0, blocks) * self.ways).sum(axis=1)
        taken: Array = numpy.zeros(len(blocks), numpy.int64)
        for index, ranks in enumerate(self.receivers):
            # The parts of all replicas, gathered at equal size.
            taken[list(ranks)] = len(ranks) * self.places(index, num_buckets)[1]
        return sent, taken

    @property
    def messages(self) -> int:
        """The most blocks that a rank sends and takes in a bucket."""
        outside = (self.nbytes > 0) & ~self.keeps
        count = (outside * self.ways).sum(axis=1)
        for index, ranks in enumerate(self.receivers):
            meet = numpy.bincount(self.targets(index)[outside[:, index]].ravel())
            count[list(ranks)] += meet.max(initial=0)
        return int(count.max(initial=0))


def _ways(nbytes: Array, targets: int) -> int:
    """Return the least divisor of `targets` with which each of them gets about as much.

    Args:
        nbytes: [sources] int64, in the order of Traffic.order.
    """
    for ways in (n for n in range(1, targets) if targets % n == 0):
        groups: Array = numpy.arange(len(nbytes)) % (targets // ways)
        loads = numpy.bincount(groups, nbytes, targets // ways)
        if loads.max() <= _UNEVEN * loads.mean():
            return ways
    return targets


@dataclass(frozen=True)
class Slices(Cells):
    """Cells on the wire, a row each: by bucket, then by block, in each in the order of the line."""

    bucket: Array  # [N] int64
    target: Array  # [N] int64: rank that the block goes to
    at: Array  # [N] int64: byte of the bucket at which the block begins

    def of(self, bucket: int) -> Slices:
        """Return those of one bucket."""
        return self.rows(slice(*self.bucket.searchsorted([bucket, bucket + 1])))


@dataclass(frozen=True)
class StreamPlan:
    """One rank's part of a push."""

    rank: int
    traffic: Traffic
    num_buckets: int
    sent: Slices  # to ranks of receivers that this rank is not of
    taken: Slices  # all that comes to the receiver that this rank is of, by whichever rank of it

    @property
    def nbytes(self) -> int:
        """Bytes that leave the sources in one push, all of them together."""
        return int(self.traffic.nbytes.sum())

    @property
    def replicas(self) -> tuple[int, ...]:
        """Ranks of the receiver that this rank is of, () if it wants nothing."""
        return next((own for own in self.traffic.receivers if self.rank in own), ())

    @property
    def held_here(self) -> Slices:
        """What this rank is the source of, sent or kept."""
        kept = self.taken.rows((self.taken.source == self.rank) & (self.taken.target == self.rank))
        return Slices.join([self.sent, kept])

    @cached_property
    def bucket_bytes(self) -> tuple[int, int]:
        """Bytes of this rank's send bucket and of its receive bucket."""
        sent, taken = self.traffic.bucket_bytes(self.num_buckets)
        return int(sent[self.rank]), int(taken[self.rank])


def count_buckets(traffic: Traffic, bucket_bytes: int) -> int:
    """Return the fewest buckets that are within `bucket_bytes` on every rank.

    With so many ranks that a few elements for each do not fit, a bucket is as small as it can be.
    """
    number = max(1, -(-_largest(traffic, 1) // bucket_bytes))
    while (
        _largest(traffic, number) > bucket_bytes and traffic.blocks(number).max() > _SMALLEST_BLOCK
    ):
        number += max(1, number // 16)
    return number


def _largest(traffic: Traffic, num_buckets: int) -> int:
    return int(numpy.max(traffic.bucket_bytes(num_buckets)))


def cut_routes(rank: int, traffic: Traffic, *, num_buckets: int, routes: OwnRoutes) -> StreamPlan:
    """TensorCut a rank's routes into buckets."""
    blocks, end = traffic.blocks(num_buckets)[rank], 0
    sent, taken = [], []
    for index, cells in enumerate(routes.sent):
        ways = int(traffic.ways[index])
        places = end + numpy.arange(ways) * blocks[index]
        sent.append(_sliced(cells, traffic, index, num_buckets=num_buckets, places=places[None]))
        if traffic.keeps[rank, index]:
            sent[-1] = sent[-1].rows(slice(0))  # it is among what it takes
        else:
            end += ways * int(blocks[index])
    for index, ranks in enumerate(traffic.receivers):
        if rank in ranks and routes.taken:
            places, part = traffic.places(index, num_buckets)
            own = _sliced(routes.taken, traffic, index, num_buckets=num_buckets, places=places)
            own.at[:] += numpy.array(ranks).searchsorted(own.target) * part
            taken.append(own)
    taken = taken or [sent[0].rows(slice(0))]
    return StreamPlan(rank, traffic, num_buckets, _in_order(sent), _in_order(taken))


def _sliced(
    cells: Cells, traffic: Traffic, receiver: int, *, num_buckets: int, places: Array
) -> Slices:
    """TensorCut routes to one receiver into slices.

    Args:
        places: [world or 1, ways]: where blocks lie.
    """
    ranks = numpy.array(traffic.receivers[receiver])
    slices, slack = (
        of(num_buckets)[cells.source, receiver] for of in (traffic.slices, traffic.slack)
    )
    pieces, index = dealt(cells, slices, slack=slack)
    source, keeps = pieces.source, traffic.keeps[pieces.source, receiver]
    ways = numpy.where(keeps, 1, traffic.ways[receiver])
    bucket, way = numpy.divmod(index, ways)
    turn = (traffic.order[source, receiver] + bucket) * ways + way
    target = numpy.where(keeps, source, ranks[turn % len(ranks)])
    at = places[source % len(places), way]
    columns: list[Array] = [*pieces.columns, bucket, target, at]
    return Slices(*columns)


def _in_order(parts: Sequence[Slices]) -> Slices:
    joined = Slices.join(parts)
    return joined.rows(numpy.lexsort((joined.at, joined.bucket)))


LARGEST = 512 * 2**20
"""Bytes: of each, a rank has two."""


def best_count(nbytes: float, link: LinkCost, *, messages: float, is_gathered: bool) -> int:
    """Return the number of buckets with which a push takes least time.

    Args:
        nbytes: that the busiest rank sends or takes.
        messages: that a rank sends and takes in a bucket.
        is_gathered: whether replicas of an engine gather parts.
    """
    round_s, byte_s = _costs(link, messages=messages, is_gathered=is_gathered)
    least = max(1, math.ceil(nbytes / LARGEST), math.floor(math.sqrt(nbytes * byte_s / round_s)))
    return min(least, least + 1, key=lambda count: count * round_s + nbytes / count * byte_s)


def overhead_s(
    nbytes: float, count: int, link: LinkCost, *, messages: float, is_gathered: bool
) -> float:
    """Return the seconds of a push in `count` buckets besides those in which bytes travel."""
    round_s, byte_s = _costs(link, messages=messages, is_gathered=is_gathered)
    return count * round_s + nbytes / count * byte_s


def _costs(link: LinkCost, *, messages: float, is_gathered: bool) -> tuple[float, float]:
    """Return c and e, see above."""
    alone = 2 / link.copy_bytes_per_s + is_gathered / link.bytes_per_s
    return link.round_s + messages * link.message_s, alone


def choose_buckets(traffic: Traffic, link: LinkCost) -> int:
    """Return in how many buckets a push of this traffic is to travel."""
    whole = max(int(own.max(initial=0)) for own in traffic.bucket_bytes(1))
    is_gathered = any(len(ranks) > 1 for ranks in traffic.receivers)
    wished = best_count(whole, link, messages=traffic.messages, is_gathered=is_gathered)
    return count_buckets(traffic, -(-whole // wished) + 64)


class Piece(NamedTuple):
    """A box of a file tensor that one rank sends to another."""

    source: int
    target: int
    at: int  # byte of the bucket at which its block begins
    want: int  # index in the wants of the target
    name: str
    box: Box
    dtype: torch.dtype  # on the wire, and of the engine
    nbytes: int  # on the wire


def pieces_of(slices: Slices, table: FileTable) -> Iterator[Piece]:
    """Yield the boxes that rows are, in their order; a span of a box may be several."""
    itemsizes = ITEMSIZES.tolist()
    columns = (slices.source, slices.target, slices.at, slices.want, slices.file, slices.dtype)
    for row, (source, target, at, want, file, dtype) in enumerate(
        zip(*(column.tolist() for column in columns))
    ):
        cell = table.box(file, slices.start[row], slices.shape[row])
        for box in cell.span(int(slices.first[row]), int(slices.last[row])):
            nbytes = box.numel * itemsizes[dtype]  # torch.dtype.itemsize takes 50 us
            yield Piece(source, target, at, want, table.names[file], box, DTYPES[dtype], nbytes)
