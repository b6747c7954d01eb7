"""Metrics of rollouts that only the replica knows which made them, as sums."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

import torch

from spmdrl.algorithms.groups import group_rewards
from spmdrl.rollout.episode import GREEDY, FinishedEpisode, Group, failure_text, place
from spmdrl.rollout.outcomes import is_answer
from spmdrl.sampling_masks import SamplingMasks
from spmdrl.types import PartialSums, exact_sum
from spmdrl.workers.messages import OVERLONG, RewardResult

log = logging.getLogger(__name__)


def warn_if_all_failed(samples: Sequence[FinishedEpisode], groups: Sequence[Group]) -> None:
    """Warn where no sample of a replica has a reward."""
    if samples and all(s.reward.failure for s in samples):
        log.warning(
            "%s: the reward of all %d samples of this replica failed and they are left out "
            "(rewards.on_failure=drop). First: %s",
            place(groups[0]),
            len(samples),
            failure_text(samples[0]),
        )


def has_spread(samples: Sequence[FinishedEpisode]) -> bool:
    """Whether the rewards of a group's samples differ by more than rounding."""
    values = [s.reward.value for s in samples if s.reward.value is not None]
    rewards = torch.tensor(values, dtype=torch.float64)
    found = group_rewards(
        rewards,
        torch.zeros(len(values), dtype=torch.int64),
        is_valid=torch.ones(len(values), dtype=torch.bool),
    )
    return bool(found.has_spread.any())


def mean_reward(samples: Sequence[FinishedEpisode]) -> tuple[float | list[float], int]:
    """Return sum and number of the rewards that did not fail, task units."""
    values = [s.reward.value for s in samples if s.reward.value is not None]
    return exact_sum(values), len(values)


def _named(reward: RewardResult) -> dict[str, float]:
    """Return what functions and environment said of a sample, by the names of metrics; not what
    they read as its answer."""
    found = {f"reward/{name}/mean": value for name, value in reward.parts.items()}
    for name, value in reward.metrics.items():
        if name.startswith("environment/"):
            found[name] = value
        elif not is_answer(name):
            found.setdefault(f"reward/{name}/mean", value)
    return found


def kept_sums(samples: Sequence[FinishedEpisode]) -> PartialSums:
    """Return what the sampling masks of sampled tokens are and take, per sampled token."""
    tokens = sum(s.trajectory.num_sampled for s in samples)
    of_samples = [SamplingMasks.of(s.trajectory.extra_columns) for s in samples]
    known = [masks for masks in of_samples if masks is not None]
    cut = sum(int((sets.sizes > 0).sum()) for sets in known)
    return {
        "rollout/sampling_mask_bytes": (sum(len(sets.data) for sets in known), tokens),
        "rollout/sampling_mask_ids": (sum(sets.num_ids() for sets in known), cut),
        "rollout/kept_all_frac": (tokens - cut, tokens),
    }


def source_sums(groups: Sequence[Group], names: Sequence[str], *, is_first: bool) -> PartialSums:
    """Return the source/ sums of one replica's share of a step; none of a single source.

    Args:
        names: of the sources of data.train.
        is_first: as of `step_sums`.
    """
    sums: PartialSums = {}
    for i, name in enumerate(names if len(names) > 1 else ()):
        own = [group for group in groups if group.prompt.source == i]
        samples = [sample for group in own for sample in group.drawn]
        spread = [has_spread(group.drawn) for group in own if mean_reward(group.drawn)[1] > 1]
        count = len(samples)
        prefix = f"source/{name}"
        sums |= {
            f"{prefix}/samples": (count, 1 if is_first else 0),
            f"{prefix}/reward": mean_reward(samples),
            f"{prefix}/zero_spread_groups_frac": (len(spread) - sum(spread), len(spread)),
            f"{prefix}/response_length": (sum(s.trajectory.num_sampled for s in samples), count),
            f"{prefix}/truncated_frac": (sum(s.trajectory.is_truncated for s in samples), count),
        }
    return sums


def step_sums(samples: Sequence[FinishedEpisode], *, is_first: bool) -> PartialSums:
    """Return the rollout/ and reward/ sums of one replica's share of a step.

    Args:
        is_first: the replica that counts for the denominator of what adds up over replicas.
    """
    greedy = [s for s in samples if s.sample == GREEDY]
    samples = [s for s in samples if s.sample != GREEDY]
    count = len(samples)
    one = 1 if is_first else 0  # counts of all replicas add up and are divided by 1
    sums: PartialSums = {
        "rollout/response_length": (sum(s.trajectory.num_sampled for s in samples), count),
        "rollout/prompt_length": (sum(len(s.prompt.tokens) for s in samples), count),
        "rollout/truncated_frac": (sum(s.trajectory.is_truncated for s in samples), count),
        "rollout/failed_rewards": (sum(s.reward.value is None for s in samples), one),
        "reward/timeouts": (sum(s.reward.failure == "timeout" for s in samples), one),
        "reward/errors": (sum(s.reward.failure in ("error", "bad_value") for s in samples), one),
        "reward/retries": (sum(s.reward.retries for s in samples), one),
        "reward/seconds": (sum(s.reward.seconds for s in samples), count),
    }
    values: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, value in _named(sample.reward).items():
            values[name].append(value)
    sums |= {name: (exact_sum(own), len(own)) for name, own in values.items()}
    overlong = sum(s.reward.failure == OVERLONG for s in samples)
    if overlong:
        sums["rollout/overlong_openings"] = (overlong, one)
    if any(s.trajectory.num_turns > 1 for s in samples):
        sums["rollout/turns"] = (sum(s.trajectory.num_turns for s in samples), count)
    if greedy:
        total, scored = mean_reward(greedy)
        sums["rollout/greedy_reward"] = (total, scored)
        sums["rollout/failed_greedy_rewards"] = (len(greedy) - scored, one)
    return sums
