"""When a replica admits prompts and when a step's share is complete: pure functions.

Groups of a replica are numbered in the order in which they are admitted. A step takes `quota`
of them. Without over-sampling it takes the next `quota` in order; with it, up to
`lookahead` > quota groups are under way for one step, the first `quota` that are complete make
the step, and the others go on into later ones. Either way no token is more than
`max_staleness` steps old when it is trained on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from spmdrl.config.fields import Config, replay_folder
from spmdrl.imports import nearest
from spmdrl.rewards.signatures import reward_models

SCHEDULE: dict[str, Any] = {
    "in_flight": False,
    "kv_cache": "recompute",
    "over_sample": 1.0,
    "max_staleness": None,
    "dynamic": 0,
    "balance": None,
    "curriculum": 1.0,
}
"""What rollout.schedule may hold, with the values that change nothing."""
BALANCES = ("even", "length", "steal")
"""How prompts come to engine replicas: by their number, dealt out by expected length, or so
dealt out and then taken over by whoever is done early."""


@dataclass(frozen=True)
class Rules:
    """What a schedule allows."""

    quota: int
    """Groups that a step takes from this replica."""
    lookahead: int
    """Groups under way for one step, at least quota."""
    max_staleness: int
    """Steps from the version that a token may come from to the one that trains on it."""


def make_rules(quota: int, *, over_sample: float, lag: int, max_staleness: int | None) -> Rules:
    """Return the rules of a replica.

    Args:
        quota: groups that a step takes from this replica; may be 0.
        over_sample: groups under way per group of a step, at least 1.
        lag: steps that generation runs ahead.
        max_staleness: steps; None takes the least that works.
    """
    least = least_staleness(over_sample, lag=lag)
    return Rules(
        quota,
        lookahead=math.ceil(over_sample * quota),
        max_staleness=least if max_staleness is None else max_staleness,
    )


def least_staleness(over_sample: float, *, lag: int) -> int:
    """Return the smallest bound on staleness under which every group that is admitted for a
    step can be trained on: its step is at most `lag` ahead, and over-sampling puts it behind up
    to over_sample - 1 steps' groups more."""
    return lag + math.ceil(over_sample) - 1


def num_to_admit(
    rules: Rules, waiting: int, *, next_step: int, last_step: int, version: int
) -> int:
    """Count the groups to admit now.

    Args:
        waiting: groups that are under way or complete, and in no step yet.
        next_step: first step whose share is not complete. last_step: last one wanted.
        version: of the engine's weights.
    Returns: how many; never one that could not be trained on within max_staleness steps.
    """
    steps = last_step - next_step + 1
    if steps <= 0 or not rules.quota:
        return 0
    wanted = rules.quota * (steps - 1) + rules.lookahead
    # The k-th that waits is trained on by step next_step + k // quota at the latest.
    limit = rules.quota * (rules.max_staleness + version - next_step + 1)
    return max(0, min(wanted, limit) - waiting)


def closing(
    rules: Rules, versions: Mapping[int, int], *, complete: Collection[int], step: int
) -> list[int] | None:
    """Choose the groups of a step, if it can be closed now.

    Args:
        versions: {number: version at admission} of all groups that wait. Numbers and versions
            rise together.
        complete: numbers of those that are complete.
        step: the first step without its share.
    Returns: `quota` numbers in order, or None while too few are complete, or while leaving the
        others for later steps would make one of them too old.
    """
    order = sorted(versions)
    ready = [n for n in order[: rules.lookahead] if n in complete]
    if len(ready) < rules.quota:
        return None
    chosen = ready[: rules.quota]
    left = [n for n in order if n not in set(chosen)]
    # Taken in order, the k-th that is left is trained on at step + 1 + k // quota.
    fits = all(
        step + 1 + k // rules.quota <= versions[n] + rules.max_staleness for k, n in enumerate(left)
    )
    return chosen if fits else None


def horizon(chosen: Mapping[str, Any], *, lag: int) -> int:
    """Return how many steps before its own a step's prompts may be asked for at the earliest.

    Generation runs max(1, lag) steps ahead of what was gathered last, and over-sampling begins
    on up to over_sample - 1 steps more. 0: there is no bound, since dynamic sampling takes as
    many prompts as it needs; then nothing that was measured may decide on them.
    """
    if chosen["dynamic"]:
        return 0
    return max(1, lag) + math.ceil(chosen["over_sample"]) - 1


# --------------------------------------------------------------------------- the config


def schedule_of(cfg: Config) -> dict[str, Any]:
    """Return all options of rollout.schedule."""
    chosen = SCHEDULE | cfg.rollout.schedule
    if chosen["balance"] is None:
        # Which replica draws a sample decides the company that it is computed in, and so the
        # last bits of its logits. Where timing decides on the batch anyway, nothing is lost.
        is_timed = chosen["in_flight"] or chosen["over_sample"] > 1
        chosen["balance"] = "steal" if is_timed else "length"
    return chosen


def schedule_problems(cfg: Config) -> list[str]:
    """Return what is wrong with rollout.schedule, each as `name: what, value seen`."""
    for name in cfg.rollout.schedule:
        if name not in SCHEDULE:
            return [f"{name}: unknown option{nearest(name, SCHEDULE)}"]
    if not cfg.rollout.schedule or replay_folder(cfg):
        return []
    if not cfg.objective.samples:
        return [
            f"{next(iter(cfg.rollout.schedule))}: the objective {cfg.algorithm.objective} "
            "samples nothing; leave it out"
        ]
    chosen = SCHEDULE | cfg.rollout.schedule
    problems = [
        *_number_problems(chosen),
        *_in_flight_problems(cfg, chosen),
        *_balance_problems(chosen),
        *_curriculum_problems(cfg, chosen),
    ]
    if problems:
        return problems
    least = least_staleness(chosen["over_sample"], lag=cfg.lag)
    if chosen["max_staleness"] is not None and chosen["max_staleness"] < least:
        problems.append(
            f"max_staleness: {chosen['max_staleness']} is below lag {cfg.lag} + "
            f"ceil(over_sample {chosen['over_sample']:g}) - 1 = {least}: groups "
            "that are under way could not all be trained on in time"
        )
    if chosen["dynamic"] and cfg.batch.group_size == 1:
        problems.append("dynamic: with batch.group_size 1 no group has a spread of rewards")
    if chosen["dynamic"] and reward_models(cfg.rewards.functions):
        problems.append(
            "dynamic: the spread of a group's rewards is not known where prompts are "
            "drawn, since rewards.functions names a model; leave it out"
        )
    return problems


def _number_problems(chosen: Mapping[str, Any]) -> list[str]:
    problems, over, stale = [], chosen["over_sample"], chosen["max_staleness"]
    if isinstance(over, bool) or not isinstance(over, (int, float)) or not 1 <= over < math.inf:
        problems.append(f"over_sample: must be a number of at least 1, got {over!r}")
    if stale is not None and (type(stale) is not int or stale < 0):
        problems.append(f"max_staleness: must be a whole number of steps, got {stale!r}")
    if type(chosen["dynamic"]) is not int or chosen["dynamic"] < 0 or chosen["dynamic"] == 1:
        problems.append(
            f"dynamic: must be a whole number of at least 2, or 0 for off, got "
            f"{chosen['dynamic']!r}"
        )
    return problems


def _in_flight_problems(cfg: Config, chosen: Mapping[str, Any]) -> list[str]:
    problems = []
    if chosen["kv_cache"] not in ("keep", "recompute"):
        problems.append(f"kv_cache: expected keep or recompute, got {chosen['kv_cache']!r}")
    if not isinstance(chosen["in_flight"], bool):
        problems.append(f"in_flight: expected true or false, got {chosen['in_flight']!r}")
    elif chosen["in_flight"] and not cfg.layout.roles.overlaps:
        problems.append(
            f"in_flight: with layout.placement {cfg.layout.placement} nothing is "
            "sampled while the policy trains; take split, or leave it out"
        )
    elif chosen["in_flight"] and not cfg.lag:
        problems.append(
            "in_flight: with lag 0 nothing is sampled while the policy trains; set lag to 1 or more"
        )
    return problems


def _balance_problems(chosen: Mapping[str, Any]) -> list[str]:
    if chosen["balance"] in (None, *BALANCES):
        return []
    return [f"balance: expected one of {', '.join(BALANCES)}, got {chosen['balance']!r}"]


def _curriculum_problems(cfg: Config, chosen: Mapping[str, Any]) -> list[str]:
    keep = chosen["curriculum"]
    if isinstance(keep, bool) or not isinstance(keep, (int, float)) or not 0 < keep <= 1:
        return [
            f"curriculum: must be in (0, 1], the share of their turns at which prompts that "
            f"are always or never solved are taken, got {keep!r}"
        ]
    if keep == 1:
        return []
    if chosen["dynamic"]:
        return [
            f"curriculum: {keep:g} with dynamic {chosen['dynamic']}, which takes prompts "
            "before it is known what earlier steps measured; leave one of them out"
        ]
    if reward_models(cfg.rewards.functions):
        return [
            f"curriculum: {keep:g}, but pass rates are not known where prompts are drawn, "
            "since rewards.functions names a model; leave it out"
        ]
    return []
