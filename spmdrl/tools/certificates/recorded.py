"""A step taken again from what a run left of it: checks of that, and the way to the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from spmdrl.checkpoint import manifest as disk
from spmdrl.checkpoint.restore import config_differences, restore
from spmdrl.config import Config
from spmdrl.errors import Refusal
from spmdrl.exchange import exchange
from spmdrl.imports import is_missing_folder
from spmdrl.rollout.recorder import kept_fields
from spmdrl.rollout.recordings import read_header
from spmdrl.rollout.replay_source import ReplaySource
from spmdrl.same_run.differences import differences
from spmdrl.types import Batch


def check_files(files: Sequence[Path], cfg: Config, *, run: Path, step: int) -> None:
    """Refuse a step's recordings that another run, or another attempt at this one, wrote.

    Args:
        files: one per replica.
        cfg: of the run, as its config.yaml says.
    """
    for replica, path in enumerate(files):
        header = read_header(path)
        named = {"step": step, "replica": replica, "replicas": len(files)}
        for name, expected in named.items():
            if header.get(name) != expected:
                raise Refusal(
                    f"{path} was renamed: it says {name} {header.get(name)!r}, its name "
                    f"{expected!r}"
                )
        own = {"config": kept_fields(cfg)}
        if found := differences({"config": header["config"]}, own):
            raise Refusal(
                f"{path} is not of this run: it differs from {run / 'config.yaml'}: {found[0]}"
            )


def weights_of(run: Path, cfg: Config) -> dict[int, Path | None]:
    """Return {step: checkpoint with the weights that it trained}, the newest first; None: those
    that the run began with.

    Args:
        cfg: of the run.
    """
    saved: dict[int, Path | None] = {
        disk.step_of(path): path for path in disk.complete_checkpoints(disk.checkpoints_folder(run))
    }
    return saved if is_missing_folder(cfg.model.path) else saved | {0: saved.get(0)}


def check_checkpoint(checkpoint: Path | None, cfg: Config, *, run: Path) -> None:
    """Refuse a checkpoint that is not whole, or of another config than the run's.

    Args:
        checkpoint: None for the weights that the run began with.
    """
    if checkpoint is None:
        return
    content = disk.read_manifest(checkpoint)
    if found := config_differences(content.config, cfg):
        raise Refusal(
            f"{checkpoint} was written under another config than {run / 'config.yaml'}, so "
            f"that its step did not train as that says: {found[0]}"
            + (f" ({len(found)} fields differ)" if len(found) > 1 else "")
        )
    if problems := disk.damages(checkpoint, content):
        raise Refusal(f"{checkpoint} cannot be used: {problems[0]}")


def go_to(checkpoint: Path, cfg: Config, *, trainer: Any, source: ReplaySource) -> None:
    """Give a trainer the weights, and all else, of a checkpoint; trainers meet.

    Args:
        cfg: that trained; what differs from the trainer's own is not of the run's course.
    """
    saved = replace(cfg.checkpoint, resume=str(checkpoint), allow_config_change=False)
    restore(replace(cfg, checkpoint=saved), trainer.world, policy=trainer, source=source)


def take_batch(trainer: Any, source: ReplaySource, *, step: int) -> Batch:
    """Return a recorded step's batch, annotated, as train.py has it; trainers meet."""
    batch = exchange(source, trainer.world, step=step)
    return trainer.annotate(batch, step=step)
