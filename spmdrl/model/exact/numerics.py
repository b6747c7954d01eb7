"""How engine and trainer compute: as their libraries do, or with the same bits (engine.exact).

Each of them asks `numerics_of` once, and applies what it gets to its modules, its cache and its
checks. So nothing else depends on which of the two it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from spmdrl.config import Config
from spmdrl.model.exact.functions import compute_exactly
from spmdrl.model.exact.units import ALIGNED, padded
from spmdrl.model.lora.layers import Adapters
from spmdrl.model.lora.merged_layers import check_mergeable, compute_merged
from spmdrl.model.lora.targets import Targets
from spmdrl.types import Microbatch

_GAP = "policy/mismatch_logprob_diff"


class Numerics:
    """Engine and trainer compute as their libraries do."""

    samples_as_scored = False
    """Whether engines sampled with the policy's logprobs before its update."""

    def apply(self, *modules: nn.Module) -> None:
        """Have modules compute so; they may be inside each other."""

    def check_targets(self, targets: Targets) -> None:
        """Refuse adapters of layers that cannot compute so. Raises: Refusal."""

    def apply_to_adapters(self, adapters: Adapters) -> None:
        """Have layers with adapters compute so."""

    def kernel(self, wanted: str) -> str:
        """Return the attention kernel, where settings want `wanted`."""
        return wanted

    def slot_tokens(self, longest: int) -> int:
        """Return the tokens of a cache's slot, for sequences of up to `longest`."""
        return longest

    def comparison(self) -> EngineComparison:
        """Return which logprobs are compared with the engine's."""
        return EngineComparison()

    def allowed_gap(self, limit: float) -> float:
        """Return the largest mean gap of logprobs between engine and trainer, nats.

        Args:
            limit: that their rounding, or a setting, allows.
        """
        return limit

    def check_probe(self, gap: float, *, version: int) -> None:
        """End a run whose engine and trainer differ by a mean of `gap` nats, if none is allowed."""

    def check_step(self, sums: Mapping[str, tuple[float, float]], *, step: int) -> None:
        """End a run in which a token was sampled with another logprob than the trainer computed.

        Args:
            sums: of the step's updates.
        """


class Scored(Protocol):
    """A micro-batch, see PreparedMicrobatch."""

    @property
    def packed(self) -> Microbatch:
        """Its tokens."""
        ...

    @property
    def loss_mask(self) -> Tensor:
        """[T] bool."""
        ...


class EngineComparison:
    """Which logprobs of a step's micro-batches are compared with those that engines sampled with:
    all of the policy before the step's updates."""

    def begin(self, first: Sequence[object]) -> None:
        """Begin a step.

        Args:
            first: micro-batches of the first update.
        """

    def chosen(
        self, microbatch: Scored, *, old: Tensor, current: Tensor, version: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return logprobs of a micro-batch [T], and which to compare [T] bool; None for none.

        Args:
            old: of the policy before the step's updates.
            current: that this pass computed.
            version: [] int64, of the policy before the step's updates.
        """
        return old, microbatch.loss_mask


class Exact(Numerics):
    """Engine and trainer compute the same bits, and a run in which they differ ends.

    Args:
        in_flight: weights may change within a response: tokens of older ones are not compared.
    """

    def __init__(self, *, in_flight: bool = False):
        self._in_flight = in_flight
        self.samples_as_scored = not in_flight

    def apply(self, *modules: nn.Module) -> None:
        """See Numerics."""
        compute_exactly(*modules)

    def check_targets(self, targets: Targets) -> None:
        """See Numerics."""
        check_mergeable(targets)

    def apply_to_adapters(self, adapters: Adapters) -> None:
        """See Numerics."""
        compute_merged(adapters)

    def kernel(self, wanted: str) -> str:
        """See Numerics."""
        return "exact"

    def slot_tokens(self, longest: int) -> int:
        """See Numerics. So long, keys are read where they are."""
        return padded(longest, ALIGNED)

    def comparison(self) -> EngineComparison:
        """See Numerics."""
        return _FirstUpdate(in_flight=self._in_flight)

    def allowed_gap(self, limit: float) -> float:
        """See Numerics."""
        return 0.0

    def check_probe(self, gap: float, *, version: int) -> None:
        """See Numerics."""
        _check_equal(gap, at=f"probe at version {version}")

    def check_step(self, sums: Mapping[str, tuple[float, float]], *, step: int) -> None:
        """See Numerics. Raises: RuntimeError, also where the first update was skipped."""
        if _GAP not in sums:
            raise RuntimeError(
                f"step {step}: engine and trainer were not compared, and engine.exact promises it: "
                "the first update was skipped, because its loss or gradient is not finite; "
                "output_dir/skipped has its tokens"
            )
        gap, count = sums[_GAP]
        unknown, _ = sums["policy/mismatch_nan_frac"]
        _check_equal(math.nan if unknown else gap / max(count, 1.0), at=f"step {step}")


class _FirstUpdate(EngineComparison):
    """Compares what the first update computes, by the weights that sampled."""

    def __init__(self, *, in_flight: bool):
        self._in_flight = in_flight
        self._left: list[object] = []  # micro-batches that took no gradient yet

    def begin(self, first: Sequence[object]) -> None:
        """See EngineComparison."""
        self._left = [*first]

    def chosen(
        self, microbatch: Scored, *, old: Tensor, current: Tensor, version: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """See EngineComparison."""
        if not any(one is microbatch for one in self._left):
            return None
        # With `balance: aux` a pass without gradients comes first, whose metrics are dropped.
        if torch.is_grad_enabled():
            self._left = [one for one in self._left if one is not microbatch]
        mask = microbatch.loss_mask
        if self._in_flight:
            mask = mask & (microbatch.packed.policy_versions == version)
        return current, mask


def _check_equal(gap: float, *, at: str) -> None:
    """End a run whose engine and trainer differ.

    Args:
        gap: |engine - trainer| of logprobs, averaged, nats.
        at: when they were compared.
    Raises: RuntimeError when it is not 0.
    """
    if gap == 0:
        return
    raise RuntimeError(
        f"{at}: log-probabilities of engine and trainer differ by {gap:.3g} nats on average with "
        "the same weights, and engine.exact promises 0; `python -m spmdrl check MODEL --exact` "
        "names the first module that differs"
    )


def numerics_of(cfg: Config) -> Numerics:
    """Return how the engine and the trainer of a config compute."""
    if not cfg.engine.exact:
        return Numerics()
    return Exact(in_flight=cfg.rollout.schedule.in_flight)
