"""Which slice of which weight goes from whom to whom: a pure function of gathered metadata.

Every rank computes the same plan from the same inputs. The words:
- a box is a rectangular part (start, shape) of a checkpoint tensor (`spmdrl.model.shards`);
- a want is a box that an inference rank needs, with the dtype it needs it in;
- a receiver is a set of ranks with the same wants (the replicas of one tensor-parallel rank):
  each byte leaves the trainers once for all of them, a part to each, and they gather the parts;
- a route is everything that one source sends to one receiver, as an ordered list of pieces.

A route is cut into `num_buckets` (times the receiver's parts) slices of equal bytes, wherever
that falls in a box. So every bucket carries the same traffic between the same pairs: senders
stay balanced within each bucket, block sizes are constants, and the bound on memory is
arithmetic.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from spmdrl.model.shards import Box

_ALIGN = 16  # bytes; blocks start at a multiple of it, so that any dtype can view them
_SPREAD_BYTES = 16 * 2**10  # pieces above this are spread over all their holders
_OVERLAP_BUCKETS = 16  # a push below one bucket is still cut, to overlap its stages
_OVERLAP_BYTES = 32 * 2**20  # ... into buckets of about this: below it, calls outweigh overlap


@dataclass(frozen=True)
class Want:
    """A box that an inference rank needs."""

    name: str  # of the checkpoint tensor
    box: Box
    dtype: torch.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize


@dataclass(frozen=True)
class Receiver:
    """Ranks, ascending, that need the same boxes."""

    ranks: tuple[int, ...]
    wants: tuple[Want, ...]


@dataclass(frozen=True)
class Piece:
    """A part of a want that one source sends."""

    want: int  # index in the receiver's wants
    box: Box


class Route:
    """What one source rank sends to one receiver, in order, and how it is cut.

    Args:
        source: rank that sends.
        receiver: index in the plan's receivers.
        targets: ranks of the receiver that get a slice each in every bucket.
        wants: the receiver's.
        pieces: in order; wider dtypes first, so that every element is aligned.
    """

    def __init__(
        self,
        source: int,
        receiver: int,
        *,
        targets: tuple[int, ...],
        wants: Sequence[Want],
        pieces: Sequence[Piece],
    ):
        self.source, self.receiver, self.targets = source, receiver, targets
        self.pieces = sorted(pieces, key=lambda p: (-wants[p.want].itemsize, p.want, p.box.start))
        self._itemsizes = [wants[p.want].itemsize for p in self.pieces]
        self._ends: list[int] = []
        end = 0
        for piece, itemsize in zip(self.pieces, self._itemsizes):
            end += piece.box.numel * itemsize
            self._ends.append(end)
        self.nbytes = end

    def block_bytes(self, num_buckets: int) -> int:
        """Return the room that one slice takes: the same in every bucket, for every target."""
        slices = num_buckets * len(self.targets)
        # A cut falls on an element: a slice may be up to one 8-byte element longer.
        return -(-(-(-self.nbytes // slices) + 7) // _ALIGN) * _ALIGN if self.nbytes else 0

    def slice(self, bucket: int, *, target: int, num_buckets: int) -> list[Piece]:
        """Return the pieces that `target` gets in `bucket`, in order, back to back."""
        slices = num_buckets * len(self.targets)
        index = bucket * len(self.targets) + self.targets.index(target)
        low, high = index * self.nbytes // slices, (index + 1) * self.nbytes // slices
        parts: list[Piece] = []
        i = bisect.bisect_right(self._ends, low)
        while i < len(self.pieces) and self._begin(i) < high:
            piece, size, begin = self.pieces[i], self._itemsizes[i], self._begin(i)
            first = max(low - begin, 0) // size
            last = min((high - begin) // size, piece.box.numel)
            parts += [Piece(piece.want, box) for box in piece.box.span(first, last)]
            i += 1
        return parts

    def _begin(self, i: int) -> int:
        return self._ends[i - 1] if i else 0


@dataclass(frozen=True)
class StreamPlan:
    """The whole push, equal on every rank."""

    world_size: int
    receivers: tuple[Receiver, ...]
    routes: tuple[Route, ...]
    num_buckets: int

    @property
    def nbytes(self) -> int:
        """Bytes that leave the sources in one push."""
        return sum(route.nbytes for route in self.routes)

    def split_bytes(self, source: int) -> list[int]:
        """Return the bytes that `source` sends to each rank in every bucket."""
        split = [0] * self.world_size
        for route in self.routes:
            if route.source == source:
                for target in route.targets:
                    split[target] += route.block_bytes(self.num_buckets)
        return split

    def part_bytes(self, rank: int) -> int:
        """Return the bytes that `rank` takes from all sources in every bucket."""
        return sum(r.block_bytes(self.num_buckets) for r in self.routes if rank in r.targets)

    def bucket_bytes(self) -> list[tuple[int, int]]:
        """Return per rank the sizes of one send bucket and of one receive bucket."""
        sent, part, got = ([0] * self.world_size for _ in range(3))
        for route in self.routes:
            block = route.block_bytes(self.num_buckets)
            sent[route.source] += block * len(route.targets)
            for target in route.targets:
                part[target] += block
        for receiver in self.receivers:
            # The parts of all replicas, gathered at equal size.
            whole = len(receiver.ranks) * max(part[rank] for rank in receiver.ranks)
            for rank in receiver.ranks:
                got[rank] = whole
        return list(zip(sent, got))


def make_plan(
    holders: Sequence[Mapping[str, Sequence[Box]]],
    wants: Sequence[Sequence[Want]],
    *,
    bucket_bytes: int,
) -> StreamPlan:
    """StreamPlan one push.

    Args:
        holders: per rank, the boxes of each checkpoint tensor that it holds.
        wants: per rank, what it needs; empty where nothing is.
        bucket_bytes: bound of one send or receive bucket of a rank, bytes. With so many
            ranks that a few elements for each do not fit, a bucket is as small as it can be.
    Returns: a plan in which every element of every want comes from exactly one source.
    Raises: ValueError naming a box that nobody holds.
    """
    receivers = _receivers(wants)
    owners = _owners(holders)
    loads = [0] * len(wants)
    pieces: dict[tuple[int, int], list[Piece]] = {}
    for index, receiver in enumerate(receivers):
        for i, want in enumerate(receiver.wants):
            for source, box in _sources(want, owners, loads=loads, near=receiver.ranks):
                pieces.setdefault((source, index), []).append(Piece(i, box))
    routes = []
    for (source, index), parts in sorted(pieces.items(), key=lambda item: item[0]):
        ranks = receivers[index].ranks
        # A source that is itself one of the replicas keeps its share: nothing moves twice.
        routes.append(
            Route(
                source,
                index,
                targets=(source,) if source in ranks else ranks,
                wants=receivers[index].wants,
                pieces=parts,
            )
        )
    return _cut(StreamPlan(len(wants), tuple(receivers), tuple(routes), 1), bucket_bytes)


def _receivers(wants: Sequence[Sequence[Want]]) -> list[Receiver]:
    ranks: dict[tuple[Want, ...], list[int]] = {}
    for rank, own in enumerate(wants):
        if own:
            ranks.setdefault(tuple(own), []).append(rank)
    return [Receiver(tuple(group), own) for own, group in ranks.items()]


def _owners(holders: Sequence[Mapping[str, Sequence[Box]]]) -> dict[str, dict[Box, list[int]]]:
    owners: dict[str, dict[Box, list[int]]] = {}
    for rank, held in enumerate(holders):
        for name, box in ((name, box) for name, boxes in held.items() for box in boxes):
            if box.numel:
                owners.setdefault(name, {}).setdefault(box, []).append(rank)
    return {name: dict(sorted(boxes.items())) for name, boxes in owners.items()}


def _sources(
    want: Want,
    owners: Mapping[str, Mapping[Box, list[int]]],
    *,
    loads: list[int],
    near: tuple[int, ...],
) -> Iterator[tuple[int, Box]]:
    """Yield (rank, box) that together are the want; `loads` (bytes sent) is brought up to date."""
    missing = [want.box]
    for held, ranks in owners.get(want.name, {}).items():
        rest = []
        for box in missing:
            common = box.intersect(held)
            if common is None:
                rest.append(box)
                continue
            rest += box.minus(held)
            yield from _shared(
                common, want.itemsize, loads=loads, ranks=[r for r in ranks if r in near] or ranks
            )
        missing = rest
        if not missing:
            return
    raise ValueError(
        f"no trainer rank holds {want.name} from {list(missing[0].start)}, shape "
        f"{list(missing[0].shape)}, which an engine needs; the policy's named_shards() must "
        "cover every tensor of names()"
    )


def _shared(
    box: Box, itemsize: int, *, loads: list[int], ranks: list[int]
) -> Iterator[tuple[int, Box]]:
    """Yield the box, spread over all `ranks` that hold it, or from the least busy if small."""
    if box.numel * itemsize < _SPREAD_BYTES:
        ranks = [min(ranks, key=lambda r: (loads[r], r))]
    for i, rank in enumerate(ranks):
        first, last = (box.numel * j // len(ranks) for j in (i, i + 1))
        loads[rank] += (last - first) * itemsize
        for part in box.span(first, last):
            yield rank, part


def _cut(plan: StreamPlan, bucket_bytes: int) -> StreamPlan:
    """Return the plan in buckets within `bucket_bytes` on every rank, and enough to overlap."""

    def cut(number: int) -> tuple[StreamPlan, int]:
        candidate = StreamPlan(plan.world_size, plan.receivers, plan.routes, number)
        return candidate, max(map(max, candidate.bucket_bytes()))

    _, largest = cut(1)
    wished = min(_OVERLAP_BUCKETS, largest // _OVERLAP_BYTES)
    number = max(1, wished, -(-largest // bucket_bytes))
    smallest_block = 2 * _ALIGN
    while True:
        candidate, size = cut(number)
        blocks = [r.block_bytes(number) for r in plan.routes]
        if size <= bucket_bytes or max(blocks) <= smallest_block:
            return candidate
        number += max(1, number // 16)
