"""Whether tokens may be as old as a schedule makes them, and which run a replay takes up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spmdrl.config.fields import Config, replay_folder
from spmdrl.rollout.decision_log import is_timed
from spmdrl.rollout.staleness import least_staleness


def schedule_problems(cfg: Config) -> Iterator[str]:
    """Yield what is wrong with rollout.schedule, each as `field: what, value seen`."""
    schedule = cfg.rollout.schedule
    if replay_folder(cfg) or not cfg.objective.samples or schedule.max_staleness == "auto":
        return
    least = least_staleness(schedule.over_sample, lag=cfg.lag)
    if schedule.max_staleness < least:
        yield (
            f"rollout.schedule.max_staleness: {schedule.max_staleness} is below lag {cfg.lag} + "
            f"ceil(over_sample {schedule.over_sample:g}) - 1 = {least}: groups that are under way "
            "could not all be trained on in time; raise it, or lower those"
        )


def record_problems(cfg: Config) -> Iterator[str]:
    """Yield what is wrong with the folders of a recorded run, each as `field: what, value seen`."""
    folder = cfg.rollout.record.replay
    again = cfg.rollout.replay_schedule
    if again and is_timed(cfg) and _is_own(cfg, again):
        yield (
            f"rollout.replay_schedule: {again} is of this very output_dir, which a resumed run "
            "follows by itself; leave it out, or set another output_dir"
        )
    elif folder and not again and _is_own(cfg, folder):
        yield (
            f"rollout.record.replay: {folder} is of this very output_dir, whose checkpoints and "
            "metrics are of the recorded run; set another output_dir"
        )


def _is_own(cfg: Config, folder: str) -> bool:
    there = Path(folder).resolve()
    return Path(cfg.output_dir).resolve() in (there, there.parent)
