"""Weights that correct for tokens sampled by the engine, not by the trainer's policy.

rho = pi_old / mu, with mu as sampled. All bounds are bounds on rho itself. `level` says which
rho a token gets: `token` its own; `sequence` the product over its sequence's loss tokens;
`geometric` their geometric mean exp(mean log rho). Log-ratios are clamped to +-20 after the
sum. A token whose rollout logprob is not finite counts as rho = 1 (`mismatch` counts them).
Some weigh (tis), some drop and leave the rest at weight 1 (sequence_mask, veto, opsm), the
others do both.

Each returns [T] weights, detached, 0 where `loss_mask` is False, in the dtype of
`old_logprobs`, and stats as losses do. The weights multiply a loss's terms; the counts that
divide the loss stay as they are.
Invariant under: dp size, micro-batching, packing order, padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from spmdrl.algorithms.masked import Stats, attach, check_bound, keep, making, masked_mean
from spmdrl.algorithms.reduce import spread_mean, spread_sum
from spmdrl.errors import Refusal

__all__ = ["icepop", "mis", "none", "opsm", "seq_mask_tis", "sequence_mask", "tis", "vaco", "veto"]

Level = Literal["token", "sequence", "geometric"]
Correction = tuple[Tensor, Stats]


def log_rho(old_logprobs: Tensor, rollout_logprobs: Tensor, *, loss_mask: Tensor) -> Tensor:
    """Return log rho of each loss token: [T] float64, detached.

    0 off the loss mask and where the engine's logprob is not finite. A trainer logprob that
    is not finite stays visible, for the update to be skipped.
    """
    old = old_logprobs.detach().double()
    rollout = rollout_logprobs.detach().double()
    return keep(old - rollout, loss_mask & rollout.isfinite())


@dataclass(frozen=True)
class Rho:
    """rho of one micro-batch, and what a correction by it returns."""

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
        """Weigh by rho inside the bounds, drop tokens outside."""
        rho = self.at(level)
        weights = keep(rho, _inside(rho, lower, upper))
        return self.correction(weights, weights != rho)

    def correction(self, weights: Tensor, is_cut: Tensor) -> Correction:
        """Return [T] weights, and the stats: their mean, and the share of tokens that are cut."""
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

    Source: the plain objective; right where engine and trainer agree, or a loss corrects itself.
    """
    return loss_mask.to(old_logprobs.dtype), {}


@making(rho=rho_of)
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
    own = rho.at(level)
    return rho.correction(own.clamp(max=upper), own > upper)


@making(rho=rho_of)
def mis(
    rho: Rho, *, level: Level = "sequence", lower: float = 0.0, upper: float = 3.0
) -> Correction:
    """Mask: rho inside [lower, upper], else 0.

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


@making(rho=rho_of)
def icepop(
    rho: Rho, *, level: Level = "token", lower: float = 0.5, upper: float = 5.0
) -> Correction:
    """Mask both sides: rho inside [lower, upper], else 0; per token in the paper.

    Args:
        old_logprobs, rollout_logprobs: [T] float, nats.
        loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        level: which rho. lower, upper: bounds on rho, inclusive.
    Returns: weights [T] and stats.
    Raises: Refusal for bounds or a level out of range.
    Source: arXiv 2510.18855 (IcePop; alpha 0.5, beta 5).
    """
    return rho.masked(level, lower, upper)


@making(rho=rho_of)
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
    Source: Liu et al. 2025, geometric sequence masking (yingru.notion.site); bounds as
        SkyRL advises for the geometric mean. The product wants wider ones.
    """
    if level == "token":
        raise Refusal("level: must be sequence or geometric, got 'token'")
    kept = _inside(rho.at(level), lower, upper)
    return rho.correction(kept.double(), ~kept)


@making(rho=rho_of)
def seq_mask_tis(
    rho: Rho, *, lower: float = 0.99, upper: float = 1.01, token_upper: float = 2.0
) -> Correction:
    """Drop sequences by their geometric rho, truncate the rest: min(rho_t, token_upper).

    Args:
        old_logprobs, rollout_logprobs: [T] float, nats.
        loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        lower, upper: bounds on the geometric mean, inclusive. token_upper: largest weight.
    Returns: weights [T] and stats.
    Raises: Refusal for bounds out of range.
    Source: `sequence_mask` times `tis`.
    """
    kept = _inside(rho.at("geometric"), lower, upper)
    check_bound(token_upper=token_upper)
    own = rho.at("token")
    weights = torch.where(kept, own.clamp(max=token_upper), 0.0)
    return rho.correction(weights, weights != own)


@making(rho=rho_of)
def veto(rho: Rho, *, lower: float = 1e-4, upper: float = 1e2) -> Correction:
    """Drop a sequence if one of its loss tokens has rho outside [lower, upper]; else weight 1.

    Args:
        old_logprobs, rollout_logprobs: [T] float, nats.
        loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        lower, upper: bounds on a token's rho, inclusive.
    Returns: weights [T] and stats.
    Raises: Refusal for bounds out of range.
    Source: Liu et al. 2025, outlier veto (yingru.notion.site).
    """
    outside = rho.loss_mask & ~_inside(rho.at("token"), lower, upper)
    kept = spread_sum(outside, rho.cu_seqlens) == 0
    return rho.correction(kept.double(), ~kept)


@making(rho=rho_of)
def opsm(rho: Rho, *, advantages: Tensor, delta: float = 1e-4) -> Correction:
    """Drop off-policy sequences with a negative advantage; weight 1 for the others.

    Dropped where A < 0 and the sequence's mean log mu - log pi_old is above delta, that is
    where its geometric rho is below exp(-delta).

    Args:
        old_logprobs, rollout_logprobs: [T] float, nats.
        advantages: [T] float. loss_mask: [T] bool. cu_seqlens: [S+1] int32.
        delta: nats per token, at least 0.
    Returns: weights [T] and stats.
    Raises: Refusal for a negative delta.
    Source: arXiv 2512.02556 (DeepSeek-V3.2, off-policy sequence masking). Deviation: pi_old,
        once per batch, where the paper has the current policy at each update.
    """
    if not delta >= 0:
        raise Refusal(f"delta: must be at least 0, got {delta}")
    drift = -spread_mean(rho.log, rho.cu_seqlens, loss_mask=rho.loss_mask)
    dropped = (advantages.detach() < 0) & (drift > delta)
    return rho.correction((~dropped).double(), dropped)


def vaco_statistics(old_logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, Tensor]:
    """Measure how far the trainer's policy is from the one that sampled, for `vaco`.

    Args:
        old_logprobs, rollout_logprobs: [N] float, nats, loss tokens of the whole batch (all
            ranks).
    Returns: mean_ratio_gap [] float64: mean |rho - 1|, 0 without tokens.
    Invariant under: permuting the columns, bit for bit.
    """
    everything = torch.ones_like(old_logprobs, dtype=torch.bool)
    rho = log_rho(old_logprobs, rollout_logprobs, loss_mask=everything).clamp(-20.0, 20.0).exp()
    gaps = (rho - 1).abs().sort().values  # sorted, so that the order cannot change the sum
    return {"mean_ratio_gap": gaps.sum() / max(len(gaps), 1)}


@attach(statistics=vaco_statistics)
@making(rho=rho_of)
def vaco(
    rho: Rho, *, advantages: Tensor, mean_ratio_gap: Tensor, bound: float = 0.2, upper: float = 2.0
) -> Correction:
    """Drop the tokens that push pi further from mu, while the two are too far apart.

    With the batch's mean |rho - 1| (twice the total variation) above `bound`, tokens with
    A (rho - 1) > 0 get 0. All others get min(rho, upper).

    Args:
        old_logprobs, rollout_logprobs: [T] float, nats.
        advantages: [T] float. loss_mask: [T] bool.
        mean_ratio_gap: [] float64, of the whole batch, from `vaco_statistics`.
        bound: on mean_ratio_gap, above 0. upper: largest weight, above 0.
    Returns: weights [T] and stats.
    Raises: Refusal for bounds out of range.
    Source: arXiv 2603.01365 (VACO), the filter alone. Deviations: pi_old, once per batch,
        where the paper has the current policy; weights truncated at `upper`.
    """
    check_bound(bound=bound, upper=upper)
    own = rho.at("token")
    pushes = advantages.detach() * (own - 1) > 0
    dropped = pushes & (mean_ratio_gap.detach() > bound)
    weights = torch.where(dropped, 0.0, own.clamp(max=upper))
    return rho.correction(weights, weights != own)
