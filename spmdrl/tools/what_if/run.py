"""Evaluate alternatives on steps of a run, in one process and without an engine."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spmdrl.algorithms import registry
from spmdrl.config import Config, LayoutSettings
from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.journal import Journal
from spmdrl.rollout.recordings import ranges
from spmdrl.tools.foreign_code import trusted_config
from spmdrl.tools.recorded_run import RecordedRun, Replayer, WayToStep
from spmdrl.tools.what_if.alternatives import AS_RUN, Alternative
from spmdrl.tools.what_if.measures import cosine
from spmdrl.tools.what_if.probe import Probe, probe
from spmdrl.train.objectives.objective_loss import needed_columns
from spmdrl.train.trainer import Trainer
from spmdrl.types import Batch, Episodes
from spmdrl.world.launch import launch_alone
from spmdrl.world.world import World

_MODEL_OF = {"values": "value model", "prm_logprobs": "process reward model"}
"""{column: the model that computes it, which the run must have trained}."""
_TOLERANCES = {"float32": 1e-3}
_TOLERANCE = 0.1  # of other dtypes: packing and device may differ from those of the run


@dataclass(frozen=True)
class Outcome(Probe):
    """The effect of one alternative at one step, without the gradients by parameters."""

    alternative: Alternative
    cosine: float
    """Of the angle between its gradient and that of the run's settings."""


@dataclass(frozen=True)
class StepOutcomes:
    """The outcomes at one step."""

    step: int
    weights: str
    """Folder or checkpoint of its weights."""
    episodes: Episodes
    outcomes: list[Outcome]
    """That of the run's settings first."""
    recorded: dict[str, float]
    """Metrics of the first outcome in metrics.jsonl; {} if they cannot be compared."""
    notes: list[str]


def open_run(
    folder: Path, *, trust_run: bool = False, trust_remote_code: bool = False
) -> RecordedRun:
    """Open a run that has recorded steps with checkpoints.

    Args:
        trust_run: run the functions that the run's config names.
        trust_remote_code: run Python code of its model's folder.
    Raises: Refusal if there is no config or no recorded step with a checkpoint, for an objective
        without advantages, or for code that is not trusted.
    """
    cfg = trusted_config(folder, trust_run=trust_run, trust_remote_code=trust_remote_code)
    if not cfg.objective.has_advantages:
        raise Refusal(
            f"{folder}: its objective is {cfg.algorithm.objective}; what-if compares losses of the "
            "objective rl, which have advantages of sampled rollouts"
        )
    run = RecordedRun.open(folder, cfg)
    if not steps_of(run):
        saved = [step for step, path in run.weights.items() if path]
        raise Refusal(
            f"{folder}: no recorded step has a checkpoint of its first weights: there are "
            f"recordings of steps {ranges(run.recorded.steps)} and checkpoints of "
            f"{ranges(saved) or 'no step'}. Set checkpoint.every_steps to a multiple of "
            "rollout.record.every, and checkpoint.keep.last large enough"
        )
    return run


def steps_of(run: RecordedRun) -> list[int]:
    """Return the recorded steps that have a checkpoint of their first weights, ascending."""
    return [step for step in sorted(run.recorded.steps) if step in run.weights]


def select_steps(run: RecordedRun, requested: Sequence[int]) -> list[int]:
    """Return the steps to evaluate, ascending: the requested ones, by default the newest one.

    Raises: Refusal for a step that was not recorded or has no checkpoint, with the steps that can
        be evaluated; or for a recording, checkpoint and run that do not belong together.
    """
    known = steps_of(run)
    for step in requested:
        if step in known:
            continue
        why = "no checkpoint holds the weights with which it began"
        if step not in run.recorded.steps:
            why = "it was not recorded (rollout.record.every)"
        raise Refusal(
            f"{run.folder}: step {step} cannot be evaluated: {why}; steps that can: {ranges(known)}"
        )
    steps = sorted(set(requested)) or known[-1:]
    for step in steps:
        run.check(WayToStep(step, step, run.weights[step]))
    return steps


def compare_alternatives(
    run: RecordedRun, steps: Sequence[int], alternatives: Sequence[Alternative]
) -> Iterator[StepOutcomes]:
    """Yield the outcomes of the run's own settings and of the alternatives at each of the steps.

    Args:
        steps: of `run.weights`, ascending.
    Raises: Refusal for a model that is missing, and for a step at which the run's settings do not
        give the gradient norm that the run reported.
    """
    candidates = [Alternative(AS_RUN, run.cfg, {}), *alternatives]
    columns = _columns(run.cfg, candidates)
    with tempfile.TemporaryDirectory() as folder:
        cfg = single_process_config(run.cfg, output_dir=folder, alternatives=candidates)
        launch_alone()
        world = World.start(cfg)
        try:
            replayer = Replayer(run, cfg, world, columns=columns)
            for step in steps:
                batch = _load(run, step, replayer)
                yield _step_outcomes(
                    run, step, batch, trainer=replayer.trainer, candidates=candidates
                )
        finally:
            world.close()


def single_process_config(
    cfg: Config, *, output_dir: str, alternatives: Sequence[Alternative]
) -> Config:
    """Return a run's config for one process that trains on its recordings.

    Args:
        output_dir: for files of this process; nothing is written to the run's folder.
        alternatives: all tokens that one of them trains on are scored.
    """
    layout = LayoutSettings(
        placement="offline",
        world_size=1,
        device="cpu" if cfg.layout.device == "cpu" else "auto",
        wait_timeout_s=cfg.layout.wait_timeout_s,
        startup_timeout_s=cfg.layout.startup_timeout_s,
    )
    # A truncated response must be scored if any alternative trains on it.
    mask_truncated = all(one.cfg.algorithm.mask_truncated for one in alternatives)
    return replace(
        cfg,
        output_dir=output_dir,
        layout=layout,
        algorithm=replace(cfg.algorithm, mask_truncated=mask_truncated),
        evaluate=replace(cfg.evaluate, every_steps=0),
    )


def _columns(cfg: Config, candidates: Sequence[Alternative]) -> set[str]:
    """Return the columns that alternatives need and the run's own settings do not.

    Raises: Refusal for a column of a model, or of greedy samples, that the run did not have.
    """
    run_columns = needed_columns(cfg)
    run_inputs = _advantage_inputs(cfg)
    columns = set()
    for other in candidates:
        new_columns = needed_columns(other.cfg) - run_columns
        if "greedy_rewards" in _advantage_inputs(other.cfg) - run_inputs:
            raise Refusal(
                f"alternative {other.name}: needs greedy_rewards, of a greedy sample of each "
                f"prompt; the run drew none (its advantage is {cfg.algorithm.advantage})"
            )
        for column, model in _MODEL_OF.items():
            if column in new_columns:
                raise Refusal(
                    f"alternative {other.name}: needs {column}, of a {model}; the run trained "
                    f"none (its advantage is {cfg.algorithm.advantage}), so no checkpoint has one"
                )
        if "ref_logprobs" in new_columns and cfg.model.reference.sync_every:
            raise Refusal(
                f"alternative {other.name}: needs ref_logprobs, of a reference that follows the "
                f"policy (model.reference.sync_every: {cfg.model.reference.sync_every}); the run "
                "used none, so no checkpoint has it"
            )
        columns |= new_columns
    return columns


def _advantage_inputs(cfg: Config) -> set[str]:
    return registry.inputs_with_helpers(registry.get("advantage", cfg.algorithm.advantage))


def _load(run: RecordedRun, step: int, replayer: Replayer) -> Batch:
    """Give the trainer the step's weights, and return the step's batch."""
    checkpoint = run.weights[step]
    if checkpoint is not None:
        cfg = replayer.trainer.cfg
        # The checkpoint was written under the run's own settings.
        cfg = replace(cfg, algorithm=run.cfg.algorithm, checkpoint=run.cfg.checkpoint)
        replayer.go_to(checkpoint, cfg)
    return replayer.batch(step)


def _step_outcomes(
    run: RecordedRun,
    step: int,
    batch: Batch,
    *,
    trainer: Trainer,
    candidates: Sequence[Alternative],
) -> StepOutcomes:
    own = probe(trainer, batch, candidates[0], step=step)
    recorded, notes = _compare_with_run(run, step, own)
    outcomes = []
    for other in candidates:
        with refusing(f"step {step}, alternative {other.name}", Refusal):
            result = own if other is candidates[0] else probe(trainer, batch, other, step=step)
        fields = vars(result) | {"gradients": {}}
        angle_cosine = cosine(result.gradients, own.gradients)
        outcomes.append(Outcome(**fields, alternative=other, cosine=angle_cosine))
    checkpoint = run.weights[step]
    weights = run.cfg.model.path if checkpoint is None else str(checkpoint)
    return StepOutcomes(step, weights, batch.scalars.episodes(), outcomes, recorded, notes)


def _compare_with_run(
    run: RecordedRun, step: int, own: Probe
) -> tuple[dict[str, float], list[str]]:
    """Return the metrics of its own gradient that the run reported, and notes on them.

    Raises: Refusal if the run reported another gradient norm: then this is not the same step.
    """
    row = _recorded_metrics(run, step)
    cfg = run.cfg
    if cfg.batch.optimizer_steps > 1:
        return {}, [
            f"the run took {cfg.batch.optimizer_steps} optimizer steps on this batch; this is the "
            "gradient of the first, and metrics.jsonl combines all of them"
        ]
    known = {name: float(row[name]) for name in own.metrics if row.get(name) is not None}
    norm = "policy/grad_norm"
    if norm not in known:
        return {}, ["metrics.jsonl has no gradient norm of this step to compare with"]
    here = own.metrics[norm]
    there = known[norm]
    dtype = cfg.model.compute_dtype
    bound = _TOLERANCES.get(dtype, _TOLERANCE)
    if not math.isclose(here, there, rel_tol=bound, abs_tol=1e-9):
        raise Refusal(
            f"{run.folder}: step {step}: the run's own settings give a gradient norm of {here:.6g} "
            f"on the recorded rollouts, but metrics.jsonl has {there:.6g}; the difference is above "
            f"{bound:g} of it. Code, model, weights or recording are not those of that step. Was "
            "train.py edited, or a file changed since?"
        )
    return known, []


def _recorded_metrics(run: RecordedRun, step: int) -> dict[str, Any]:
    """Return the step's last row of metrics.jsonl; {} if there is none."""
    last_row: dict[str, Any] = {}
    for row in Journal(run.folder / "metrics.jsonl").rows():
        # Other rows of the step, such as those of an evaluation, have no policy/lr.
        if row["step"] == step and "policy/lr" in row:
            last_row = row
    return last_row
