"""Tensors of the trainers that are written into live engine memory: planned, moved, compared."""

from __future__ import annotations

from collections.abc import Sequence

from spmdrl.sync.live_shards import LiveShards
from spmdrl.sync.plan import StreamPlan
from spmdrl.sync.planning import make_plans
from spmdrl.sync.tables import Want
from spmdrl.sync.trace import Copy
from spmdrl.sync.transfer import Transfer, make_gather_groups
from spmdrl.sync.verify import differences
from spmdrl.world.world import World


class TracedTensors:
    """The way of some named tensors into the places where a trace has seen them go.

    Every rank constructs it and calls its methods together.

    Args:
        world: the job.
        kind: of tensors, names the folder of plans.
        copies: the places in this rank's engine; empty where there is none.
        live: what this rank has of the tensors.
    """

    def __init__(self, world: World, *, kind: str, copies: Sequence[Copy], live: LiveShards):
        self._world, self._copies, self._live = world, copies, live
        wants = [Want(copy.name, copy.box, copy.view.dtype) for copy in copies]
        (self.plan,) = make_plans([wants], live, world=world, kind=kind)
        self._gathers = make_gather_groups(self.plan)
        self._transfer: Transfer | None = None

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
        """Return, on every rank, which slices in engines are not those of the trainers."""
        return differences(self._copies, self.plan, self._live, self._world)
