"""Metrics of rollouts that only the replica that sampled them can compute, as sums."""

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
    """Log a warning if no sample of a replica has a reward."""
    if samples and all(s.reward.failure for s in samples):
        log.warning(
            "%s: the rewards of all %d samples of this replica failed, and the samples are left "
            "out (rewards.on_failure=drop). First: %s",
            place(groups[0]),
            len(samples),
            failure_text(samples[0]),
        )


def has_spread(samples: Sequence[FinishedEpisode]) -> bool:
    """Return whether the rewards of a group's samples differ by more than rounding."""
    values = [s.reward.value for s in samples if s.reward.value is not None]
    rewards = torch.tensor(values, dtype=torch.float64)
    statistics = group_rewards(
        rewards,
        torch.zeros(len(values), dtype=torch.int64),
        is_valid=torch.ones(len(values), dtype=torch.bool),
    )
    return bool(statistics.has_spread.any())


def mean_reward(samples: Sequence[FinishedEpisode]) -> tuple[float | list[float], int]:
    """Return the sum and the number of the rewards that did not fail, in task units."""
    values = [s.reward.value for s in samples if s.reward.value is not None]
    return exact_sum(values), len(values)


def _metrics_of(reward: RewardResult) -> dict[str, float]:
    """Return {name of a metric: number} that reward functions, environment or agent report of a
    sample.

    The answers that they extracted are left out.
    """
    values = {f"reward/{name}/mean": value for name, value in reward.parts.items()}
    for name, value in reward.metrics.items():
        if name.startswith(("environment/", "agent/")):
            values[name] = value
        elif not is_answer(name):
            values.setdefault(f"reward/{name}/mean", value)
    return values


def mask_sums(samples: Sequence[FinishedEpisode]) -> PartialSums:
    """Return the sums of the sampling masks' sizes and bytes, per sampled token."""
    tokens = sum(s.num_sampled for s in samples)
    of_traces = [SamplingMasks.of(trace.extra_columns) for s in samples for trace in s.traces]
    all_masks = [masks for masks in of_traces if masks is not None]
    # A token that was drawn from the whole vocabulary has a mask of size 0.
    num_masked = sum(int((masks.sizes > 0).sum()) for masks in all_masks)
    return {
        "rollout/sampling_mask_bytes": (sum(len(masks.data) for masks in all_masks), tokens),
        "rollout/sampling_mask_ids": (sum(masks.num_ids() for masks in all_masks), num_masked),
        "rollout/kept_all_frac": (tokens - num_masked, tokens),
    }


def trace_sums(samples: Sequence[FinishedEpisode]) -> PartialSums:
    """Return how many traces samples of an agent have, and how long these are."""
    traces = [trace for sample in samples for trace in sample.traces]
    return {
        "rollout/traces": (len(traces), len(samples)),
        "rollout/branched_frac": (sum(len(s.traces) > 1 for s in samples), len(samples)),
        "rollout/trace_length": (sum(len(trace.tokens) for trace in traces), len(traces)),
    }


def source_sums(groups: Sequence[Group], names: Sequence[str], *, is_first: bool) -> PartialSums:
    """Return the source/ sums of one replica's share of a step; empty if there is one source.

    Args:
        names: names of the sources of data.train.
        is_first: as for `step_sums`.
    """
    sums: PartialSums = {}
    for i, name in enumerate(names if len(names) > 1 else ()):
        own = [group for group in groups if group.prompt.source == i]
        samples = [sample for group in own for sample in group.drawn_samples]
        compared = [g.drawn_samples for g in own if mean_reward(g.drawn_samples)[1] > 1]
        num_flat = sum(not has_spread(group) for group in compared)
        count = len(samples)
        prefix = f"source/{name}"
        sums |= {
            f"{prefix}/samples": (count, 1 if is_first else 0),
            f"{prefix}/reward": mean_reward(samples),
            f"{prefix}/zero_spread_groups_frac": (num_flat, len(compared)),
            f"{prefix}/response_length": (sum(s.num_sampled for s in samples), count),
            f"{prefix}/truncated_frac": (sum(s.is_truncated for s in samples), count),
        }
    return sums


def step_sums(samples: Sequence[FinishedEpisode], *, is_first: bool) -> PartialSums:
    """Return the rollout/ and reward/ sums of one replica's share of a step.

    Args:
        is_first: whether this is the first replica. It alone adds 1 to the denominators of counts
            that are summed over replicas.
    """
    greedy = [s for s in samples if s.sample == GREEDY]
    samples = [s for s in samples if s.sample != GREEDY]
    count = len(samples)
    one = 1 if is_first else 0
    sums: PartialSums = {
        "rollout/response_length": (sum(s.num_sampled for s in samples), count),
        "rollout/prompt_length": (sum(len(s.prompt.tokens) for s in samples), count),
        "rollout/truncated_frac": (sum(s.is_truncated for s in samples), count),
        "rollout/failed_rewards": (sum(s.reward.value is None for s in samples), one),
        "reward/timeouts": (sum(s.reward.failure == "timeout" for s in samples), one),
        "reward/errors": (sum(s.reward.failure in ("error", "bad_value") for s in samples), one),
        "reward/retries": (sum(s.reward.retries for s in samples), one),
        "reward/seconds": (sum(s.reward.seconds for s in samples), count),
    }
    values: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, value in _metrics_of(sample.reward).items():
            values[name].append(value)
    sums |= {name: (exact_sum(own), len(own)) for name, own in values.items()}
    overlong = sum(s.reward.failure == OVERLONG for s in samples)
    if overlong:
        sums["rollout/overlong_openings"] = (overlong, one)
    if any(s.num_turns > 1 for s in samples):
        sums["rollout/turns"] = (sum(s.num_turns for s in samples), count)
    if greedy:
        total, scored = mean_reward(greedy)
        sums["rollout/greedy_reward"] = (total, scored)
        sums["rollout/failed_greedy_rewards"] = (len(greedy) - scored, one)
    return sums
