"""Rules of when a replica admits prompts and closes a step, so that no token gets too old.

A replica numbers its groups in the order of admission. Each step takes `quota` of them. Without
over-sampling, a step takes the next `quota` groups in order. With over-sampling, up to
`lookahead` > quota groups are sampled for one step; the step takes the first `quota` that are
complete, and the others go on into later steps. In both cases no token is more than
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
    """The limits of a schedule for one replica."""

    quota: int
    """Groups that a step takes from this replica."""
    lookahead: int
    """Most groups that are sampled for one step, at least quota."""
    max_staleness: int
    """Most steps between the version that sampled a token and the step that trains on it."""


def make_rules(
    quota: int, *, over_sample: float, lag: int, max_staleness: int | Literal["auto"]
) -> Rules:
    """Return the rules of a replica.

    Args:
        quota: groups that a step takes from this replica; may be 0.
        over_sample: groups that are sampled for each group that a step takes, at least 1.
        lag: steps that generation runs ahead.
        max_staleness: steps; auto takes the smallest number that works.
    """
    least = least_staleness(over_sample, lag=lag)
    return Rules(
        quota,
        lookahead=math.ceil(over_sample * quota),
        max_staleness=least if max_staleness == "auto" else max_staleness,
    )


def least_staleness(over_sample: float, *, lag: int) -> int:
    """Return the smallest max_staleness with which every admitted group can be trained on.

    A group is admitted at most `lag` steps before its step, and over-sampling lets the groups of
    up to over_sample - 1 more steps be trained on first.
    """
    return lag + math.ceil(over_sample) - 1


def num_to_admit(
    rules: Rules, waiting: int, *, next_step: int, last_step: int, version: int
) -> int:
    """Count the groups to admit now.

    Args:
        waiting: number of groups, unfinished or complete, that no step has taken yet.
        next_step: first step whose share is not complete.
        last_step: last step to sample for.
        version: of the engine's weights.
    Returns: the number of groups, all of which can be trained on within max_staleness steps.
    """
    steps = last_step - next_step + 1
    if steps <= 0 or not rules.quota:
        return 0
    # Only the last step needs groups beyond its quota: those of other steps go on into the next.
    wanted = rules.quota * (steps - 1) + rules.lookahead
    # The k-th waiting group (from 0) is trained on at step next_step + k // quota at the latest.
    limit = rules.quota * (rules.max_staleness + version - next_step + 1)
    return max(0, min(wanted, limit) - waiting)


def choose_groups(
    rules: Rules, versions: Mapping[int, int], *, complete: Collection[int], step: int
) -> list[int] | None:
    """Choose the groups of a step, if it can be closed now.

    Args:
        versions: {number: version at admission} of all groups that no step has taken. A higher
            number never has a lower version.
        complete: numbers of the complete groups.
        step: the first step without its share.
    Returns: `quota` numbers in order. None if too few groups are complete, or if one of the other
        groups would get too old by waiting for a later step.
    """
    order = sorted(versions)
    ready = [n for n in order[: rules.lookahead] if n in complete]
    if len(ready) < rules.quota:
        return None
    chosen = ready[: rules.quota]
    left = [n for n in order if n not in set(chosen)]
    # If later steps take the rest in order, they train on the k-th at step + 1 + k // quota.
    fits = all(
        step + 1 + k // rules.quota <= versions[n] + rules.max_staleness for k, n in enumerate(left)
    )
    return chosen if fits else None


def horizon(schedule: ScheduleSettings, *, lag: int) -> int:
    """Return how many steps ahead, at most, the prompts of a step are asked for.

    Generation runs max(1, lag) steps ahead of the last gathered batch, or lag + 1 in flight, and
    over-sampling begins up to over_sample - 1 more steps. 0 means that there is no bound: dynamic
    sampling takes as many prompts as it needs, so earlier measurements must not decide which
    prompts come.
    """
    if schedule.dynamic:
        return 0
    ahead = lag + 1 if schedule.in_flight else max(1, lag)
    return least_staleness(schedule.over_sample, lag=ahead)
