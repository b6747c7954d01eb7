"""Reward shaping, estimates of pass@k and best@k, and the adaptive KL coefficient.

Functions of rewards take and return [S] tensors; the results are float64, task units. They treat
each sample alone, so they are invariant under any order or placement of samples. They do not change
a reward that is not finite: the advantage refuses it by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from spmdrl.algorithms.masked import check_not_negative, check_unit
from spmdrl.errors import Refusal

RIGHT_AT = 1.0
"""A sample is right if its reward is at least this, the most that a verifiable reward gives."""
ROUNDING = 1e-9
"""Tolerance of RIGHT_AT, because weights such as 0.7 + 0.2 + 0.1 add up to just below 1."""


def shape(
    rewards: Tensor,
    response_lengths: Tensor,
    is_truncated: Tensor,
    *,
    max_response_tokens: int,
    overlong_tokens: int,
    overlong_penalty: float,
    truncated_factor: float,
    truncated_penalty: float,
    shift: float,
    scale: float,
    clamp_low: float,
    clamp_high: float,
) -> Tensor:
    """Apply the settings of `rewards.shaping`: penalties first, then shift, scale and clamp.

    Args:
        rewards: [S] float, task units; NaN stays NaN. response_lengths: [S] int64, tokens.
        is_truncated: [S] bool. max_response_tokens: the length limit.
        overlong_tokens, overlong_penalty: see `penalize_overlong`; with 0 tokens there is no
            penalty.
        truncated_factor, truncated_penalty: see `stop_properly`.
        shift, scale, clamp_low, clamp_high: see `scale_and_clamp`.
    Returns: [S] float64.
    Raises: Refusal for an option out of range.
    """
    if overlong_tokens:
        rewards = penalize_overlong(
            rewards,
            response_lengths,
            max_response_tokens=max_response_tokens,
            buffer_tokens=overlong_tokens,
            penalty=overlong_penalty,
        )
    rewards = stop_properly(
        rewards, is_truncated, factor=truncated_factor, penalty=truncated_penalty
    )
    return scale_and_clamp(rewards, shift=shift, scale=scale, low=clamp_low, high=clamp_high)


def penalize_overlong(
    rewards: Tensor,
    response_lengths: Tensor,
    *,
    max_response_tokens: int,
    buffer_tokens: int,
    penalty: float = 1.0,
) -> Tensor:
    """Subtract up to `penalty` from responses that come close to the length limit.

    The penalty is 0 up to max_response_tokens - buffer_tokens tokens. It rises linearly to
    `penalty` at the limit.

    Args:
        rewards: [S] float, task units. response_lengths: [S] int64, tokens.
        max_response_tokens: L. buffer_tokens: c, in [1, L].
        penalty: task units, at least 0.
    Returns: [S] float64.
    Raises: Refusal for an option out of range.
    Source: arXiv 2503.14476 eq. 13 (soft overlong punishment).
    """
    if not 1 <= buffer_tokens <= max_response_tokens:
        raise Refusal(
            f"buffer_tokens: must be in [1, max_response_tokens = "
            f"{max_response_tokens}], got {buffer_tokens}"
        )
    check_not_negative(penalty=penalty)
    excess = response_lengths.double() - (max_response_tokens - buffer_tokens)
    return rewards.double() - penalty * (excess / buffer_tokens).clamp(0, 1)


def stop_properly(
    rewards: Tensor, is_truncated: Tensor, *, factor: float = 1.0, penalty: float = 0.0
) -> Tensor:
    """Lower the reward of responses that were cut at the length limit: factor R - penalty.

    Args:
        rewards: [S] float, task units. is_truncated: [S] bool.
        factor: in [0, 1]; not applied to a negative reward, which it would raise.
        penalty: task units, at least 0.
    Returns: [S] float64.
    Raises: Refusal for an option out of range.
    Source: NeMo-RL's stop_properly_penalty_coef (factor) for positive rewards.
    """
    check_unit(factor=factor)
    check_not_negative(penalty=penalty)
    rewards = rewards.double()
    lowered = torch.minimum(rewards, factor * rewards) - penalty
    return torch.where(is_truncated, lowered, rewards)


def scale_and_clamp(
    rewards: Tensor,
    *,
    shift: float = 0.0,
    scale: float = 1.0,
    low: float = -math.inf,
    high: float = math.inf,
) -> Tensor:
    """Return clamp(scale (R + shift), low, high).

    Args:
        rewards: [S] float, task units.
        shift, low, high: task units. scale: finite.
    Returns: [S] float64.
    Raises: Refusal unless low < high and shift and scale are finite.
    Source: common practice; a linear map and bounds.
    """
    if not low < high:
        raise Refusal(f"low, high: must be low < high, got {low}, {high}")
    if not (math.isfinite(shift) and math.isfinite(scale)):
        raise Refusal(f"shift, scale: must be finite, got {shift}, {scale}")
    scaled = scale * (rewards.double() + shift)
    return torch.where(scaled.isfinite(), scaled.clamp(low, high), scaled)


def pass_at_k_estimate(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate without bias the probability that at least one of k samples is right.

    1 - C(n - c, k) / C(n, k), the mean over all subsets of k of the n samples. Computed in
    integers, so that the result is the nearest float.

    Raises: Refusal unless 0 <= num_correct <= num_samples and 1 <= k <= num_samples.
    Source: arXiv 2107.03374 eq. 1.
    """
    if not 0 <= num_correct <= num_samples:
        raise Refusal(
            f"num_correct: must be in [0, num_samples = {num_samples}], got {num_correct}"
        )
    _check_k(k, num_samples)
    subsets = math.comb(num_samples, k)
    return (subsets - math.comb(num_samples - num_correct, k)) / subsets


def best_at_k_estimate(rewards: Sequence[float], k: int) -> float:
    """Estimate without bias the best reward of k samples: the mean over all subsets of k.

    For rewards of 0 and 1 it is `pass_at_k_estimate`.

    Raises: Refusal unless 1 <= k <= number of rewards.
    """
    _check_k(k, len(rewards))
    subsets = math.comb(len(rewards), k)
    # The i-th smallest (from 0) is the best of C(i, k - 1) subsets.
    return math.fsum(
        reward * (math.comb(i, k - 1) / subsets) for i, reward in enumerate(sorted(rewards))
    )


def _check_k(k: int, num_samples: int) -> None:
    if not 1 <= k <= num_samples:
        raise Refusal(f"k: must be in [1, {num_samples}], the number of samples, got {k}")


def adaptive_kl_coef(
    coef: float, *, kl: float, target: float, horizon: float, num_samples: int
) -> float:
    """Move the KL coefficient toward the one that holds the KL at its target.

    coef (1 + e num_samples / horizon), with e = kl / target - 1 clipped to +-0.2.

    Args:
        coef: current coefficient, task units per nat.
        kl: measured with it, nats per token or sequence.
        target: in the unit of kl, above 0.
        horizon: samples over which the coefficient may change by a fifth.
        num_samples: sequences since the last call.
    Returns: the next coefficient, above 0 if coef is.
    Raises: Refusal for a kl that is not finite, a target or horizon that is not above 0, a negative
        coef, or so large a num_samples that the coefficient could reach 0.
    Source: arXiv 1909.08593 section 2.2 (Ziegler et al.), in the form of lvwerra/trl.
    """
    if not math.isfinite(kl):
        raise Refusal(f"kl: must be finite, got {kl}")
    if not (coef >= 0 and target > 0 and horizon > 0):
        raise Refusal(
            f"coef, target, horizon: must be at least 0, above 0 and above 0, got "
            f"{coef}, {target}, {horizon}"
        )
    if not 0 <= num_samples < 5 * horizon:
        raise Refusal(
            f"horizon: {horizon} is too short for {num_samples} samples a step: the "
            f"coefficient could reach 0; use more than {num_samples / 5:g}"
        )
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * num_samples / horizon)
