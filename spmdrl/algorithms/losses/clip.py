"""Losses that bound how far a token moves. T packed tokens.

`ppo_clip` and `sapo` bound its ratio r = pi / pi_old. `decoupled_ppo` and `a3po` clip around
pi_prox, the policy of the batch's start, which is not the one that sampled; a detached weight
pi_prox / mu corrects for that. `dppo_tv` and `dppo_kl` drop a token once it moved too far in
probability, not in ratio, and take the ratio w = pi / mu to the policy that sampled. These four
correct for the engine themselves; do not add a correction.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from spmdrl.algorithms.losses.common import (
    Loss,
    Moved,
    check_clip,
    from_old,
    from_rollout,
    log_ratio,
    ratio_of,
    sampled_logprobs,
)
from spmdrl.algorithms.masked import (
    check_bound,
    check_not_negative,
    check_positive,
    making,
    masked_mean,
)
from spmdrl.errors import Refusal

__all__ = ["a3po", "decoupled_ppo", "dppo_kl", "dppo_tv", "ppo_clip", "sapo"]


@making(moved=from_old)
def ppo_clip(
    moved: Moved,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 0.0,
    ratio_cap: float = 0.0,
) -> Loss:
    """Clip the ratio r = pi / pi_old: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    Args:
        logprobs, old_logprobs: [T] float, nats. Current and at batch preparation.
        advantages: [T] float. loss_mask: [T] bool.
        clip_low, clip_high: distances from 1 of the bounds.
        dual_clip: for A < 0, no term above dual_clip * |A|; 0 switches it off, else above 1.
        ratio_cap: r is capped here before the min (matters for A < 0); 0 is off, else above
            1 + clip_high.
    Returns: terms [T] and stats.
    Raises: Refusal for bounds out of range.
    Source: arXiv 1707.06347 eq. 7; 2503.14476 (two bounds); 1912.09729 (dual_clip);
        2505.07291 (ratio_cap).
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    check_clip(clip_low, clip_high)
    if dual_clip and dual_clip <= 1:
        raise Refusal(f"dual_clip: must be above 1 (or 0 for off), got {dual_clip}")
    if ratio_cap and ratio_cap <= 1 + clip_high:
        raise Refusal(
            f"ratio_cap: must be above 1 + clip_high = {1 + clip_high:g} (or 0 for "
            f"off), got {ratio_cap}"
        )
    advantages = moved.advantages
    ratio = moved.ratio
    _, low, high = moved.clipped(clip_low, clip_high)
    capped = ratio.clamp(max=ratio_cap) if ratio_cap else ratio
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(capped * advantages, clipped * advantages)
    if dual_clip:
        floor = dual_clip * advantages
        surrogate = torch.where((advantages < 0) & (surrogate < floor), floor, surrogate)
    bound = min([b for b in (dual_clip, ratio_cap) if b], default=float("inf"))
    beyond = (advantages < 0) & (ratio > bound)
    terms, stats = moved.loss(-surrogate, low=low, high=high | beyond)
    return terms, stats | {"policy/dual_clip_frac": masked_mean(beyond, moved.loss_mask)}


@making(moved=from_old)
def sapo(moved: Moved, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Loss:
    """Gate the ratio softly: -(4 / tau) sigmoid(tau (r - 1)) A.

    The gradient's weight is 4 s (1 - s) r A with s the sigmoid: A at r = 1, for any tau, and
    fading on both sides. The term itself is -2 A / tau there.

    Args:
        logprobs, old_logprobs: [T] float, nats.
        advantages: [T] float. loss_mask: [T] bool.
        tau_pos, tau_neg: steepness of the gate for A > 0 and for the rest; higher fades faster.
    Returns: terms [T] and stats.
    Raises: Refusal for a tau that is not above 0.
    Source: arXiv 2511.20347 (SAPO).
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    check_positive(tau_pos=tau_pos, tau_neg=tau_neg)
    tau = torch.full_like(moved.ratio, tau_neg).masked_fill(moved.advantages > 0, tau_pos)
    gate = 4 / tau * torch.sigmoid(tau * (moved.ratio - 1))
    return moved.loss(-gate * moved.advantages)


@making(moved=from_old)
def decoupled_ppo(
    moved: Moved,
    rollout_logprobs: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    weight_cap: float = 0.0,
) -> Loss:
    """Clip around pi_old, weigh by its ratio to mu: -sg(pi_old / mu) min(r A, clip(r) A).

    Args:
        logprobs, old_logprobs, rollout_logprobs: [T] float, nats.
        advantages: [T] float. loss_mask: [T] bool.
        clip_low, clip_high: distances from 1 of the bounds on r = pi / pi_old.
        weight_cap: tokens whose pi_old / mu is above it are dropped; 0 switches it off.
    Returns: terms [T] and stats.
    Raises: Refusal for bounds out of range.
    Source: arXiv 2110.00641; 2505.24298 (AReaL), whose code has the cap.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    mu = sampled_logprobs(moved.before, rollout_logprobs)
    weight = ratio_of(log_ratio(moved.before, mu, moved.loss_mask))
    return _decoupled(moved, weight, (clip_low, clip_high), weight_cap=weight_cap)


@making(moved=from_rollout)
def a3po(
    moved: Moved,
    *,
    policy_versions: Tensor,
    version: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    weight_cap: float = 0.0,
) -> Loss:
    """Do as decoupled_ppo with a guessed pi_prox, which spares scoring the batch beforehand.

    log pi_prox = log mu + alpha (log pi - log mu), detached, with
    alpha = (v_prox - v_mu) / (v_pi - v_mu) = s / (s + 1) for a token s versions old: pi_prox is
    `version`, the weights at the batch's start, and pi is on its way to the next. A token as
    fresh as the trainer has pi_prox = mu.

    Args:
        logprobs, rollout_logprobs: [T] float, nats. Trainer's and engine's.
        advantages: [T] float. loss_mask: [T] bool.
        policy_versions: [T] int64, version that sampled the token. version: [] int64, the one
            being trained.
        clip_low, clip_high: distances from 1 of the bounds on pi / pi_prox.
        weight_cap: tokens whose pi_prox / mu is above it are dropped; 0 switches it off.
    Returns: terms [T] and stats; the ratio in the stats is pi / pi_prox.
    Raises: Refusal for bounds out of range.
    Source: arXiv 2512.06547 (A-3PO), alpha as in AReaL, whose v_prox is one version older than its
    v_pi.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    log_w = moved.log_ratio
    age = (version - policy_versions).clamp(min=0).to(log_w.dtype)
    alpha = torch.where(policy_versions >= 0, age / (age + 1), 0.0)
    prox_log_w = alpha * log_w.detach()
    from_prox = replace(moved, log_ratio=log_w - prox_log_w, is_from_old=True)
    weight = ratio_of(prox_log_w)
    bounds = (clip_low, clip_high)
    terms, stats = _decoupled(from_prox, weight, bounds, weight_cap=weight_cap)
    # Also report the distance from mu, whose metrics have names of their own.
    return terms, stats | moved.loss(terms)[1]


def _decoupled(
    moved: Moved, weight: Tensor, bounds: tuple[float, float], *, weight_cap: float
) -> Loss:
    check_not_negative(weight_cap=weight_cap)
    surrogate, low, high = moved.clipped(*bounds)
    dropped = weight > (weight_cap or float("inf"))
    return moved.loss(-weight * surrogate, low=low, high=high, dropped=dropped)


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
    # `own` is 0 with the gradient of log pi. The clamp of a live ratio would stop the gradient of
    # capped tokens.
    capped = moved.ratio.detach().clamp(max=ratio_cap) * (1 + moved.own)
    return moved.loss(-capped * moved.advantages, dropped=dropped)
