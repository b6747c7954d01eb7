"""Policy losses: per-token terms to be minimised, and what to report about them.

`loss_mask` [T] bool says which tokens are in the loss. Where it is False the term is exactly
0 and the gradient exactly 0, whatever the other inputs hold there (NaN and inf included).
`advantages` [T] is one value per token (a sequence's, repeated). Log-probabilities are
natural, in nats; log-ratios are clamped to +-20. Terms are not yet divided by anything:
`reduce` does that. No loss knows about micro-batches or ranks, which is why all of them are
invariant under dp size, micro-batching, packing order and padding.

Stats are {name: (numerator, denominator)}, detached float64 scalars summed over loss tokens;
add up pairwise over micro-batches and dp ranks, then divide.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.algorithms.reduce import per_token, sequence_mean

__all__ = ["ppo_clip", "reinforce", "cispo", "gspo", "sft"]

Stats = dict[str, tuple[Tensor, Tensor]]
_MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: beyond it one token decides the whole gradient


def ppo_clip(
    logprobs: Tensor, old_logprobs: Tensor, *, advantages: Tensor, loss_mask: Tensor,
    clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 0.0, ratio_cap: float = 0.0,
) -> tuple[Tensor, Stats]:
    """Clip the ratio r = pi / pi_old: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    Args:
        logprobs, old_logprobs: [T] float, nats. Current and at batch preparation.
        advantages: [T] float. loss_mask: [T] bool.
        clip_low, clip_high: distances from 1 of the bounds.
        dual_clip: for A < 0, no term above dual_clip * |A|; 0 switches it off, else above 1.
        ratio_cap: r is capped here before the min (matters for A < 0); 0 is off, else above
            1 + clip_high.
    Returns: terms [T] and stats.
    Raises: ValueError for bounds out of range.
    Source: arXiv 1707.06347 eq. 7; 2503.14476 (two bounds); 1912.09729 (dual_clip);
        2505.07291 (ratio_cap).
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    _check_clip(clip_low, clip_high)
    if dual_clip and dual_clip <= 1:
        raise ValueError(f"dual_clip: must be above 1 (or 0 for off), got {dual_clip}")
    if ratio_cap and ratio_cap <= 1 + clip_high:
        raise ValueError(f"ratio_cap: must be above 1 + clip_high = {1 + clip_high:g} (or 0 for "
                         f"off), got {ratio_cap}")
    advantages = _keep(advantages, loss_mask)
    ratio = _log_ratio(logprobs, old_logprobs, loss_mask).exp()
    capped = ratio.clamp(max=ratio_cap) if ratio_cap else ratio
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(capped * advantages, clipped * advantages)
    if dual_clip:
        floor = dual_clip * advantages
        surrogate = torch.where((advantages < 0) & (surrogate < floor), floor, surrogate)
    bound = min([b for b in (dual_clip, ratio_cap) if b], default=float("inf"))
    beyond = (advantages < 0) & (ratio > bound)
    stats = _clip_stats(
        ratio, loss_mask, low=(advantages < 0) & (ratio < 1 - clip_low),
        high=((advantages > 0) & (ratio > 1 + clip_high)) | beyond,
    )
    stats["policy/dual_clip_frac"] = _masked_mean(beyond.double(), loss_mask)
    return _keep(-surrogate, loss_mask), stats


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
    ratio = _log_ratio(logprobs, old_logprobs, loss_mask).exp()
    surrogate = _keep(advantages, loss_mask) * _keep(logprobs, loss_mask)
    return _keep(-surrogate, loss_mask), _ratio_stats(ratio, loss_mask)


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, *, advantages: Tensor, loss_mask: Tensor,
    ratio_low: float = 0.0, ratio_high: float = 5.0,
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
        raise ValueError(f"ratio_low, ratio_high: must be 0 <= low < 1 < high (bounds on the "
                         f"ratio itself), got {ratio_low}, {ratio_high}")
    ratio = _log_ratio(logprobs, old_logprobs, loss_mask).exp().detach()
    weight = ratio.clamp(ratio_low, ratio_high) * _keep(advantages, loss_mask)
    stats = _clip_stats(ratio, loss_mask, low=ratio < ratio_low, high=ratio > ratio_high)
    return _keep(-weight * _keep(logprobs, loss_mask), loss_mask), stats


def gspo(
    logprobs: Tensor, old_logprobs: Tensor, *, advantages: Tensor, loss_mask: Tensor,
    cu_seqlens: Tensor, clip_low: float = 3e-4, clip_high: float = 4e-4,
) -> tuple[Tensor, Stats]:
    """Clip the sequence's ratio s = exp(mean_t log r_t): -min(s A, clip(s) A) at each token.

    With aggregation `seq_mean_token_mean` this is the paper's objective.

    Args:
        logprobs, old_logprobs: [T] float, nats.
        advantages: [T] float, one value per sequence. loss_mask: [T] bool.
        cu_seqlens: [S+1] int32.
        clip_low, clip_high: distances from 1 of the bounds on s.
    Returns: terms [T] and stats; the ratio in the stats is s, counted per token.
    Raises: ValueError for bounds out of range.
    Source: arXiv 2507.18071 (GSPO).
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    _check_clip(clip_low, clip_high)
    advantages = _keep(advantages, loss_mask)
    mean = sequence_mean(_log_ratio(logprobs, old_logprobs, loss_mask), cu_seqlens,
                         loss_mask=loss_mask)
    ratio = per_token(mean.exp().to(logprobs.dtype), cu_seqlens, num_tokens=logprobs.numel())
    surrogate = torch.minimum(ratio * advantages,
                              ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    stats = _clip_stats(ratio, loss_mask, low=(advantages < 0) & (ratio < 1 - clip_low),
                        high=(advantages > 0) & (ratio > 1 + clip_high))
    return _keep(-surrogate, loss_mask), stats


def sft(logprobs: Tensor, *, loss_mask: Tensor) -> tuple[Tensor, Stats]:
    """Return the negative log-likelihood of the data: -log pi.

    Args:
        logprobs: [T] float, nats. loss_mask: [T] bool.
    Returns: terms [T] and stats (policy/nll, nats per token).
    Source: maximum likelihood.
    Invariant under: dp size, micro-batching, packing order, padding.
    """
    terms = _keep(-logprobs, loss_mask)
    return terms, {"policy/nll": _masked_mean(terms, loss_mask)}


def _keep(values: Tensor, loss_mask: Tensor) -> Tensor:
    # where, not a product: NaN * 0 is NaN, and so would be the gradient.
    return torch.where(loss_mask, values, 0.0)


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    difference = _keep(logprobs - old_logprobs.detach(), loss_mask)
    return difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def _check_clip(clip_low: float, clip_high: float) -> None:
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(f"clip_low, clip_high: distances from a ratio of 1, must be in [0, 1] "
                         f"and at least 0, got {clip_low}, {clip_high}")


def _masked_mean(values: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    return _keep(values.detach(), loss_mask).double().sum(), loss_mask.double().sum()


def _ratio_stats(ratio: Tensor, loss_mask: Tensor) -> Stats:
    ratio = ratio.detach()
    return {
        "policy/ratio": _masked_mean(ratio, loss_mask),
        "policy/kl_old": _masked_mean(-ratio.log(), loss_mask),  # k1 of old || current
    }


def _clip_stats(ratio: Tensor, loss_mask: Tensor, *, low: Tensor, high: Tensor) -> Stats:
    return _ratio_stats(ratio, loss_mask) | {
        "policy/clip_frac": _masked_mean((low | high).double(), loss_mask),
        "policy/clip_low_frac": _masked_mean(low.double(), loss_mask),
        "policy/clip_high_frac": _masked_mean(high.double(), loss_mask),
    }
