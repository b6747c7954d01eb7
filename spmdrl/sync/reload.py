"""The slow way of weights into an engine: whole tensors, loaded by vLLM's own reloading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from spmdrl.engine.protocol import EngineProtocol
from spmdrl.errors import Refusal
from spmdrl.imports import attempt
from spmdrl.model.files.reader import CheckpointReader
from spmdrl.model.load import model_folder
from spmdrl.model.shards import Box
from spmdrl.sync.buckets import LARGEST
from spmdrl.sync.live_shards import LiveShards
from spmdrl.sync.negotiation import make_plans
from spmdrl.sync.tables import Want
from spmdrl.sync.transfer import Transfer, make_gather_groups
from spmdrl.sync.verify import checksum, flip_bits, parameter_checksums, shown, sums_sent
from spmdrl.world.comm import agree, gather_objects, gather_problems
from spmdrl.world.lost_peers.watch import first_line
from spmdrl.world.world import World

Names = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""{name in the safetensors files: (shape, dtype)}."""


class ReloadedTensors:
    """The way of all weights into engines that cannot be written in place.

    Every rank constructs it and calls its methods together.

    Args:
        world: the job.
        names: of the whole tensors, on every rank.
        engine: used on inference ranks.
        live: what this rank has of the tensors.
    Raises: Refusal on every rank, when reloading the very weights that the engine holds fails
        or changes it. On the CPU vLLM 0.32 does where it packs weights, as those of
        DeepSeek-V3's MLA.
    """

    def __init__(self, world: World, *, names: Names, engine: EngineProtocol, live: LiveShards):
        self._world, self._engine, self._live = world, engine, live
        self._sums: list[int] | None = None  # of tensors handed over, where they are wanted
        changed = _changed_by_reload(engine, names, world) if world.is_inference else []
        problems = gather_problems(changed, group=world.control)
        if problems:
            raise Refusal(
                "weight stream: no way to update this engine. Its weights cannot be written in "
                "place, and vLLM's own reload of the weights that it already holds fails, or "
                f"changes parameters:\n{shown(problems)}\nUse engine.kind transformers, a model "
                "without them, or another device or vLLM version"
            )
        self._pushes = _grouped(names, world.cfg.stream.bucket_bytes or LARGEST)
        wants = self._pushes if world.is_inference else [[] for _ in self._pushes]
        self.plans = make_plans(wants, live, world=world, kind="reload")
        self._gathers = make_gather_groups(self.plans[0])

    def move(self) -> None:
        """Have every engine load every tensor's value of now.

        Raises: RuntimeError on every rank when one cannot.
        """
        self._live.refresh()
        tensors = self._whole_tensors()
        with agree(group=self._world.control, kind=RuntimeError):
            error = None
            if self._world.is_inference:
                _, error = attempt(lambda: self._engine.reload_weights(tensors), Exception)
            for _ in tensors:  # the others wait in these exchanges
                pass
            if error:
                text = f"vLLM could not reload the weights: {type(error).__name__}: {error}"
                raise RuntimeError(text) from error

    def _whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor whole (on inference ranks), a plan's worth at a time."""
        device = self._world.device
        for plan, push in zip(self.plans, self._pushes):
            wants = push if self._world.is_inference else []
            # New memory each time: vLLM keeps tensors until their layer is complete.
            whole = [torch.empty(w.box.shape, dtype=w.dtype, device=device) for w in wants]
            targets = [(want.box, tensor) for want, tensor in zip(wants, whole)]
            Transfer(plan, self._live, self._world, targets=targets, gathers=self._gathers).run()
            if self._sums is not None:
                self._sums += [checksum(t, w.box, shape=w.box.shape) for w, t in zip(wants, whole)]
            yield from zip([want.name for want in wants], whole)

    def differences(self) -> list[str]:
        """Load every tensor once more, over rubbish, and compare both loadings.

        Returns: on every rank, which parameters are not those that vLLM makes of the trainers'
            tensors of now, and which of these tensors did not arrive as they were sent.
        """
        model = self._engine.model if self._world.is_inference else None
        held = parameter_checksums(model) if model is not None else {}
        if model is not None:
            flip_bits(model, dict(model.named_parameters()))
        self._sums = []
        self.move()
        arrived, self._sums = self._sums, None
        again = parameter_checksums(model) if model is not None else {}
        problems = [
            f"engine of rank {self._world.rank}: {name} has checksum {held[name]:016x}, and "
            f"{again[name]:016x} when the trainers' tensors are loaded again"
            for name in held
            if held[name] != again[name]
        ]
        problems += self._lost(arrived)
        every = gather_objects(problems, group=self._world.control)
        return [line for lines in every for line in lines]

    def _lost(self, arrived: list[int]) -> list[str]:
        """Return which tensors are not those that trainers sent, by their checksums here."""
        sent: list[int] = []
        for plan, push in zip(self.plans, self._pushes):
            sent += sums_sent(plan, self._live, most=len(push), world=self._world)
        names = [want.name for push in self._pushes for want in push]
        return [
            f"engine of rank {self._world.rank}: {name} arrived with checksum {own:016x}, the "
            f"trainers sent {total:016x}"
            for name, own, total in zip(names, arrived, sent)
            if own != total
        ]


def _changed_by_reload(engine: EngineProtocol, names: Names, world: World) -> list[str]:
    """Reload the files' weights over rubbish; return what is not as it was before, and why."""
    cfg, model = world.cfg.model, engine.model
    reader = CheckpointReader(model_folder(cfg.path), part=cfg.part)
    before = parameter_checksums(model)
    flip_bits(model, before)
    flipped = parameter_checksums(model)
    tensors = (
        (name, reader.read(name, start=(0,) * len(shape), shape=tuple(shape)))
        for name, (shape, _) in names.items()
    )
    # Loading and repacking may raise anything.
    _, error = attempt(lambda: engine.reload_weights(tensors), Exception)
    after, parameters = parameter_checksums(model), dict(model.named_parameters())
    changed = [name for name in before if before[name] != after[name]]
    left = [name for name in changed if after[name] == flipped[name]]
    flip_bits(model, left)
    # Buffers may be the engine's own, of no tensor of the files.
    constants = set(left) - parameters.keys()
    return (
        [first_line(error)]
        if error
        else [
            f"{name}: the reload does not write it" if name in left else name
            for name in changed
            if name not in constants
        ]
    )


def _grouped(names: Names, most: int) -> list[list[Want]]:
    """Return whole tensors in groups of up to so many bytes, or of one."""
    groups: list[list[Want]] = []
    size = most
    for name, (shape, dtype) in names.items():
        want = Want(name, Box.whole(shape), dtype)
        nbytes = want.box.numel * dtype.itemsize
        if size + nbytes > most:
            groups, size = groups + [[]], 0
        groups[-1].append(want)
        size += nbytes
    return groups
