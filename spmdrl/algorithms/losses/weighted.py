"""Losses of the form -weight A log pi, with a detached weight.

Every token has a gradient, for any ratio. The ratio of `aipo`, `dro` and `topr` is to the sampling
policy mu, that of the others to pi_old. T packed tokens, S sequences.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from spmdrl.algorithms.losses.common import (
    Loss,
    PolicyShift,
    check_level,
    ratio_of,
    shift_from_old,
    shift_from_rollout,
)
from spmdrl.algorithms.masked import check_not_negative, check_positive, derive, keep, masked_mean
from spmdrl.algorithms.reduce import spread_sum
from spmdrl.errors import Refusal

__all__ = ["aipo", "cispo", "dro", "kimi", "reinforce", "sft", "tis_pg", "topr"]

Level = Literal["token", "sequence"]


@derive(shift=shift_from_old)
def reinforce(shift: PolicyShift) -> Loss:
    """Return the plain policy gradient: -A log pi, without a ratio.

    Args:
        logprobs: [T] float, nats. old_logprobs: [T], for the stats only.
        advantages: [T] float. loss_mask: [T] bool.
    Returns: terms [T] and stats.
    Source: Williams 1992, REINFORCE.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    return shift.loss(shift.reinforce_terms())


@derive(shift=shift_from_old)
def cispo(shift: PolicyShift, *, ratio_low: float = 0.0, ratio_high: float = 5.0) -> Loss:
    """Clip the weight but no gradient: -sg(clip(r, ratio_low, ratio_high)) A log pi.

    Args:
        logprobs, old_logprobs: [T] float, nats.
        advantages: [T] float. loss_mask: [T] bool.
        ratio_low, ratio_high: absolute bounds of r, not distances from 1.
    Returns: terms [T] and stats.
    Raises: Refusal unless 0 <= ratio_low < 1 < ratio_high.
    Source: arXiv 2506.13585 (CISPO); defaults of 2510.13786 (cap 5, no lower bound).
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    if not 0 <= ratio_low < 1 < ratio_high:
        raise Refusal(
            f"ratio_low, ratio_high: must be 0 <= low < 1 < high (bounds on the "
            f"ratio itself), got {ratio_low}, {ratio_high}"
        )
    ratio = shift.ratio.detach()
    terms = shift.reinforce_terms(ratio.clamp(ratio_low, ratio_high))
    return shift.loss(terms, low=ratio < ratio_low, high=ratio > ratio_high)


@derive(shift=shift_from_old)
def tis_pg(shift: PolicyShift, *, upper: float = 1.0) -> Loss:
    """Truncate the weight at `upper`: -sg(min(r, upper)) A log pi, for A of either sign.

    Args:
        logprobs, old_logprobs: [T] float, nats.
        advantages: [T] float. loss_mask: [T] bool.
        upper: largest weight, above 0.
    Returns: terms [T] and stats.
    Raises: Refusal for an upper that is not above 0.
    Source: arXiv 2503.14286, the baseline with truncated importance sampling, per token.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    return _truncated(shift, upper)


@derive(shift=shift_from_rollout)
def aipo(shift: PolicyShift, *, upper: float = 4.0) -> Loss:
    """Weigh by the ratio to the sampling policy, capped: -sg(min(w, upper)) A log pi.

    w = pi / mu already corrects for the engine; do not add a correction.

    Args:
        logprobs, rollout_logprobs: [T] float, nats. Trainer's and engine's.
        advantages: [T] float. loss_mask: [T] bool.
        upper: largest weight, above 0.
    Returns: terms [T] and stats.
    Raises: Refusal for an upper that is not above 0.
    Source: arXiv 2505.24034 (AIPO). The default cap is ours.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    return _truncated(shift, upper)


@derive(shift=shift_from_rollout)
def topr(
    shift: PolicyShift, *, cu_seqlens: Tensor, level: Level = "sequence", upper: float = 1.0
) -> Loss:
    """Truncate only for A <= 0: -A log pi for A > 0, else -sg(min(w, upper)) A log pi.

    w = pi / mu already corrects for the engine; do not add a correction.

    Args:
        logprobs, rollout_logprobs: [T] float, nats. Trainer's and engine's.
        advantages: [T] float; the sign stands for that of the paper's reward. loss_mask: [T] bool.
        cu_seqlens: [S+1] int32.
        level: w of the `sequence`, a product over its loss tokens, or of each `token`.
        upper: largest weight where A <= 0, above 0.
    Returns: terms [T] and stats.
    Raises: Refusal for a level or an upper out of range.
    Source: arXiv 2503.14286 (TOPR), in which the ratio is that of the trajectory.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    check_level(level)
    check_positive(upper=upper)
    log_w = shift.log_ratio.detach().double()
    if level == "sequence":
        log_w = spread_sum(log_w, cu_seqlens)
    w = ratio_of(log_w)
    weight = torch.where(shift.advantages > 0, 1.0, w.clamp(max=upper))
    capped = (shift.advantages < 0) & (w > upper)
    return shift.loss(shift.reinforce_terms(weight), high=capped)


@derive(shift=shift_from_old)
def kimi(
    shift: PolicyShift, *, cu_seqlens: Tensor, level: Level = "sequence", tau: float = 0.1
) -> Loss:
    """Add a squared penalty towards pi_old: -A log pi + (tau / 2) (log r)^2.

    At level `sequence`, log r is the sum over the sequence. A token's share of the square is its
    own log-ratio times the sum, so the shares add up to the square.

    Args:
        logprobs, old_logprobs: [T] float, nats.
        advantages: [T] float. loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        level: square per `sequence` or per `token`.
        tau: strength of the pull, per nat^2, at least 0.
    Returns: terms [T] and stats.
    Raises: Refusal for a level or a tau out of range.
    Source: arXiv 2501.12599 (Kimi k1.5), the gradient of its policy optimisation, in which the
        square is that of the sequence. The default tau is ours.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    check_not_negative(tau=tau)
    return shift.loss(shift.reinforce_terms() + tau / 2 * _square(shift, cu_seqlens, level=level))


@derive(shift=shift_from_rollout)
def dro(
    shift: PolicyShift, *, cu_seqlens: Tensor, level: Level = "token", beta: float = 0.05
) -> Loss:
    """Add a squared penalty towards the sampling policy: -A log pi + (beta / 2) (log w)^2.

    This is the policy's loss in direct reward optimisation, with mu as the reference and A as
    reward minus value. It is meant for off-policy data and needs no correction.

    Args:
        logprobs, rollout_logprobs: [T] float, nats. Trainer's and engine's.
        advantages: [T] float. loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        level: square per `token`, or of the sum over the `sequence` as in `kimi`.
        beta: strength of the pull, per nat^2, at least 0.
    Returns: terms [T] and stats.
    Raises: Refusal for a level or a beta out of range.
    Source: arXiv 2405.19107 (DRO), the squared loss divided by beta. In the paper the square is
        that of the sequence; the default here is the token's, as in Tinker.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    check_not_negative(beta=beta)
    return shift.loss(shift.reinforce_terms() + beta / 2 * _square(shift, cu_seqlens, level=level))


def sft(logprobs: Tensor, *, loss_mask: Tensor) -> Loss:
    """Return the negative log-likelihood of the data: -log pi.

    Args:
        logprobs: [T] float, nats. loss_mask: [T] bool.
    Returns: terms [T] and stats (policy/nll, nats per token).
    Source: maximum likelihood.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    terms = keep(-logprobs, loss_mask)
    return terms, {"policy/nll": masked_mean(terms, loss_mask)}


def _square(shift: PolicyShift, cu_seqlens: Tensor, *, level: Level) -> Tensor:
    check_level(level)
    log_ratios = shift.log_ratio
    if level == "token":
        return log_ratios**2
    return (log_ratios * spread_sum(log_ratios, cu_seqlens)).to(log_ratios.dtype)


def _truncated(shift: PolicyShift, upper: float) -> Loss:
    check_positive(upper=upper)
    weight = shift.ratio.detach()
    return shift.loss(shift.reinforce_terms(weight.clamp(max=upper)), high=weight > upper)
