"""Advantages: one number per sample from the rewards of the whole batch.

A sample is a sequence, or an agent's episode with all its traces. Inputs are [S] tensors of
`types.Scalars`, equal on every rank. R is a reward; mu_g and sigma_g are mean and population
standard deviation over a group's valid samples. Every function returns [S] float64 in the order of
its inputs. An advantage is exactly 0 for a sample that is not valid, and for a group of one if the
baseline comes from the other samples. Rewards that differ only by rounding (2^-40 relative) count
as equal.

Invariant under: permuting sequences or groups; dp size.
Raises: Refusal for a valid reward that is not finite (every function).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from spmdrl.algorithms.groups import ROUNDING, Groups, group_rewards
from spmdrl.algorithms.masked import check_positive, derive
from spmdrl.errors import Refusal

__all__ = [
    "dr_grpo",
    "gdpo",
    "gpg",
    "grpo",
    "lite_ppo",
    "max_rl",
    "opo",
    "pass_at_k",
    "reinforce",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
]  # the methods, for the registry


@derive(groups=group_rewards)
def grpo(groups: Groups, *, std_eps: float = 1e-6) -> Tensor:
    """Standardise within the group: (R - mu_g) / (sigma_g + std_eps).

    Source: arXiv 2402.03300, outcome supervision. Also invariant under adding a constant per
        group.
    """
    check_positive(std_eps=std_eps)
    return groups.centred() / (groups.stds + std_eps)[groups.index]


@derive(groups=group_rewards)
def dr_grpo(groups: Groups) -> Tensor:
    """Centre within the group: R - mu_g.

    Source: arXiv 2503.20783. Also invariant under adding a constant per group.
    """
    return groups.centred()


@derive(groups=group_rewards)
def rloo(groups: Groups) -> Tensor:
    """Subtract the mean of the group's other samples: G / (G - 1) * (R - mu_g).

    Source: arXiv 2402.14740. Also invariant under adding a constant per group.
    """
    factor = groups.counts / (groups.counts - 1).clamp(min=1)
    return groups.centred() * factor[groups.index]


@derive(groups=group_rewards)
def lite_ppo(groups: Groups, *, std_eps: float = 1e-6) -> Tensor:
    """Centre within the group, scale by the batch: (R - mu_g) / (sigma_batch + std_eps).

    Source: arXiv 2508.08221; sigma_batch is the population standard deviation of all valid
        rewards. Also invariant under adding one constant to all rewards.
    """
    check_positive(std_eps=std_eps)
    one_group = torch.zeros_like(groups.index)
    batch = group_rewards(groups.rewards, one_group, is_valid=groups.is_valid)
    return groups.centred() / (batch.stds + std_eps)[batch.index]


@derive(groups=group_rewards)
def max_rl(groups: Groups, *, mean_eps: float = 1e-6) -> Tensor:
    """Scale by the group's success rate: (R - mu_g) / (mu_g + mean_eps).

    Raises: Refusal for a negative reward, with which the divisor can vanish.
    Source: SkyRL's `maxrl` estimator of maximum-likelihood RL. Not invariant under adding a
        constant, by design.
    """
    check_positive(mean_eps=mean_eps)
    if (groups.rewards < 0).any():
        raise Refusal(
            f"max_rl needs rewards of at least 0, got {float(groups.rewards.min())}; "
            "shift the reward or take another advantage"
        )
    return groups.centred() / (groups.means + mean_eps)[groups.index]


@derive(groups=group_rewards)
def gpg(groups: Groups) -> Tensor:
    """Centre within the group, and scale up for groups without signal: alpha (R - mu_g).

    alpha = valid samples / valid samples in groups whose rewards differ.

    Source: arXiv 2504.02546. Also invariant under adding a constant per group.
    """
    with_signal = (groups.counts * groups.has_spread).sum().clamp(min=1)
    return groups.centred() * (groups.counts.sum() / with_signal)


@derive(groups=group_rewards)
def opo(groups: Groups, *, response_lengths: Tensor) -> Tensor:
    """Subtract the length-weighted group mean: R - sum(|y| R) / sum(|y|).

    Args:
        response_lengths: [S] int64, tokens.
    Source: arXiv 2505.23585. Also invariant under adding a constant per group.
    """
    lengths = response_lengths.double() * groups.is_valid
    # Differences from the mean are small, so their sum loses no digits.
    offset = groups.rewards - groups.means[groups.index]
    shift = groups.sum(lengths * offset) / groups.sum(lengths).clamp(min=1)
    return groups.centred(groups.means + shift)


@derive(groups=group_rewards)
def pass_at_k(
    groups: Groups, *, scale: Literal["none", "std"] = "none", std_eps: float = 1e-6
) -> Tensor:
    """Give only the group's best sample an advantage: best - second best.

    This is how much the best reward of the group's k samples falls without that sample. If two
    samples tie for the best reward, both get 0.

    Args:
        scale: `std` divides by sigma_g + std_eps.
    Source: arXiv 2503.19595, the leave-one-out baseline of the max objective. Also invariant
        under adding a constant per group.
    """
    check_positive(std_eps=std_eps)
    best = groups.max(groups.rewards)
    is_best = groups.is_valid & groups.has_spread[groups.index]
    is_best = is_best & (groups.rewards == best[groups.index])
    below = torch.where(is_best, -torch.inf, groups.rewards)
    second = torch.where(groups.sum(is_best.double()) > 1, best, groups.max(below))
    lead = best - second
    leads = lead > ROUNDING * torch.maximum(best.abs(), second.abs())
    lead = torch.where(leads, lead, 0.0)
    if scale == "std":
        lead = lead / (groups.stds + std_eps)
    return torch.where(is_best, lead[groups.index], 0.0)


def gdpo(
    reward_parts: Tensor,
    group_ids: Tensor,
    *,
    is_valid: Tensor,
    part_weights: Sequence[float] = (),
    std_eps: float = 1e-6,
) -> Tensor:
    """Standardise each reward function within its group, add them up, scale by the batch.

    A = sum_k w_k (R_k - mu_gk) / sigma_gk, then A / (sigma_A + std_eps). sigma_A is over all valid
    samples of the batch in groups of two or more; their mean of A is 0.

    Args:
        reward_parts: [S, K] float64, the unweighted values of K reward functions.
        part_weights: K weights; empty for 1 each.
    Raises: Refusal for a valid part that is not finite, or if there are not K weights.
    Source: arXiv 2601.05242; sigma_gk needs no eps, as equal rewards give 0. Also invariant
        under adding a constant to one part of a group, or scaling it by a factor above 0.
    """
    check_positive(std_eps=std_eps)
    if reward_parts.dim() != 2:
        raise Refusal(f"reward_parts {tuple(reward_parts.shape)} must have the shape [S, K]")
    num_parts = reward_parts.shape[1]
    weights = list(part_weights) or [1.0] * num_parts
    if len(weights) != num_parts:
        raise Refusal(f"part_weights: {len(weights)} weights for {num_parts} reward functions")
    total = torch.zeros(len(group_ids), dtype=torch.float64)
    size = torch.zeros_like(total)
    counted = is_valid
    for weight, part in zip(weights, reward_parts.unbind(1), strict=True):
        groups = group_rewards(part, group_ids, is_valid=is_valid)
        stds = torch.where(groups.has_spread, groups.stds, 1.0)
        term = weight * groups.centred() / stds[groups.index]
        total = total + term
        size = size + term.abs()
        counted = is_valid & (groups.counts >= 2)[groups.index]
    # Parts that cancel out leave only rounding errors.
    total = torch.where(total.abs() > ROUNDING * size, total, 0.0)
    std = (total.square().sum() / counted.sum().clamp(min=1)).sqrt()
    return total / (std + std_eps)


@derive(groups=group_rewards)
def reinforce_plus_plus_baseline(
    groups: Groups, *, response_lengths: Tensor, std_eps: float = 1e-8
) -> Tensor:
    """Centre within the group, then whiten over all response tokens of the batch.

    Groups of one do not take part in the whitening; their advantage is 0.

    Args:
        response_lengths: [S] int64, tokens: the weights of the sequences in the whitening.
    Source: arXiv 2501.03262, REINFORCE++ with baseline. Also invariant under adding a
        constant per group.
    """
    check_positive(std_eps=std_eps)
    counted = groups.is_valid & (groups.counts >= 2)[groups.index]
    weights = response_lengths.double() * counted
    total = weights.sum().clamp(min=1)
    centred = groups.centred()
    centred = torch.where(counted, centred - (weights * centred).sum() / total, 0.0)
    std = ((weights * centred**2).sum() / total).sqrt()
    # If all tokens have the same value, the standard deviation is only a rounding error.
    has_scale = len(centred) > 0 and bool(std > 2.0**-40 * centred.abs().max())
    return centred / (std + std_eps) if has_scale else torch.zeros_like(centred)


def remax(rewards: Tensor, greedy_rewards: Tensor, *, is_valid: Tensor) -> Tensor:
    """Subtract the reward of the prompt's greedy sample: R - R(greedy).

    Args:
        greedy_rewards: [S] float64, task units. NaN: the prompt has no greedy sample, and its
            samples get 0.
    Raises: Refusal for an infinite greedy reward of a valid sample.
    Source: arXiv 2310.10505. Also invariant under adding a constant per prompt to both.
    """
    compared = is_valid & ~greedy_rewards.isnan()
    reward_values = reinforce(rewards, is_valid=is_valid)
    baselines = reinforce(greedy_rewards, is_valid=compared)
    gap = reward_values - baselines
    differs = gap.abs() > ROUNDING * torch.maximum(reward_values.abs(), baselines.abs())
    return torch.where(compared & differs, gap, 0.0)


def reinforce(rewards: Tensor, *, is_valid: Tensor) -> Tensor:
    """Return the reward itself, without a baseline.

    Source: Williams 1992, REINFORCE.
    """
    one_group = torch.zeros(len(rewards), dtype=torch.int64)
    return group_rewards(rewards, one_group, is_valid=is_valid).rewards
