"""Execute a plan: pack, one all-to-all per bucket, gather among replicas, unpack in place.

All copies are listed once, when the transfer is built; a run is `copy_`, `all_to_all_single`
and `copy_`. While bucket k travels, k + 1 is packed and queued behind it; while k + 1 travels,
k is unpacked. Two send and two receive buckets exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.sync.plan import Box, Piece, Plan, Receiver, Route
from spmdrl.sync.shards import narrow

Copies = tuple[list[Tensor], list[Tensor]]  # (to, from), pairwise the same shapes


def make_gather_groups(plan: Plan) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Create the groups in which replicas gather their parts; every rank must call it."""
    return {receiver.ranks: dist.new_group(list(receiver.ranks))
            for receiver in plan.receivers if len(receiver.ranks) > 1}


class Transfer:
    """One rank's side of a plan, ready to run any number of times.

    Args:
        plan: the same on every rank.
        rank: of the default group, over which the buckets travel.
        device: of the buckets.
        source: gives this rank's live view of a box of a checkpoint tensor.
        targets: per want of this rank, the live view to write; empty where nothing is wanted.
        groups: from make_gather_groups.
    """

    def __init__(self, plan: Plan, *, rank: int, device: torch.device,
                 source: Callable[[str, Box], Tensor], targets: Sequence[Tensor],
                 groups: dict[tuple[int, ...], dist.ProcessGroup]):
        self._plan, self._rank = plan, rank
        self._send_split = plan.split_bytes(rank)
        self._receive_split = [0] * plan.world_size
        for route in plan.routes:
            if rank in route.targets:
                self._receive_split[route.source] += route.block_bytes(plan.num_buckets)
        mine = [r for r in plan.receivers if rank in r.ranks]
        self._receiver = mine[0] if mine else None
        self._group = groups.get(self._receiver.ranks) if self._receiver else None
        replicas = len(self._receiver.ranks) if self._receiver else 0
        self._part = max((plan.part_bytes(r) for r in self._receiver.ranks), default=0) \
            if self._receiver else 0
        own = self._receiver.ranks.index(rank) * self._part if self._receiver else 0
        self._send, self._receive, self._own = [], [], []
        for _ in range(min(2, plan.num_buckets)):
            self._send.append(_bytes(sum(self._send_split), device))
            self._receive.append(_bytes(replicas * self._part, device))
            self._own.append(self._receive[-1][own:own + self._part])
        self._packs = [self._pack_list(k, source) for k in range(plan.num_buckets)]
        self._unpacks = [self._unpack_list(k, targets) for k in range(plan.num_buckets)]

    def run(self) -> None:
        """Move everything once. Every rank must call it; returns when this rank's part is done."""
        if not self._plan.routes:
            return
        last, travelling = self._plan.num_buckets - 1, []
        with torch.no_grad():
            for k in range(last + 2):
                if k <= last:
                    _copy(self._packs[k])
                    travelling.append(self._exchange(k))  # queued behind k - 1
                if k >= 1:
                    self._take(k - 1, travelling.pop(0))

    def _take(self, bucket: int, travelling: dist.Work) -> None:
        travelling.wait()
        if self._group is not None:
            _gather(self._receive[bucket % 2], self._own[bucket % 2], group=self._group)
        _copy(self._unpacks[bucket])

    def _exchange(self, bucket: int) -> dist.Work:
        taken = sum(self._receive_split)
        return dist.all_to_all_single(
            self._own[bucket % 2][:taken], self._send[bucket % 2],
            self._receive_split, self._send_split, async_op=True)

    def _pack_list(self, bucket: int, source: Callable[[str, Box], Tensor]) -> Copies:
        to, begin = ([], []), 0
        buffer = self._send[bucket % 2]
        for target in range(self._plan.world_size):
            for route in self._plan.routes:
                if route.source != self._rank or target not in route.targets:
                    continue
                receiver = self._plan.receivers[route.receiver]
                for piece, view in self._blocks(
                        route, target=target, buffer=buffer[begin:], bucket=bucket):
                    to[0].append(view)
                    to[1].append(source(receiver.wants[piece.want].name, piece.box))
                begin += route.block_bytes(self._plan.num_buckets)
        return to

    def _unpack_list(self, bucket: int, targets: Sequence[Tensor]) -> Copies:
        copies: Copies = ([], [])
        receiver = self._receiver
        if receiver is None:
            return copies
        for i, rank in enumerate(receiver.ranks):
            begin = i * self._part
            # Within a part the blocks stand in the order of their sources, as they arrive.
            for route in self._plan.routes:
                if rank not in route.targets:
                    continue
                buffer = self._receive[bucket % 2][begin:]
                for piece, view in self._blocks(
                        route, target=rank, buffer=buffer, bucket=bucket):
                    want = receiver.wants[piece.want]
                    copies[0].append(narrow(targets[piece.want], outer=want.box, part=piece.box))
                    copies[1].append(view)
                begin += route.block_bytes(self._plan.num_buckets)
        return copies

    def _blocks(self, route: Route, *, target: int, buffer: Tensor, bucket: int
                ) -> list[tuple[Piece, Tensor]]:
        wants, at, placed = self._plan.receivers[route.receiver].wants, 0, []
        for piece in route.slice(bucket, target=target, num_buckets=self._plan.num_buckets):
            want = wants[piece.want]
            size = piece.box.numel * want.itemsize
            flat = buffer[at:at + size].view(getattr(torch, want.dtype))
            placed.append((piece, flat.view(piece.box.shape)))
            at += size
        return placed


def _gather(parts: Tensor, own: Tensor, *, group: dist.ProcessGroup) -> None:
    # torch 2.13 renamed it; 2.11 knows only the old name.
    new = getattr(dist, "all_gather_single", None)
    (new or dist.all_gather_into_tensor)(parts, own, group=group)


def _bytes(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def _copy(copies: Copies) -> None:
    if copies[0]:
        # One call for the list: per-tensor copy_ from Python cost 3 us each on the CPU, and a
        # kernel launch each on CUDA.
        torch._foreach_copy_(copies[0], copies[1])
