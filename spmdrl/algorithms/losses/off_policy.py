"""PPO around a proximal policy that is not the one that sampled. T packed tokens.

The clip is around pi_prox, the policy of the batch's start, while a detached weight
pi_prox / mu corrects for the sampling policy; take no correction besides.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from spmdrl.algorithms.losses.common import (
    Loss,
    Moved,
    from_old,
    from_rollout,
    log_ratio,
    ratio_of,
    sampled_logprobs,
)
from spmdrl.algorithms.masked import check_not_negative, making


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
    Source: arXiv 2512.06547 (A-3PO), alpha as in AReaL, whose v_prox is one behind its v_pi.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    log_w = moved.log_ratio
    age = (version - policy_versions).clamp(min=0).to(log_w.dtype)
    alpha = torch.where(policy_versions >= 0, age / (age + 1), 0.0)
    prox_log_w = alpha * log_w.detach()
    from_prox = replace(moved, log_ratio=log_w - prox_log_w, is_from_old=True)
    weight, bounds = ratio_of(prox_log_w), (clip_low, clip_high)
    terms, stats = _decoupled(from_prox, weight, bounds, weight_cap=weight_cap)
    return terms, stats | moved.loss(terms)[1]


def _decoupled(
    moved: Moved, weight: Tensor, bounds: tuple[float, float], *, weight_cap: float
) -> Loss:
    check_not_negative(weight_cap=weight_cap)
    surrogate, low, high = moved.clipped(*bounds)
    dropped = weight > (weight_cap or float("inf"))
    return moved.loss(-weight * surrogate, low=low, high=high, dropped=dropped)
