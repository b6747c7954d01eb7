"""Which steps of a run can be looked at again: recorded ones whose weights are still there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.checkpoint import manifest as disk
from spmdrl.checkpoint.restore import config_differences
from spmdrl.config import Config, load_yaml
from spmdrl.errors import Refusal
from spmdrl.imports import is_missing_folder
from spmdrl.report.jsonl import read_rows
from spmdrl.rollout.recordings import Recorded, find_recorded, ranges, read_header
from spmdrl.what_if.alternatives import METHODS


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
    cfg = load_yaml(folder / "config.yaml", may_be_former=True)
    _check_kind(cfg, folder)
    _check_trust(cfg, folder, trust_run=trust_run, trust_remote_code=trust_remote_code)
    recorded = find_recorded(folder)
    saved = {
        disk.step_of(path): path
        for path in disk.complete_checkpoints(disk.checkpoints_folder(folder))
    }
    weights = {step: saved[step] for step in recorded.steps if step in saved}
    begins = {} if 0 in weights or is_missing_folder(cfg.model.path) else {0: None}
    found = {s: p for s, p in (begins | weights).items() if s in recorded.steps}
    if not found:
        raise Refusal(
            f"{folder}: no recorded step has a checkpoint right before it: recorded are steps "
            f"{ranges(recorded.steps)}, checkpoints there are of {ranges(saved) or 'no step'}. "
            "Let checkpoint.every_steps be a multiple of rollout.record.every, and "
            "checkpoint.keep.last large enough"
        )
    return RecordedRun(folder, cfg, recorded, dict(sorted(found.items())))


def _check_kind(cfg: Config, folder: Path) -> None:
    if not cfg.objective.has_advantages:
        raise Refusal(
            f"{folder}: its objective is {cfg.algorithm.objective}; what-if compares losses on "
            "advantages of sampled rollouts, those of the objective rl"
        )


def _check_trust(cfg: Config, folder: Path, *, trust_run: bool, trust_remote_code: bool) -> None:
    """Refuse code that the run's config names and the command line did not allow."""
    named = [(kind, getattr(cfg.algorithm, kind)) for kind in METHODS]
    code = [f"algorithm.{kind}: {name}" for kind, name in named if ":" in name]
    code, hints = ([], []) if trust_run else (code, ["--trust-run"] * bool(code))
    if cfg.model.trust_remote_code and not trust_remote_code:
        code.append("model.trust_remote_code: true")
        hints.append("--trust-remote-code")
    if code:
        raise Refusal(
            f"{folder / 'config.yaml'} may be somebody else's, and would run code here:\n  "
            + "\n  ".join(code)
            + f"\nLook at it, then allow it by {' and '.join(hints)}"
        )


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
        _check_files(run, step)
        _check_weights(run, run.weights[step])
    return steps


def _check_files(run: RecordedRun, step: int) -> None:
    """Refuse a recording that another run, or another attempt at this one, wrote."""
    files = run.recorded.files_of(step)
    for replica, path in enumerate(files):
        header = read_header(path)
        told = {
            "step": step,
            "replica": replica,
            "replicas": len(files),
            "model": run.cfg.model.path,
            "seed": run.cfg.seed,
            "lag": run.cfg.lag,
        }
        for name, expected in told.items():
            if header.get(name) != expected:
                raise Refusal(
                    f"{path} is not of this run: its {name} is {header.get(name)!r}, that of "
                    f"{run.folder / 'config.yaml'} is {expected!r}"
                    if name in ("model", "seed", "lag")
                    else f"{path} was renamed: it says {name} {header.get(name)!r}, its name "
                    f"{expected!r}"
                )


def _check_weights(run: RecordedRun, checkpoint: Path | None) -> None:
    """Refuse a checkpoint that is not whole, or of another config than the run's."""
    if checkpoint is None:
        return
    content = disk.read_manifest(checkpoint)
    if differences := config_differences(content.config, run.cfg):
        raise Refusal(
            f"{checkpoint} was written under another config than {run.folder / 'config.yaml'}, so "
            f"that its step did not train as that says: {differences[0]}"
            + (f" ({len(differences)} fields differ)" if len(differences) > 1 else "")
        )
    if problems := disk.damages(checkpoint, content):
        raise Refusal(f"{checkpoint} cannot be used: {problems[0]}")


def recorded_metrics(run: RecordedRun, step: int) -> dict[str, Any]:
    """Return the step's row of metrics.jsonl; {} where there is none."""
    path = run.folder / "metrics.jsonl"
    rows = read_rows(path) if path.is_file() else []
    return next((r for r in reversed(rows) if r["step"] == step and "policy/lr" in r), {})
