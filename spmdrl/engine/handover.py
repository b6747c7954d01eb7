"""Colocated placement: the update uses the engine's memory while nothing is generated.

`release` is called where generation ends, `wake_weights` where a push begins, `wake_cache` where it
ends. Each of them asks the device how much memory is in use, so that memory that is not freed is
found in the step that keeps it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from spmdrl.engine.kept_tensors import KeptTensors
from spmdrl.engine.protocol import EngineProtocol
from spmdrl.types import Sums
from spmdrl.world.world import World

log = logging.getLogger(__name__)

GROWTH_FRAC = 0.05
GROWTH_BYTES = 2**29
"""How far the memory in use after a wake may grow beyond that of the first wake after an update: by
this share of it, or by this many bytes if that is more."""
_GIB = 2**30


class Handover:
    """Puts one rank's engine to sleep and wakes it; does nothing where it cannot sleep.

    Args:
        engine: of this rank.
        world: the job. The engine sleeps only with colocated placement, and without over-sampling,
            which leaves requests unfinished from step to step.
        constants: parts of its weights that no push writes.
    """

    def __init__(self, engine: EngineProtocol, world: World, *, constants: Sequence[Tensor] = ()):
        self._engine = engine
        self._sleeps = (
            world.cfg.layout.roles.shares_devices and world.is_inference and engine.can_sleep
        )
        if self._sleeps and world.cfg.rollout.schedule.leaves_unfinished:
            log.warning(
                "the engine stays awake during updates, and keeps its memory, since "
                "rollout.schedule.over_sample leaves requests unfinished"
            )
            self._sleeps = False
        self._constants = KeptTensors(constants if self._sleeps else [])
        self._is_asleep = False
        self._freed = 0
        self._wakes = 0
        self._level = 0

    def release(self, *, keeps_weights: bool) -> None:
        """Put the engine to sleep, unless requests are unfinished.

        Args:
            keeps_weights: the next push will not write all weights.
        Raises: RuntimeError when this frees no memory.
        """
        if not self._sleeps or self._is_asleep or self._engine.is_busy:
            return
        before = self._engine.held_bytes()
        self._engine.sleep(keeps_weights=keeps_weights)
        self._is_asleep = True
        self._freed = before - self._engine.held_bytes()
        if self._freed <= 0:
            raise RuntimeError(
                f"the engine sleeps, and {-self._freed / _GIB:.3g} GiB more are in use than the "
                f"{before / _GIB:.3g} GiB before: nothing was handed over, unless another process "
                f"took it at this moment. {self._engine.sleep_hint}"
            )

    def wake_weights(self) -> None:
        """Allocate the weights' memory at the addresses that it had. A push must write them."""
        if self._is_asleep:
            self._engine.wake("weights")
            self._constants.restore()

    def wake_cache(self) -> Sums:
        """Allocate the KV cache's memory, and compare the memory in use with earlier steps.

        Returns: mem/engine_freed_gib and mem/after_wake_gib, of this rank; {} if it was awake.
        Raises: RuntimeError when the memory in use has grown by more than GROWTH_*.
        """
        if not self._is_asleep:
            return {}
        self._engine.wake("cache")
        self._is_asleep = False
        level = self._engine.held_bytes()
        self._wakes += 1
        if self._wakes <= 2:  # the second is the first after an update, which allocates its states
            self._level = level
        grown = level - self._level
        margin = max(GROWTH_FRAC * self._level, GROWTH_BYTES)
        if grown > margin:
            raise RuntimeError(
                f"memory grows: {level / _GIB:.4g} GiB are in use after the engine woke for the "
                f"{self._wakes}th time, {grown / _GIB:.3g} GiB more than the "
                f"{self._level / _GIB:.4g} GiB after the second (allowed: {margin / _GIB:.3g} "
                "GiB). Something of the update is not given back, or another process is on this "
                "device; lower batch.tokens_per_microbatch if a step needs more, else find what is "
                "kept"
            )
        return {
            "mem/engine_freed_gib": (self._freed / _GIB, 1.0),
            "mem/after_wake_gib": (level / _GIB, 1.0),
        }
