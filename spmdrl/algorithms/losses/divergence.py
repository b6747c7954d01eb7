"""Losses that drop a token once it moved too far in probability, not in ratio. T packed tokens.

Both take the ratio w = pi / mu to the policy that sampled, so they need no pi_old and already
correct for the engine; take no correction besides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.algorithms.losses.common import (
    dropped_stats,
    rollout_log_ratio,
    rollout_stats,
    sampled_logprobs,
)
from spmdrl.algorithms.masked import Stats, check_not_negative, keep


def dppo_tv(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    *,
    advantages: Tensor,
    loss_mask: Tensor,
    threshold_low: float = 0.15,
    threshold_high: float = 0.15,
) -> tuple[Tensor, Stats]:
    """Return -w A, without the tokens whose probability moved too far the way A pushes.

    Dropped: pi - mu > threshold_high where A > 0, mu - pi > threshold_low where A < 0.

    Args:
        logprobs, rollout_logprobs: [T] float, nats. Trainer's and engine's.
        advantages: [T] float. loss_mask: [T] bool.
        threshold_low, threshold_high: bounds on the total variation of taking the token or
            another, in probability, at least 0.
    Returns: terms [T] and stats.
    Raises: ValueError for a threshold below 0.
    Source: arXiv 2602.04879 (DPPO, binary TV).
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    check_not_negative(threshold_low=threshold_low, threshold_high=threshold_high)
    new, sampled = _log_probabilities(logprobs, rollout_logprobs)
    moved = new.exp() - sampled.exp()
    return _without(
        moved > threshold_high,
        moved < -threshold_low,
        logprobs=logprobs,
        rollout_logprobs=rollout_logprobs,
        advantages=advantages,
        loss_mask=loss_mask,
    )


def dppo_kl(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    *,
    advantages: Tensor,
    loss_mask: Tensor,
    threshold_low: float = 0.05,
    threshold_high: float = 0.05,
) -> tuple[Tensor, Stats]:
    """Return -w A, without the tokens whose divergence grew too far the way A pushes.

    The divergence is KL(mu || pi) of taking the token or another,
    mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)). Dropped: above threshold_high with
    pi > mu where A > 0, above threshold_low with pi < mu where A < 0.

    Args:
        logprobs, rollout_logprobs: [T] float, nats. Trainer's and engine's.
        advantages: [T] float. loss_mask: [T] bool.
        threshold_low, threshold_high: bounds on the divergence, nats, at least 0.
    Returns: terms [T] and stats.
    Raises: ValueError for a threshold below 0.
    Source: arXiv 2602.04879 (DPPO, binary KL).
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    check_not_negative(threshold_low=threshold_low, threshold_high=threshold_high)
    new, sampled = _log_probabilities(logprobs, rollout_logprobs)
    rest = -torch.expm1(sampled)  # 1 - mu, exact where mu is near 1
    of_rest = rest * (rest.log() - (-torch.expm1(new)).log())
    divergence = sampled.exp() * (sampled - new) + torch.where(rest > 0, of_rest, 0.0)
    return _without(
        (divergence > threshold_high) & (new > sampled),
        (divergence > threshold_low) & (new < sampled),
        logprobs=logprobs,
        rollout_logprobs=rollout_logprobs,
        advantages=advantages,
        loss_mask=loss_mask,
    )


def _log_probabilities(logprobs: Tensor, rollout_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Return log pi and log mu, [T] float64, detached, at most 0 where rounding had it above."""
    sampled = sampled_logprobs(logprobs, rollout_logprobs)
    return logprobs.detach().double().clamp(max=0.0), sampled.double().clamp(max=0.0)


def _without(
    up: Tensor,
    down: Tensor,
    *,
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
) -> tuple[Tensor, Stats]:
    """Drop where A pushes further `up` or `down`, both [T] bool."""
    advantages = keep(advantages.detach(), loss_mask)
    dropped = ((advantages > 0) & up) | ((advantages < 0) & down)
    log_w = rollout_log_ratio(logprobs, rollout_logprobs, loss_mask)
    terms = keep(-log_w.exp() * advantages, loss_mask & ~dropped)
    return terms, rollout_stats(log_w, loss_mask) | dropped_stats(dropped, loss_mask)
