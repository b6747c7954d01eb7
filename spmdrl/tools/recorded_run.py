"""Read a run again from its folder: open it, load the weights of a step, and take its batch. No
engine is built, and nothing of the run is changed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spmdrl.checkpoint import manifest as disk
from spmdrl.checkpoint.restore import config_differences, restore
from spmdrl.config import Config
from spmdrl.credit import advantages_of
from spmdrl.errors import Refusal
from spmdrl.exchange import exchange
from spmdrl.imports import is_missing_folder
from spmdrl.roles import make_trainer
from spmdrl.rollout import model_limits
from spmdrl.rollout.recorder import header_fields
from spmdrl.rollout.recordings import RecordedSteps, find_recorded, read_header
from spmdrl.rollout.replay_source import ReplaySource
from spmdrl.same_run.differences import differences
from spmdrl.types import Advantages, Batch, Sums
from spmdrl.world.world import World


@dataclass(frozen=True)
class WayToStep:
    """How to reach a step: load the weights before `start`, then train on the recorded steps up to
    it."""

    step: int
    start: int
    checkpoint: Path | None
    """That of `start`; None: the weights that the run began with, at step 0."""


@dataclass(frozen=True)
class RecordedRun:
    """A run's folder, with its recordings and checkpoints."""

    folder: Path
    cfg: Config
    recorded: RecordedSteps
    weights: dict[int, Path | None]
    """{step: checkpoint with the weights that it trained}, newest first; None: those that the run
    began with. The checkpoint `step_k` is written after k steps: step k, counted from 0 as in
    metrics.jsonl, trains its weights."""

    @classmethod
    def open(cls, folder: Path, cfg: Config) -> RecordedRun:
        """Find a run's recordings and checkpoints.

        Args:
            folder: output_dir.
            cfg: of the run.
        Raises: Refusal where no step is recorded.
        """
        checkpoints = disk.complete_checkpoints(disk.checkpoints_folder(folder))
        weights: dict[int, Path | None] = {disk.step_of(path): path for path in checkpoints}
        if not is_missing_folder(cfg.model.path):
            weights.setdefault(0, None)
        return cls(folder, cfg, find_recorded(folder), weights)

    def way_to(self, step: int) -> WayToStep | None:
        """Return the shortest way to a recorded step; None where there is none."""
        # Newest first, so the first way is the shortest.
        for start, checkpoint in self.weights.items():
            steps = range(start, step + 1)
            if steps and all(between in self.recorded.steps for between in steps):
                return WayToStep(step, start, checkpoint)
        return None

    def check(self, way: WayToStep) -> None:
        """Refuse recordings or a checkpoint that are damaged, or of another run or attempt."""
        for step in range(way.start, way.step + 1):
            self._check_recordings(step)
        if way.checkpoint is not None:
            self._check_checkpoint(way.checkpoint)

    def _check_recordings(self, step: int) -> None:
        files = self.recorded.files_of(step)
        for replica, path in enumerate(files):
            header = read_header(path)
            by_name = {"step": step, "replica": replica, "replicas": len(files)}
            for name, expected in by_name.items():
                if header[name] != expected:
                    raise Refusal(
                        f"{path} was renamed: it says {name} {header[name]}, its name {expected}"
                    )
            found = differences({"config": header["config"]}, {"config": header_fields(self.cfg)})
            if found:
                raise Refusal(
                    f"{path} is not of this run: it differs from {self.folder / 'config.yaml'}: "
                    f"{found[0]}"
                )

    def _check_checkpoint(self, path: Path) -> None:
        content = disk.read_manifest(path)
        if found := config_differences(content.config, self.cfg):
            more = f" ({len(found)} fields differ)" if len(found) > 1 else ""
            raise Refusal(
                f"{path} was written under another config than {self.folder / 'config.yaml'}, so "
                f"its step was not trained as that file says: {found[0]}{more}"
            )
        if problems := disk.damages(path, content):
            raise Refusal(f"{path} cannot be used: {problems[0]}")


class Replayer:
    """A trainer that takes a run's recorded batches; every trainer rank makes one and calls it.

    Args:
        cfg: of this job.
        columns: more columns for the batches than the config's loss and advantage need.
    """

    def __init__(
        self, run: RecordedRun, cfg: Config, world: World, *, columns: Collection[str] = ()
    ):
        self.trainer: Any = make_trainer(cfg, world, columns=columns)
        limits = model_limits(cfg)
        self._source = ReplaySource(cfg, world, recorded=run.recorded, **limits)

    def go_to(self, checkpoint: Path, cfg: Config) -> None:
        """Load the weights, and all else, of a checkpoint.

        Args:
            cfg: that the checkpoint was written under. It may differ from the trainer's own only in
                settings that do not change the run's result.
        """
        saved = replace(cfg.checkpoint, resume=str(checkpoint), allow_config_change=False)
        cfg = replace(cfg, checkpoint=saved)
        restore(cfg, self.trainer.world, policy=self.trainer, source=self._source)

    def batch(self, step: int) -> Batch:
        """Return a step's batch, annotated, as train.py has it."""
        batch = exchange(self._source, self.trainer.world, step=step)
        return self.trainer.annotate(batch, step=step)

    def train(self, step: int) -> tuple[Batch, Advantages, Sums]:
        """Take a step as train.py does; return its batch, advantages and the update's sums."""
        trainer = self.trainer
        batch = self.batch(step)
        advantages = advantages_of(batch, cfg=trainer.cfg, world=trainer.world, step=step)
        return batch, advantages, trainer.update(batch, advantages, step=step)
