"""Losses of the form -weight A log pi, with a weight that carries no gradient.

Every token keeps a gradient, whatever its ratio; `topr` and `aipo` take the ratio to the
sampling policy mu, the others to pi_old. T packed tokens, S sequences.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from spmdrl.algorithms.losses.common import (
    Loss,
    Moved,
    check_level,
    from_old,
    from_rollout,
    ratio_of,
)
from spmdrl.algorithms.masked import check_not_negative, check_positive, keep, making, masked_mean
from spmdrl.algorithms.reduce import spread_sum
from spmdrl.errors import Refusal

__all__ = ["aipo", "cispo", "dro", "kimi", "reinforce", "sft", "tis_pg", "topr"]

Level = Literal["token", "sequence"]


@making(moved=from_old)
def reinforce(moved: Moved) -> Loss:
    """Return the plain policy gradient: -A log pi, without a ratio.

    Args:
        logprobs: [T] float, nats. old_logprobs: [T], for the stats only.
        advantages: [T] float. loss_mask: [T] bool.
    Returns: terms [T] and stats.
    Source: Williams 1992, REINFORCE.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    return moved.loss(moved.weighted())


@making(moved=from_old)
def cispo(moved: Moved, *, ratio_low: float = 0.0, ratio_high: float = 5.0) -> Loss:
    """Clip the weight, keep every gradient: -sg(clip(r, ratio_low, ratio_high)) A log pi.

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
    ratio = moved.ratio.detach()
    terms = moved.weighted(ratio.clamp(ratio_low, ratio_high))
    return moved.loss(terms, low=ratio < ratio_low, high=ratio > ratio_high)


@making(moved=from_old)
def tis_pg(moved: Moved, *, upper: float = 1.0) -> Loss:
    """Truncate the weight at `upper`: -sg(min(r, upper)) A log pi, for A of either sign.

    Args:
        logprobs, old_logprobs: [T] float, nats.
        advantages: [T] float. loss_mask: [T] bool.
        upper: largest weight, above 0.
    Returns: terms [T] and stats.
    Raises: Refusal for an upper that is not above 0.
    Source: arXiv 2503.14286, its truncated importance sampling baseline, per token.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    return _truncated(moved, upper)


@making(moved=from_rollout)
def aipo(moved: Moved, *, upper: float = 4.0) -> Loss:
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
    return _truncated(moved, upper)


@making(moved=from_rollout)
def topr(
    moved: Moved, *, cu_seqlens: Tensor, level: Level = "sequence", upper: float = 1.0
) -> Loss:
    """Taper negative advantages only: -A log pi for A > 0, else -sg(min(w, upper)) A log pi.

    w = pi / mu already corrects for the engine; do not add a correction.

    Args:
        logprobs, rollout_logprobs: [T] float, nats. Trainer's and engine's.
        advantages: [T] float, whose sign is taken as the reward's. loss_mask: [T] bool.
        cu_seqlens: [S+1] int32.
        level: w of the `sequence`, a product over its loss tokens, or of each `token`.
        upper: largest weight where A <= 0, above 0.
    Returns: terms [T] and stats.
    Raises: Refusal for a level or an upper out of range.
    Source: arXiv 2503.14286 (TOPR), whose ratio is the trajectory's.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    check_level(level)
    check_positive(upper=upper)
    log_w = moved.log_ratio.detach().double()
    if level == "sequence":
        log_w = spread_sum(log_w, cu_seqlens)
    w = ratio_of(log_w)
    weight = torch.where(moved.advantages > 0, 1.0, w.clamp(max=upper))
    capped = (moved.advantages < 0) & (w > upper)
    return moved.loss(moved.weighted(weight), high=capped)


@making(moved=from_old)
def kimi(moved: Moved, *, cu_seqlens: Tensor, level: Level = "sequence", tau: float = 0.1) -> Loss:
    """Pull back to pi_old by a square: -A log pi + (tau / 2) (log r)^2.

    At level `sequence` the square is that of the sequence's summed log-ratio; each token's
    share of it is its own log-ratio times the sum, so that the terms add up to it.

    Args:
        logprobs, old_logprobs: [T] float, nats.
        advantages: [T] float. loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        level: square per `sequence` or per `token`.
        tau: strength of the pull, per nat^2, at least 0.
    Returns: terms [T] and stats.
    Raises: Refusal for a level or a tau out of range.
    Source: arXiv 2501.12599 (Kimi k1.5), the gradient of its policy optimisation, where the
        square is the sequence's. The default tau is ours.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    check_not_negative(tau=tau)
    return moved.loss(moved.weighted() + tau / 2 * _square(moved, cu_seqlens, level=level))


@making(moved=from_rollout)
def dro(moved: Moved, *, cu_seqlens: Tensor, level: Level = "token", beta: float = 0.05) -> Loss:
    """Pull back to the sampling policy by a square: -A log pi + (beta / 2) (log w)^2.

    The policy part of direct reward optimisation, with mu as the reference and A for reward
    minus value. Made for off-policy data: no weight, so no correction is needed.

    Args:
        logprobs, rollout_logprobs: [T] float, nats. Trainer's and engine's.
        advantages: [T] float. loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        level: square per `token` or of the `sequence`'s sum, shared as in `kimi`.
        beta: strength of the pull, per nat^2, at least 0.
    Returns: terms [T] and stats.
    Raises: Refusal for a level or a beta out of range.
    Source: arXiv 2405.19107 (DRO), its squared loss divided by beta; the paper's square is the
        sequence's, ours is the token's by default as in Tinker.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    check_not_negative(beta=beta)
    return moved.loss(moved.weighted() + beta / 2 * _square(moved, cu_seqlens, level=level))


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


def _square(moved: Moved, cu_seqlens: Tensor, *, level: Level) -> Tensor:
    check_level(level)
    log_ratios = moved.log_ratio
    if level == "token":
        return log_ratios**2
    return (log_ratios * spread_sum(log_ratios, cu_seqlens)).to(log_ratios.dtype)


def _truncated(moved: Moved, upper: float) -> Loss:
    check_positive(upper=upper)
    weight = moved.ratio.detach()
    return moved.loss(moved.weighted(weight.clamp(max=upper)), high=weight > upper)
