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

    index: Tensor  # [S] int64, position of each sequence's group in the [G] tensors
    rewards: Tensor  # [S] float64, 0 where not valid
    is_valid: Tensor  # [S] bool
    counts: Tensor  # [G] float64, valid samples
    means: Tensor  # [G] float64, 0 without a valid sample
    stds: Tensor  # [G] float64, population standard deviation (divides by the count)
    has_spread: Tensor  # [G] bool, at least two samples, with rewards that differ

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of [S] float64 values over each group: [G]."""
        return torch.zeros_like(self.counts).index_add(0, self.index, values)

    def max(self, values: Tensor) -> Tensor:
        """Return the largest of [S] float64 values over each group's valid samples: [G].

        It is -inf for a group without valid samples.
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
    # A second pass removes the rounding error of the first.
    means = means + total(valid * (rewards - means[index])) / divisor
    stds = (total(valid * (rewards - means[index]) ** 2) / divisor).sqrt()
    high = _largest(torch.where(is_valid, rewards, -torch.inf), index, len(ids))
    low = -_largest(torch.where(is_valid, -rewards, -torch.inf), index, len(ids))
    has_spread = (counts >= 2) & (high - low > ROUNDING * torch.maximum(high.abs(), low.abs()))
    stds = torch.where(has_spread, stds, 0.0)
    return Groups(index, rewards, is_valid, counts, means, stds, has_spread)


def best_and_worst(rewards: Tensor, group_ids: Tensor, *, is_valid: Tensor) -> Tensor:
    """Find the samples with the largest and the smallest reward of each group.

    Args:
        rewards: [S] float64, task units. Ignored where not valid.
        group_ids: [S] int64, in any order. is_valid: [S] bool.
    Returns: [P, 2] int64, positions of the best and the worst sample of each group, by group id.
        If several have the same reward, the first of them. Groups whose rewards do not differ are
        left out.
    Raises: Refusal, see `group_rewards`.
    """
    groups = group_rewards(rewards, group_ids, is_valid=is_valid)
    order = torch.arange(len(groups.index), device=rewards.device)
    columns = []
    for sign in (1, -1):
        values = torch.where(is_valid, sign * groups.rewards, -torch.inf)
        largest = _largest(values, groups.index, len(groups.counts))
        is_largest = is_valid & (values == largest[groups.index])
        positions = torch.where(is_largest, order, len(order))
        start = torch.full_like(groups.counts, len(order), dtype=torch.int64)
        columns.append(start.scatter_reduce(0, groups.index, positions, "amin"))
    return torch.stack(columns, dim=1)[groups.has_spread]


def _largest(values: Tensor, index: Tensor, num_groups: int) -> Tensor:
    start = torch.full((num_groups,), -torch.inf, dtype=torch.float64, device=values.device)
    return start.scatter_reduce(0, index, values, "amax")
