"""Metrics computed from a batch's scalars; every trainer rank gets the same numbers."""

from __future__ import annotations

from spmdrl.algorithms.groups import Groups, group_rewards
from spmdrl.types import Batch, Sums, add_sums


def batch_sums(batch: Batch) -> Sums:
    """Return the reward/, rollout/, data/ and perf/ sums of a whole annotated batch.

    Only trainers have the rewards of reward models, so only their reward/ sums include them.
    reward/ sums count valid samples, including those that `Batch.without` took out. `reward/std` is
    the root of the mean within-group variance (population form) over groups of at least two valid
    samples. Batches of dataset rows have no reward/ sums.
    """
    episodes = batch.scalars.episodes()
    scalars = episodes.scalars
    is_valid = scalars.is_valid
    if batch.was_valid is not None:
        is_valid = episodes.sum(batch.was_valid.long()) > 0
    groups = group_rewards(scalars.rewards, scalars.group_ids, is_valid=is_valid)
    own: Sums = {
        "rollout/samples": (len(episodes), 1),
        "perf/generated_tokens": (int(scalars.response_lengths.sum()), 1),
        "perf/batch_tokens": (int(scalars.lengths.sum()), 1),
        "data/groups": (len(groups.counts), 1),
        "data/groups_of_one": (int((groups.counts == 1).sum()), 1),
    }
    if batch.was_valid is not None:
        own["rollout/left_out_frac"] = (int((is_valid & ~scalars.is_valid).sum()), len(scalars))
    if batch.has_rewards:
        own |= _reward_sums(groups, num_valid=int(is_valid.sum()))
    return add_sums(batch.sums, own)


def _reward_sums(groups: Groups, *, num_valid: int) -> Sums:
    compared = groups.counts >= 2
    num_compared = int(compared.sum())
    num_flat = int((compared & ~groups.has_spread).sum())
    variance = (groups.stds[compared] ** 2).sum().item()
    std = (variance / num_compared) ** 0.5 if num_compared else 0.0
    return {
        "reward/mean": (groups.rewards.sum().item(), num_valid),
        "reward/std": (std, min(num_compared, 1)),
        "reward/zero_spread_groups_frac": (num_flat, num_compared),
    }
