"""Colocated placement: the update uses the engine's memory while nothing is generated.

`release` is called where generation ends, `wake_weights` where a push begins, `wake_cache` where it
ends. In the first steps, and in some later ones, they ask the device how much memory is in use, so
that memory that is not freed is found near the step that keeps it. To ask takes time: torch's cache
is emptied and filled again.
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
"""The memory in use after a wake may grow beyond that of the first wake after an update without a
warning: by this share of it, or by this many bytes if that is more. NCCL's communicators, which
open when they are first used, take some hundred MB each."""
_FIRST = 5
_EVERY = 50
"""Memory is measured at the first wakes and at every so many later."""
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
        self._is_measured = False
        self._freed = 0
        self._wakes = 0
        self._level = 0

    def release(self, *, keeps_weights: bool) -> None:
        """Put the engine to sleep, unless requests are unfinished.

        Args:
            keeps_weights: the next push will not write all weights.
        Raises: RuntimeError when this frees no memory, where it is measured.
        """
        if not self._sleeps or self._is_asleep or self._engine.is_busy:
            return
        self._is_measured = self._wakes < _FIRST or self._wakes % _EVERY == 0
        before = self._engine.held_bytes() if self._is_measured else 0
        self._engine.sleep(keeps_weights=keeps_weights)
        self._is_asleep = True
        if not self._is_measured:
            return
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
        """Allocate the KV cache's memory, and compare the memory in use with earlier steps. The log
        warns when it has grown by more than GROWTH_*.

        Returns: mem/engine_freed_gib and mem/after_wake_gib, of this rank; {} if it was awake or
            is not measured.
        """
        if not self._is_asleep:
            return {}
        self._engine.wake("cache")
        self._is_asleep = False
        self._wakes += 1
        if not self._is_measured:
            return {}
        level = self._engine.held_bytes()
        if self._wakes <= 2:  # the second is the first after an update, which allocates its states
            self._level = level
        grown = level - self._level
        margin = max(GROWTH_FRAC * self._level, GROWTH_BYTES)
        if grown > margin:
            log.warning(
                "memory grows: %.4g GiB are in use after the engine woke for the %dth time, %.3g "
                "GiB more than the %.4g GiB after the second. Something of the update is not given "
                "back, or another process is on this device; if this goes on, the run ends out of "
                "memory: lower batch.tokens_per_microbatch if a step needs more, else find what is "
                "kept",
                level / _GIB,
                self._wakes,
                grown / _GIB,
                self._level / _GIB,
            )
        return {
            "mem/engine_freed_gib": (self._freed / _GIB, 1.0),
            "mem/after_wake_gib": (level / _GIB, 1.0),
        }
