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
from spmdrl.types import Batch, Scalars
from spmdrl.world.launch import launch_alone
from spmdrl.world.world import World

_TRAINED = {"values": "value model", "prm_logprobs": "process reward model"}
"""{column: the model that it comes from, which the run must have trained}."""
_TOLERANCES = {"float32": 1e-3}
_TOLERANCE = 0.1  # of other dtypes: rows may be packed in another way, on another device


@dataclass(frozen=True)
class Outcome(Probe):
    """The effect of one alternative at one step, without the gradients by parameters."""

    alternative: Alternative
    cosine: float
    """Of the angle between its gradient and the run's own."""


@dataclass(frozen=True)
class StepFound:
    """The outcomes at one step."""

    step: int
    weights: str
    """Folder or checkpoint of its weights."""
    scalars: Scalars
    outcomes: list[Outcome]
    """The run's own first."""
    recorded: dict[str, float]
    """Metrics of the run's own outcome, as metrics.jsonl has them; {} if they do not compare."""
    notes: list[str]


def open_run(
    folder: Path, *, trust_run: bool = False, trust_remote_code: bool = False
) -> RecordedRun:
    """Open a run that has recorded steps whose weights are still there.

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
    run = RecordedRun.open(folder, cfg)
    if not steps_of(run):
        saved = [step for step, path in run.weights.items() if path]
        raise Refusal(
            f"{folder}: no recorded step has a checkpoint right before it: recorded are steps "
            f"{ranges(run.recorded.steps)}, checkpoints there are of {ranges(saved) or 'no step'}. "
            "Let checkpoint.every_steps be a multiple of rollout.record.every, and "
            "checkpoint.keep.last large enough"
        )
    return run


def steps_of(run: RecordedRun) -> list[int]:
    """Return the recorded steps whose weights are there, ascending."""
    return [step for step in sorted(run.recorded.steps) if step in run.weights]


def chosen_steps(run: RecordedRun, asked: Sequence[int]) -> list[int]:
    """Return the steps to evaluate, ascending: those of `asked`, or by default the newest one.

    Raises: Refusal naming a step that was not recorded, or whose weights are not there, and
        the steps that can be taken; or the first difference between a recording, its checkpoint
        and the run.
    """
    known = steps_of(run)
    for step in asked:
        if step in known:
            continue
        why = "no checkpoint holds the weights that it trained"
        if step not in run.recorded.steps:
            why = "it was not recorded (rollout.record.every)"
        raise Refusal(
            f"{run.folder}: step {step} cannot be looked at: {why}; steps that can: {ranges(known)}"
        )
    steps = sorted(set(asked)) or known[-1:]
    for step in steps:
        run.check(WayToStep(step, step, run.weights[step]))
    return steps


def look_again(
    run: RecordedRun, steps: Sequence[int], alternatives: Sequence[Alternative]
) -> Iterator[StepFound]:
    """Yield the outcomes of the run's own settings and of the alternatives at each of some steps.

    Args:
        steps: of `run.weights`, ascending.
    Raises: Refusal for a model that is needed and missing, and for a step whose own gradient
        norm is not the one that the run reported.
    """
    everyone = [Alternative(AS_RUN, run.cfg, {}), *alternatives]
    columns = _columns(run.cfg, everyone)
    with tempfile.TemporaryDirectory() as folder:
        cfg = alone(run.cfg, output_dir=folder, alternatives=everyone)
        launch_alone()
        world = World.start(cfg)
        try:
            replayer = Replayer(run, cfg, world, columns=columns)
            for step in steps:
                batch = _load(run, step, replayer)
                yield _found(run, step, batch, trainer=replayer.trainer, everyone=everyone)
        finally:
            world.close()


def alone(cfg: Config, *, output_dir: str, alternatives: Sequence[Alternative]) -> Config:
    """Return a run's config for one process that trains on its recordings.

    Args:
        output_dir: for files of this process; nothing is written to the run's folder.
        alternatives: the tokens of all of them are scored.
    """
    own = cfg.layout
    layout = LayoutSettings(
        placement="offline",
        world_size=1,
        device="cpu" if own.device == "cpu" else "auto",
        wait_timeout_s=own.wait_timeout_s,
        startup_timeout_s=own.startup_timeout_s,
    )
    # A truncated response must be scored if any alternative trains on it.
    everywhere = all(other.cfg.algorithm.mask_truncated for other in alternatives)
    return replace(
        cfg,
        output_dir=output_dir,
        layout=layout,
        algorithm=replace(cfg.algorithm, mask_truncated=everywhere),
        evaluate=replace(cfg.evaluate, every_steps=0),
    )


def _columns(cfg: Config, everyone: Sequence[Alternative]) -> set[str]:
    """Return the columns that alternatives need and the run did not. Raises: Refusal for a column
    of a model, or of greedy samples, that the run did not have."""
    own = needed_columns(cfg)
    found = set()
    drawn = _asked(cfg)
    for other in everyone:
        asked = needed_columns(other.cfg) - own
        if "greedy_rewards" in _asked(other.cfg) - drawn:
            raise Refusal(
                f"alternative {other.name}: asks for greedy_rewards, of a greedy sample of each "
                f"prompt; the run drew none (its advantage is {cfg.algorithm.advantage})"
            )
        for column, model in _TRAINED.items():
            if column in asked:
                raise Refusal(
                    f"alternative {other.name}: asks for {column}, of a {model}; the run trained "
                    f"none (its advantage is {cfg.algorithm.advantage}), so that no checkpoint "
                    "has one"
                )
        if "ref_logprobs" in asked and cfg.model.reference.sync_every:
            raise Refusal(
                f"alternative {other.name}: asks for ref_logprobs, of a reference that follows the "
                f"policy (model.reference.sync_every: {cfg.model.reference.sync_every}); the run "
                "used none, so that no checkpoint has it"
            )
        found |= asked
    return found


def _asked(cfg: Config) -> set[str]:
    return registry.inputs_with_helpers(registry.get("advantage", cfg.algorithm.advantage))


def _load(run: RecordedRun, step: int, replayer: Replayer) -> Batch:
    """Give the trainer the step's weights, and return the step's batch."""
    checkpoint = run.weights[step]
    if checkpoint is not None:
        cfg = replayer.trainer.cfg
        # The run's own settings, by which the checkpoint was written.
        cfg = replace(cfg, algorithm=run.cfg.algorithm, checkpoint=run.cfg.checkpoint)
        replayer.go_to(checkpoint, cfg)
    return replayer.batch(step)


def _found(
    run: RecordedRun, step: int, batch: Batch, *, trainer: Trainer, everyone: Sequence[Alternative]
) -> StepFound:
    own = probe(trainer, batch, everyone[0], step=step)
    recorded, notes = _compared(run, step, own)
    outcomes = []
    for other in everyone:
        with refusing(f"step {step}, alternative {other.name}", Refusal):
            found = own if other is everyone[0] else probe(trainer, batch, other, step=step)
        shown = vars(found) | {"gradients": {}}
        angle = cosine(found.gradients, own.gradients)
        outcomes.append(Outcome(**shown, alternative=other, cosine=angle))
    checkpoint = run.weights[step]
    weights = run.cfg.model.path if checkpoint is None else str(checkpoint)
    return StepFound(step, weights, batch.scalars, outcomes, recorded, notes)


def _compared(run: RecordedRun, step: int, own: Probe) -> tuple[dict[str, float], list[str]]:
    """Return the metrics that the run reported of its own gradient, and notes on them.

    Raises: Refusal where the run reported another gradient norm: then this is not its step.
    """
    row = _recorded_metrics(run, step)
    cfg = run.cfg
    if cfg.batch.optimizer_steps > 1:
        return {}, [
            f"the run took {cfg.batch.optimizer_steps} optimizer steps on this batch; this is the "
            "gradient of the first, and what metrics.jsonl has is of all of them"
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
            f"on what was recorded, and metrics.jsonl has {there:.6g}, more than {bound:g} of it "
            "apart: code, model, weights or recording are not what that step had. Was train.py "
            "edited, or a file changed since?"
        )
    return known, []


def _recorded_metrics(run: RecordedRun, step: int) -> dict[str, Any]:
    """Return the step's row of metrics.jsonl; {} where there is none."""
    found: dict[str, Any] = {}
    for row in Journal(run.folder / "metrics.jsonl").rows():
        # Other rows of the step, such as those of an evaluation, have no policy/lr.
        if row["step"] == step and "policy/lr" in row:
            found = row
    return found
