"""Losses of the form -weight A log pi, with a weight that carries no gradient.

Every token keeps a gradient, whatever its ratio; `topr` and `aipo` take the ratio to the
sampling policy mu, the others to pi_old. T packed tokens, S sequences.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from spmdrl.algorithms.losses.common import (
    MAX_LOG_RATIO,
    check_level,
    clip_stats,
    log_ratio,
    ratio_stats,
    rollout_log_ratio,
    rollout_stats,
    weighted,
)
from spmdrl.algorithms.masked import Stats, check_not_negative, check_positive, keep, masked_mean
from spmdrl.algorithms.reduce import spread_sum


def reinforce(
    logprobs: Tensor, old_logprobs: Tensor, *, advantages: Tensor, loss_mask: Tensor
) -> tuple[Tensor, Stats]:
    """Return the plain policy gradient: -A log pi, without a ratio.

    Args:
        logprobs: [T] float, nats. old_logprobs: [T], for the stats only.
        advantages: [T] float. loss_mask: [T] bool.
    Returns: terms [T] and stats.
    Source: Williams 1992, REINFORCE.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    ratio = log_ratio(logprobs, old_logprobs, loss_mask).exp()
    terms = weighted(logprobs, advantages, loss_mask=loss_mask)
    return terms, ratio_stats(ratio, loss_mask)


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    *,
    advantages: Tensor,
    loss_mask: Tensor,
    ratio_low: float = 0.0,
    ratio_high: float = 5.0,
) -> tuple[Tensor, Stats]:
    """Clip the weight, keep every gradient: -sg(clip(r, ratio_low, ratio_high)) A log pi.

    Args:
        logprobs, old_logprobs: [T] float, nats.
        advantages: [T] float. loss_mask: [T] bool.
        ratio_low, ratio_high: absolute bounds of r, not distances from 1.
    Returns: terms [T] and stats.
    Raises: ValueError unless 0 <= ratio_low < 1 < ratio_high.
    Source: arXiv 2506.13585 (CISPO); defaults of 2510.13786 (cap 5, no lower bound).
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    if not 0 <= ratio_low < 1 < ratio_high:
        raise ValueError(
            f"ratio_low, ratio_high: must be 0 <= low < 1 < high (bounds on the "
            f"ratio itself), got {ratio_low}, {ratio_high}"
        )
    ratio = log_ratio(logprobs, old_logprobs, loss_mask).exp().detach()
    terms = weighted(logprobs, advantages, ratio.clamp(ratio_low, ratio_high), loss_mask=loss_mask)
    return terms, ratio_stats(ratio, loss_mask) | clip_stats(
        loss_mask, low=ratio < ratio_low, high=ratio > ratio_high
    )


def tis_pg(
    logprobs: Tensor,
    old_logprobs: Tensor,
    *,
    advantages: Tensor,
    loss_mask: Tensor,
    upper: float = 1.0,
) -> tuple[Tensor, Stats]:
    """Truncate the weight at `upper`: -sg(min(r, upper)) A log pi, for A of either sign.

    Args:
        logprobs, old_logprobs: [T] float, nats.
        advantages: [T] float. loss_mask: [T] bool.
        upper: largest weight, above 0.
    Returns: terms [T] and stats.
    Raises: ValueError for an upper that is not above 0.
    Source: arXiv 2503.14286, its truncated importance sampling baseline, per token.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    check_positive(upper=upper)
    ratio = log_ratio(logprobs, old_logprobs, loss_mask).exp().detach()
    terms = weighted(logprobs, advantages, ratio.clamp(max=upper), loss_mask=loss_mask)
    return terms, ratio_stats(ratio, loss_mask) | _capped_stats(ratio > upper, loss_mask)


def aipo(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    *,
    advantages: Tensor,
    loss_mask: Tensor,
    upper: float = 4.0,
) -> tuple[Tensor, Stats]:
    """Weigh by the ratio to the sampling policy, capped: -sg(min(w, upper)) A log pi.

    w = pi / mu already corrects for the engine; take no correction besides.

    Args:
        logprobs, rollout_logprobs: [T] float, nats. Trainer's and engine's.
        advantages: [T] float. loss_mask: [T] bool.
        upper: largest weight, above 0.
    Returns: terms [T] and stats.
    Raises: ValueError for an upper that is not above 0.
    Source: arXiv 2505.24034 (AIPO). The default cap is ours.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    check_positive(upper=upper)
    log_w = rollout_log_ratio(logprobs, rollout_logprobs, loss_mask).detach()
    weight = log_w.exp()
    terms = weighted(logprobs, advantages, weight.clamp(max=upper), loss_mask=loss_mask)
    return terms, rollout_stats(log_w, loss_mask) | _capped_stats(weight > upper, loss_mask)


def topr(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    *,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    level: Literal["token", "sequence"] = "sequence",
    upper: float = 1.0,
) -> tuple[Tensor, Stats]:
    """Taper what is unlearnt only: -A log pi for A > 0, else -sg(min(w, upper)) A log pi.

    w = pi / mu already corrects for the engine; take no correction besides.

    Args:
        logprobs, rollout_logprobs: [T] float, nats. Trainer's and engine's.
        advantages: [T] float, whose sign stands for the reward's. loss_mask: [T] bool.
        cu_seqlens: [S+1] int32.
        level: w of the `sequence`, a product over its loss tokens, or of each `token`.
        upper: largest weight where A <= 0, above 0.
    Returns: terms [T] and stats.
    Raises: ValueError for a level or an upper out of range.
    Source: arXiv 2503.14286 (TOPR), whose ratio is the trajectory's.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    check_level(level)
    check_positive(upper=upper)
    token_log_w = rollout_log_ratio(logprobs, rollout_logprobs, loss_mask).detach()
    log_w = token_log_w.double()
    if level == "sequence":
        log_w = spread_sum(log_w, cu_seqlens).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    advantages = keep(advantages.detach(), loss_mask)
    weight = torch.where(advantages > 0, 1.0, log_w.exp().clamp(max=upper))
    terms = weighted(logprobs, advantages, weight, loss_mask=loss_mask)
    stats = rollout_stats(token_log_w, loss_mask)
    capped = (advantages < 0) & (log_w.exp() > upper)
    return terms, stats | _capped_stats(capped, loss_mask)


def kimi(
    logprobs: Tensor,
    old_logprobs: Tensor,
    *,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    level: Literal["token", "sequence"] = "sequence",
    tau: float = 0.1,
) -> tuple[Tensor, Stats]:
    """Pull back to pi_old by a square: -A log pi + (tau / 2) (log r)^2.

    At level `sequence` the square is that of the sequence's summed log-ratio; each token's
    share of it is its own log-ratio times the sum, so that the terms add up to it.

    Args:
        logprobs, old_logprobs: [T] float, nats.
        advantages: [T] float. loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        level: square per `sequence` or per `token`.
        tau: strength of the pull, per nat^2, at least 0.
    Returns: terms [T] and stats.
    Raises: ValueError for a level or a tau out of range.
    Source: arXiv 2501.12599 (Kimi k1.5), the gradient of its policy optimisation, where the
        square is the sequence's. The default tau is ours.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    check_level(level)
    check_not_negative(tau=tau)
    log_r = log_ratio(logprobs, old_logprobs, loss_mask)
    terms = weighted(logprobs, advantages, loss_mask=loss_mask)
    square = _square(log_r, cu_seqlens, level=level)
    return keep(terms + tau / 2 * square, loss_mask), ratio_stats(log_r.exp(), loss_mask)


def dro(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    *,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    level: Literal["token", "sequence"] = "token",
    beta: float = 0.05,
) -> tuple[Tensor, Stats]:
    """Pull back to the sampling policy by a square: -A log pi + (beta / 2) (log w)^2.

    The policy part of direct reward optimisation, with mu as the reference and A for reward
    minus value. Made for off-policy data: no weight, so no correction is needed.

    Args:
        logprobs, rollout_logprobs: [T] float, nats. Trainer's and engine's.
        advantages: [T] float. loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        level: square per `token` or of the `sequence`'s sum, shared as in `kimi`.
        beta: strength of the pull, per nat^2, at least 0.
    Returns: terms [T] and stats.
    Raises: ValueError for a level or a beta out of range.
    Source: arXiv 2405.19107 (DRO), its squared loss divided by beta; the paper's square is the
        sequence's, ours is the token's by default as in Tinker.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    check_level(level)
    check_not_negative(beta=beta)
    log_w = rollout_log_ratio(logprobs, rollout_logprobs, loss_mask)
    terms = weighted(logprobs, advantages, loss_mask=loss_mask)
    square = _square(log_w, cu_seqlens, level=level)
    return keep(terms + beta / 2 * square, loss_mask), rollout_stats(log_w, loss_mask)


def sft(logprobs: Tensor, *, loss_mask: Tensor) -> tuple[Tensor, Stats]:
    """Return the negative log-likelihood of the data: -log pi.

    Args:
        logprobs: [T] float, nats. loss_mask: [T] bool.
    Returns: terms [T] and stats (policy/nll, nats per token).
    Source: maximum likelihood.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    terms = keep(-logprobs, loss_mask)
    return terms, {"policy/nll": masked_mean(terms, loss_mask)}


def _square(log_ratios: Tensor, cu_seqlens: Tensor, *, level: str) -> Tensor:
    if level == "token":
        return log_ratios**2
    return (log_ratios * spread_sum(log_ratios, cu_seqlens)).to(log_ratios.dtype)


def _capped_stats(capped: Tensor, loss_mask: Tensor) -> Stats:
    return clip_stats(loss_mask, low=torch.zeros_like(capped), high=capped)
