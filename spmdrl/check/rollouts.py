"""Whether the schedule of rollouts, and what is recorded of them, suit the rest of a config."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spmdrl.config.fields import Config, replay_folder
from spmdrl.rewards.signatures import reward_models
from spmdrl.rollout.decision_log import is_timed
from spmdrl.rollout.staleness import least_staleness


def schedule_problems(cfg: Config) -> list[str]:
    """Return what is wrong with rollout.schedule, each as `field: what, value seen`."""
    if replay_folder(cfg) or not cfg.objective.samples:
        return []
    return [f"rollout.schedule.{problem}" for problem in _schedule_problems(cfg)]


def _schedule_problems(cfg: Config) -> Iterator[str]:
    schedule, dynamic = cfg.rollout.schedule, cfg.rollout.schedule.dynamic
    has_model = bool(reward_models(cfg.rewards.functions))
    if schedule.in_flight and not cfg.layout.roles.overlaps:
        yield (
            f"in_flight: with layout.placement {cfg.layout.placement} nothing is "
            "sampled while the policy trains; take split, or leave it out"
        )
    elif schedule.in_flight and not cfg.lag:
        yield (
            "in_flight: with lag 0 nothing is sampled while the policy trains; set lag to 1 or more"
        )
    if dynamic and cfg.batch.group_size == 1:
        yield "dynamic: with batch.group_size 1 no group has a spread of rewards"
    if dynamic and has_model:
        yield (
            "dynamic: the spread of a group's rewards is not known where prompts are "
            "drawn, since rewards.functions names a model; leave it out"
        )
    if schedule.curriculum != 1 and dynamic:
        yield (
            f"curriculum: {schedule.curriculum:g} with dynamic {dynamic}, which takes prompts "
            "before it is known what earlier steps measured; leave one of them out"
        )
    elif schedule.curriculum != 1 and has_model:
        yield (
            f"curriculum: {schedule.curriculum:g}, but pass rates are not known where prompts are "
            "drawn, since rewards.functions names a model; leave it out"
        )
    if schedule.max_staleness != "auto" and schedule.over_sample >= 1:
        least = least_staleness(schedule.over_sample, lag=cfg.lag)
        if schedule.max_staleness < least:
            yield (
                f"max_staleness: {schedule.max_staleness} is below lag {cfg.lag} + "
                f"ceil(over_sample {schedule.over_sample:g}) - 1 = {least}: groups "
                "that are under way could not all be trained on in time"
            )


def record_problems(cfg: Config) -> Iterator[str]:
    """Yield what is wrong with rollout.record, each as `field: what, value seen`."""
    every, folder = cfg.rollout.record.every, cfg.rollout.record.replay
    again = cfg.rollout.replay_schedule
    if every and folder:
        yield (
            f"rollout.record.every: {every} with replay {folder}, which samples nothing new to "
            "record; leave one of them out"
        )
    elif again and not is_timed(cfg):
        yield (
            f"rollout.replay_schedule: {again}, but time decides nothing in this run: its engines "
            "neither work ahead nor have an environment, and it repeats by itself; leave it out"
        )
    elif again and _is_own(cfg, again):
        yield (
            f"rollout.replay_schedule: {again} is of this very output_dir, which a resumed run "
            "follows by itself; leave it out, or set another output_dir"
        )
    elif folder and _is_own(cfg, folder):
        yield (
            f"rollout.record.replay: {folder} is of this very output_dir, whose checkpoints and "
            "metrics are of the recorded run; set another output_dir"
        )


def _is_own(cfg: Config, folder: str) -> bool:
    there = Path(folder).resolve()
    return Path(cfg.output_dir).resolve() in (there, there.parent)
