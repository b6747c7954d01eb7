"""Finished sequences as flat tensors, and such tensors joined and restored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from spmdrl.algorithms.shaping import shape
from spmdrl.config import Config, ShapingSettings
from spmdrl.rewards.signatures import part_names, reward_models
from spmdrl.rollout.episode import GREEDY, Group, Sample
from spmdrl.rollout.sums import mean_reward, step_sums, warn_if_all_failed
from spmdrl.types import Rollouts, Scalars, Sums, add_sums, join_routes, join_turns
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
        groups: complete, each with the slot that it takes in the step's batch.
        is_first: the replica that counts for the denominator of what adds up over replicas, and
            shows a few samples.
        seconds: of generation that went into it.
        measured: further metrics of it.
        dropped: groups without a spread of rewards that were replaced.
        num_carried: groups that stay under way for later steps.
    """
    samples = [
        replace(group.samples[i], slot=group.slot)
        for group in groups
        for i in sorted(group.samples)
    ]
    drawn = [s for s in samples if s.sample != GREEDY]
    warn_if_all_failed(drawn, groups)
    one = int(is_first)
    has_models = bool(reward_models(cfg.rewards.functions))
    sums = step_sums(samples, is_first=is_first)
    if cfg.rewards.shaping.is_on and not has_models:
        sums["reward/mean_raw"] = mean_reward(drawn)
    if not cfg.rollout.schedule.is_plain:
        sums["rollout/dropped_groups"] = (len(dropped), one)
        sums["rollout/carried_groups"] = (num_carried, one)
    sums["time/generate"] = (seconds, 1)
    return pack(
        samples,
        sums=sums | measured,
        num_shown=4 if is_first else 0,
        part_names=part_names(cfg.rewards.functions),
        shaping=cfg.rewards.shaping,
        max_response_tokens=cfg.sampling.max_response_tokens,
        is_partial=has_models,
    )


def pack(
    samples: Sequence[Sample],
    *,
    sums: Sums,
    num_shown: int,
    part_names: Sequence[str] = (),
    shaping: ShapingSettings | None = None,
    max_response_tokens: int = 0,
    is_partial: bool = False,
) -> Rollouts:
    """Pack samples into flat tensors. A failed reward becomes is_valid = False, reward 0.

    Args:
        samples: greedy ones are not packed: their rewards become greedy_rewards.
        part_names: of the reward functions, K of them; empty for one task's grader.
        shaping: rewards.shaping, with max_response_tokens as its length limit.
        is_partial: trainers add the part of reward models, and shape. The shown samples say
            which they are, so that they can be given their whole reward.
    """
    if is_partial:
        shaping = None
    shaping = shaping or ShapingSettings()
    rewards = shaped_rewards(samples, shaping=shaping, limit=max_response_tokens)
    greedy = {s.slot: r for s, r in zip(samples, rewards) if s.sample == GREEDY}
    kept = [(s, r) for s, r in zip(samples, rewards) if s.sample != GREEDY]
    samples = [s for s, _ in kept]
    tokens, mask, logprobs, versions = [], [], [], []
    for s in samples:
        prompt, response = len(s.prompt.tokens), s.response
        tokens += [*s.prompt.tokens, *response.tokens]
        mask += [False] * prompt + response.is_sampled
        logprobs += [0.0] * prompt + response.logprobs
        versions += [-1] * prompt + response.versions
    lengths = [len(s.prompt.tokens) + len(s.response.tokens) for s in samples]
    is_valid = [s.reward.value is not None for s in samples]
    scalars = Scalars(
        lengths=ints(lengths),
        response_lengths=ints([s.response.num_sampled for s in samples]),
        group_ids=ints([s.slot for s in samples]),
        sample_ids=ints([s.sample for s in samples]),
        rewards=doubles([r if ok else 0.0 for (_, r), ok in zip(kept, is_valid)]),
        is_truncated=torch.tensor([s.response.is_truncated for s in samples], dtype=torch.bool),
        is_valid=torch.tensor(is_valid, dtype=torch.bool),
        min_versions=ints(
            [min((v for v in s.response.versions if v >= 0), default=-1) for s in samples]
        ),
        reward_parts=doubles([_parts(s.reward, part_names) for s in samples]).view(
            len(samples), len(part_names) or 1
        ),
        greedy_rewards=doubles([greedy.get(s.slot, math.nan) for s in samples]),
        turns=join_turns([turns_of(s.response.earned, s.response.states) for s in samples])
        if samples
        else None,
        rows=ints([s.prompt.index for s in samples]),
    )
    shown = tuple(
        {"prompt": s.prompt.text, "response": s.text, "reward": s.reward.value}
        | ({"group": s.slot, "sample": s.sample} if is_partial else {})
        for s in _shown(samples)[:num_shown]
    )
    return Rollouts(
        tokens=ints(tokens),
        response_mask=torch.tensor(mask, dtype=torch.bool),
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        policy_versions=ints(versions),
        cu_seqlens=cumulative(lengths),
        scalars=scalars,
        sums=sums,
        samples=shown,
        routes=join_routes([s.response.routes for s in samples], lengths),
    )


def turns_of(earned: Sequence[float], states: Sequence[int]) -> Tensor:
    """Return one sequence's turns for `Scalars.turns`: [1, U, 2] float64."""
    return doubles([*zip(earned, states)] or [(0.0, -1)])[None]


def _shown(samples: Sequence[Sample]) -> list[Sample]:
    """Return the first sample of each prompt, behind one without reward if there is any."""
    firsts = {s.slot: s for s in reversed(samples)}
    wrong = next((s for s in samples if s.reward.value is not None and s.reward.value <= 0), None)
    rest = [firsts[slot] for slot in sorted(firsts) if wrong is None or slot != wrong.slot]
    return rest if wrong is None else [wrong, *rest]


def shaped_rewards(
    samples: Sequence[Sample], *, shaping: ShapingSettings, limit: int
) -> list[float]:
    """Return each sample's reward after shaping, task units; NaN where it failed."""
    values = [math.nan if s.reward.value is None else s.reward.value for s in samples]
    if not shaping:
        return values
    return shape(
        doubles(values),
        ints([s.response.num_sampled for s in samples]),
        torch.tensor([s.response.is_truncated for s in samples], dtype=torch.bool),
        max_response_tokens=limit,
        **asdict(shaping),
    ).tolist()


def _parts(result: RewardResult, names: Sequence[str]) -> list[float]:
    """Return the value of each function, 0 where it does not apply or failed: K numbers."""
    if not names:
        return [result.value or 0.0]
    return [result.parts.get(name, 0.0) for name in names]


def empty_rollouts() -> Rollouts:
    """Return the rollouts of a rank that made none."""
    return pack([], sums={}, num_shown=0)


def concat_rollouts(parts: list[Rollouts]) -> Rollouts:
    """Return all sequences of several Rollouts in one."""
    packed = {
        name: torch.cat([getattr(p, name) for p in parts])
        for name in ("tokens", "response_mask", "rollout_logprobs", "policy_versions")
    }
    scalars = Scalars.concat([p.scalars for p in parts])
    return Rollouts(
        **packed,
        cu_seqlens=cumulative(scalars.lengths.tolist()),
        scalars=scalars,
        sums=add_sums(*(p.sums for p in parts)),
        samples=tuple(s for p in parts for s in p.samples),
        routes=join_routes([p.routes for p in parts], [len(p.tokens) for p in parts]),
    )


def rollouts_from_dict(tree: dict[str, Any]) -> Rollouts:
    """Undo dataclasses.asdict."""
    return Rollouts(
        **{
            **tree,
            "scalars": Scalars(**tree["scalars"]),
            "sums": {k: tuple(v) for k, v in tree["sums"].items()},
            "samples": tuple(tree["samples"]),
        }
    )


def ints(values: list[int]) -> Tensor:
    """Return [n] int64."""
    return torch.tensor(values, dtype=torch.int64)


def doubles(values: Sequence[float] | Sequence[Sequence[float]]) -> Tensor:
    """Return [n] or [n, k] float64."""
    return torch.tensor(values, dtype=torch.float64)


def cumulative(lengths: list[int]) -> Tensor:
    """Return [n + 1] int64, where each sequence starts, and the end."""
    return torch.cat([ints([0]), ints(lengths).cumsum(0)])
