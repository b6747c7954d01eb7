"""Losses that bound the ratio r = pi / pi_old of each token. T packed tokens."""

from __future__ import annotations

import torch

from spmdrl.algorithms.losses.common import Loss, Moved, check_clip, from_old
from spmdrl.algorithms.masked import check_positive, making, masked_mean
from spmdrl.errors import Refusal


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
    advantages, ratio = moved.advantages, moved.ratio
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
