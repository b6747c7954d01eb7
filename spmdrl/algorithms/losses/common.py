"""What the policy losses share: masked values, log-ratios, stats, checks. T packed tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Stats = dict[str, tuple[Tensor, Tensor]]
Loss = TypeVar("Loss", bound=Callable[..., Any])

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: beyond it one token decides the whole gradient


def aggregated_by(*names: str) -> Callable[[Loss], Loss]:
    """Say which aggregations make a method the objective of its paper; others are refused.

    For methods whose terms are a sequence's, which an aggregation over tokens would weigh by
    its length.
    """

    def attach(function: Loss) -> Loss:
        function.aggregations = names  # type: ignore[attr-defined]
        return function

    return attach


def with_statistics(companion: Callable[..., dict[str, Tensor]]) -> Callable[[Loss], Loss]:
    """Attach, as `statistics`, the function that gives a method its whole-batch scalars.

    The companion takes, by name, [N] columns of the loss tokens of the whole batch (all ranks;
    N may be 0) and those of the method's options that matter to it. It returns {input name: []
    float64}, to be passed to the method for every micro-batch. Its columns are those of the
    batch's start: computed once, the scalars do not move during the batch's updates.
    Invariant under: permuting the columns, bit for bit.
    """

    def attach(function: Loss) -> Loss:
        function.statistics = companion  # type: ignore[attr-defined]
        return function

    return attach


def keep(values: Tensor, loss_mask: Tensor) -> Tensor:
    """Return [T] values with exactly 0, and no gradient, off the loss mask."""
    # where, not a product: NaN * 0 is NaN, and so would be the gradient.
    return torch.where(loss_mask, values, 0.0)


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Return log r = log pi - log pi_old: [T], nats, clamped, 0 off the loss mask."""
    difference = keep(logprobs - old_logprobs.detach(), loss_mask)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def rollout_log_ratio(logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Return log w = log pi - log mu: [T], nats, clamped, 0 off the loss mask.

    Where the engine's logprob is not finite, mu is taken to be the current policy: w is 1 and
    has the gradient of an on-policy token.
    """
    return log_ratio(logprobs, sampled_logprobs(logprobs, rollout_logprobs), loss_mask)


def sampled_logprobs(logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Return log mu: [T], nats, detached; log pi where the engine's is not finite."""
    rollout = rollout_logprobs.detach()
    return torch.where(rollout.isfinite(), rollout, logprobs.detach())


def masked_mean(values: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum and count of [T] values over loss tokens, detached float64 scalars."""
    return keep(values.detach(), loss_mask).double().sum(), loss_mask.double().sum()


def ratio_stats(ratio: Tensor, loss_mask: Tensor) -> Stats:
    """Report a [T] ratio to pi_old: its mean, and k1 of old || current in nats."""
    ratio = ratio.detach()
    return {
        "policy/ratio": masked_mean(ratio, loss_mask),
        "policy/kl_old": masked_mean(-ratio.log(), loss_mask),
    }


def rollout_stats(log_w: Tensor, loss_mask: Tensor) -> Stats:
    """Report [T] log w: the mean of w = pi / mu, and k1 of mu || current in nats."""
    return {
        "policy/rollout_ratio": masked_mean(log_w.detach().exp(), loss_mask),
        "policy/kl_rollout": masked_mean(-log_w, loss_mask),
    }


def clip_stats(loss_mask: Tensor, *, low: Tensor, high: Tensor) -> Stats:
    """Report the shares of tokens clipped at either bound, from [T] bool each."""
    return {
        "policy/clip_frac": masked_mean((low | high).double(), loss_mask),
        "policy/clip_low_frac": masked_mean(low.double(), loss_mask),
        "policy/clip_high_frac": masked_mean(high.double(), loss_mask),
    }


def dropped_stats(dropped: Tensor, loss_mask: Tensor) -> Stats:
    """Report the share of loss tokens that a method leaves out, from [T] bool."""
    return {"policy/dropped_frac": masked_mean(dropped.double(), loss_mask)}


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return min(r A, clip(r) A) and where its lower and its upper bound is active: [T] each."""
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    low = (advantages < 0) & (ratio < 1 - clip_low)
    high = (advantages > 0) & (ratio > 1 + clip_high)
    return torch.minimum(ratio * advantages, clipped * advantages), low, high


def check_clip(clip_low: float, clip_high: float) -> None:
    """Raise ValueError for distances from 1 that are not bounds on a ratio."""
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(
            f"clip_low, clip_high: distances from a ratio of 1, must be in [0, 1] "
            f"and at least 0, got {clip_low}, {clip_high}"
        )


def check_positive(**values: float) -> None:
    """Raise ValueError for an option that is not a finite number above 0."""
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name}: must be above 0, got {value}")


def check_not_negative(**values: float) -> None:
    """Raise ValueError for an option that is not a finite number of at least 0."""
    for name, value in values.items():
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name}: must be at least 0, got {value}")


def check_share(**values: float) -> None:
    """Raise ValueError for an option that is not a share of the tokens."""
    for name, value in values.items():
        if not 0 < value <= 1:
            raise ValueError(f"{name}: a share, must be above 0 and at most 1, got {value}")


def check_level(level: str) -> None:
    """Raise ValueError for a level that is neither token nor sequence."""
    if level not in ("token", "sequence"):
        raise ValueError(f"level: must be token or sequence, got {level!r}")
