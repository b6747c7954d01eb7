"""Execute a plan: pack, send, gather among replicas, unpack in place, bucket after bucket.

All copies and messages are listed once, when the transfer is built. A large piece is a message of
its own. Where the live memory of a piece already is the message (contiguous, in the engine's
dtype), a rank sends from it or receives into it; small pieces, casts and strided views go through
a buffer. What a rank keeps for itself goes from shards to the engine at once, unless replicas
gather. While bucket k travels, bucket k + 1 is packed and queued after it; while k + 1 travels, k
is unpacked. There are two send and two receive buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.model.tensor_parts import Box, Value, narrow
from spmdrl.sync.buckets import Piece, Slices, StreamPlan, pieces_of
from spmdrl.sync.tables import LiveShards
from spmdrl.world.torch_internals import all_gather_single, copy_all

_MESSAGE_BYTES = 128 * 2**10  # smaller pieces are joined up to here, a larger one travels alone


def make_gather_groups(plan: StreamPlan) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Create the groups in which replicas gather their parts; every rank must call it."""
    groups = {}
    for ranks in plan.traffic.receivers:
        if len(ranks) > 1:
            groups[ranks] = dist.new_group(list(ranks))
    return groups


@dataclass(frozen=True)
class RankSide:
    """One rank's side of a plan: what it sends from and writes to."""

    plan: StreamPlan
    live: LiveShards
    """What this rank holds now; when that has moved, make another transfer."""
    wire: torch.device
    """Where messages are."""
    targets: Sequence[tuple[Box, Tensor]]
    """For each want of this rank, its box and the live view to write, box.shape; empty where
    nothing is wanted."""
    gathers: Mapping[tuple[int, ...], dist.ProcessGroup]
    """From make_gather_groups."""

    @property
    def gather_group(self) -> dist.ProcessGroup | None:
        """The group in which replicas gather their parts; None where no other rank takes them."""
        return self.gathers.get(self.plan.replicas)


class Transfer:
    """Runs a plan on one rank, any number of times.

    Args:
        side: of this rank.
    """

    def __init__(self, side: RankSide):
        plan = side.plan
        self._plan = plan
        self._table = side.live.table
        self._value = side.live.held.value
        self._gather_group = side.gather_group
        self._targets = side.targets
        send_bytes, receive_bytes = plan.bucket_bytes
        # Where all that this rank takes is its own, and nobody gathers it, nothing is received: the
        # places of messages in a bucket are only counted.
        is_own = self._gather_group is None and bool((plan.received.source == plan.rank).all())
        receives_on = torch.device("meta") if is_own else side.wire
        self._send_buffers: list[Tensor] = []
        self._receive_buffers: list[Tensor] = []
        for _ in range(min(2, plan.num_buckets)):
            self._send_buffers.append(_new_buffer(send_bytes, side.wire))
            self._receive_buffers.append(_new_buffer(receive_bytes, receives_on))
        self._buckets = [self._build_bucket(index) for index in range(plan.num_buckets)]

    def run(self) -> None:
        """Move everything once. Every rank must call it; returns when this rank's part is done."""
        travelling: Sequence[dist.Work] = ()
        with torch.no_grad():
            for index, bucket in enumerate(self._buckets):
                bucket.pack.run()
                started = bucket.start()  # queued after the bucket before
                if index:
                    self._finish(index - 1, travelling)
                travelling = started
            self._finish(len(self._buckets) - 1, travelling)

    def _finish(self, index: int, travelling: Sequence[dist.Work]) -> None:
        """Wait for a bucket, gather it among replicas and write it."""
        for work in travelling:
            work.wait()
        if self._gather_group is not None:
            whole = self._receive_buffers[index % 2]
            replicas = self._plan.replicas
            own_part = whole.chunk(len(replicas))[replicas.index(self._plan.rank)]
            all_gather_single(whole, own_part, group=self._gather_group)
        self._buckets[index].unpack.run()

    # ---------------------------------------------------------------- what to do, listed once

    def _build_bucket(self, index: int) -> _Bucket:
        bucket = _Bucket()
        sent = self._plan.sent.in_bucket(index)
        for message in self._messages(sent, self._send_buffers[index % 2]):
            self._add_sent(bucket, message)
        received = self._plan.received.in_bucket(index)
        for message in self._messages(received, self._receive_buffers[index % 2]):
            self._add_received(bucket, message)
        return bucket

    def _add_sent(self, bucket: _Bucket, message: _Message) -> None:
        values = self._values(message)
        live: list[Tensor] = []
        if all(value.is_live for value in values):
            live = [value.live for value in values]
        if not message.is_memory_of(live):
            bucket.pack.add(message.views, values)
        bucket.operations.append(dist.P2POp(dist.isend, message.wire(live), message.target))

    def _add_received(self, bucket: _Bucket, message: _Message) -> None:
        live = []
        for piece in message.pieces:
            outer, view = self._targets[piece.want]
            live.append(narrow(view, outer=outer, part=piece.box))
        is_from_self = message.source == self._plan.rank
        if self._gather_group is None:
            # Nobody else reads this rank's buffer, so a message may skip it.
            if is_from_self:
                bucket.pack.add(live, self._values(message))
                return
            bucket.operations.append(dist.P2POp(dist.irecv, message.wire(live), message.source))
            if message.is_memory_of(live):
                return
        elif is_from_self:
            bucket.pack.add(message.views, self._values(message))
        elif message.target == self._plan.rank:
            bucket.operations.append(dist.P2POp(dist.irecv, message.wire(()), message.source))
        bucket.unpack.add(live, [Value(view) for view in message.views])

    def _values(self, message: _Message) -> list[Value]:
        return [self._value(piece.name, piece.box) for piece in message.pieces]

    def _messages(self, slices: Slices, buffer: Tensor) -> Iterator[_Message]:
        """Yield the messages of one bucket; source and target cut them at the same places."""
        message = None
        for piece in pieces_of(slices, self._table):
            if message is None or not message.has_room_for(piece):
                if message is not None:
                    yield message
                message = _Message(buffer, piece, after=message)
            message.add(piece)
        if message is not None:
            yield message


class _Message:
    """Pieces that travel together, and their places in a buffer, back to back.

    Args:
        buffer: [bytes of a bucket] uint8.
        first: its first piece, which `add` has yet to take.
        after: the message before, maybe in the same block.
    """

    def __init__(self, buffer: Tensor, first: Piece, *, after: _Message | None):
        self._buffer = buffer
        self.source = first.source
        self.target = first.target
        self.block = first.offset  # where its block begins
        if after is not None and after.block == self.block:
            self._begin = after.end
        else:
            self._begin = self.block
        self.end: int = self._begin
        self.pieces: list[Piece] = []
        self.views: list[Tensor] = []

    def has_room_for(self, piece: Piece) -> bool:
        """Return whether a piece is of the same block and does not make the message too long."""
        nbytes = self.end + piece.nbytes - self._begin
        return piece.offset == self.block and nbytes <= _MESSAGE_BYTES

    def add(self, piece: Piece) -> None:
        flat = self._buffer[self.end : self.end + piece.nbytes].view(piece.dtype)
        self.pieces.append(piece)
        self.views.append(flat.view(piece.box.shape))
        self.end += piece.nbytes

    def is_memory_of(self, live: Sequence[Tensor]) -> bool:
        """Return whether the live memory of the pieces already is the message."""
        return (
            len(live) == 1
            and live[0].is_contiguous()
            and live[0].dtype == self.views[0].dtype
            and live[0].device == self.views[0].device  # shards may be on the host
        )

    def wire(self, live: Sequence[Tensor]) -> Tensor:
        """Return the bytes to send from or receive into: the live memory if it can be."""
        if self.is_memory_of(live):
            return live[0].flatten().view(torch.uint8)
        return self._buffer[self._begin : self.end]


class CopyList:
    """Tensors to write, and the values to write into them, of the same shapes.

    Live values are copied in groups, in which all pairs have the same dtypes and devices, and are
    contiguous or not. One pair that differs would make `copy_all` launch a kernel for each tensor
    of its list; before torch 2.13 it would copy mixed dtypes wrong.
    """

    def __init__(self) -> None:
        self._groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        self._computed: list[tuple[Tensor, Value]] = []

    def add(self, targets: Sequence[Tensor], values: Sequence[Value]) -> None:
        for target, value in zip(targets, values, strict=True):
            if not value.is_live:
                self._computed.append((target, value))
                continue
            source = value.live
            is_dense = target.is_contiguous() and source.is_contiguous()
            kind = (target.dtype, source.dtype, target.device, source.device, is_dense)
            targets_of_kind, sources = self._groups.setdefault(kind, ([], []))
            targets_of_kind.append(target)
            sources.append(source)

    def run(self) -> None:
        for targets, sources in self._groups.values():
            # One call for the list: per-tensor copy_ from Python cost 3 us each on the CPU,
            # and a kernel launch each on CUDA.
            copy_all(targets, sources)
        for target, value in self._computed:
            target.copy_(value.read())


@dataclass
class _Bucket:
    """What one rank does for one bucket."""

    pack: CopyList = field(default_factory=CopyList)
    operations: list[dist.P2POp] = field(default_factory=list)
    unpack: CopyList = field(default_factory=CopyList)

    def start(self) -> Sequence[dist.Work]:
        if not self.operations:
            return ()
        return dist.batch_isend_irecv(self.operations)


def _new_buffer(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)
