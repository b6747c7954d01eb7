"""What travels in which bucket: how routes are cut into buckets, how many, and where pieces lie.

A route is cut into slices of equal bytes, `fanout` of them in each bucket, wherever the cut falls
in a cell. So every bucket carries the same traffic from every source: senders stay balanced within
each bucket, the sizes of blocks are constants, and the bound on memory is arithmetic. A slice goes
to one rank of the receiver, and to another one in the next bucket. With few sources and many
replicas, a source sends to several ranks in each bucket.

Where stream.bucket_bytes does not say how large a bucket is, the model is: a push in K buckets, of
which the busiest rank sends or receives B bytes in all, takes about

    B / link + K * c + (B / K) * e    seconds.

c is what a round costs before its first byte: its start, and something for each message that a
rank sends or receives. e is what a byte costs that overlaps with nothing: the first bucket is
packed before anything travels, and the last one is gathered among replicas and written after
everything has arrived. The least is at K = sqrt(B * e / c).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy
import torch

from spmdrl.model.tensor_parts import Box
from spmdrl.sync.routes import Cells, RankRoutes, split_lines
from spmdrl.sync.tables import DTYPES, ITEMSIZES, Array, FileTable
from spmdrl.world.machine.hardware import LinkCost

LARGEST = 512 * 2**20
"""Bytes of the largest bucket that is chosen; a rank has two to send and two to receive."""

_ALIGN = 16  # bytes; a block starts at a multiple of it, so that any dtype can view it
_SMALLEST_BLOCK = 2 * _ALIGN  # a few elements: more buckets do not make a block smaller
_UNEVEN = 1.1  # how much more than the mean a replica may receive: parts are gathered at equal size


# --------------------------------------------------------------------------- bytes and places


@dataclass(frozen=True)
class Traffic:
    """The bytes of every route, and how much room they take in a bucket; equal on every rank."""

    receivers: tuple[tuple[int, ...], ...]  # ranks of each, ascending
    nbytes: Array  # [world, receivers] int64: of each route

    @cached_property
    def is_local(self) -> Array:
        """[world, receivers] bool: the source is in the receiver itself, and keeps its share."""
        is_member = numpy.zeros(self.nbytes.shape, bool)
        for index, ranks in enumerate(self.receivers):
            is_member[list(ranks), index] = True
        return is_member & (self.nbytes > 0)

    @cached_property
    def is_remote(self) -> Array:
        """[world, receivers] bool: the source sends to a receiver that it is not in."""
        return (self.nbytes > 0) & ~self.is_local

    @cached_property
    def source_index(self) -> Array:
        """[world, receivers] int64: the number of a source among the remote ones of a receiver."""
        return self.is_remote.cumsum(axis=0) - self.is_remote

    @cached_property
    def fanout(self) -> Array:
        """[receivers] int64: how many ranks of a receiver a remote source sends to in one bucket.

        It is as small as possible, for few messages, while all ranks get about the same bytes.
        """
        found = []
        for index, ranks in enumerate(self.receivers):
            nbytes = self.nbytes[:, index][self.is_remote[:, index]]
            found.append(_smallest_fanout(nbytes, len(ranks)))
        return numpy.array(found, numpy.int64)

    def num_slices(self, num_buckets: int) -> Array:
        """Return [world, receivers] int64: the number of slices of each route."""
        return num_buckets * numpy.where(self.is_local, 1, self.fanout)

    def slack(self, num_buckets: int) -> Array:
        """Return [world, receivers] int64: bytes by which a cut may move to the start of a row."""
        return _slack(self.nbytes, self.num_slices(num_buckets))

    def block_bytes(self, num_buckets: int) -> Array:
        """Return [world, receivers] int64: the room in bytes for a slice of each route."""
        room = slice_room(self.nbytes, self.num_slices(num_buckets))
        return numpy.where(self.nbytes > 0, room, 0)

    def targets(self, receiver: int) -> Array:
        """Return [world, fanout] int64: to which ranks of a receiver a source sends in bucket 0.

        These are indices into the receiver's ranks; only the rows of remote sources count.
        """
        fanout = int(self.fanout[receiver])
        num_ranks = len(self.receivers[receiver])
        first = self.source_index[:, receiver] * fanout
        return (first[:, None] + numpy.arange(fanout)) % num_ranks

    def block_offsets(self, receiver: int, num_buckets: int) -> tuple[Array, int]:
        """Return where blocks lie in the part of the rank that receives them.

        The blocks that share a part are the same in every bucket; the rank that receives them is
        another one each time.

        Returns: [world, fanout] int64 bytes (a local source has column 0), and the bytes of a part.
        """
        blocks = self.block_bytes(num_buckets)[:, receiver]
        is_local = self.is_local[:, receiver]
        local_bytes = int(blocks[is_local].max(initial=0))
        targets = self.targets(receiver)
        remote_blocks = numpy.where(is_local, 0, blocks)
        room = remote_blocks[:, None].repeat(targets.shape[1], axis=1)
        offsets = numpy.zeros_like(room)
        fullest = 0
        for target in range(len(self.receivers[receiver])):
            same_target = targets == target
            ends = room[same_target].cumsum()
            offsets[same_target] = local_bytes + ends - room[same_target]
            if len(ends):
                fullest = max(fullest, int(ends[-1]))
        offsets[is_local] = 0
        return offsets, local_bytes + fullest

    def bucket_bytes(self, num_buckets: int) -> tuple[Array, Array]:
        """Return [world] int64 each: the bytes of one send bucket and of one receive bucket."""
        remote_blocks = numpy.where(self.is_local, 0, self.block_bytes(num_buckets))
        sent = (remote_blocks * self.fanout).sum(axis=1)
        received: Array = numpy.zeros(len(sent), numpy.int64)
        for index, ranks in enumerate(self.receivers):
            _, part = self.block_offsets(index, num_buckets)
            received[list(ranks)] = len(ranks) * part  # replicas gather parts of equal size
        return sent, received

    def largest_bucket(self, num_buckets: int) -> int:
        """Return the bytes of the largest bucket of any rank."""
        sent, received = self.bucket_bytes(num_buckets)
        return max(int(sent.max(initial=0)), int(received.max(initial=0)))

    @property
    def max_messages(self) -> int:
        """The most blocks that any rank sends and receives in a bucket."""
        count = (self.is_remote * self.fanout).sum(axis=1)
        for index, ranks in enumerate(self.receivers):
            of_remote = self.targets(index)[self.is_remote[:, index]]
            count[list(ranks)] += numpy.bincount(of_remote.ravel()).max(initial=0)
        return int(count.max(initial=0))


def slice_room(nbytes: Array, num_slices: Array) -> Array:
    """Return the room in bytes for each of the slices of routes of so many bytes."""
    mean = -(-nbytes // num_slices)
    # A cut falls on an element: a slice may be up to one 8-byte element longer.
    longest = mean + 7 + _slack(nbytes, num_slices)
    return -(-longest // _ALIGN) * _ALIGN


def _slack(nbytes: Array, num_slices: Array) -> Array:
    return numpy.where(num_slices > 1, nbytes // num_slices // 16, 0)


def _smallest_fanout(nbytes: Array, num_targets: int) -> int:
    """Return the least divisor of `num_targets` with which each target gets about as much.

    Args:
        nbytes: [sources] int64, of the remote sources in the order of Traffic.source_index.
    """
    for fanout in range(1, num_targets):
        if num_targets % fanout:
            continue
        num_groups = num_targets // fanout
        groups: Array = numpy.arange(len(nbytes)) % num_groups
        loads = numpy.bincount(groups, nbytes, num_groups)
        if loads.max() <= _UNEVEN * loads.mean():
            return fanout
    return num_targets


# --------------------------------------------------------------------------- how many buckets


def count_buckets(traffic: Traffic, bucket_bytes: int) -> int:
    """Return the fewest buckets that are within `bucket_bytes` on every rank.

    With so many ranks that a few elements for each do not fit, a bucket is as small as it can be.
    """
    number = max(1, -(-traffic.largest_bucket(1) // bucket_bytes))
    while (
        traffic.largest_bucket(number) > bucket_bytes
        and traffic.block_bytes(number).max() > _SMALLEST_BLOCK
    ):
        number += max(1, number // 16)
    return number


def choose_buckets(traffic: Traffic, link: LinkCost) -> int:
    """Return the number of buckets with which a push of this traffic takes least time."""
    nbytes = traffic.largest_bucket(1)
    is_gathered = any(len(ranks) > 1 for ranks in traffic.receivers)
    best = best_count(nbytes, link, messages=traffic.max_messages, is_gathered=is_gathered)
    return count_buckets(traffic, bound_of(nbytes, best))


def bound_of(nbytes: int, count: int) -> int:
    """Return the bytes that a bucket may have, if the busiest rank has about `count` of them."""
    return -(-nbytes // count) + 64


def best_count(nbytes: float, link: LinkCost, *, messages: float, is_gathered: bool) -> int:
    """Return the number of buckets with which a push takes least time.

    Args:
        nbytes: what the busiest rank sends or receives.
        messages: how many a rank sends and receives in a bucket.
        is_gathered: whether replicas of an engine gather parts.
    """
    round_s, byte_s = _costs(link, messages=messages, is_gathered=is_gathered)
    optimum = math.floor(math.sqrt(nbytes * byte_s / round_s))
    count = max(1, math.ceil(nbytes / LARGEST), optimum)

    def seconds(count: int) -> float:
        return count * round_s + nbytes / count * byte_s

    return min(count, count + 1, key=seconds)


def overhead_s(
    nbytes: float, count: int, link: LinkCost, *, messages: float, is_gathered: bool
) -> float:
    """Return the seconds of a push in `count` buckets in which no bytes travel; see best_count."""
    round_s, byte_s = _costs(link, messages=messages, is_gathered=is_gathered)
    return count * round_s + nbytes / count * byte_s


def _costs(link: LinkCost, *, messages: float, is_gathered: bool) -> tuple[float, float]:
    """Return c, seconds for a bucket, and e, seconds for a byte; see the top of this file."""
    round_s = link.round_s + messages * link.message_s
    byte_s = 2 / link.copy_bytes_per_s
    if is_gathered:
        byte_s += 1 / link.bytes_per_s
    return round_s, byte_s


# --------------------------------------------------------------------------- one rank's plan


@dataclass(frozen=True)
class Slices(Cells):
    """Pieces on the wire: ordered by bucket, then by block, then as on their route."""

    bucket: Array  # [N] int64
    target: Array  # [N] int64: the rank that receives the block
    offset: Array  # [N] int64: byte of the bucket at which the block begins

    def in_bucket(self, bucket: int) -> Slices:
        """Return the pieces of one bucket."""
        first, last = self.bucket.searchsorted([bucket, bucket + 1])
        return self.rows(slice(first, last))


@dataclass(frozen=True)
class StreamPlan:
    """One rank's part of a push."""

    rank: int
    traffic: Traffic
    num_buckets: int
    sent: Slices  # by this rank, to receivers that it is not in
    received: Slices  # by any rank of the receiver that this rank is in

    @property
    def nbytes(self) -> int:
        """Bytes that leave all sources together in one push."""
        return int(self.traffic.nbytes.sum())

    @property
    def replicas(self) -> tuple[int, ...]:
        """Ranks of the receiver that this rank is in; () if it wants nothing."""
        for ranks in self.traffic.receivers:
            if self.rank in ranks:
                return ranks
        return ()

    @property
    def from_this_rank(self) -> Slices:
        """The pieces of which this rank is the source, sent or kept."""
        is_kept = (self.received.source == self.rank) & (self.received.target == self.rank)
        return Slices.join([self.sent, self.received.rows(is_kept)])

    @cached_property
    def bucket_bytes(self) -> tuple[int, int]:
        """Bytes of this rank's send bucket and of its receive bucket."""
        sent, received = self.traffic.bucket_bytes(self.num_buckets)
        return int(sent[self.rank]), int(received[self.rank])


def cut_routes(rank: int, traffic: Traffic, *, num_buckets: int, routes: RankRoutes) -> StreamPlan:
    """Cut a rank's routes into buckets."""
    blocks = traffic.block_bytes(num_buckets)[rank]
    end = 0
    sent = []
    for index, cells in enumerate(routes.sent):
        fanout = int(traffic.fanout[index])
        offsets = end + numpy.arange(fanout) * blocks[index]
        slices = _slice(cells, traffic, index, num_buckets=num_buckets, offsets=offsets[None])
        if traffic.is_local[rank, index]:
            slices = slices.rows(slice(0))  # they are among what this rank receives
        else:
            end += fanout * int(blocks[index])
        sent.append(slices)
    received = sent[0].rows(slice(0))
    for index, ranks in enumerate(traffic.receivers):
        if rank in ranks and routes.received:
            offsets, part = traffic.block_offsets(index, num_buckets)
            received = _slice(
                routes.received, traffic, index, num_buckets=num_buckets, offsets=offsets
            )
            # The receive bucket is the parts of all replicas, in order.
            replica = numpy.array(ranks).searchsorted(received.target)
            received.offset[:] += replica * part
    return StreamPlan(
        rank, traffic, num_buckets, sent=_in_order(Slices.join(sent)), received=_in_order(received)
    )


def _slice(
    cells: Cells, traffic: Traffic, receiver: int, *, num_buckets: int, offsets: Array
) -> Slices:
    """Cut routes to one receiver into slices.

    Args:
        offsets: [world or 1, fanout] int64: where blocks lie.
    """
    num_slices = traffic.num_slices(num_buckets)[cells.source, receiver]
    slack = traffic.slack(num_buckets)[cells.source, receiver]
    pieces, number = split_lines(cells, num_slices, slack=slack)
    source = pieces.source
    is_local = traffic.is_local[source, receiver]
    fanout = numpy.where(is_local, 1, traffic.fanout[receiver])
    bucket, block = numpy.divmod(number, fanout)
    # Sources take turns: each bucket goes to the next ranks of the receiver.
    source_index = traffic.source_index[source, receiver]
    turn = (source_index + bucket) * fanout + block
    ranks = numpy.array(traffic.receivers[receiver])
    target = numpy.where(is_local, source, ranks[turn % len(ranks)])
    offset = offsets[source % len(offsets), block]
    columns: list[Array] = [*pieces.columns, bucket, target, offset]
    return Slices(*columns)


def _in_order(slices: Slices) -> Slices:
    return slices.rows(numpy.lexsort((slices.offset, slices.bucket)))


class Piece(NamedTuple):
    """A box of a file tensor that one rank sends to another."""

    source: int
    target: int
    offset: int  # byte of the bucket at which its block begins
    want: int  # index in the wants of the target
    name: str
    box: Box
    dtype: torch.dtype  # on the wire and in the engine
    nbytes: int  # on the wire


def pieces_of(slices: Slices, table: FileTable, *, longest: int | None = None) -> Iterator[Piece]:
    """Yield the boxes of each row, in order; a row whose elements are no box gives several.

    Args:
        longest: bytes; a box of more is cut at rows of its first dim.
    """
    # Python integers: reading numpy scalars, or torch.dtype.itemsize (50 us), would take longer.
    itemsizes = ITEMSIZES.tolist()
    slots = zip(slices.source.tolist(), slices.target.tolist(), slices.offset.tolist())
    cells = zip(slices.file.tolist(), slices.start.tolist(), slices.shape.tolist())
    spans = zip(slices.first.tolist(), slices.last.tolist())
    rows = zip(slots, cells, spans, slices.want.tolist(), slices.dtype.tolist())
    for (source, target, offset), (file, start, shape), (first, last), want, dtype in rows:
        itemsize = itemsizes[dtype]
        for box in _cut(table.box(file, start, shape).span(first, last), longest, itemsize):
            yield Piece(
                source=source,
                target=target,
                offset=offset,
                want=want,
                name=table.names[file],
                box=box,
                dtype=DTYPES[dtype],
                nbytes=box.numel * itemsize,
            )


def _cut(boxes: Iterator[Box], longest: int | None, itemsize: int) -> Iterator[Box]:
    """Yield boxes of at most `longest` bytes, or of one row if that is more."""
    for box in boxes:
        nbytes = box.numel * itemsize
        if longest is None or nbytes <= longest:
            yield box
            continue
        row = nbytes // box.shape[0]
        rows = max(1, longest // row)
        for first in range(0, box.shape[0], rows):
            count = min(rows, box.shape[0] - first)
            yield Box((box.start[0] + first, *box.start[1:]), (count, *box.shape[1:]))
