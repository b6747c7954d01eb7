"""The proof that a run gives of engine.exact."""

from __future__ import annotations

import math
from collections.abc import Mapping

_GAP = "policy/mismatch_logprob_diff"


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
        sums: of the step's updates, the first of which compares engine and trainer.
    Raises: RuntimeError, also where that update was skipped.
    """
    if _GAP not in sums:
        raise RuntimeError(
            f"step {step}: engine and trainer were not compared, and engine.exact promises it: the "
            "first update was skipped, because its loss or gradient is not finite; "
            "output_dir/skipped has its tokens"
        )
    gap, count = sums[_GAP]
    unknown, _ = sums["policy/mismatch_nan_frac"]
    check_equal(math.nan if unknown else gap / max(count, 1.0), at=f"step {step}")
