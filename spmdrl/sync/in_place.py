"""Tensors of the trainers that are written into live engine memory: planned, moved, compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from spmdrl.sync.live_shards import LiveShards
from spmdrl.sync.pieces import pieces_of
from spmdrl.sync.plan import StreamPlan
from spmdrl.sync.planning import make_plans
from spmdrl.sync.prove import checksum
from spmdrl.sync.tables import Want
from spmdrl.sync.trace import Copy
from spmdrl.sync.transfer import Transfer, make_gather_groups
from spmdrl.world import World
from spmdrl.world.comm import gather_objects


class TracedTensors:
    """The way of some named tensors into the places where a trace has seen them go.

    Every rank constructs it and calls its methods together.

    Args:
        world: the job.
        kind: of tensors, names the folder of plans.
        copies: the places in this rank's engine; empty where there is none.
        live: what this rank has of the tensors.
    """

    _is_settled = False
    _transfer: Transfer | None = None

    def __init__(self, world: World, *, kind: str, copies: Sequence[Copy], live: LiveShards):
        self._world, self._copies, self._live, self._kind = world, copies, live, kind
        if not world.is_alone:
            self.settle()
        if world.survival is not None:
            world.survival.forget.append(self._forget)

    def settle(self) -> None:
        """Plan, where there is no plan for the ranks of now. Every rank calls it."""
        if self._is_settled:
            return
        wants = [Want(copy.name, copy.box, copy.view.dtype) for copy in self._copies]
        (self.plan,) = make_plans([wants], self._live, world=self._world, kind=self._kind)
        self._gathers = make_gather_groups(self.plan, self._world, kind=self._kind)
        self._is_settled = True

    def _forget(self) -> None:
        self.release()
        self._gathers, self._is_settled = {}, False

    @property
    def plans(self) -> list[StreamPlan]:
        """The plan."""
        return [self.plan]

    def release(self) -> None:
        """Free the buffers until the next `move`."""
        self._transfer = None

    def move(self) -> None:
        """Write every tensor's value of now, in the dtype of its place."""
        if self._live.refresh():
            self.release()
        if self._transfer is None:
            self._transfer = Transfer(
                self.plan,
                self._live,
                self._world,
                targets=[(copy.box, copy.view) for copy in self._copies],
                gathers=self._gathers,
            )
        self._transfer.run()

    def differences(self) -> list[str]:
        """Compare checksums of what trainers hold with what engines hold, slice by slice.

        Returns: on every rank, what differs: engine, tensor and both sums.
        """
        counts = gather_objects(len(self._copies), group=self._world.control)
        sums = sums_sent(self.plan, self._live, most=max(counts), world=self._world)
        problems = []
        for want, copy in enumerate(self._copies):
            held = checksum(copy.view, copy.box, shape=self._live.parts[copy.name].shape)
            total = sums[want]
            if held != total:
                problems.append(
                    f"engine of rank {self._world.rank}: {copy.name} has checksum {held:016x}, "
                    f"the trainers sent {total:016x}"
                )
        every = gather_objects(problems, group=self._world.control)
        return [line for lines in every for line in lines]


def sums_sent(plan: StreamPlan, live: LiveShards, *, most: int, world: World) -> list[int]:
    """Return the checksum of what all trainers hold of each want of this rank, mod 2^64.

    Args:
        most: the wants of the rank that has most. Every rank calls.
    """
    receivers = plan.traffic.receivers
    receiver_of = {target: i for i, ranks in enumerate(receivers) for target in ranks}
    sent = [[0] * most for _ in receivers]
    for piece in pieces_of(plan.held_here, live.table):
        value = live.held.value(piece.name, piece.box).read().to(piece.dtype)
        own = sent[receiver_of[piece.target]]
        own[piece.want] += checksum(value, piece.box, shape=live.parts[piece.name].shape)
    sums = torch.tensor([[_signed(total) for total in own] for own in sent])
    dist.all_reduce(sums, group=world.control)
    return [int(total) % 2**64 for total in sums[receiver_of.get(world.rank, 0)]]


def _signed(total: int) -> int:
    """Return an integer mod 2^64 as int64 has it."""
    return (total + 2**63) % 2**64 - 2**63
