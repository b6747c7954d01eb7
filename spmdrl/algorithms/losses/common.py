"""What the policy losses share: log-ratios, clipping, stats, checks. T packed tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from spmdrl.algorithms.masked import Method, Stats, attach, keep, masked_mean

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: beyond it one token decides the whole gradient


def aggregated_by(*names: str) -> Callable[[Method], Method]:
    """Say which aggregations make a method the objective of its paper; others are refused.

    For methods whose terms are a sequence's, which an aggregation over tokens would weigh by
    its length.
    """

    return attach(aggregations=names)


def with_statistics(companion: Callable[..., dict[str, Tensor]]) -> Callable[[Method], Method]:
    """Attach, as `statistics`, the function that gives a method its whole-batch scalars.

    The companion takes, by name, [N] columns of the loss tokens of the whole batch (all ranks;
    N may be 0) and those of the method's options that matter to it. It returns {input name: []
    float64}, to be passed to the method for every micro-batch. Its columns are those of the
    batch's start: computed once, the scalars do not move during the batch's updates.
    Invariant under: permuting the columns, bit for bit.
    """

    return attach(statistics=companion)


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


class Clipped(NamedTuple):
    """A clipped objective of T tokens."""

    surrogate: Tensor
    """min(r A, clip(r) A)."""
    low: Tensor
    """Where the lower bound is active."""
    high: Tensor
    stats: Stats


def clipped(
    ratio: Tensor, advantages: Tensor, *, loss_mask: Tensor, clip_low: float, clip_high: float
) -> Clipped:
    """Clip a ratio r where it helps the objective. Raises: ValueError for bounds out of range."""
    check_clip(clip_low, clip_high)
    advantages = keep(advantages.detach(), loss_mask)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    low = (advantages < 0) & (ratio < 1 - clip_low)
    high = (advantages > 0) & (ratio > 1 + clip_high)
    stats = ratio_stats(ratio, loss_mask) | clip_stats(loss_mask, low=low, high=high)
    return Clipped(torch.minimum(ratio * advantages, bounded * advantages), low, high, stats)


def weighted(
    logprobs: Tensor, advantages: Tensor, weight: Tensor | None = None, *, loss_mask: Tensor
) -> Tensor:
    """Return -weight A log pi: [T], with a weight that carries no gradient; None for 1."""
    factor = keep(advantages.detach(), loss_mask)
    if weight is not None:
        factor = (weight * factor).to(logprobs.dtype)
    return keep(-factor * keep(logprobs, loss_mask), loss_mask)


def check_clip(clip_low: float, clip_high: float) -> None:
    """Raise ValueError for distances from 1 that are not bounds on a ratio."""
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(
            f"clip_low, clip_high: distances from a ratio of 1, must be in [0, 1] "
            f"and at least 0, got {clip_low}, {clip_high}"
        )


def check_level(level: str) -> None:
    """Raise ValueError for a level that is neither token nor sequence."""
    if level not in ("token", "sequence"):
        raise ValueError(f"level: must be token or sequence, got {level!r}")
