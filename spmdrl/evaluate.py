"""Held-out evaluation inside the loop."""

from __future__ import annotations

from spmdrl.comm import gather_objects
from spmdrl.engine.protocol import EngineProtocol
from spmdrl.rollout.source import Source
from spmdrl.types import Sums, add_sums
from spmdrl.world import World


def evaluate(source: Source, engine: EngineProtocol, *, world: World, step: int) -> Sums:
    """Sample the held-out prompts with the current weights when `step` is due.

    Due are multiples of evaluate.every_steps and the last step. Every rank calls it; engine
    replicas share the prompts.

    Returns: eval/ sums over all replicas, equal on every rank; empty when not due.
    """
    cfg = world.cfg
    every = cfg.evaluate.every_steps
    if not every or (step % every and step != cfg.steps):
        return {}
    with world.watch.phase("evaluate", step):
        sums = source.evaluate(engine, step=step)
    with world.watch.wait("gather evaluation", step):
        return add_sums(*gather_objects(sums, group=world.control))
