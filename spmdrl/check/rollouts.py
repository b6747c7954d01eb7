"""Whether the schedule of rollouts, and what is recorded of them, suit the rest of a config."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spmdrl.config.fields import Config, replay_folder
from spmdrl.rewards.signatures import reward_models
from spmdrl.rollout.staleness import least_staleness


def schedule_problems(cfg: Config) -> list[str]:
    """Return what is wrong with rollout.schedule, each as `field: what, value seen`."""
    if replay_folder(cfg) or not cfg.objective.samples:
        return []
    problems = [*_in_flight_problems(cfg), *_dynamic_problems(cfg), *_curriculum_problems(cfg)]
    schedule = cfg.rollout.schedule
    if schedule.max_staleness != "auto" and schedule.over_sample >= 1:
        least = least_staleness(schedule.over_sample, lag=cfg.lag)
        if schedule.max_staleness < least:
            problems.append(
                f"max_staleness: {schedule.max_staleness} is below lag {cfg.lag} + "
                f"ceil(over_sample {schedule.over_sample:g}) - 1 = {least}: groups "
                "that are under way could not all be trained on in time"
            )
    return [f"rollout.schedule.{problem}" for problem in problems]


def _in_flight_problems(cfg: Config) -> list[str]:
    if not cfg.rollout.schedule.in_flight:
        return []
    if not cfg.layout.roles.overlaps:
        return [
            f"in_flight: with layout.placement {cfg.layout.placement} nothing is "
            "sampled while the policy trains; take split, or leave it out"
        ]
    if not cfg.lag:
        return [
            "in_flight: with lag 0 nothing is sampled while the policy trains; set lag to 1 or more"
        ]
    return []


def _dynamic_problems(cfg: Config) -> Iterator[str]:
    dynamic = cfg.rollout.schedule.dynamic
    if dynamic and cfg.batch.group_size == 1:
        yield "dynamic: with batch.group_size 1 no group has a spread of rewards"
    if dynamic and reward_models(cfg.rewards.functions):
        yield (
            "dynamic: the spread of a group's rewards is not known where prompts are "
            "drawn, since rewards.functions names a model; leave it out"
        )


def _curriculum_problems(cfg: Config) -> list[str]:
    keep, dynamic = cfg.rollout.schedule.curriculum, cfg.rollout.schedule.dynamic
    if keep == 1:
        return []
    if dynamic:
        return [
            f"curriculum: {keep:g} with dynamic {dynamic}, which takes prompts "
            "before it is known what earlier steps measured; leave one of them out"
        ]
    if reward_models(cfg.rewards.functions):
        return [
            f"curriculum: {keep:g}, but pass rates are not known where prompts are drawn, "
            "since rewards.functions names a model; leave it out"
        ]
    return []


def record_problems(cfg: Config) -> list[str]:
    """Return what is wrong with rollout.record, each as `field: what, value seen`."""
    every, folder = cfg.rollout.record.every, cfg.rollout.record.replay
    if every and folder:
        return [
            f"rollout.record.every: {every} with replay {folder}, which samples nothing new to "
            "record; leave one of them out"
        ]
    own = Path(cfg.output_dir).resolve()
    if folder and own in (Path(folder).resolve(), Path(folder).resolve().parent):
        return [
            f"rollout.record.replay: {folder} is of this very output_dir, whose checkpoints and "
            "metrics are of the recorded run; set another output_dir"
        ]
    return []
