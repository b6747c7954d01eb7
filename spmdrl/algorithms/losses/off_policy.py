"""PPO around a proximal policy that is not the one that sampled. T packed tokens.

The clip is around pi_prox, the policy of the batch's start, while a detached weight
pi_prox / mu corrects for the sampling policy; take no correction besides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.algorithms.losses.common import (
    clipped,
    dropped_stats,
    log_ratio,
    rollout_log_ratio,
    rollout_stats,
)
from spmdrl.algorithms.masked import Stats, check_not_negative, keep


def decoupled_ppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    *,
    advantages: Tensor,
    loss_mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    weight_cap: float = 0.0,
) -> tuple[Tensor, Stats]:
    """Clip around pi_old, weigh by its ratio to mu: -sg(pi_old / mu) min(r A, clip(r) A).

    Args:
        logprobs, old_logprobs, rollout_logprobs: [T] float, nats.
        advantages: [T] float. loss_mask: [T] bool.
        clip_low, clip_high: distances from 1 of the bounds on r = pi / pi_old.
        weight_cap: tokens whose pi_old / mu is above it are dropped; 0 switches it off.
    Returns: terms [T] and stats.
    Raises: ValueError for bounds out of range.
    Source: arXiv 2110.00641; 2505.24298 (AReaL), whose code has the cap.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    prox_log_w = rollout_log_ratio(old_logprobs.detach(), rollout_logprobs, loss_mask)
    log_r = log_ratio(logprobs, old_logprobs, loss_mask)
    return _decoupled(
        log_r,
        prox_log_w,
        advantages=advantages,
        loss_mask=loss_mask,
        clip_low=clip_low,
        clip_high=clip_high,
        weight_cap=weight_cap,
    )


def a3po(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    *,
    advantages: Tensor,
    loss_mask: Tensor,
    policy_versions: Tensor,
    version: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    weight_cap: float = 0.0,
) -> tuple[Tensor, Stats]:
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
    Raises: ValueError for bounds out of range.
    Source: arXiv 2512.06547 (A-3PO), alpha as in AReaL, whose v_prox is one behind its v_pi.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    log_w = rollout_log_ratio(logprobs, rollout_logprobs, loss_mask)
    age = (version - policy_versions).clamp(min=0).to(log_w.dtype)
    alpha = torch.where(policy_versions >= 0, age / (age + 1), 0.0)
    prox_log_w = alpha * log_w.detach()
    terms, stats = _decoupled(
        log_w - prox_log_w,
        prox_log_w,
        advantages=advantages,
        loss_mask=loss_mask,
        clip_low=clip_low,
        clip_high=clip_high,
        weight_cap=weight_cap,
    )
    return terms, stats | rollout_stats(log_w, loss_mask)


def _decoupled(
    log_r: Tensor,
    prox_log_w: Tensor,
    *,
    advantages: Tensor,
    loss_mask: Tensor,
    clip_low: float,
    clip_high: float,
    weight_cap: float,
) -> tuple[Tensor, Stats]:
    check_not_negative(weight_cap=weight_cap)
    weight = prox_log_w.exp()
    found = clipped(
        log_r.exp(), advantages, loss_mask=loss_mask, clip_low=clip_low, clip_high=clip_high
    )
    dropped = loss_mask & (weight > (weight_cap or float("inf")))
    terms = keep(-weight * found.surrogate, loss_mask & ~dropped)
    return terms, found.stats | dropped_stats(dropped, loss_mask)
