"""Weights that correct for tokens sampled by the engine, not by the trainer's policy.

rho = pi_old / mu, with mu as sampled. All bounds are bounds on rho itself. `level` says which
rho a token gets: `token` its own; `sequence` the product over its sequence's loss tokens;
`geometric` their geometric mean exp(mean log rho). Log-ratios are clamped to +-20 after the
sum. A token whose rollout logprob is not finite counts as rho = 1 (`mismatch` counts them).

Each returns [T] weights, detached, 0 where `loss_mask` is False, in the dtype of
`old_logprobs`, and stats as losses do. The weights multiply a loss's terms; the counts that
divide the loss stay as they are.
Invariant under: dp size, micro-batching, packing order, padding.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from spmdrl.algorithms.reduce import per_token, sequence_mean, sequence_sum

__all__ = ["none", "tis", "mis", "icepop"]

Level = Literal["token", "sequence", "geometric"]
Stats = dict[str, tuple[Tensor, Tensor]]


def none(old_logprobs: Tensor, *, loss_mask: Tensor) -> tuple[Tensor, Stats]:
    """Return weight 1 for every loss token: [T], and no stats."""
    return loss_mask.to(old_logprobs.dtype), {}


def tis(
    old_logprobs: Tensor, rollout_logprobs: Tensor, *, loss_mask: Tensor, cu_seqlens: Tensor,
    level: Level = "token", upper: float = 2.0,
) -> tuple[Tensor, Stats]:
    """Truncate: min(rho, upper).

    Args:
        old_logprobs, rollout_logprobs: [T] float, nats. Trainer's and engine's.
        loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        level: which rho. upper: largest weight, above 0.
    Returns: weights [T] and stats.
    Raises: ValueError for a bound or level out of range.
    Source: Yao et al. 2025, truncated importance sampling between engine and trainer
        (fengyao.notion.site/off-policy-rl); Ionides 2008.
    """
    if not upper > 0:
        raise ValueError(f"upper: must be above 0, got {upper}")
    rho = _ratio(old_logprobs, rollout_logprobs, loss_mask=loss_mask, cu_seqlens=cu_seqlens,
                 level=level)
    return _finish(rho.clamp(max=upper), rho, loss_mask=loss_mask, like=old_logprobs)


def mis(
    old_logprobs: Tensor, rollout_logprobs: Tensor, *, loss_mask: Tensor, cu_seqlens: Tensor,
    level: Level = "sequence", lower: float = 0.0, upper: float = 3.0,
) -> tuple[Tensor, Stats]:
    """Mask: rho inside [lower, upper], else 0.

    Args:
        old_logprobs, rollout_logprobs: [T] float, nats.
        loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        level: which rho. lower, upper: bounds on rho, inclusive.
    Returns: weights [T] and stats.
    Raises: ValueError for bounds or a level out of range.
    Source: Liu et al. 2025, masked importance sampling (yingru.notion.site, speed kills
        stability); defaults as in TRL.
    """
    return _masked_ratio(old_logprobs, rollout_logprobs, loss_mask=loss_mask,
                         cu_seqlens=cu_seqlens, level=level, lower=lower, upper=upper)


def icepop(
    old_logprobs: Tensor, rollout_logprobs: Tensor, *, loss_mask: Tensor, cu_seqlens: Tensor,
    level: Level = "token", lower: float = 0.5, upper: float = 5.0,
) -> tuple[Tensor, Stats]:
    """Mask both sides: rho inside [lower, upper], else 0; per token in the paper.

    Args:
        old_logprobs, rollout_logprobs: [T] float, nats.
        loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        level: which rho. lower, upper: bounds on rho, inclusive.
    Returns: weights [T] and stats.
    Raises: ValueError for bounds or a level out of range.
    Source: arXiv 2510.18855 (IcePop; alpha 0.5, beta 5).
    """
    return _masked_ratio(old_logprobs, rollout_logprobs, loss_mask=loss_mask,
                         cu_seqlens=cu_seqlens, level=level, lower=lower, upper=upper)


def _masked_ratio(
    old_logprobs: Tensor, rollout_logprobs: Tensor, *, loss_mask: Tensor, cu_seqlens: Tensor,
    level: Level, lower: float, upper: float,
) -> tuple[Tensor, Stats]:
    if not 0 <= lower < upper:
        raise ValueError(f"lower, upper: must be 0 <= lower < upper, got {lower}, {upper}")
    rho = _ratio(old_logprobs, rollout_logprobs, loss_mask=loss_mask, cu_seqlens=cu_seqlens,
                 level=level)
    weights = torch.where((rho >= lower) & (rho <= upper), rho, 0.0)
    return _finish(weights, rho, loss_mask=loss_mask, like=old_logprobs)


def log_rho(old_logprobs: Tensor, rollout_logprobs: Tensor, *, loss_mask: Tensor) -> Tensor:
    """Return log rho of each loss token: [T] float64, detached.

    0 off the loss mask and where the engine's logprob is not finite. A trainer logprob that
    is not finite stays visible, for the update to be skipped.
    """
    old, rollout = old_logprobs.detach().double(), rollout_logprobs.detach().double()
    return torch.where(loss_mask & rollout.isfinite(), old - rollout, 0.0)


def _ratio(
    old_logprobs: Tensor, rollout_logprobs: Tensor, *, loss_mask: Tensor, cu_seqlens: Tensor,
    level: Level,
) -> Tensor:
    log_ratio = log_rho(old_logprobs, rollout_logprobs, loss_mask=loss_mask)
    if level == "sequence":
        log_ratio = per_token(sequence_sum(log_ratio, cu_seqlens), cu_seqlens,
                              num_tokens=log_ratio.numel())
    elif level == "geometric":
        log_ratio = per_token(sequence_mean(log_ratio, cu_seqlens, loss_mask=loss_mask),
                              cu_seqlens, num_tokens=log_ratio.numel())
    elif level != "token":
        raise ValueError(f"level: must be token, sequence or geometric, got {level!r}")
    return log_ratio.clamp(-20.0, 20.0).exp()


def _finish(
    weights: Tensor, rho: Tensor, *, loss_mask: Tensor, like: Tensor
) -> tuple[Tensor, Stats]:
    weights = torch.where(loss_mask, weights, 0.0)
    count = loss_mask.double().sum()
    stats = {
        "policy/correction_weight": (weights.sum(), count),
        "policy/correction_cut_frac": ((loss_mask & (weights != rho)).double().sum(), count),
    }
    return weights.to(like.dtype), stats
