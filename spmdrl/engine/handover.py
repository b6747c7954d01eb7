"""Colocated placement: an engine's memory is the update's while nothing is generated.

`release` where generation ends, `wake_weights` where a push begins, `wake_cache` where it ends.
Each time the device is asked what is in use, so that memory that does not come back is found in
the step in which it is lost.
"""

from __future__ import annotations

import logging

from spmdrl.engine.protocol import EngineProtocol
from spmdrl.types import Sums
from spmdrl.world.world import World

log = logging.getLogger(__name__)

GROWTH_FRAC = 0.05
GROWTH_BYTES = 2**29
"""How far the level after waking may grow over that of the first wake that follows an update: by
this share of it, or so many bytes if that is more."""
_GIB = 2**30


class Handover:
    """Puts one rank's engine to sleep and wakes it; nothing where it cannot sleep.

    Args:
        engine: of this rank.
        world: the job; anything but colocated placement leaves the engine awake, and so does
            over-sampling, which leaves requests unfinished from step to step.
    """

    def __init__(self, engine: EngineProtocol, world: World):
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
        self._kind = world.cfg.engine.kind
        self._is_asleep = False
        self._freed = self._wakes = self._level = 0

    def release(self, *, keeps_weights: bool) -> None:
        """Put the engine to sleep. One with unfinished requests stays awake, for their sake.

        Args:
            keeps_weights: what the next push writes is not all that there is.
        Raises: RuntimeError when the device has no more memory than before.
        """
        if not self._sleeps or self._is_asleep or self._engine.is_busy:
            return
        before = self._engine.held_bytes()
        self._engine.sleep(keeps_weights=keeps_weights)
        self._is_asleep, self._freed = True, before - self._engine.held_bytes()
        if self._freed <= 0:
            hint = (
                "Set engine.options {enable_sleep_mode: false} and lower engine.gpu_memory_frac"
                if self._kind == "vllm"
                else "Raise engine.max_num_seqs: so small a cache shares pages with other memory"
            )
            raise RuntimeError(
                f"the engine sleeps, and {-self._freed / _GIB:.3g} GiB more are in use than the "
                f"{before / _GIB:.3g} GiB before: nothing was handed over, unless another process "
                f"took it at this moment. {hint}"
            )

    def wake_weights(self) -> None:
        """Give the weights their memory, at the addresses that they had; to be written anew."""
        if self._is_asleep:
            self._engine.wake("weights")

    def wake_cache(self) -> Sums:
        """Give the KV cache its memory, and compare what is in use with earlier steps.

        Returns: mem/engine_freed_gib and mem/after_wake_gib, of this rank; {} if it was awake.
        Raises: RuntimeError when more than GROWTH_* did not come back.
        """
        if not self._is_asleep:
            return {}
        self._engine.wake("cache")
        self._is_asleep = False
        level = self._engine.held_bytes()
        self._wakes += 1
        if self._wakes <= 2:  # the second follows an update, which makes what all others find
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
