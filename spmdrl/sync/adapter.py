"""Adapters on their way into an engine that computes with them itself: A and scale * B alone.

What the engine does with whole matrices is watched once, as with weights; then slices are written
in place, into its adapter's memory, at each push.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from spmdrl.engine.protocol import AdapterEngine
from spmdrl.errors import Refusal
from spmdrl.model.lora.targets import SentAdapter
from spmdrl.model.shards import Part
from spmdrl.sync.in_place import TracedTensors
from spmdrl.sync.live_shards import LiveShards
from spmdrl.sync.trace import Trace, trace_loader
from spmdrl.sync.verify import shown
from spmdrl.world.comm import gather_problems
from spmdrl.world.world import World


def trace_adapter(
    sent: SentAdapter,
    shards: Callable[[], Mapping[str, Tensor]],
    *,
    engine: AdapterEngine,
    world: World,
) -> TracedTensors:
    """Return the way of A and scale * B of every adapter; every rank calls.

    Args:
        sent: the matrices, on every rank.
        shards: gives this rank's, by name; {} off the trainers.
        engine: used on inference ranks.
        world: the job.
    Raises: Refusal on every rank, when an engine cannot take the matrices in place.
    """
    trace, missing = Trace(), set()
    if world.is_inference:
        names = {name: (shape, torch.float32) for name, shape in sent.shapes.items()}
        trace = trace_loader(engine.adapter(sent.shapes), names, load=engine.load_adapter)
        missing = sent.shapes.keys() - {copy.name for copy in trace.copies}
    reasons = trace.reasons + [f"{name}: the engine takes none of it" for name in sorted(missing)]
    problems = gather_problems(reasons, group=world.control)
    if problems:
        raise Refusal(
            "model.lora.push: adapter, but this engine cannot take the adapters; push merged, "
            f"or choose other targets\n{shown(problems)}"
        )

    def own() -> dict[str, Tensor]:
        held = shards()
        return {name: held[name] for name in sent.shapes if name in held}

    parts = {name: Part.whole(name, shape) for name, shape in sent.shapes.items()}
    live = LiveShards(own, parts, factors=sent.factors)
    return TracedTensors(world, kind="adapters", copies=trace.copies, live=live)
