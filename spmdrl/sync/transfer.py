"""Execute a plan: pack, send, gather among replicas, unpack in place, bucket after bucket.

All copies and messages are listed once, when the transfer is built. A large piece is a message
of its own, and a side whose live memory already is that message (contiguous, in the engine's
dtype) sends from it or receives into it; small pieces, casts and strided views go through a
buffer. While bucket k travels, k + 1 is packed and queued behind it; while k + 1 travels, k is
unpacked. Two send and two receive buffers exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.model.shards import Box, Value, narrow
from spmdrl.sync.buckets import Piece, Slices, StreamPlan, pieces_of
from spmdrl.sync.live_shards import LiveShards
from spmdrl.world.torch_internals import all_gather_single, copy_all
from spmdrl.world.world import World

_MESSAGE_BYTES = 128 * 2**10  # smaller pieces are joined up to here, larger ones travel alone


def make_gather_groups(plan: StreamPlan) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Create the groups in which replicas gather their parts; every rank must call it."""
    return {
        ranks: dist.new_group(list(ranks)) for ranks in plan.traffic.receivers if len(ranks) > 1
    }


class Transfer:
    """One rank's side of a plan, ready to run any number of times.

    Args:
        plan: of this rank.
        live: what this rank holds now; a transfer is made anew when that has moved.
        targets: per want of this rank, its box and the live view to write; empty where nothing is
            wanted.
        gathers: from make_gather_groups.
    """

    def __init__(
        self,
        plan: StreamPlan,
        live: LiveShards,
        world: World,
        *,
        targets: Sequence[tuple[Box, Tensor]],
        gathers: dict[tuple[int, ...], dist.ProcessGroup],
    ):
        self._plan, self._table, self._source = plan, live.table, live.held.value
        self._group = gathers.get(plan.replicas)
        self._targets = targets
        send, receive = plan.bucket_bytes
        buffers = range(min(2, plan.num_buckets))
        self._sent = [_bytes(send, world.wire) for _ in buffers]
        self._received = [_bytes(receive, world.wire) for _ in buffers]
        self._buckets = [self._list(k) for k in range(plan.num_buckets)]

    def run(self) -> None:
        """Move everything once. Every rank must call it; returns when this rank's part is done."""
        last, travelling = self._plan.num_buckets - 1, []
        with torch.no_grad():
            for k in range(last + 2):
                if k <= last:
                    self._buckets[k].pack.run()
                    travelling.append(self._buckets[k].start())  # queued behind k - 1
                if k >= 1:
                    self._finish(k - 1, travelling.pop(0))

    def _finish(self, index: int, travelling: Sequence[dist.Work]) -> None:
        for work in travelling:
            work.wait()
        if self._group is not None:
            whole = self._received[index % 2]
            own = whole.chunk(len(self._plan.replicas))[self._plan.replicas.index(self._plan.rank)]
            all_gather_single(whole, own, group=self._group)
        self._buckets[index].unpack.run()

    # ---------------------------------------------------------------- what to do, listed once

    def _list(self, index: int) -> _Bucket:
        bucket = _Bucket()
        for message in self._messages(self._plan.sent, index, self._sent):
            self._list_sent(bucket, message)
        for message in self._messages(self._plan.taken, index, self._received):
            self._list_taken(bucket, message)
        return bucket

    def _list_sent(self, bucket: _Bucket, message: _Message) -> None:
        values = self._values(message)
        is_plain = all(value.is_live for value in values)
        live = [value.live for value in values] if is_plain else []
        if not message.is_like(live):
            bucket.pack.add(message.views, values)
        bucket.operations.append(dist.P2POp(dist.isend, message.wire(live), message.target))

    def _list_taken(self, bucket: _Bucket, message: _Message) -> None:
        rank = self._plan.rank
        is_alone = self._group is None  # else other replicas take it from this one's buffer
        live = []
        for piece in message.pieces:
            outer, view = self._targets[piece.want]
            live.append(narrow(view, outer=outer, part=piece.box))
        from_self = message.source == rank
        if from_self:
            bucket.pack.add(live if is_alone else message.views, self._values(message))
        elif message.target == rank:
            wire = message.wire(live if is_alone else ())
            bucket.operations.append(dist.P2POp(dist.irecv, wire, message.source))
        if not (is_alone and (from_self or message.is_like(live))):
            bucket.unpack.add(live, [Value(view) for view in message.views])

    def _values(self, message: _Message) -> list[Value]:
        return [self._source(piece.name, piece.box) for piece in message.pieces]

    def _messages(
        self, slices: Slices, index: int, buffers: Sequence[Tensor]
    ) -> Iterator[_Message]:
        """Yield what travels in one bucket; the same cuts on both sides."""
        message = None
        for piece in pieces_of(slices.of(index), self._table):
            if message is None or not message.takes(piece):
                if message is not None:
                    yield message
                message = _Message(buffers[index % 2], piece, after=message)
            message.add(piece)
        if message is not None:
            yield message


class _Message:
    """Pieces that travel together, and their places in a buffer, back to back.

    Args:
        first: its first piece.
        after: the message before, in the same block perhaps.
    """

    def __init__(self, buffer: Tensor, first: Piece, *, after: _Message | None):
        self._buffer, self.at = buffer, first.at
        self.source, self.target = first.source, first.target
        self._begin: int = after.end if after is not None and after.at == first.at else first.at
        self.end: int = self._begin
        self.pieces: list[Piece] = []
        self.views: list[Tensor] = []

    def takes(self, piece: Piece) -> bool:
        """Whether a piece is of the same block and not too much."""
        return piece.at == self.at and self.end + piece.nbytes - self._begin <= _MESSAGE_BYTES

    def add(self, piece: Piece) -> None:
        flat = self._buffer[self.end : self.end + piece.nbytes].view(piece.dtype)
        self.pieces.append(piece)
        self.views.append(flat.view(piece.box.shape))
        self.end += piece.nbytes

    def is_like(self, live: Sequence[Tensor]) -> bool:
        """Return whether the live memory of the pieces already is the message."""
        return (
            len(live) == 1
            and live[0].is_contiguous()
            and live[0].dtype == self.views[0].dtype
            and live[0].device == self.views[0].device
        )  # shards may be on the host

    def wire(self, live: Sequence[Tensor]) -> Tensor:
        """Return the bytes to send from or receive into: the live memory if it can be."""
        if self.is_like(live):
            return live[0].flatten().view(torch.uint8)
        return self._buffer[self._begin : self.end]


class _Copies:
    """Tensors to write, and the values to write into them, of the same shapes."""

    def __init__(self) -> None:
        self._to: list[Tensor] = []
        self._of: list[Tensor] = []
        self._computed: list[tuple[Tensor, Value]] = []

    def add(self, to: Sequence[Tensor], of: Sequence[Value]) -> None:
        for target, value in zip(to, of, strict=True):
            if value.is_live:
                self._to.append(target)
                self._of.append(value.live)
            else:
                self._computed.append((target, value))

    def run(self) -> None:
        if self._to:
            # One call for the list: per-tensor copy_ from Python cost 3 us each on the CPU,
            # and a kernel launch each on CUDA.
            copy_all(self._to, self._of)
        for target, value in self._computed:
            target.copy_(value.read())


@dataclass
class _Bucket:
    """What one rank does for one bucket."""

    pack: _Copies = field(default_factory=_Copies)
    operations: list[dist.P2POp] = field(default_factory=list)
    unpack: _Copies = field(default_factory=_Copies)

    def start(self) -> Sequence[dist.Work]:
        return dist.batch_isend_irecv(self.operations) if self.operations else ()


def _bytes(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)
