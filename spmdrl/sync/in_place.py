"""Write trainers' tensors into live engine memory: plan, move and compare them.

The plan is made in `negotiation`; `transfer` sends the tensors and copies them into the engine.

Weights go where a trace has seen the engine's loader put them. Where the engine computes with
adapters itself, they are pushed separately: A and scale * B go into the engine's adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from spmdrl.engine.protocol import AdapterEngine
from spmdrl.errors import Refusal
from spmdrl.model.lora.targets import SentAdapter
from spmdrl.model.tensor_parts import Part
from spmdrl.sync.change_choice import ChangeChoice, Moved
from spmdrl.sync.change_transfer import ChangeTransfer
from spmdrl.sync.negotiation import make_plans
from spmdrl.sync.tables import LiveShards, Want
from spmdrl.sync.trace import Copy, Trace, trace_loader
from spmdrl.sync.transfer import RankSide, Transfer, make_gather_groups
from spmdrl.sync.verify import bullet_list, differences
from spmdrl.world.comm import any_of, gather_problems
from spmdrl.world.world import World

T = TypeVar("T", Transfer, ChangeTransfer)


class TracedTensors:
    """Writes named tensors to the places where a trace has seen them go.

    Every rank constructs it and calls its methods together.

    Args:
        world: the job.
        kind: name of these tensors, for the log.
        copies: the places in this rank's engine; empty where there is none.
        live: what this rank has of the tensors.
        may_send_changes: nothing but `move` changes what the engines hold.
    """

    def __init__(
        self,
        world: World,
        *,
        kind: str,
        copies: Sequence[Copy],
        live: LiveShards,
        may_send_changes: bool = False,
    ):
        self._world = world
        self._copies = copies
        self._live = live
        wants = [Want(copy.name, copy.box, copy.view.dtype) for copy in copies]
        self.plans = make_plans([wants], live, world=world, kind=kind)
        self._gathers = make_gather_groups(self.plans[0])
        self._transfer: Transfer | None = None
        self._changes: ChangeTransfer | None = None
        self._choice: ChangeChoice | None = None
        if may_send_changes:
            itemsize = getattr(torch, world.cfg.engine.dtype).itemsize
            traffic = self.plans[0].traffic
            self._choice = ChangeChoice(traffic, world, itemsize=itemsize, kind=kind)

    def release(self) -> None:
        """Free the buffers until the next `move`, which sends everything."""
        self._transfer = None
        self._changes = None

    def move(self, *, is_full: bool = False) -> Moved:
        """Write every tensor's current value, in the dtype of its place.

        Args:
            is_full: send also what did not change.
        """
        if self._live.refresh():
            self.release()
        choice = self._choice
        if choice is None or not choice.is_on:
            return self._move_all()
        is_full = is_full or choice.is_full()
        # A rank whose shards have moved has lost its copy.
        if any_of(is_full or self._changes is None, group=self._world.control):
            moved = self._move_all()
            # These buffers are not used again soon.
            self.release()
            if choice.keeps:
                self._changes = self._make(ChangeTransfer)
                self._changes.keep()
        else:
            assert self._changes is not None, "any_of asks it of every rank"
            self._changes.run()
            moved = self._changes.moved(self._world)
        choice.note(moved, full_bytes=self.plans[0].nbytes)
        return moved

    def _move_all(self) -> Moved:
        if self._transfer is None:
            self._transfer = self._make(Transfer)
        self._transfer.run()
        return Moved(self.plans[0].nbytes)

    def _make(self, kind: type[T]) -> T:
        targets = [(copy.box, copy.view) for copy in self._copies]
        return kind(RankSide(self.plans[0], self._live, self._world.wire, targets, self._gathers))

    def differences(self) -> list[str]:
        """Return, on every rank, which slices in engines differ from those of the trainers."""
        return differences(self._copies, self.plans[0], self._live, self._world)


def trace_adapter(
    sent: SentAdapter,
    shards: Callable[[], Mapping[str, Tensor]],
    *,
    engine: AdapterEngine,
    world: World,
) -> TracedTensors:
    """Trace and plan A and scale * B of every adapter; every rank calls.

    Args:
        sent: the matrices, on every rank.
        shards: returns this rank's shards by name; {} off the trainers.
        engine: used on inference ranks.
        world: the job.
    Raises: Refusal on every rank, when an engine cannot take the matrices in place.
    """
    trace = Trace()
    reasons = []
    if world.is_inference:
        names = {name: (shape, torch.float32) for name, shape in sent.shapes.items()}
        trace = trace_loader(engine.adapter(sent.shapes), names, load=engine.load_adapter)
        copied = {copy.name for copy in trace.copies}
        reasons += trace.reasons
        for name in sorted(sent.shapes.keys() - copied):
            reasons.append(f"{name}: the engine takes none of it")
    problems = gather_problems(reasons, group=world.control)
    if problems:
        raise Refusal(
            "model.lora.push: adapter, but this engine cannot take the adapters; push merged, "
            f"or choose other targets\n{bullet_list(problems)}"
        )

    def adapter_shards() -> dict[str, Tensor]:
        held = shards()
        return {name: held[name] for name in sent.shapes if name in held}

    parts = {name: Part.whole(name, shape) for name, shape in sent.shapes.items()}
    live = LiveShards(adapter_shards, parts, factors=sent.factors)
    return TracedTensors(world, kind="adapters", copies=trace.copies, live=live)
