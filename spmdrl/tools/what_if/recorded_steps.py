"""Which steps of a run can be looked at again: recorded ones whose weights are still there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.config import Config
from spmdrl.errors import Refusal
from spmdrl.journal import read_rows
from spmdrl.rollout.recordings import Recorded, find_recorded, ranges
from spmdrl.tools.certificates.recorded import check_checkpoint, check_files, weights_of
from spmdrl.tools.foreign_code import trusted_config


@dataclass(frozen=True)
class RecordedRun:
    """A run's folder, and what of it can be looked at again."""

    folder: Path
    cfg: Config
    recorded: Recorded
    weights: dict[int, Path | None]
    """Step -> checkpoint with the weights that it trained; None: those that the run began with."""


def open_run(
    folder: Path, *, trust_run: bool = False, trust_remote_code: bool = False
) -> RecordedRun:
    """Read a run's config, and find its recorded steps and their weights.

    The checkpoint `step_k` is written after k steps: its weights are those that step k, counted
    from 0 as in metrics.jsonl, trained on its batch.

    Args:
        trust_run: run the functions that the run's config names. trust_remote_code: run Python code
            of its model's folder.
    Raises: Refusal where there is no config, no recorded step, or none with its weights; for an
        objective without advantages; for code of the run's that is not trusted.
    """
    cfg = trusted_config(folder, trust_run=trust_run, trust_remote_code=trust_remote_code)
    if not cfg.objective.has_advantages:
        raise Refusal(
            f"{folder}: its objective is {cfg.algorithm.objective}; what-if compares losses on "
            "advantages of sampled rollouts, those of the objective rl"
        )
    recorded = find_recorded(folder)
    starts = weights_of(folder, cfg)
    found = {step: starts[step] for step in sorted(recorded.steps) if step in starts}
    if not found:
        saved = [step for step, path in starts.items() if path]
        raise Refusal(
            f"{folder}: no recorded step has a checkpoint right before it: recorded are steps "
            f"{ranges(recorded.steps)}, checkpoints there are of {ranges(saved) or 'no step'}. "
            "Let checkpoint.every_steps be a multiple of rollout.record.every, and "
            "checkpoint.keep.last large enough"
        )
    return RecordedRun(folder, cfg, recorded, found)


def chosen_steps(run: RecordedRun, asked: Sequence[int]) -> list[int]:
    """Return the steps to look at, ascending: those asked for, or the newest one that can be.

    Raises: Refusal naming a step that was not recorded, or whose weights are not there, and those
        that can be taken; or the first difference between a recording, its checkpoint and the run.
    """
    for step in asked:
        if step in run.weights:
            continue
        why = "no checkpoint holds the weights that it trained"
        if step not in run.recorded.steps:
            why = "it was not recorded (rollout.record.every)"
        raise Refusal(
            f"{run.folder}: step {step} cannot be looked at: {why}; steps that can: "
            f"{ranges(run.weights)}"
        )
    steps = sorted(set(asked)) or [max(run.weights)]
    for step in steps:
        check_files(run.recorded.files_of(step), run.cfg, run=run.folder, step=step)
        check_checkpoint(run.weights[step], run.cfg, run=run.folder)
    return steps


def recorded_metrics(run: RecordedRun, step: int) -> dict[str, Any]:
    """Return the step's row of metrics.jsonl; {} where there is none."""
    path = run.folder / "metrics.jsonl"
    rows = read_rows(path) if path.is_file() else []
    return next((r for r in reversed(rows) if r["step"] == step and "policy/lr" in r), {})
