"""Pack finished sequences into flat tensors; join, save and restore these."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from spmdrl.algorithms.shaping import shape
from spmdrl.config import Config, ShapingSettings
from spmdrl.rewards.signatures import part_names, reward_models
from spmdrl.rollout.episode import GREEDY, FinishedEpisode, Group, failure_text
from spmdrl.rollout.sums import (
    mask_sums,
    mean_reward,
    source_sums,
    step_sums,
    trace_sums,
    warn_if_all_failed,
)
from spmdrl.types import PartialSums, Rollouts, Scalars, Sums, Tokens, join_sums, token_fields_from
from spmdrl.workers.pool import RewardResult


def pack_step(
    groups: Sequence[Group],
    cfg: Config,
    *,
    is_first: bool,
    seconds: float,
    measured: Sums,
    dropped: Sequence[Group],
    num_carried: int,
) -> Rollouts:
    """Pack a replica's share of a step, with its metrics.

    Args:
        groups: complete groups, each with its slot in the step's batch.
        is_first: whether this is the first replica. It alone adds 1 to the denominators of counts
            that are summed over replicas, and it alone returns samples to show.
        seconds: seconds that the generation of the share took.
        measured: more metrics of the share.
        dropped: groups without a spread of rewards, which were replaced.
        num_carried: number of groups that later steps will take.
    """
    samples = [sample for group in groups for sample in group.all_samples]
    drawn = [s for s in samples if s.sample != GREEDY]
    warn_if_all_failed(drawn, groups)
    one = int(is_first)
    has_models = bool(reward_models(cfg.rewards.functions))
    sums = step_sums(samples, is_first=is_first)
    if cfg.sampling.truncates:
        sums |= mask_sums(drawn)
    if cfg.rollout.has_agent:
        sums |= trace_sums(drawn)
    if cfg.rewards.shaping.is_on and not has_models:
        sums["reward/mean_raw"] = mean_reward(drawn)
    if not cfg.rollout.schedule.is_plain:
        sums["rollout/dropped_groups"] = (len(dropped), one)
        sums["rollout/carried_groups"] = (num_carried, one)
    names = [source.name for source in cfg.data.sources("train")]
    sums |= source_sums(groups, names, is_first=is_first)
    sums["time/generate"] = (seconds, 1)
    return pack(
        samples,
        sums=sums | measured,
        num_shown=4 if is_first else 0,
        part_names=part_names(cfg.reward_functions),
        shaping=cfg.rewards.shaping,
        max_response_tokens=cfg.sampling.max_response_tokens,
        is_partial=has_models,
    )


def pack(
    samples: Sequence[FinishedEpisode],
    *,
    sums: PartialSums,
    num_shown: int,
    part_names: Sequence[str] = (),
    shaping: ShapingSettings | None = None,
    max_response_tokens: int = 0,
    is_partial: bool = False,
) -> Rollouts:
    """Pack samples into flat tensors, each trace as a sequence. A failed reward becomes is_valid =
    False, reward 0.

    Args:
        samples: greedy ones are not packed; their rewards become greedy_rewards.
        num_shown: how many samples to return for people to read.
        part_names: names of the K reward functions; empty for one task's grader.
        shaping: rewards.shaping, with max_response_tokens as its length limit.
        is_partial: whether trainers will add the rewards of reward models and shape the sum. Then
            nothing is shaped here, and each sample to show has its group and number, so that its
            whole reward can be filled in later.
    """
    if is_partial:
        shaping = None
    shaping = shaping or ShapingSettings()
    rewards = shape_rewards(samples, shaping=shaping, limit=max_response_tokens)
    greedy = {s.slot: r for s, r in zip(samples, rewards) if s.sample == GREEDY}
    pairs = [(s, r) for s, r in zip(samples, rewards) if s.sample != GREEDY]
    samples = [s for s, _ in pairs]
    to_show = tuple(_row(s, is_partial=is_partial) for s in _samples_to_show(samples)[:num_shown])
    tokens, scalars = flat_episodes(
        samples,
        rewards=[0.0 if s.reward.value is None else r for s, r in pairs],
        greedy_rewards=[greedy.get(s.slot, math.nan) for s in samples],
        part_names=part_names,
    )
    return Rollouts(
        **tokens.token_fields(),
        cu_seqlens=cumulative(scalars.lengths),
        scalars=scalars,
        sums=sums,
        samples=to_show,
    )


def flat_episodes(
    episodes: Sequence[FinishedEpisode],
    *,
    rewards: Sequence[float],
    greedy_rewards: Sequence[float],
    part_names: Sequence[str],
) -> tuple[Tokens, Scalars]:
    """Return the concatenated tokens of finished episodes, a sequence for each trace, and their
    scalars.

    Args:
        rewards, greedy_rewards: of each episode, task units.
    """
    traces = [trace for e in episodes for trace in e.traces]
    tokens = Tokens.concat(traces) if traces else Tokens.unsampled([])
    lengths = ints([len(t.tokens) for t in traces])
    counts = ints([len(e.traces) for e in episodes])
    parts = doubles([_parts(e.reward, part_names) for e in episodes])

    def of_traces(values: Tensor) -> Tensor:
        return values.repeat_interleave(counts, dim=0)

    scalars = Scalars(
        lengths=lengths,
        response_lengths=ints([t.num_sampled for t in traces]),
        group_ids=of_traces(ints([e.slot for e in episodes])),
        sample_ids=of_traces(ints([e.sample for e in episodes])),
        rewards=of_traces(doubles(rewards)),
        is_truncated=bools([t.is_truncated for t in traces]),
        is_valid=of_traces(bools([e.reward.value is not None for e in episodes])),
        min_versions=_min_versions(tokens, lengths),
        reward_parts=of_traces(parts.view(len(episodes), len(part_names) or 1)),
        greedy_rewards=of_traces(doubles(greedy_rewards)),
        turns=turns_of((t.earned, t.states) for t in traces),
        rows=of_traces(ints([e.prompt.index for e in episodes])),
        traces=ints([number for e in episodes for number in range(len(e.traces))]),
    )
    return tokens, scalars


def _min_versions(tokens: Tokens, lengths: Tensor) -> Tensor:
    """Return the oldest version of each sequence's sampled tokens, [S] int64.

    -1 for a sequence without sampled tokens.
    """
    none = torch.iinfo(torch.int64).max
    versions = tokens.policy_versions.where(tokens.policy_versions >= 0, none)
    sequences = torch.arange(len(lengths)).repeat_interleave(lengths)
    oldest = torch.full_like(lengths, none).scatter_reduce(0, sequences, versions, "amin")
    return oldest.where(oldest < none, -1)


def turns_of(turns: Iterable[tuple[Sequence[float], Sequence[int]]]) -> Tensor:
    """Return `Scalars.turns` of sequences.

    Args:
        turns: of each sequence, the rewards of its turns and their states.
    """
    # A sequence without finished turns gets one without a known state (-1); -2 is padding.
    rows = [[*zip(earned, states)] or [(0.0, -1)] for earned, states in turns]
    most = max(map(len, rows), default=1)
    padded = [row + [(0.0, -2)] * (most - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.float64).view(len(rows), most, 2)


def _row(sample: FinishedEpisode, *, is_partial: bool) -> dict[str, Any]:
    """Return a sample for people to read; see docs/runs.md."""
    reward = sample.reward
    row: dict[str, Any] = {
        "prompt": sample.prompt.text,
        "response": sample.text,
        "reward": reward.value,
        "reward_parts": dict(reward.parts),
    }
    for name, text in reward.extras.items():
        row[f"reward/{name}"] = text
    if reward.failure:
        row["failure"] = failure_text(sample)
    if is_partial:
        row["group"] = sample.slot
        row["sample"] = sample.sample
    return row


def _samples_to_show(samples: Sequence[FinishedEpisode]) -> list[FinishedEpisode]:
    """Return the first sample of each prompt.

    If any sample has a reward of 0 or less, it comes first and stands for its prompt.
    """
    # Reversed, since the last value of a key stays in a dict.
    firsts = {s.slot: s for s in reversed(samples)}
    wrong = next((s for s in samples if s.reward.value is not None and s.reward.value <= 0), None)
    rest = [firsts[slot] for slot in sorted(firsts) if wrong is None or slot != wrong.slot]
    return rest if wrong is None else [wrong, *rest]


def shape_rewards(
    samples: Sequence[FinishedEpisode], *, shaping: ShapingSettings, limit: int
) -> list[float]:
    """Return each sample's reward after shaping, task units; NaN for a failed reward."""
    values = [math.nan if s.reward.value is None else s.reward.value for s in samples]
    if not shaping.is_on:
        return values
    return shape(
        doubles(values),
        ints([s.num_sampled for s in samples]),
        bools([s.is_truncated for s in samples]),
        max_response_tokens=limit,
        **asdict(shaping),
    ).tolist()


def _parts(result: RewardResult, names: Sequence[str]) -> list[float]:
    """Return the value of each of the K functions; 0 for one that does not apply or failed."""
    if not names:
        return [result.value or 0.0]
    return [result.parts.get(name, 0.0) for name in names]


def empty_rollouts() -> Rollouts:
    """Return the rollouts of a rank that has no sequences."""
    return pack([], sums={}, num_shown=0)


def concat_rollouts(parts: Sequence[Rollouts]) -> Rollouts:
    """Join several Rollouts into one."""
    scalars = Scalars.concat([p.scalars for p in parts])
    return Rollouts(
        **Tokens.concat(parts).token_fields(),
        cu_seqlens=cumulative(scalars.lengths),
        scalars=scalars,
        sums=join_sums(*(p.sums for p in parts)),
        samples=tuple(s for p in parts for s in p.samples),
    )


def rollouts_to_dict(rollouts: Rollouts) -> dict[str, Any]:
    """Return rollouts as dictionaries, tensors and numbers; tensors are shared."""
    return rollouts.state_dict() | {"scalars": dict(vars(rollouts.scalars))}


def rollouts_from_dict(tree: dict[str, Any]) -> Rollouts:
    """Undo `rollouts_to_dict`."""
    return Rollouts(
        **{
            **token_fields_from(tree),
            "scalars": Scalars(**tree["scalars"]),
            "sums": {k: tuple(v) for k, v in tree["sums"].items()},
            "samples": tuple(tree["samples"]),
        }
    )


def ints(values: Sequence[int]) -> Tensor:
    """Return [n] int64."""
    return torch.tensor(values, dtype=torch.int64)


def bools(values: Sequence[bool]) -> Tensor:
    """Return [n] bool."""
    return torch.tensor(values, dtype=torch.bool)


def doubles(values: Sequence[float] | Sequence[Sequence[float]]) -> Tensor:
    """Return [n] or [n, k] float64."""
    return torch.tensor(values, dtype=torch.float64)


def cumulative(lengths: Tensor) -> Tensor:
    """Return [S + 1] int64: the start of each sequence of these lengths [S], and the end."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
