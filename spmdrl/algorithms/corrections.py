"""Importance weights: the engine sampled the tokens, and its policy differs from the trainer's.

rho = pi_old / mu, where mu is the engine's policy. All bounds are on rho, not on its distance from
1. `level` selects the rho of a token: `token` is its own ratio; `sequence` is the product over the
loss tokens of its sequence; `geometric` is their geometric mean exp(mean log rho). Each trace of an
episode is a sequence. Log-ratios are clamped to +-20 after the sum. A token has rho = 1 if its
rollout logprob is not finite (`mismatch` counts these). Some corrections scale tokens (tis), some
drop tokens and give the others weight 1 (sequence_mask, veto, opsm), and some do both.

Each correction returns [T] weights, detached, 0 where `loss_mask` is False, in the dtype of
`old_logprobs`; and stats as losses do. The weights multiply the terms of a loss. They do not change
the counts that divide the loss.
Invariant under: dp size, micro-batching, packing order, padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from spmdrl.algorithms.masked import Stats, attach, check_bound, derive, keep, masked_mean
from spmdrl.algorithms.reduce import spread_mean, spread_sum
from spmdrl.errors import Refusal

__all__ = ["icepop", "mis", "none", "opsm", "seq_mask_tis", "sequence_mask", "tis", "vaco", "veto"]

Level = Literal["token", "sequence", "geometric"]
Correction = tuple[Tensor, Stats]


def log_rho(old_logprobs: Tensor, rollout_logprobs: Tensor, *, loss_mask: Tensor) -> Tensor:
    """Return log rho of each loss token: [T] float64, detached.

    It is 0 off the loss mask and where the engine's logprob is not finite. It is not finite where
    the trainer's logprob is not, so that the update is skipped.
    """
    old = old_logprobs.detach().double()
    rollout = rollout_logprobs.detach().double()
    return keep(old - rollout, loss_mask & rollout.isfinite())


@dataclass(frozen=True)
class Rho:
    """rho of one micro-batch, and the results of corrections."""

    log: Tensor  # [T] float64, of each loss token; 0 elsewhere
    loss_mask: Tensor  # [T] bool
    cu_seqlens: Tensor  # [S+1] int32
    dtype: torch.dtype  # of the weights

    def at(self, level: Level) -> Tensor:
        """Return rho of each token at a level: [T] float64. Raises: Refusal for another."""
        log = self.log
        if level == "sequence":
            log = spread_sum(log, self.cu_seqlens)
        elif level == "geometric":
            log = spread_mean(log, self.cu_seqlens, loss_mask=self.loss_mask)
        elif level != "token":
            raise Refusal(f"level: must be token, sequence or geometric, got {level!r}")
        return log.clamp(-20.0, 20.0).exp()

    def masked(self, level: Level, lower: float, upper: float) -> Correction:
        """Return a correction that weighs by rho inside the bounds and drops tokens outside."""
        rho = self.at(level)
        weights = keep(rho, _inside(rho, lower, upper))
        return self.correction(weights, weights != rho)

    def correction(self, weights: Tensor, is_cut: Tensor) -> Correction:
        """Return [T] weights and stats: their mean, and the share of tokens that `is_cut` marks."""
        weights = keep(weights, self.loss_mask)
        stats = {
            "policy/correction_weight": masked_mean(weights, self.loss_mask),
            "policy/correction_cut_frac": masked_mean(is_cut, self.loss_mask),
        }
        return weights.to(self.dtype), stats


def rho_of(
    old_logprobs: Tensor, rollout_logprobs: Tensor, *, loss_mask: Tensor, cu_seqlens: Tensor
) -> Rho:
    """Compare the trainer's logprobs with the engine's, [T] float each, nats."""
    log = log_rho(old_logprobs, rollout_logprobs, loss_mask=loss_mask)
    return Rho(log, loss_mask, cu_seqlens, old_logprobs.dtype)


def _inside(rho: Tensor, lower: float, upper: float) -> Tensor:
    if not 0 <= lower < upper:
        raise Refusal(f"lower, upper: must be 0 <= lower < upper, got {lower}, {upper}")
    return (rho >= lower) & (rho <= upper)


def none(old_logprobs: Tensor, *, loss_mask: Tensor) -> tuple[Tensor, Stats]:
    """Return weight 1 for every loss token: [T], and no stats.

    Source: the plain objective, for a trainer and an engine that agree, or a loss that weighs by
        pi / mu itself.
    """
    return loss_mask.to(old_logprobs.dtype), {}


@derive(rho=rho_of)
def tis(rho: Rho, *, level: Level = "token", upper: float = 2.0) -> Correction:
    """Truncate: min(rho, upper).

    Args:
        old_logprobs, rollout_logprobs: [T] float, nats. Trainer's and engine's.
        loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        level: which rho. upper: largest weight, above 0.
    Returns: weights [T] and stats.
    Raises: Refusal for a bound or level out of range.
    Source: Yao et al. 2025, truncated importance sampling between engine and trainer
        (fengyao.notion.site/off-policy-rl); Ionides 2008.
    """
    check_bound(upper=upper)
    token_rho = rho.at(level)
    return rho.correction(token_rho.clamp(max=upper), token_rho > upper)


@derive(rho=rho_of)
def mis(
    rho: Rho, *, level: Level = "sequence", lower: float = 0.0, upper: float = 3.0
) -> Correction:
    """Weigh by rho inside [lower, upper], else 0.

    Args:
        old_logprobs, rollout_logprobs: [T] float, nats.
        loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        level: which rho. lower, upper: bounds on rho, inclusive.
    Returns: weights [T] and stats.
    Raises: Refusal for bounds or a level out of range.
    Source: Liu et al. 2025, masked importance sampling (yingru.notion.site, speed kills
        stability); defaults as in TRL.
    """
    return rho.masked(level, lower, upper)


@derive(rho=rho_of)
def icepop(
    rho: Rho, *, level: Level = "token", lower: float = 0.5, upper: float = 5.0
) -> Correction:
    """Weigh by rho inside [lower, upper], else 0; per token in the paper.

    Args:
        old_logprobs, rollout_logprobs: [T] float, nats.
        loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        level: which rho. lower, upper: bounds on rho, inclusive.
    Returns: weights [T] and stats.
    Raises: Refusal for bounds or a level out of range.
    Source: arXiv 2510.18855 (IcePop; alpha 0.5, beta 5).
    """
    return rho.masked(level, lower, upper)


@derive(rho=rho_of)
def sequence_mask(
    rho: Rho,
    *,
    level: Literal["sequence", "geometric"] = "geometric",
    lower: float = 0.99,
    upper: float = 1.01,
) -> Correction:
    """Drop whole sequences: weight 1 if the sequence's rho is inside [lower, upper], else 0.

    Args:
        old_logprobs, rollout_logprobs: [T] float, nats.
        loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        level: which rho, the product or the geometric mean. lower, upper: bounds, inclusive.
    Returns: weights [T] and stats.
    Raises: Refusal for bounds or a level out of range.
    Source: Liu et al. 2025, geometric sequence masking (yingru.notion.site). The default bounds
        are SkyRL's advice for the geometric mean; the product needs wider bounds.
    """
    if level == "token":
        raise Refusal("level: must be sequence or geometric, got 'token'")
    in_bounds = _inside(rho.at(level), lower, upper)
    return rho.correction(in_bounds.double(), ~in_bounds)


@derive(rho=rho_of)
def seq_mask_tis(
    rho: Rho, *, lower: float = 0.99, upper: float = 1.01, token_upper: float = 2.0
) -> Correction:
    """Drop sequences by their geometric rho; the others get min(rho_t, token_upper).

    Args:
        old_logprobs, rollout_logprobs: [T] float, nats.
        loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        lower, upper: bounds on the geometric mean, inclusive. token_upper: largest weight.
    Returns: weights [T] and stats.
    Raises: Refusal for bounds out of range.
    Source: `sequence_mask` times `tis`.
    """
    in_bounds = _inside(rho.at("geometric"), lower, upper)
    check_bound(token_upper=token_upper)
    token_rho = rho.at("token")
    weights = torch.where(in_bounds, token_rho.clamp(max=token_upper), 0.0)
    return rho.correction(weights, weights != token_rho)


@derive(rho=rho_of)
def veto(rho: Rho, *, lower: float = 1e-4, upper: float = 1e2) -> Correction:
    """Drop a sequence if any loss token has rho outside [lower, upper]; else weight 1.

    Args:
        old_logprobs, rollout_logprobs: [T] float, nats.
        loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        lower, upper: bounds on a token's rho, inclusive.
    Returns: weights [T] and stats.
    Raises: Refusal for bounds out of range.
    Source: Liu et al. 2025, outlier veto (yingru.notion.site).
    """
    outside = rho.loss_mask & ~_inside(rho.at("token"), lower, upper)
    in_bounds = spread_sum(outside, rho.cu_seqlens) == 0
    return rho.correction(in_bounds.double(), ~in_bounds)


@derive(rho=rho_of)
def opsm(rho: Rho, *, advantages: Tensor, delta: float = 1e-4) -> Correction:
    """Drop off-policy sequences with a negative advantage; weight 1 for the others.

    A token is dropped if A < 0 and the mean of log mu - log pi_old over its sequence is above
    delta. This is the same as a geometric rho below exp(-delta).

    Args:
        old_logprobs, rollout_logprobs: [T] float, nats.
        advantages: [T] float. loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        delta: nats per token, at least 0.
    Returns: weights [T] and stats.
    Raises: Refusal for a negative delta.
    Source: arXiv 2512.02556 (DeepSeek-V3.2, off-policy sequence masking). Deviation: the ratio is
        that of pi_old, once per batch; the paper uses the current policy at each update.
    """
    if not delta >= 0:
        raise Refusal(f"delta: must be at least 0, got {delta}")
    drift = -spread_mean(rho.log, rho.cu_seqlens, loss_mask=rho.loss_mask)
    dropped = (advantages.detach() < 0) & (drift > delta)
    return rho.correction((~dropped).double(), dropped)


def vaco_statistics(old_logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, Tensor]:
    """Measure how far the trainer's policy is from the engine's, for `vaco`.

    Args:
        old_logprobs, rollout_logprobs: [N] float, nats, loss tokens of the whole batch (all
            ranks).
    Returns: mean_ratio_gap [] float64: mean |rho - 1|, 0 without tokens.
    Invariant under: permuting the columns, bit for bit.
    """
    everything = torch.ones_like(old_logprobs, dtype=torch.bool)
    rho = log_rho(old_logprobs, rollout_logprobs, loss_mask=everything).clamp(-20.0, 20.0).exp()
    gaps = (rho - 1).abs().sort().values  # the sum then does not depend on the order of tokens
    return {"mean_ratio_gap": gaps.sum() / max(len(gaps), 1)}


@attach(statistics=vaco_statistics)
@derive(rho=rho_of)
def vaco(
    rho: Rho, *, advantages: Tensor, mean_ratio_gap: Tensor, bound: float = 0.2, upper: float = 2.0
) -> Correction:
    """Drop the tokens that push pi further from mu, while the two are too far apart.

    If the batch's mean |rho - 1| (twice the total variation) is above `bound`, tokens with
    A (rho - 1) > 0 get 0. All other tokens get min(rho, upper).

    Args:
        old_logprobs, rollout_logprobs: [T] float, nats.
        advantages: [T] float. loss_mask: [T] bool.
        mean_ratio_gap: [] float64, of the whole batch, from `vaco_statistics`.
        bound: on mean_ratio_gap, above 0. upper: largest weight, above 0.
    Returns: weights [T] and stats.
    Raises: Refusal for bounds out of range.
    Source: arXiv 2603.01365 (VACO), only its filter. Deviations: the ratio is that of pi_old, once
        per batch, where the paper uses the current policy; weights are truncated at `upper`.
    """
    check_bound(bound=bound, upper=upper)
    token_rho = rho.at("token")
    pushes = advantages.detach() * (token_rho - 1) > 0
    dropped = pushes & (mean_ratio_gap.detach() > bound)
    weights = torch.where(dropped, 0.0, token_rho.clamp(max=upper))
    return rho.correction(weights, weights != token_rho)
