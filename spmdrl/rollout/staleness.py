"""When a replica admits prompts and when a step's share is complete, so that no token gets too old.

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
from typing import Literal

from spmdrl.config import ScheduleSettings


@dataclass(frozen=True)
class Rules:
    """What a schedule allows."""

    quota: int
    """Groups that a step takes from this replica."""
    lookahead: int
    """Groups under way for one step, at least quota."""
    max_staleness: int
    """Steps from the version that a token may come from to the one that trains on it."""


def make_rules(
    quota: int, *, over_sample: float, lag: int, max_staleness: int | Literal["auto"]
) -> Rules:
    """Return the rules of a replica.

    Args:
        quota: groups that a step takes from this replica; may be 0.
        over_sample: groups under way per group of a step, at least 1.
        lag: steps that generation runs ahead.
        max_staleness: steps; auto takes the least that works.
    """
    least = least_staleness(over_sample, lag=lag)
    return Rules(
        quota,
        lookahead=math.ceil(over_sample * quota),
        max_staleness=least if max_staleness == "auto" else max_staleness,
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


def horizon(schedule: ScheduleSettings, *, lag: int) -> int:
    """Return how many steps before its own a step's prompts may be asked for at the earliest.

    Generation runs max(1, lag) steps ahead of what was gathered last, and over-sampling begins
    on up to over_sample - 1 steps more. 0: there is no bound, since dynamic sampling takes as
    many prompts as it needs; then nothing that was measured may decide on them.
    """
    return 0 if schedule.dynamic else least_staleness(schedule.over_sample, lag=max(1, lag))
