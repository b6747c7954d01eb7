"""Losses whose ratio is that of a whole sequence. T packed tokens, S sequences.

Every loss token gets the term of its sequence. The aggregation then weighs the tokens:
`seq_mean_token_mean` for gspo, gspo_token and gmpo, `seq_mean_token_sum` for luspo.

Of an episode of several traces, each trace is a sequence with a ratio of its own, over the tokens
that are trained in it. These were drawn one after the other in one context, and the mean over them
evens out their noise. A ratio of the whole episode would clip tokens of one trace because of
another that they never saw, and would need all traces in one micro-batch. So these losses depend on
the trace in which a token that several traces hold is trained. Aggregations weigh tokens by the
episode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.algorithms.losses.common import (
    MAX_LOG_RATIO,
    Loss,
    PolicyShift,
    ratio_of,
    shift_from_old,
    shift_from_rollout,
)
from spmdrl.algorithms.masked import attach, check_not_negative, check_positive, derive, masked_mean
from spmdrl.algorithms.reduce import per_token, sequence_mean, spread_sum

__all__ = ["gmpo", "gspo", "gspo_token", "luspo", "vespo"]


@attach(aggregations=("seq_mean_token_mean",))
@derive(shift=shift_from_old)
def gspo(
    shift: PolicyShift, *, cu_seqlens: Tensor, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> Loss:
    """Clip the sequence's ratio s = exp(mean_t log r_t): -min(s A, clip(s) A) at each token.

    With aggregation `seq_mean_token_mean` this is the paper's objective.

    Args:
        logprobs, old_logprobs: [T] float, nats.
        advantages: [T] float, one value per sequence. loss_mask: [T] bool.
        cu_seqlens: [S+1] int32.
        clip_low, clip_high: distances from 1 of the bounds on s.
    Returns: terms [T] and stats; the ratio in the stats is s, counted per token.
    Raises: Refusal for bounds out of range.
    Source: arXiv 2507.18071 (GSPO).
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    return _clipped(shift, _mean_exp(shift.log_ratio, shift, cu_seqlens), (clip_low, clip_high))


@attach(aggregations=("seq_mean_token_mean",))
@derive(shift=shift_from_old)
def gspo_token(
    shift: PolicyShift, *, cu_seqlens: Tensor, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> Loss:
    """Clip as gspo, with each token's own gradient: s_t = sg(s) pi_t / sg(pi_t).

    Value and gradient equal those of gspo if A is one value per sequence. Here A may differ within
    a sequence.

    Args:
        logprobs, old_logprobs: [T] float, nats.
        advantages: [T] float. loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        clip_low, clip_high: distances from 1 of the bounds on s.
    Returns: terms [T] and stats; the ratio in the stats is s, counted per token.
    Raises: Refusal for bounds out of range.
    Source: arXiv 2507.18071 (GSPO-token). It equals gspo under an aggregation that gives all tokens
        of a sequence the same weight.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    ratio = _mean_exp(shift.log_ratio.detach(), shift, cu_seqlens)
    ratio = ratio * shift.zero_with_grad.exp()
    return _clipped(shift, ratio, (clip_low, clip_high))


@attach(aggregations=("seq_mean_token_sum", "seq_mean_token_sum_norm"))
@derive(shift=shift_from_old)
def luspo(
    shift: PolicyShift, *, cu_seqlens: Tensor, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> Loss:
    """Weigh gspo's sequence term by the length: -min(s A, clip(s) A) at each token, summed.

    The terms are those of gspo. The aggregation `seq_mean_token_sum` multiplies them by |y|, which
    removes the length bias. Under `seq_mean_token_mean` this loss would be gspo.

    Args:
        logprobs, old_logprobs: [T] float, nats.
        advantages: [T] float, one value per sequence. loss_mask: [T] bool.
        cu_seqlens: [S+1] int32.
        clip_low, clip_high: distances from 1 of the bounds on s.
    Returns: terms [T] and stats; the ratio in the stats is s, counted per token.
    Raises: Refusal for bounds out of range.
    Source: arXiv 2602.05261 (LUSPO); bounds as in gspo.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    return _clipped(shift, _mean_exp(shift.log_ratio, shift, cu_seqlens), (clip_low, clip_high))


@attach(aggregations=("seq_mean_token_mean",))
@derive(shift=shift_from_old)
def gmpo(
    shift: PolicyShift, *, cu_seqlens: Tensor, clip_low: float = 0.4, clip_high: float = 0.4
) -> Loss:
    """Clip each token's log-ratio on the side that A pushes to, then take the geometric mean.

    The term is -A exp(mean_t l_t), with l_t = min(log r_t, clip_high) where A > 0,
    max(log r_t, -clip_low) where A < 0 and log r_t where A = 0.

    Args:
        logprobs, old_logprobs: [T] float, nats.
        advantages: [T] float, one value per sequence. loss_mask: [T] bool.
        cu_seqlens: [S+1] int32.
        clip_low, clip_high: bounds on log r, nats, at least 0.
    Returns: terms [T] and stats; the ratio in the stats is each token's own.
    Raises: Refusal for bounds out of range.
    Source: arXiv 2507.20673 (GMPO), with aggregation `seq_mean_token_mean`.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    check_not_negative(clip_low=clip_low, clip_high=clip_high)
    log_r = shift.log_ratio
    advantages = shift.advantages
    high = (advantages > 0) & (log_r > clip_high)
    low = (advantages < 0) & (log_r < -clip_low)
    bounded = log_r.masked_fill(high, clip_high).masked_fill(low, -clip_low)
    terms = -_mean_exp(bounded, shift, cu_seqlens) * advantages
    return shift.loss(terms, low=low, high=high)


@derive(shift=shift_from_rollout)
def vespo(
    shift: PolicyShift,
    *,
    cu_seqlens: Tensor,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Loss:
    """Shape the sequence's weight softly: -sg(phi(W)) A log pi, phi = W^k exp(lambda (1 - W)).

    W is the product of w = pi / mu over the sequence's loss tokens; phi(1) = 1. W already corrects
    for the engine; do not add a correction.

    Args:
        logprobs, rollout_logprobs: [T] float, nats. Trainer's and engine's.
        advantages: [T] float. loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        k_pos, lambda_pos: shape for A >= 0: k at least 0, lambda above 0.
        k_neg, lambda_neg: shape for A < 0.
    Returns: terms [T] and stats; `policy/sequence_weight` is the mean of phi over tokens.
    Raises: Refusal for a k or lambda out of range.
    Source: arXiv 2602.10693 (VESPO), appendix I. log W is clamped to +-20 after the sum.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    check_not_negative(k_pos=k_pos, k_neg=k_neg)
    check_positive(lambda_pos=lambda_pos, lambda_neg=lambda_neg)
    log_w = spread_sum(shift.log_ratio.detach(), cu_seqlens).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    is_negative = shift.advantages < 0
    k = torch.full_like(log_w, k_pos).masked_fill(is_negative, k_neg)
    rate = torch.full_like(log_w, lambda_pos).masked_fill(is_negative, lambda_neg)
    weight = (k * log_w - rate * torch.expm1(log_w)).exp()
    terms, stats = shift.loss(shift.reinforce_terms(weight))
    return terms, stats | {"policy/sequence_weight": masked_mean(weight, shift.loss_mask)}


def _mean_exp(log_r: Tensor, shift: PolicyShift, cu_seqlens: Tensor) -> Tensor:
    mean = sequence_mean(log_r, cu_seqlens, loss_mask=shift.loss_mask)
    sequence_ratio = ratio_of(mean).to(shift.logprobs.dtype)
    return per_token(sequence_ratio, cu_seqlens, num_tokens=log_r.numel())


def _clipped(shift: PolicyShift, ratio: Tensor, bounds: tuple[float, float]) -> Loss:
    surrogate, low, high = shift.clipped_surrogate(*bounds, ratio=ratio)
    return shift.loss(-surrogate, ratio=ratio, low=low, high=high)
