"""Advantages: one number per sequence from the rewards of the whole batch.

Inputs are [S] tensors of `types.Scalars`, equal on every rank; R is a reward, mu_g and
sigma_g mean and population standard deviation over a group's valid samples. Every function
returns [S] float64 in the order given: exactly 0 for samples that are not valid and, where
the baseline is the other samples, for groups of one. Rewards that are equal up to rounding
(2^-40 relative) count as equal. Invariant under: permuting sequences or groups; dp size.
Raises everywhere: ValueError for a valid reward that is not finite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spmdrl.algorithms import registry
from spmdrl.algorithms.groups import group_rewards
from spmdrl.types import Batch

if TYPE_CHECKING:  # a name in a signature; algorithms depend on `types` alone
    from spmdrl.config import Config

__all__ = ["grpo", "dr_grpo", "rloo", "lite_ppo", "max_rl", "gpg", "opo",
           "reinforce_plus_plus_baseline", "reinforce"]  # the methods, for the registry


def advantages_of(batch: Batch, cfg: Config) -> Tensor:
    """Compute the configured advantage of every sequence of the batch.

    Returns: [S] float64, in the order of batch.scalars, equal on every rank; zeros for the
        sft objective, whose loss has no advantage.
    Raises: ValueError for a result of a method of one's own that is not [S] finite numbers.
    """
    chosen, scalars = cfg.algorithm, batch.scalars
    if chosen.objective == "sft":
        return torch.zeros(len(scalars), dtype=torch.float64)
    inputs = {name: getattr(scalars, name) for name in registry.INPUTS["advantage"]}
    method = registry.get("advantage", chosen.advantage)
    advantages = registry.call(method, inputs, chosen.advantage_options).double()
    if advantages.shape != (len(scalars),) or not advantages.isfinite().all():
        raise ValueError(f"algorithm.advantage: {chosen.advantage} gave shape "
                         f"{tuple(advantages.shape)} with "
                         f"{int((~advantages.isfinite()).sum())} values that are not finite; "
                         f"expected ({len(scalars)},), all finite")
    return advantages


def grpo(
    rewards: Tensor, group_ids: Tensor, *, is_valid: Tensor, std_eps: float = 1e-6
) -> Tensor:
    """Standardise within the group: (R - mu_g) / (sigma_g + std_eps).

    Source: arXiv 2402.03300, outcome supervision. Also invariant under adding a constant per
        group.
    """
    _check_eps(std_eps)
    groups = group_rewards(rewards, group_ids, is_valid=is_valid)
    return groups.centred() / (groups.stds + std_eps)[groups.index]


def dr_grpo(rewards: Tensor, group_ids: Tensor, *, is_valid: Tensor) -> Tensor:
    """Centre within the group: R - mu_g.

    Source: arXiv 2503.20783. Also invariant under adding a constant per group.
    """
    return group_rewards(rewards, group_ids, is_valid=is_valid).centred()


def rloo(rewards: Tensor, group_ids: Tensor, *, is_valid: Tensor) -> Tensor:
    """Subtract the mean of the group's other samples: G / (G - 1) * (R - mu_g).

    Source: arXiv 2402.14740. Also invariant under adding a constant per group.
    """
    groups = group_rewards(rewards, group_ids, is_valid=is_valid)
    factor = groups.counts / (groups.counts - 1).clamp(min=1)
    return groups.centred() * factor[groups.index]


def lite_ppo(
    rewards: Tensor, group_ids: Tensor, *, is_valid: Tensor, std_eps: float = 1e-6
) -> Tensor:
    """Centre within the group, scale by the batch: (R - mu_g) / (sigma_batch + std_eps).

    Source: arXiv 2508.08221; sigma_batch is the population standard deviation of all valid
        rewards. Also invariant under adding one constant to all rewards.
    """
    _check_eps(std_eps)
    groups = group_rewards(rewards, group_ids, is_valid=is_valid)
    batch = group_rewards(rewards, torch.zeros_like(group_ids), is_valid=is_valid)
    return groups.centred() / (batch.stds + std_eps)[batch.index]


def max_rl(
    rewards: Tensor, group_ids: Tensor, *, is_valid: Tensor, mean_eps: float = 1e-6
) -> Tensor:
    """Scale by the group's success rate: (R - mu_g) / (mu_g + mean_eps).

    Raises: ValueError for a negative reward, with which the divisor can vanish.
    Source: SkyRL's `maxrl` estimator of maximum-likelihood RL. Not invariant under adding a
        constant, by design.
    """
    _check_eps(mean_eps)
    groups = group_rewards(rewards, group_ids, is_valid=is_valid)
    if (groups.rewards < 0).any():
        raise ValueError(f"max_rl needs rewards of at least 0, got {float(groups.rewards.min())}; "
                         "shift the reward or take another advantage")
    return groups.centred() / (groups.means + mean_eps)[groups.index]


def gpg(rewards: Tensor, group_ids: Tensor, *, is_valid: Tensor) -> Tensor:
    """Centre within the group, make up for groups without signal: alpha (R - mu_g).

    alpha = valid samples / valid samples in groups whose rewards differ.

    Source: arXiv 2504.02546. Also invariant under adding a constant per group.
    """
    groups = group_rewards(rewards, group_ids, is_valid=is_valid)
    with_signal = (groups.counts * groups.has_spread).sum().clamp(min=1)
    return groups.centred() * (groups.counts.sum() / with_signal)


def opo(
    rewards: Tensor, group_ids: Tensor, *, is_valid: Tensor, response_lengths: Tensor
) -> Tensor:
    """Subtract the length-weighted group mean: R - sum(|y| R) / sum(|y|).

    Args:
        response_lengths: [S] int64, tokens.
    Source: arXiv 2505.23585. Also invariant under adding a constant per group.
    """
    groups = group_rewards(rewards, group_ids, is_valid=is_valid)
    lengths = response_lengths.double() * is_valid
    offset = groups.rewards - groups.means[groups.index]  # around the mean: no cancellation
    shift = groups.sum(lengths * offset) / groups.sum(lengths).clamp(min=1)
    return groups.centred(groups.means + shift)


def reinforce_plus_plus_baseline(
    rewards: Tensor, group_ids: Tensor, *, is_valid: Tensor, response_lengths: Tensor,
    std_eps: float = 1e-8,
) -> Tensor:
    """Centre within the group, then whiten over all response tokens of the batch.

    Groups of one are left out of the whitening and get 0.

    Args:
        response_lengths: [S] int64, tokens; a sequence weighs as many tokens as it has.
    Source: arXiv 2501.03262, REINFORCE++ with baseline. Also invariant under adding a
        constant per group.
    """
    _check_eps(std_eps)
    groups = group_rewards(rewards, group_ids, is_valid=is_valid)
    counted = is_valid & (groups.counts >= 2)[groups.index]
    weights = response_lengths.double() * counted
    total = weights.sum().clamp(min=1)
    centred = groups.centred()
    centred = torch.where(counted, centred - (weights * centred).sum() / total, 0.0)
    std = ((weights * centred**2).sum() / total).sqrt()
    # All tokens on one value: there is no scale to whiten by, only round-off.
    has_scale = len(centred) > 0 and bool(std > 2.0**-40 * centred.abs().max())
    return centred / (std + std_eps) if has_scale else torch.zeros_like(centred)


def reinforce(rewards: Tensor, *, is_valid: Tensor) -> Tensor:
    """Take the reward as it is, without a baseline.

    Source: Williams 1992, REINFORCE.
    """
    one_group = torch.zeros(len(rewards), dtype=torch.int64)
    return group_rewards(rewards, one_group, is_valid=is_valid).rewards


def _check_eps(eps: float) -> None:
    if not eps > 0:
        raise ValueError(f"std_eps, mean_eps: must be above 0, got {eps}")
