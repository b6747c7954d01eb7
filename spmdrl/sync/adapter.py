"""Adapters on their way into an engine that computes with them itself: A and scale * B alone.

What the engine does with whole matrices is watched once, as with weights; then slices are written
in place, into its adapter's memory, at each push.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spmdrl.engine.protocol import AdapterEngine
from spmdrl.model.lora.layers import SentAdapter
from spmdrl.model.shards import Held, Part, addresses
from spmdrl.sync.trace import trace_loader
from spmdrl.sync.traced import TracedTensors
from spmdrl.world import World
from spmdrl.world.comm import gather_problems


class AdapterPush:
    """Moves A and scale * B of every adapter. Every rank constructs it, and calls it, together.

    Args:
        sent: the matrices, on every rank.
        shards: of this rank, by name; {} off the trainers.
        engine: used on inference ranks.
        world: the job.
    Raises: ValueError on every rank, when an engine cannot take the matrices in place.
    """

    def __init__(
        self,
        sent: SentAdapter,
        shards: Mapping[str, Tensor],
        *,
        engine: AdapterEngine,
        world: World,
    ):
        self._sent, copies, reasons = sent, [], []
        if world.is_inference:
            names = {name: (shape, torch.float32) for name, shape in sent.shapes.items()}
            trace = trace_loader(engine.adapter(sent.shapes), names, load=engine.load_adapter)
            copies = trace.copies
            missing = sent.shapes.keys() - {copy.name for copy in copies}
            reasons = trace.reasons + [
                f"{name}: the engine takes none of it" for name in sorted(missing)
            ]
        lines = gather_problems(reasons, group=world.control)
        if lines:
            raise ValueError(
                "model.lora.push: adapter, but this engine cannot take the adapters; push merged, "
                "or choose other targets\n  - " + "\n  - ".join(lines[:8])
            )
        self._addresses = addresses(self._own(shards))
        self._tensors = TracedTensors(
            world, shapes=sent.shapes, copies=copies, held=self._hold(shards)
        )

    @property
    def nbytes(self) -> int:
        """Bytes that leave the trainers in one push, all of them together."""
        return self._tensors.plan.nbytes

    def push(self, shards: Mapping[str, Tensor]) -> None:
        """Write the matrices of now; the shards are taken anew if they have moved."""
        if addresses(self._own(shards)) != self._addresses:
            self._addresses = addresses(self._own(shards))
            self._tensors.hold(self._hold(shards))
        self._tensors.move()

    def differences(self) -> list[str]:
        """Return what differs between trainers and engines; see TracedTensors."""
        return self._tensors.differences()

    def _own(self, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: shards[name] for name in self._sent.shapes if name in shards}

    def _hold(self, shards: Mapping[str, Tensor]) -> Held:
        parts = {name: Part.whole(name, shape) for name, shape in self._sent.shapes.items()}
        return Held(self._own(shards), parts, factors=self._sent.factors)
