"""Engines: what generates. `protocol` says what the rest of the program may ask of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spmdrl.config import Config
    from spmdrl.engine.protocol import EngineProtocol
    from spmdrl.world.world import World


def make_engine(cfg: Config, world: World) -> EngineProtocol:
    """Build the engine of `engine.kind`; every rank calls it, at the same place.

    Raises: Refusal when vLLM is asked for and missing, or the model cannot be built.
    """
    if cfg.engine.kind == "transformers":
        from spmdrl.engine.transformers.engine import TransformersEngine

        return TransformersEngine(cfg, world)
    from spmdrl.engine.vllm.engine import VllmEngine

    return VllmEngine(cfg, world)
