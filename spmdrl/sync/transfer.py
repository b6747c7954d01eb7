"""Execute a plan: pack, send, gather among replicas, unpack in place, bucket after bucket.

All copies and messages are listed once, when the transfer is built. A large piece is a message
of its own, and a side whose live memory already is that message (contiguous, in the engine's
dtype) sends from it or receives into it; small pieces, casts and strided views go through a
buffer. While bucket k travels, k + 1 is packed and queued behind it; while k + 1 travels, k is
unpacked. Two send and two receive buffers exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.model.shards import Box, Value, narrow
from spmdrl.sync.plan import Piece, Receiver, Route, StreamPlan
from spmdrl.world.torch_internals import all_gather_single, copy_all

_MESSAGE_BYTES = 128 * 2**10  # smaller pieces are joined up to here, larger ones travel alone


def make_gather_groups(plan: StreamPlan) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Create the groups in which replicas gather their parts; every rank must call it."""
    return {
        receiver.ranks: dist.new_group(list(receiver.ranks))
        for receiver in plan.receivers
        if len(receiver.ranks) > 1
    }


class Transfer:
    """One rank's side of a plan, ready to run any number of times.

    Args:
        plan: the same on every rank.
        rank: of the default group, over which the messages travel.
        device: of the buffers.
        source: gives what this rank holds in a box of a checkpoint tensor.
        targets: per want of this rank, the live view to write; empty where nothing is wanted.
        groups: from make_gather_groups.
    """

    def __init__(
        self,
        plan: StreamPlan,
        *,
        rank: int,
        device: torch.device,
        source: Callable[[str, Box], Value],
        targets: Sequence[Tensor],
        groups: dict[tuple[int, ...], dist.ProcessGroup],
    ):
        self._plan, self._rank = plan, rank
        self._source, self._targets = source, targets
        mine = [r for r in plan.receivers if rank in r.ranks]
        self._receiver = mine[0] if mine else Receiver((), ())
        ranks = self._receiver.ranks
        self._group = groups.get(ranks)
        self._part = max((plan.part_bytes(r) for r in ranks), default=0)
        self._sent, self._received = [], []
        for _ in range(min(2, plan.num_buckets)):
            self._sent.append(_bytes(sum(plan.split_bytes(rank)), device))
            self._received.append(_bytes(len(ranks) * self._part, device))
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
            parts = self._received[index % 2]
            begin = self._receiver.ranks.index(self._rank) * self._part
            all_gather_single(parts, parts[begin : begin + self._part], group=self._group)
        self._buckets[index].unpack.run()

    # ---------------------------------------------------------------- what to do, listed once

    def _list(self, index: int) -> _Bucket:
        bucket = _Bucket()
        # For this rank's own messages to itself, see _list_received.
        begin = 0
        own = [route for route in self._plan.routes if route.source == self._rank]
        for target in range(self._plan.world_size):
            for route in (route for route in own if target in route.targets):
                end = begin + route.block_bytes(self._plan.num_buckets)
                if target != self._rank:
                    block = self._sent[index % 2][begin:end]
                    self._list_sent(bucket, route, target=target, index=index, block=block)
                begin = end
        for i, rank in enumerate(self._receiver.ranks):
            begin = i * self._part
            for route in self._plan.routes:
                if rank in route.targets:
                    end = begin + route.block_bytes(self._plan.num_buckets)
                    self._list_received(
                        bucket,
                        route,
                        target=rank,
                        index=index,
                        block=self._received[index % 2][begin:end],
                    )
                    begin = end
        return bucket

    def _list_sent(
        self, bucket: _Bucket, route: Route, *, target: int, index: int, block: Tensor
    ) -> None:
        for message in self._messages(route, target=target, index=index, block=block):
            values = self._values(message, route)
            is_plain = all(value.is_live for value in values)
            live = [value.live for value in values] if is_plain else []
            if not message.is_like(live):
                bucket.pack.add(message.views, values)
            bucket.operations.append(dist.P2POp(dist.isend, message.wire(live), target))

    def _list_received(
        self, bucket: _Bucket, route: Route, *, target: int, index: int, block: Tensor
    ) -> None:
        wants = self._receiver.wants
        is_alone = self._group is None  # else other replicas take it from this one's buffer
        for message in self._messages(route, target=target, index=index, block=block):
            live = [
                narrow(self._targets[p.want], outer=wants[p.want].box, part=p.box)
                for p in message.pieces
            ]
            from_self = route.source == self._rank
            if from_self:
                bucket.pack.add(live if is_alone else message.views, self._values(message, route))
            elif target == self._rank:
                wire = message.wire(live if is_alone else ())
                bucket.operations.append(dist.P2POp(dist.irecv, wire, route.source))
            if not (is_alone and (from_self or message.is_like(live))):
                bucket.unpack.add(live, [Value(view) for view in message.views])

    def _values(self, message: _Message, route: Route) -> list[Value]:
        wants = self._plan.receivers[route.receiver].wants
        return [self._source(wants[piece.want].name, piece.box) for piece in message.pieces]

    def _messages(
        self, route: Route, *, target: int, index: int, block: Tensor
    ) -> Iterator[_Message]:
        """Yield what `target` gets in one bucket; the same cuts on both sides."""
        wants, message, end = self._plan.receivers[route.receiver].wants, None, 0
        for piece in route.slice(index, target=target, num_buckets=self._plan.num_buckets):
            want, begin = wants[piece.want], end
            end = begin + piece.box.numel * want.itemsize
            if message is None or end - message.begin > _MESSAGE_BYTES:
                if message is not None:
                    yield message
                message = _Message(block, begin)
            message.add(piece, end, dtype=want.dtype)
        if message is not None:
            yield message


class _Message:
    """Pieces that travel together, and their places in a buffer, back to back."""

    def __init__(self, block: Tensor, begin: int):
        self._block, self.begin, self._end = block, begin, begin
        self.pieces: list[Piece] = []
        self.views: list[Tensor] = []

    def add(self, piece: Piece, end: int, *, dtype: torch.dtype) -> None:
        flat = self._block[self._end : end].view(dtype)
        self.pieces.append(piece)
        self.views.append(flat.view(piece.box.shape))
        self._end = end

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
        return self._block[self.begin : self._end]


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
