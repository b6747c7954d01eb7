"""Tensors of the trainers that are written into live engine memory: planned, moved, compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spmdrl.sync.live_shards import LiveShards
from spmdrl.sync.plan import StreamPlan, Want, make_plan
from spmdrl.sync.prove import checksum, checksum_problems
from spmdrl.sync.trace import Copy
from spmdrl.sync.transfer import Transfer, make_gather_groups
from spmdrl.world import World
from spmdrl.world.comm import gather_objects


class TracedTensors:
    """The way of some named tensors into the places where a trace has seen them go.

    Every rank constructs it and calls its methods together.

    Args:
        world: the job.
        shapes: of the whole tensors, by name, on every rank.
        copies: the places in this rank's engine; empty where there is none.
        live: what this rank has of the tensors.
    """

    def __init__(
        self,
        world: World,
        *,
        shapes: Mapping[str, tuple[int, ...]],
        copies: Sequence[Copy],
        live: LiveShards,
    ):
        self._world, self._shapes = world, shapes
        self._copies, self._live = copies, live
        wants = [Want(copy.name, copy.box, copy.view.dtype) for copy in copies]
        gathered = gather_objects((live.held.boxes(), wants), group=world.control)
        self.plan = make_plan(
            [boxes for boxes, _ in gathered],
            [own for _, own in gathered],
            bucket_bytes=world.cfg.stream.bucket_bytes,
        )
        self._groups = make_gather_groups(self.plan)
        self.release()

    @property
    def plans(self) -> list[StreamPlan]:
        """The plan."""
        return [self.plan]

    def release(self) -> None:
        """Free the buffers until the next `move`."""
        self._transfer: Transfer | None = None

    def move(self) -> None:
        """Write every tensor's value of now, in the dtype of its place."""
        if self._live.refresh():
            self.release()
        if self._transfer is None:
            self._transfer = Transfer(
                self.plan,
                rank=self._world.rank,
                device=self._world.wire,
                source=self._live.held.value,
                targets=[copy.view for copy in self._copies],
                groups=self._groups,
            )
        self._transfer.run()

    def differences(self) -> list[str]:
        """Compare checksums of what trainers hold with what engines hold, slice by slice.

        Returns: on every rank, what differs: engine, tensor and both sums.
        """
        plan, rank = self.plan, self._world.rank
        wants = {
            (i, j): want
            for i, receiver in enumerate(plan.receivers)
            for j, want in enumerate(receiver.wants)
        }
        sent: dict[tuple[int, int], int] = {}
        for route in plan.routes:
            for piece in route.pieces if route.source == rank else ():
                key = (route.receiver, piece.want)
                value = self._live.held.value(wants[key].name, piece.box).read()
                value = value.to(wants[key].dtype)
                sent[key] = sent.get(key, 0) + checksum(
                    value, piece.box, shape=self._shapes[wants[key].name]
                )
        held = {
            (i, j): checksum(copy.view, copy.box, shape=self._shapes[copy.name])
            for i, receiver in enumerate(plan.receivers)
            if rank in receiver.ranks
            for j, copy in enumerate(self._copies)
        }
        both = gather_objects((sent, held), group=self._world.control)
        return checksum_problems(
            [s for s, _ in both],
            [h for _, h in both],
            names={key: want.name for key, want in wants.items()},
        )
