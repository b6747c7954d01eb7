"""The proof that a run gives of engine.exact."""

from __future__ import annotations

import math
from collections.abc import Mapping


def check_equal(gap: float, *, at: str) -> None:
    """End a run whose engine and trainer differ.

    Args:
        gap: |engine - trainer| of logprobs, summed or averaged, nats.
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


def check_sampled(sums: Mapping[str, tuple[float, float]], *, step: int) -> None:
    """End a run in which a token was sampled with another logprob than the trainer computed.

    Args:
        sums: of the step's updates, the first of which compared engine and trainer; without a
            comparison no token was in the loss.
    Raises: RuntimeError.
    """
    gap, count = sums.get("policy/mismatch_logprob_diff", (0.0, 0.0))
    unknown, _ = sums.get("policy/mismatch_nan_frac", (0.0, 0.0))
    check_equal(math.nan if unknown else gap / max(count, 1.0), at=f"step {step}")
