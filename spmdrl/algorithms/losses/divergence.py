"""Losses that drop a token once it moved too far in probability, not in ratio. T packed tokens.

Both take the ratio w = pi / mu to the policy that sampled, so they need no pi_old and already
correct for the engine; take no correction besides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.algorithms.losses.common import Loss, Moved, from_rollout
from spmdrl.algorithms.masked import check_bound, check_not_negative, making


@making(moved=from_rollout)
def dppo_tv(
    moved: Moved,
    *,
    threshold_low: float = 0.15,
    threshold_high: float = 0.15,
    ratio_cap: float = 20.0,
) -> Loss:
    """Return -w A, without the tokens whose probability moved too far the way A pushes.

    Dropped: pi - mu > threshold_high where A > 0, mu - pi > threshold_low where A < 0.

    Args:
        logprobs, rollout_logprobs: [T] float, nats. Trainer's and engine's.
        advantages: [T] float. loss_mask: [T] bool.
        threshold_low, threshold_high: bounds on the total variation of taking the token or
            another, in probability, at least 0.
        ratio_cap: largest w, above 0; a token beyond keeps its gradient, weighed by the cap.
    Returns: terms [T] and stats.
    Raises: Refusal for a threshold below 0, or a cap that is not above 0.
    Source: arXiv 2602.04879 (DPPO, binary TV).
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    check_not_negative(threshold_low=threshold_low, threshold_high=threshold_high)
    new, sampled = _log_probabilities(moved)
    gap = new.exp() - sampled.exp()
    return _without(gap > threshold_high, gap < -threshold_low, moved, ratio_cap=ratio_cap)


@making(moved=from_rollout)
def dppo_kl(
    moved: Moved,
    *,
    threshold_low: float = 0.05,
    threshold_high: float = 0.05,
    ratio_cap: float = 20.0,
) -> Loss:
    """Return -w A, without the tokens whose divergence grew too far the way A pushes.

    The divergence is KL(mu || pi) of taking the token or another,
    mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)). Dropped: above threshold_high with
    pi > mu where A > 0, above threshold_low with pi < mu where A < 0.

    Args:
        logprobs, rollout_logprobs: [T] float, nats. Trainer's and engine's.
        advantages: [T] float. loss_mask: [T] bool.
        threshold_low, threshold_high: bounds on the divergence, nats, at least 0.
        ratio_cap: largest w, above 0; a token beyond keeps its gradient, weighed by the cap.
    Returns: terms [T] and stats.
    Raises: Refusal for a threshold below 0, or a cap that is not above 0.
    Source: arXiv 2602.04879 (DPPO, binary KL).
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    check_not_negative(threshold_low=threshold_low, threshold_high=threshold_high)
    new, sampled = _log_probabilities(moved)
    rest = -torch.expm1(sampled)  # 1 - mu, exact where mu is near 1
    of_rest = rest * (rest.log() - (-torch.expm1(new)).log())
    divergence = sampled.exp() * (sampled - new) + torch.where(rest > 0, of_rest, 0.0)
    up = (divergence > threshold_high) & (new > sampled)
    down = (divergence > threshold_low) & (new < sampled)
    return _without(up, down, moved, ratio_cap=ratio_cap)


def _log_probabilities(moved: Moved) -> tuple[Tensor, Tensor]:
    """Return log pi and log mu, [T] float64, detached, at most 0 where rounding had it above."""
    new, sampled = (x.detach().double().clamp(max=0.0) for x in (moved.logprobs, moved.before))
    return new, sampled


def _without(up: Tensor, down: Tensor, moved: Moved, *, ratio_cap: float) -> Loss:
    """Drop where A pushes further `up` or `down`, both [T] bool."""
    check_bound(ratio_cap=ratio_cap)
    dropped = ((moved.advantages > 0) & up) | ((moved.advantages < 0) & down)
    capped = moved.ratio.detach().clamp(max=ratio_cap) * (1 + moved.own)
    return moved.loss(-capped * moved.advantages, dropped=dropped)
