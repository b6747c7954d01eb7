"""Execute a plan, but send only what changed since the last push.

Sources keep a copy of what they sent last, in the engine's dtype. Buckets are those of a full push.
What one rank sends to another in a bucket is cut into blocks of one dtype, and each block is
encoded (see changes.py). The encoded size differs from push to push, so headers travel before each
bucket. The replicas of an engine pass on what they received without decoding it.

While bucket k travels, bucket k + 1 is compared. While k + 1 travels, k is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.model.tensor_parts import Value, narrow
from spmdrl.sync.buckets import Piece, Slices, pieces_of
from spmdrl.sync.change_choice import Moved
from spmdrl.sync.changes import HEADER, bits_of, encode, payload_bytes, write
from spmdrl.sync.transfer import CopyList, RankSide
from spmdrl.world.torch_internals import all_gather_single
from spmdrl.world.world import World

_BLOCK_BYTES = {"cpu": 2**19, "cuda": 2**25}
"""Most bytes of a block: on a CPU it stays in the cache, on a GPU it fills all cores."""


class ChangeTransfer:
    """One rank's side of a plan, and its copy of what it sent last.

    Args:
        side: of this rank.
    """

    def __init__(self, side: RankSide):
        plan = side.plan
        self._plan = plan
        self._live = side.live
        self._wire = side.wire
        self._targets = side.targets
        self._gather_group = side.gather_group
        sent = []
        received = []
        for index in range(plan.num_buckets):
            sent.append(self._blocks(plan.sent.in_bucket(index)))
            received.append(self._blocks(plan.received.in_bucket(index)))
        # All blocks are read and written through the same memory, one after the other.
        self._scratch = torch.empty(_longest(sent + received), dtype=torch.uint8, device=side.wire)
        self._buckets = [self._build_bucket(*blocks) for blocks in zip(sent, received)]
        # Of this rank, in the last run: elements that changed, elements that were compared, and
        # bytes that were sent or kept for its own engine.
        self._changed = 0
        self._compared = 0
        self._nbytes = 0

    def moved(self, world: World) -> Moved:
        """Return what all ranks together moved in the last run; every rank calls."""
        own = torch.tensor([self._nbytes, self._changed, self._compared])
        dist.all_reduce(own, group=world.control)
        nbytes, changed, compared = own.tolist()
        return Moved(nbytes, changed=changed, compared=compared)

    def keep(self) -> None:
        """Copy what a full push has sent."""
        with torch.no_grad():
            for source in self._sources():
                source.kept.copy_(source.read())

    def run(self) -> None:
        """Move what changed. Every rank must call it; returns when this rank's part is done."""
        self._changed = 0
        self._compared = 0
        self._nbytes = 0
        before: _CodedBucket | None = None
        travelling: Sequence[dist.Work] = ()
        with torch.no_grad():
            for bucket in self._buckets:
                self._encode(bucket)
                # Headers queue after the payloads of the bucket before.
                _wait(_start(bucket.sent.values(), bucket.received.values(), what="headers"))
                for message in bucket.received.values():
                    message.make_room()
                _wait(travelling)
                travelling = _start(bucket.sent.values(), bucket.received.values(), what="payload")
                if before is not None:
                    self._write(before)
                before = bucket
            _wait(travelling)
            if before is not None:
                self._write(before)

    # ---------------------------------------------------------------- the steps of a bucket

    def _sources(self) -> Iterable[_Source]:
        for bucket in self._buckets:
            for message in (*bucket.sent.values(), *bucket.to_self):
                yield from message.sources

    def _encode(self, bucket: _CodedBucket) -> None:
        for message in (*bucket.sent.values(), *bucket.to_self):
            rows = []
            payloads = []
            for source in message.sources:
                encoded = encode(source.read(), source.kept)
                rows.append(encoded.header)
                payloads.append(encoded.payload)
                self._changed += encoded.changed
                self._compared += len(source.kept)
            message.headers.copy_(torch.tensor(rows))
            message.payload = torch.cat(payloads)
            self._nbytes += message.headers.nbytes + message.payload.nbytes
        bucket.own.run()
        self._nbytes += bucket.own_bytes

    def _write(self, bucket: _CodedBucket) -> None:
        """Write a bucket that has arrived, gathered among replicas."""
        if self._gather_group is None:
            for message in bucket.received.values():
                message.write()
            return
        replicas = self._plan.replicas
        own = replicas.index(self._plan.rank)
        arrived = [*bucket.received.values(), *bucket.to_self]
        by_source = sorted(arrived, key=lambda message: message.source)
        headers = [message.headers.flatten() for message in by_source]
        payload = [message.payload for message in by_source]
        parts = bucket.parts
        longest = max(sum(message.headers.numel() for message in part) for part in parts)
        all_headers = self._gather(headers, longest, own, dtype=torch.int64)
        for part, row in zip(parts, all_headers):
            for message in part:
                size = message.headers.numel()
                message.headers.copy_(row[:size].view(-1, HEADER))
                row = row[size:]
        sizes = [sum(sum(message.sizes()) for message in part) for part in parts]
        all_payloads = self._gather(payload, max(sizes), own, dtype=torch.uint8)
        for part, row in zip(parts, all_payloads):
            for message in part:
                size = sum(message.sizes())
                message.payload = row[:size]
                message.write()
                row = row[size:]

    def _gather(
        self, own: Sequence[Tensor], size: int, index: int, *, dtype: torch.dtype
    ) -> Tensor:
        """Return [replicas, size], which all replicas give; this one, at `index`, gives `own`."""
        rows = torch.zeros(len(self._plan.replicas), size, dtype=dtype, device=self._wire)
        begin = 0
        for tensor in own:
            rows[index, begin : begin + len(tensor)] = tensor
            begin += len(tensor)
        if size:
            all_gather_single(rows.flatten(), rows[index], group=self._gather_group)
        return rows

    # ---------------------------------------------------------------- what to do, listed once

    def _build_bucket(self, sent: _CodedBlocks, received: _CodedBlocks) -> _CodedBucket:
        bucket = _CodedBucket()
        rank = self._plan.rank
        for (_, target), blocks in sent.items():
            bucket.sent[target] = self._message(rank, target, blocks, is_source=True)
        is_alone = self._gather_group is None
        parts: dict[int, list[_CodedMessage]] = {replica: [] for replica in self._plan.replicas}
        for (source, target), blocks in sorted(received.items()):
            if is_alone and source == rank:
                for block in blocks:
                    bucket.own.add(self._live_places(block), self._values(block))
                    bucket.own_bytes += block.nbytes
                continue
            if source == target == rank:
                bucket.to_self.append(self._message(source, target, blocks, is_source=True))
            message = self._message(source, target, blocks, is_target=True)
            parts[target].append(message)
            if target == rank and source != rank:
                bucket.received[source] = message
        bucket.parts = list(parts.values())
        return bucket

    def _message(
        self,
        source: int,
        target: int,
        blocks: Sequence[_CodedBlock],
        *,
        is_source: bool = False,
        is_target: bool = False,
    ) -> _CodedMessage:
        headers = torch.zeros(len(blocks), HEADER, dtype=torch.int64, device=self._wire)
        message = _CodedMessage(source, target, headers)
        for block in blocks:
            flat = self._scratch[: block.nbytes].view(block.dtype)
            if is_source:
                message.sources.append(_Source(block, flat, self._values(block)))
            if is_target:
                message.places.append(_Place(block, flat, self._live_places(block)))
        return message

    def _values(self, block: _CodedBlock) -> list[Value]:
        return [self._live.held.value(piece.name, piece.box) for piece in block.pieces]

    def _live_places(self, block: _CodedBlock) -> list[Tensor]:
        views = []
        for piece in block.pieces:
            outer, view = self._targets[piece.want]
            views.append(narrow(view, outer=outer, part=piece.box))
        return views

    def _blocks(self, slices: Slices) -> _CodedBlocks:
        """Return the blocks of a bucket; source and target cut them at the same places."""
        longest = _BLOCK_BYTES[self._wire.type]
        found: _CodedBlocks = {}
        for piece in pieces_of(slices, self._live.table, longest=longest):
            blocks = found.setdefault((piece.source, piece.target), [])
            if not blocks or not blocks[-1].has_room_for(piece, longest):
                blocks.append(_CodedBlock(piece.dtype))
            blocks[-1].add(piece)
        return found


class _CodedBlock:
    """Pieces of one dtype that are encoded together, back to back."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.pieces: list[Piece] = []
        self.nbytes = 0

    def has_room_for(self, piece: Piece, longest: int) -> bool:
        """Return whether a piece is of the same dtype and does not make the block too long."""
        return piece.dtype == self.dtype and self.nbytes + piece.nbytes <= longest

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.nbytes += piece.nbytes

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the views of the pieces in a flat tensor."""
        views = []
        begin = 0
        for piece in self.pieces:
            views.append(flat[begin : begin + piece.box.numel].view(piece.box.shape))
            begin += piece.box.numel
        return views


_CodedBlocks = dict[tuple[int, int], list[_CodedBlock]]
"""{(source, target): what the one sends to the other in a bucket}."""


def _longest(buckets: Sequence[_CodedBlocks]) -> int:
    """Return the bytes of the longest block."""
    sizes = [0]
    for messages in buckets:
        for blocks in messages.values():
            sizes += [block.nbytes for block in blocks]
    return max(sizes)


class _Source:
    """A block that this rank sends.

    Args:
        flat: memory for its values, shared with other blocks.
        values: of its pieces.
    """

    def __init__(self, block: _CodedBlock, flat: Tensor, values: Sequence[Value]):
        self._bits = bits_of(flat)
        self._reading = CopyList()
        self._reading.add(block.views(flat), values)
        self.kept = torch.zeros_like(self._bits)
        """Bits that were sent last."""

    def read(self) -> Tensor:
        """Return the current bits in the dtype that travels; the next block overwrites them."""
        self._reading.run()
        return self._bits


class _Place:
    """Where a block goes.

    Args:
        flat: memory for its values, shared with other blocks.
        views: of its pieces, live.
    """

    def __init__(self, block: _CodedBlock, flat: Tensor, views: Sequence[Tensor]):
        self.itemsize = block.dtype.itemsize
        self._bits = bits_of(flat)
        self._before: CopyList | None = None
        self._after: CopyList | None = None
        if len(views) == 1 and views[0].is_contiguous() and views[0].device == flat.device:
            self._bits = bits_of(views[0])
            return
        self._before = CopyList()
        self._after = CopyList()
        self._before.add(block.views(flat), [Value(view) for view in views])
        self._after.add(views, [Value(view) for view in block.views(flat)])

    def write(self, header: tuple[int, int, int], payload: Tensor) -> None:
        if not len(payload):
            return  # nothing changed
        if self._before is not None:
            self._before.run()
        write(self._bits, header, payload)
        if self._after is not None:
            self._after.run()


@dataclass
class _CodedMessage:
    """What one rank sends to another in a bucket."""

    source: int
    target: int
    headers: Tensor  # [blocks, HEADER] int64
    sources: list[_Source] = field(default_factory=list)  # on the rank that sends it
    places: list[_Place] = field(default_factory=list)  # on ranks that write it
    payload: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def sizes(self) -> list[int]:
        """Return the bytes of each block's payload; the headers must have arrived."""
        found = []
        for header, place in zip(self.headers.tolist(), self.places):
            found.append(payload_bytes(header, place.itemsize))
        return found

    def make_room(self) -> None:
        """Allocate the payload that the headers announce."""
        self.payload = self.payload.new_empty(sum(self.sizes()), device=self.headers.device)

    def write(self) -> None:
        """Write all blocks, and free the payload."""
        payloads = self.payload.split(self.sizes())
        for header, place, payload in zip(self.headers.tolist(), self.places, payloads):
            place.write(header, payload)
        self.payload = self.payload[:0]


@dataclass
class _CodedBucket:
    """What one rank does for one bucket."""

    sent: dict[int, _CodedMessage] = field(default_factory=dict)
    """{target: message}."""
    received: dict[int, _CodedMessage] = field(default_factory=dict)
    """{source: message}, of those that come to this rank."""
    to_self: list[_CodedMessage] = field(default_factory=list)
    """What this rank keeps, encoded for other replicas; at most one."""
    parts: list[list[_CodedMessage]] = field(default_factory=list)
    """What each replica receives, by source."""
    own: CopyList = field(default_factory=CopyList)
    """What this rank keeps where there are no other replicas."""
    own_bytes: int = 0


def _start(
    sent: Iterable[_CodedMessage], received: Iterable[_CodedMessage], *, what: str
) -> Sequence[dist.Work]:
    """Start to send and receive the headers, or the payload, of messages."""
    operations = []
    for message in sent:
        operations.append(dist.P2POp(dist.isend, getattr(message, what), message.target))
    for message in received:
        operations.append(dist.P2POp(dist.irecv, getattr(message, what), message.source))
    operations = [operation for operation in operations if operation.tensor.numel()]
    return dist.batch_isend_irecv(operations) if operations else ()


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
