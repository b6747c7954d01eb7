"""Batches from recorded rollouts: a run trains on the samples of another one, without an engine."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from spmdrl.columns import RouterRoutes
from spmdrl.config import Config
from spmdrl.config.fields import replay_folder
from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.model_inputs import MultimodalItems
from spmdrl.rollout.packing import empty_rollouts
from spmdrl.rollout.recorder import ORIGIN_FIELDS, header_fields
from spmdrl.rollout.recordings import (
    RecordedSteps,
    find_recorded,
    ranges,
    read_header,
    read_rollouts,
)
from spmdrl.rollout.source import Source
from spmdrl.same_run.differences import differences
from spmdrl.types import Rollouts
from spmdrl.world.world import World

log = logging.getLogger(__name__)


class ReplaySource(Source):
    """The recorded batch of every step; the first rank of each dp index reads its share.

    Args:
        max_positions: the model's context, tokens; None if it has no limit.
        vocab_size: rows of the model's embedding.
        recorded: the recordings; by default those that the config names, with all steps.
    Raises (on construction): Refusal as `check_recorded`.
    """

    def __init__(
        self,
        cfg: Config,
        world: World,
        *,
        max_positions: int | None,
        vocab_size: int,
        recorded: RecordedSteps | None = None,
    ):
        self.cfg = cfg
        self.world = world
        self.recorded = recorded or check_recorded(cfg)
        if cfg.evaluate.every_steps and world.rank == 0:
            log.warning(
                "evaluation is left out: a replay has no engine to sample with; evaluate "
                "a checkpoint by `python -m spmdrl evaluate`"
            )
        self._max_positions = max_positions
        self._vocab_size = vocab_size
        self._replays_routes = cfg.model.moe.replay

    def take(self, step: int) -> Rollouts:
        """Return this rank's part of the recorded batch.

        Raises: Refusal if the step was not recorded, its file cannot be read, or the model cannot
            train on it.
        """
        world = self.world
        files = self.recorded.files_of(step)
        if not world.is_dp_leader:
            return empty_rollouts()
        _check_fields(self.cfg, files[0], header=read_header(files[0]))
        rollouts = read_rollouts(files, part=world.dp_index(world.rank), num_parts=world.dp_size)
        if len(rollouts):
            self._check(rollouts, step)
        if self._replays_routes:
            return rollouts
        # Leave the routes out, so that the trainer's own routers choose the experts.
        columns = {k: v for k, v in rollouts.extra_columns.items() if k != RouterRoutes.key}
        return replace(rollouts, extra_columns=columns)

    def _check(self, rollouts: Rollouts, step: int) -> None:
        longest = int(rollouts.scalars.lengths.max())
        highest = int(rollouts.tokens.max())
        if self._max_positions is not None and longest > self._max_positions:
            raise Refusal(
                f"{self.recorded.folder}: step {step} has a sequence of {longest} "
                f"tokens, above the model's context of {self._max_positions}"
            )
        if MultimodalItems.key in rollouts.extra_columns and self.cfg.model.part == "text":
            raise Refusal(
                f"{self.recorded.folder}: step {step} has images, and model.part: text leaves out "
                "the tower that reads them; set model.part to all"
            )
        if highest >= self._vocab_size:
            raise Refusal(
                f"{self.recorded.folder}: step {step} has the token {highest}, and the model's "
                f"embedding {self._vocab_size} rows; it was recorded with another tokenizer"
            )


def check_recorded(cfg: Config) -> RecordedSteps:
    """Return the recorded rollouts that a config names.

    Raises: Refusal if a step is missing, or if the config differs in a field that the recorded
        numbers depend on.
    """
    with refusing("rollout.record.replay", Refusal):
        recorded = find_recorded(replay_folder(cfg))
    steps = recorded.steps
    # A resumed run starts at a later step than 0, so the first steps may be missing.
    missing = sorted(set(range(min(steps), cfg.steps)) - set(steps))
    if missing or min(steps) >= cfg.steps:
        raise Refusal(
            f"rollout.record.replay: {recorded.folder} has steps {ranges(steps)}; not recorded, "
            f"of steps {cfg.steps}: {ranges(missing or range(cfg.steps))}. Lower steps, or "
            "record every step"
        )
    first = recorded.files_of(min(steps))[0]
    _check_fields(cfg, first, header=read_header(first))
    return recorded


def _check_fields(cfg: Config, path: Path, *, header: dict[str, Any]) -> None:
    own = {"config": header_fields(cfg)}
    if changed := differences({"config": header["config"]}, own, may_differ=ORIGIN_FIELDS):
        raise Refusal(
            f"{path} was recorded with other values of fields that its numbers depend on:\n  "
            + "\n  ".join(map(str, changed))
            + "\nSet these fields to the values there, or record again"
        )
    if cfg.model.moe.replay and RouterRoutes.key not in header["columns"]:
        raise Refusal(
            f"model.moe.replay: {path} was recorded without the engine's routes, by a run with "
            "model.moe.replay: false; set it to false, or record again"
        )
