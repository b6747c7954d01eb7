"""The slow way to update an engine: whole tensors, loaded by vLLM's own reloading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from spmdrl.engine.protocol import EngineProtocol
from spmdrl.errors import Refusal
from spmdrl.imports import attempt
from spmdrl.model.files.reader import CheckpointReader
from spmdrl.model.load import model_folder
from spmdrl.model.tensor_parts import Box
from spmdrl.sync.buckets import LARGEST
from spmdrl.sync.change_choice import Moved
from spmdrl.sync.negotiation import make_plans
from spmdrl.sync.tables import LiveShards, Want
from spmdrl.sync.transfer import RankSide, Transfer, make_gather_groups
from spmdrl.sync.verify import (
    bullet_list,
    checksum,
    flip_bits,
    gather_lines,
    on_host,
    parameter_checksums,
    sent_checksums,
)
from spmdrl.world.comm import agree, gather_problems
from spmdrl.world.lost_peers.watch import first_line
from spmdrl.world.world import World

Names = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""{name in the safetensors files: (shape, dtype)}."""


class ReloadedTensors:
    """Sends all weights to engines that cannot be written in place.

    Every rank constructs it and calls its methods together.

    Args:
        world: the job.
        names: of the whole tensors, on every rank.
        engine: used on inference ranks.
        live: what this rank has of the tensors.
    Raises: Refusal on every rank, when reloading the very weights that the engine holds fails
        or changes it. On the CPU vLLM 0.32 does where it packs weights.
    """

    def __init__(self, world: World, *, names: Names, engine: EngineProtocol, live: LiveShards):
        self._world = world
        self._engine = engine
        self._live = live
        # Checksums of the tensors that arrived, during `differences`.
        self._arrived: list[Tensor] | None = None
        changed = _changed_by_reload(engine, names, world) if world.is_inference else []
        problems = gather_problems(changed, group=world.control)
        if problems:
            raise Refusal(
                "weight stream: no way to update this engine. Its weights cannot be written in "
                "place, and vLLM's own reload of the weights that it already holds fails, or "
                f"changes parameters:\n{bullet_list(problems)}\nUse engine.kind transformers, a "
                "model without them, or another device or vLLM version"
            )
        self._pushes = _groups(names, world.cfg.stream.bucket_bytes or LARGEST)
        wants = self._pushes if world.is_inference else [[] for _ in self._pushes]
        self.plans = make_plans(wants, live, world=world, kind="reload")
        self._gathers = make_gather_groups(self.plans[0])

    def release(self) -> None:
        """Do nothing: no buffers stay after `move`."""

    def move(self, *, is_full: bool = True) -> Moved:
        """Let every engine load every tensor's current value.

        Args:
            is_full: has no effect: everything is sent.
        Raises: RuntimeError on every rank when an engine cannot.
        """
        self._live.refresh()
        tensors = self._whole_tensors()
        with agree(group=self._world.control, kind=RuntimeError):
            error = None
            if self._world.is_inference:
                _, error = attempt(lambda: self._engine.reload_weights(tensors), Exception)
            # If the engine failed, other ranks wait in the exchanges that it did not reach.
            for _ in tensors:
                pass
            if error:
                raise RuntimeError(
                    f"vLLM could not reload the weights: {type(error).__name__}: {error}"
                ) from error
        return Moved(sum(plan.nbytes for plan in self.plans))

    def _whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor whole (on inference ranks), those of one plan at a time."""
        for plan, push in zip(self.plans, self._pushes):
            wants = push if self._world.is_inference else []
            targets = []
            for want in wants:
                # New memory each time: vLLM keeps tensors until their layer is complete.
                shape = want.box.shape
                whole = torch.empty(shape, dtype=want.dtype, device=self._world.device)
                targets.append((want.box, whole))
            Transfer(RankSide(plan, self._live, self._world.wire, targets, self._gathers)).run()
            if self._arrived is not None:
                for box, whole in targets:
                    self._arrived.append(checksum(whole, box, shape=box.shape))
            for want, (_, whole) in zip(wants, targets):
                yield want.name, whole

    def differences(self) -> list[str]:
        """Load every tensor once more, over flipped bits, and compare the two loads.

        Returns: on every rank, which parameters are not those that vLLM makes of the trainers'
            current tensors, and which of these tensors did not arrive as they were sent.
        """
        before: dict[str, int] = {}
        after: dict[str, int] = {}
        self._arrived = []
        if self._world.is_inference:
            before = parameter_checksums(self._engine.model)
            flip_bits(self._engine.model, dict(self._engine.model.named_parameters()))
        self.move()
        if self._world.is_inference:
            after = parameter_checksums(self._engine.model)
        problems = []
        for name in before:
            if before[name] != after[name]:
                problems.append(
                    f"engine of rank {self._world.rank}: {name} has checksum {before[name]:016x}, "
                    f"and {after[name]:016x} when the trainers' tensors are loaded again"
                )
        problems += self._altered_on_the_way(on_host(self._arrived))
        self._arrived = None
        return gather_lines(problems, self._world)

    def _altered_on_the_way(self, arrived: list[int]) -> list[str]:
        """Return which tensors have other checksums here than on the trainers.

        Args:
            arrived: checksums of all tensors in the order of the pushes; empty off the engines.
        """
        sent: list[int] = []
        names: list[str] = []
        for plan, push in zip(self.plans, self._pushes):
            sent += sent_checksums(plan, self._live, most=len(push), world=self._world)
            names += [want.name for want in push]
        problems = []
        for name, here, on_trainers in zip(names, arrived, sent):
            if here != on_trainers:
                problems.append(
                    f"engine of rank {self._world.rank}: {name} arrived with checksum "
                    f"{here:016x}, the trainers sent {on_trainers:016x}"
                )
        return problems


def _changed_by_reload(engine: EngineProtocol, names: Names, world: World) -> list[str]:
    """Reload the files' weights over flipped bits; return what differs from before, and why."""
    cfg = world.cfg.model
    model = engine.model
    reader = CheckpointReader(model_folder(cfg.path), part=cfg.part)

    def file_tensors() -> Iterator[tuple[str, Tensor]]:
        for name, (shape, _) in names.items():
            yield name, reader.read(name, start=(0,) * len(shape), shape=tuple(shape))

    before = parameter_checksums(model)
    flip_bits(model, before)
    flipped = parameter_checksums(model)
    # Loading and repacking may raise anything.
    _, error = attempt(lambda: engine.reload_weights(file_tensors()), Exception)
    after = parameter_checksums(model)
    parameters = dict(model.named_parameters())
    unwritten = []
    problems = []
    for name in before:
        if after[name] == before[name]:
            continue
        if after[name] != flipped[name]:
            problems.append(name)
            continue
        unwritten.append(name)
        if name in parameters:  # a buffer may be the engine's own, which no file has
            problems.append(f"{name}: the reload does not write it")
    flip_bits(model, unwritten)
    return [first_line(error)] if error else problems


def _groups(names: Names, max_bytes: int) -> list[list[Want]]:
    """Return whole tensors in groups of at most `max_bytes`, or of one larger tensor."""
    groups: list[list[Want]] = []
    group_bytes = 0
    for name, (shape, dtype) in names.items():
        want = Want(name, Box.whole(shape), dtype)
        nbytes = want.box.numel * dtype.itemsize
        if not groups or group_bytes + nbytes > max_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(want)
        group_bytes += nbytes
    return groups
