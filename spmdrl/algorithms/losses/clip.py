"""Losses that bound the change of the policy at each token. T packed tokens.

`ppo_clip` and `sapo` bound the ratio r = pi / pi_old. `decoupled_ppo` and `a3po` clip around
pi_prox, the policy at the batch's start, and multiply by pi_prox / mu, detached, because mu sampled
the tokens. `dppo_tv` and `dppo_kl` use the ratio w = pi / mu, and drop a token whose probability,
not its ratio, changed too much. These four correct for the engine; do not add a correction.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from spmdrl.algorithms.losses.common import (
    Loss,
    PolicyShift,
    check_clip,
    log_ratio,
    ratio_of,
    sampled_logprobs,
    shift_from_old,
    shift_from_rollout,
)
from spmdrl.algorithms.masked import (
    check_bound,
    check_not_negative,
    check_positive,
    derive,
    masked_mean,
)
from spmdrl.errors import Refusal

__all__ = ["a3po", "decoupled_ppo", "dppo_kl", "dppo_tv", "ppo_clip", "sapo"]


@derive(shift=shift_from_old)
def ppo_clip(
    shift: PolicyShift,
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
        dual_clip: for A < 0, the largest term is dual_clip * |A|; 0 is off, else above 1.
        ratio_cap: upper bound on r before the min (has an effect for A < 0); 0 is off, else above
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
    advantages = shift.advantages
    ratio = shift.ratio
    _, low, high = shift.clipped_surrogate(clip_low, clip_high)
    capped = ratio.clamp(max=ratio_cap) if ratio_cap else ratio
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(capped * advantages, clipped * advantages)
    if dual_clip:
        floor = dual_clip * advantages
        surrogate = torch.where((advantages < 0) & (surrogate < floor), floor, surrogate)
    bound = min([b for b in (dual_clip, ratio_cap) if b], default=float("inf"))
    beyond = (advantages < 0) & (ratio > bound)
    terms, stats = shift.loss(-surrogate, low=low, high=high | beyond)
    return terms, stats | {"policy/dual_clip_frac": masked_mean(beyond, shift.loss_mask)}


@derive(shift=shift_from_old)
def sapo(shift: PolicyShift, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Loss:
    """Gate the ratio softly: -(4 / tau) sigmoid(tau (r - 1)) A.

    With s the sigmoid, the gradient of log pi has the weight 4 s (1 - s) r A. At r = 1 this is A
    for any tau, and it falls to 0 on both sides. The term at r = 1 is -2 A / tau.

    Args:
        logprobs, old_logprobs: [T] float, nats.
        advantages: [T] float. loss_mask: [T] bool.
        tau_pos, tau_neg: steepness of the gate for A > 0 and for A <= 0; higher falls faster.
    Returns: terms [T] and stats.
    Raises: Refusal for a tau that is not above 0.
    Source: arXiv 2511.20347 (SAPO).
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    check_positive(tau_pos=tau_pos, tau_neg=tau_neg)
    tau = torch.full_like(shift.ratio, tau_neg).masked_fill(shift.advantages > 0, tau_pos)
    gate = 4 / tau * torch.sigmoid(tau * (shift.ratio - 1))
    return shift.loss(-gate * shift.advantages)


@derive(shift=shift_from_old)
def decoupled_ppo(
    shift: PolicyShift,
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
        weight_cap: tokens whose pi_old / mu is above it are dropped; 0 is off.
    Returns: terms [T] and stats.
    Raises: Refusal for bounds out of range.
    Source: arXiv 2110.00641; 2505.24298 (AReaL), whose code has the cap.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    mu = sampled_logprobs(shift.earlier_logprobs, rollout_logprobs)
    weight = ratio_of(log_ratio(shift.earlier_logprobs, mu, shift.loss_mask))
    return _decoupled(shift, weight, (clip_low, clip_high), weight_cap=weight_cap)


@derive(shift=shift_from_rollout)
def a3po(
    shift: PolicyShift,
    *,
    policy_versions: Tensor,
    version: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    weight_cap: float = 0.0,
) -> Loss:
    """Compute decoupled_ppo with an interpolated pi_prox, without scoring the batch beforehand.

    log pi_prox = log mu + alpha (log pi - log mu), detached, with
    alpha = (v_prox - v_mu) / (v_pi - v_mu) = s / (s + 1) for a token that is s versions old. v_prox
    is `version`, the weights at the batch's start, and v_pi = v_prox + 1. For a token of the
    current version, pi_prox = mu.

    Args:
        logprobs, rollout_logprobs: [T] float, nats. Trainer's and engine's.
        advantages: [T] float. loss_mask: [T] bool.
        policy_versions: [T] int64, version that sampled the token.
        version: [] int64, the version that trains.
        clip_low, clip_high: distances from 1 of the bounds on pi / pi_prox.
        weight_cap: tokens whose pi_prox / mu is above it are dropped; 0 is off.
    Returns: terms [T] and stats; the ratio in the stats is pi / pi_prox.
    Raises: Refusal for bounds out of range.
    Source: arXiv 2512.06547 (A-3PO), with AReaL's alpha, in which v_prox is one version older than
        v_pi.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    log_w = shift.log_ratio
    age = (version - policy_versions).clamp(min=0).to(log_w.dtype)
    alpha = torch.where(policy_versions >= 0, age / (age + 1), 0.0)
    prox_log_w = alpha * log_w.detach()
    from_prox = replace(shift, log_ratio=log_w - prox_log_w, is_from_old=True)
    weight = ratio_of(prox_log_w)
    bounds = (clip_low, clip_high)
    terms, stats = _decoupled(from_prox, weight, bounds, weight_cap=weight_cap)
    # Report the distance from mu too; its metrics have other names.
    return terms, stats | shift.loss(terms)[1]


def _decoupled(
    shift: PolicyShift, weight: Tensor, bounds: tuple[float, float], *, weight_cap: float
) -> Loss:
    check_not_negative(weight_cap=weight_cap)
    surrogate, low, high = shift.clipped_surrogate(*bounds)
    dropped = weight > (weight_cap or float("inf"))
    return shift.loss(-weight * surrogate, low=low, high=high, dropped=dropped)


@derive(shift=shift_from_rollout)
def dppo_tv(
    shift: PolicyShift,
    *,
    threshold_low: float = 0.15,
    threshold_high: float = 0.15,
    ratio_cap: float = 20.0,
) -> Loss:
    """Return -w A, without the tokens whose probability moved too far in the direction of A.

    A token is dropped if A > 0 and pi - mu > threshold_high, or A < 0 and mu - pi > threshold_low.

    Args:
        logprobs, rollout_logprobs: [T] float, nats. Trainer's and engine's.
        advantages: [T] float. loss_mask: [T] bool.
        threshold_low, threshold_high: bounds on the total variation between two outcomes, this
            token or another, in probability, at least 0.
        ratio_cap: largest w, above 0. A token with a larger w keeps a gradient, with this weight.
    Returns: terms [T] and stats.
    Raises: Refusal for a threshold below 0, or a cap that is not above 0.
    Source: arXiv 2602.04879 (DPPO, binary TV).
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    check_not_negative(threshold_low=threshold_low, threshold_high=threshold_high)
    new, sampled = _log_probabilities(shift)
    gap = new.exp() - sampled.exp()
    return _without(gap > threshold_high, gap < -threshold_low, shift, ratio_cap=ratio_cap)


@derive(shift=shift_from_rollout)
def dppo_kl(
    shift: PolicyShift,
    *,
    threshold_low: float = 0.05,
    threshold_high: float = 0.05,
    ratio_cap: float = 20.0,
) -> Loss:
    """Return -w A, without the tokens whose divergence grew too far in the direction of A.

    The divergence is KL(mu || pi) between two outcomes, this token or another:
    mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)). A token is dropped if A > 0, pi > mu and
    the divergence is above threshold_high, or A < 0, pi < mu and it is above threshold_low.

    Args:
        logprobs, rollout_logprobs: [T] float, nats. Trainer's and engine's.
        advantages: [T] float. loss_mask: [T] bool.
        threshold_low, threshold_high: bounds on the divergence, nats, at least 0.
        ratio_cap: largest w, above 0. A token with a larger w keeps a gradient, with this weight.
    Returns: terms [T] and stats.
    Raises: Refusal for a threshold below 0, or a cap that is not above 0.
    Source: arXiv 2602.04879 (DPPO, binary KL).
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    check_not_negative(threshold_low=threshold_low, threshold_high=threshold_high)
    new, sampled = _log_probabilities(shift)
    rest = -torch.expm1(sampled)  # 1 - mu, accurate for mu near 1
    rest_term = rest * (rest.log() - (-torch.expm1(new)).log())
    divergence = sampled.exp() * (sampled - new) + torch.where(rest > 0, rest_term, 0.0)
    up = (divergence > threshold_high) & (new > sampled)
    down = (divergence > threshold_low) & (new < sampled)
    return _without(up, down, shift, ratio_cap=ratio_cap)


def _log_probabilities(shift: PolicyShift) -> tuple[Tensor, Tensor]:
    """Return log pi and log mu, [T] float64, detached; clamped to 0, which rounding may exceed."""
    new, sampled = (
        x.detach().double().clamp(max=0.0) for x in (shift.logprobs, shift.earlier_logprobs)
    )
    return new, sampled


def _without(up: Tensor, down: Tensor, shift: PolicyShift, *, ratio_cap: float) -> Loss:
    """Return -w A without the tokens that are too far `up` ([T] bool) with A > 0, or `down`."""
    check_bound(ratio_cap=ratio_cap)
    dropped = ((shift.advantages > 0) & up) | ((shift.advantages < 0) & down)
    # Autograd through the clamp would give capped tokens no gradient.
    capped = shift.ratio.detach().clamp(max=ratio_cap) * (1 + shift.zero_with_grad)
    return shift.loss(-capped * shift.advantages, dropped=dropped)
