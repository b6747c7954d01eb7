"""Groups of samples of one prompt: counts, means and spreads of their rewards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.errors import Refusal

ROUNDING = 2.0**-40  # relative spread below which float64 rewards count as equal


@dataclass(frozen=True)
class Groups:
    """Reward statistics of each group over its valid samples. G groups, S sequences."""

    index: Tensor  # [S] int64, position of a sequence's group below
    rewards: Tensor  # [S] float64, 0 where not valid
    is_valid: Tensor  # [S] bool
    counts: Tensor  # [G] float64, valid samples
    means: Tensor  # [G] float64, 0 without a valid sample
    stds: Tensor  # [G] float64, population standard deviation (divides by the count)
    has_spread: Tensor  # [G] bool, two samples or more and rewards that differ

    def sum(self, values: Tensor) -> Tensor:
        """Sum [S] float64 values within each group: [G]."""
        return torch.zeros_like(self.counts).index_add(0, self.index, values)

    def max(self, values: Tensor) -> Tensor:
        """Return the largest of [S] float64 values over each group's valid samples: [G].

        -inf for a group without one.
        """
        values = torch.where(self.is_valid, values, -torch.inf)
        return _largest(values, self.index, len(self.counts))

    def centred(self, baselines: Tensor | None = None) -> Tensor:
        """Return reward minus its group's baseline (default: the mean): [S] float64.

        Exactly 0 for samples that are not valid, groups of one and groups of equal rewards.
        """
        baselines = self.means if baselines is None else baselines
        counted = self.is_valid & self.has_spread[self.index]
        return torch.where(counted, self.rewards - baselines[self.index], 0.0)


def group_rewards(rewards: Tensor, group_ids: Tensor, *, is_valid: Tensor) -> Groups:
    """Compute reward statistics per group.

    Args:
        rewards: [S] float64, task units. Ignored where not valid.
        group_ids: [S] int64, in any order. is_valid: [S] bool.
    Raises: Refusal for shapes that differ or a valid reward that is not finite.
    """
    if not rewards.shape == group_ids.shape == is_valid.shape:
        raise Refusal(
            f"rewards {tuple(rewards.shape)}, group_ids {tuple(group_ids.shape)} and "
            f"is_valid {tuple(is_valid.shape)} must have one shape [S]"
        )
    rewards = torch.where(is_valid, rewards.double(), 0.0)
    if not rewards.isfinite().all():
        row = int((~rewards.isfinite()).nonzero()[0])
        raise Refusal(
            f"reward of sequence {row} (group {int(group_ids[row])}) is "
            f"{float(rewards[row])}; rewards must be finite"
        )
    ids, index = torch.unique(group_ids, return_inverse=True)
    empty = torch.zeros(len(ids), dtype=torch.float64, device=rewards.device)

    def total(values: Tensor) -> Tensor:
        return empty.index_add(0, index, values)

    valid = is_valid.double()
    counts = total(valid)
    divisor = counts.clamp(min=1)
    means = total(rewards) / divisor
    means = means + total(valid * (rewards - means[index])) / divisor  # second pass: round-off
    stds = (total(valid * (rewards - means[index]) ** 2) / divisor).sqrt()
    high = _largest(torch.where(is_valid, rewards, -torch.inf), index, len(ids))
    low = -_largest(torch.where(is_valid, -rewards, -torch.inf), index, len(ids))
    has_spread = (counts >= 2) & (high - low > ROUNDING * torch.maximum(high.abs(), low.abs()))
    stds = torch.where(has_spread, stds, 0.0)
    return Groups(index, rewards, is_valid, counts, means, stds, has_spread)


def best_and_worst(rewards: Tensor, group_ids: Tensor, *, is_valid: Tensor) -> Tensor:
    """Return the samples with the largest and the smallest reward of each group.

    Args:
        rewards: [S] float64, task units. Ignored where not valid.
        group_ids: [S] int64, in any order. is_valid: [S] bool.
    Returns: [P, 2] int64, positions of the best and of the worst; of equal ones the first. In the
        order of group ids, without groups that have no spread of rewards.
    Raises: Refusal, see `group_rewards`.
    """
    groups = group_rewards(rewards, group_ids, is_valid=is_valid)
    order = torch.arange(len(groups.index), device=rewards.device)
    found = []
    for sign in (1, -1):
        values = torch.where(is_valid, sign * groups.rewards, -torch.inf)
        extreme = _largest(values, groups.index, len(groups.counts))
        is_it = is_valid & (values == extreme[groups.index])
        first = torch.where(is_it, order, len(order))
        least = torch.full_like(groups.counts, len(order), dtype=torch.int64)
        found.append(least.scatter_reduce(0, groups.index, first, "amin"))
    return torch.stack(found, dim=1)[groups.has_spread]


def _largest(values: Tensor, index: Tensor, num_groups: int) -> Tensor:
    start = torch.full((num_groups,), -torch.inf, dtype=torch.float64, device=values.device)
    return start.scatter_reduce(0, index, values, "amax")
