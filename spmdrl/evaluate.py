"""Held-out evaluation: sample the problems of data.eval with the weights of now, and write it down.

`python -m spmdrl evaluate` does the same with a model, a run or a checkpoint by itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from spmdrl.algorithms.shaping import RIGHT_AT
from spmdrl.config import Config
from spmdrl.engine.protocol import EngineProtocol
from spmdrl.rollout.outcomes import (
    Estimate,
    ProblemOutcome,
    by_source,
    eval_sums,
    evaluation_file,
    part_means,
    summarize,
)
from spmdrl.rollout.source import Source
from spmdrl.types import Sums
from spmdrl.world.comm import gather_objects
from spmdrl.world.world import World


@dataclass(frozen=True)
class Result:
    """What an evaluation found."""

    step: int
    """Steps that the checkpoint was trained; 0 for a model folder."""
    outcomes: list[ProblemOutcome]


def evaluate(source: Source, engine: EngineProtocol, *, world: World, step: int) -> Sums:
    """Sample the held-out prompts with the current weights when `step` is due.

    Due are multiples of evaluate.every_steps and the last step. Every rank calls it; engine
    replicas share the prompts. Rank 0 writes output_dir/evaluations/evaluation_STEP.json and .txt.

    Returns: eval/ sums over all replicas, equal on every rank; empty when not due.
    """
    cfg = world.cfg
    every = cfg.evaluate.every_steps
    if not every or (step % every and step != cfg.steps):
        return {}
    outcomes = sample(source, engine, world=world, step=step)
    if outcomes and world.rank == 0:
        found = Result(step, outcomes)
        write(evaluation_file(cfg.output_dir, step), cfg, found, model=cfg.output_dir)
    return eval_sums(outcomes, samples=cfg.evaluate.samples)


def sample(
    source: Source, engine: EngineProtocol, *, world: World, step: int
) -> list[ProblemOutcome]:
    """Sample and reward the held-out prompts; return what all came to, in order, on every rank."""
    with world.watch.phase("evaluate", step):
        own = source.evaluate(engine, step=step)
    with world.watch.wait("gather evaluation", step):
        gathered = gather_objects(own, group=world.control)
    return sorted((o for part in gathered for o in part), key=lambda outcome: outcome.index)


# --------------------------------------------------------------------------- what is shown


def table(outcomes: Sequence[ProblemOutcome], *, samples: int, right_at: float) -> str:
    """Return the estimates as text, one row for all problems and one per data source."""
    sources = by_source(outcomes)
    parts = {"all": list(outcomes)} | (
        {name or "(none)": own for name, own in sources.items()} if len(sources) > 1 else {}
    )
    found = {
        name: summarize(own, samples=samples, right_at=right_at) for name, own in parts.items()
    }
    columns = [c for c in found["all"] if not c.startswith("best_at_") or not _is_binary(outcomes)]
    rows = [["data source", "problems", *(c.replace("_at_", "@") for c in columns)]]
    rows += [
        [name, str(len(parts[name])), *(_cell(estimates.get(c)) for c in columns)]
        for name, estimates in found.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths))
        )
        for row in rows
    ]
    return "\n".join([*lines, *_notes(outcomes, samples=samples, right_at=right_at)])


def _is_binary(outcomes: Sequence[ProblemOutcome]) -> bool:
    return {reward for o in outcomes for reward in o.rewards} <= {0.0, 1.0}


def _cell(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    spread = "" if estimate.half_width is None else f" ±{estimate.half_width:.3f}"
    return f"{estimate.mean:.3f}{spread}"


def _notes(outcomes: Sequence[ProblemOutcome], *, samples: int, right_at: float) -> list[str]:
    notes = [
        "",
        f"{samples} sample{'s' * (samples > 1)} of each problem; ± is the 95% interval, "
        "1.96 standard errors over problems",
    ]
    best = max((reward for o in outcomes for reward in o.rewards), default=math.nan)
    if not _is_binary(outcomes):
        notes.append(
            f"rewards are not all 0 or 1: a sample is right from {right_at:g} on "
            "(--right-at); best@k is the mean of the best reward among k"
        )
    if best < right_at:
        notes.append(f"no sample is right: the largest reward is {best:g}")
    return notes + [f"{name}: {mean:.3f}" for name, mean in part_means(outcomes).items()]


def content(cfg: Config, result: Result, *, model: str, right_at: float = RIGHT_AT) -> dict:
    """Return all that was found as plain values for JSON."""
    samples, outcomes = cfg.evaluate.samples, result.outcomes

    def plain(own: Sequence[ProblemOutcome]) -> dict:
        found = summarize(own, samples=samples, right_at=right_at)
        return {name: asdict(estimate) for name, estimate in found.items()}

    return {
        "model": model,
        "step": result.step,
        "data": ", ".join(cfg.data.paths("eval")),
        "samples": samples,
        "temperature": cfg.evaluate.temperature,
        "top_p": cfg.evaluate.top_p,
        "top_k": cfg.evaluate.top_k,
        "min_p": cfg.evaluate.min_p,
        "max_response_tokens": cfg.sampling.max_response_tokens,
        "seed": cfg.seed,
        "right_at": right_at,
        "interval": "half_width: 95%, 1.96 standard errors of the mean over problems",
        "all": plain(outcomes),
        "parts": part_means(outcomes),
        "sources": {name: plain(own) for name, own in by_source(outcomes).items()},
        "problems": [asdict(outcome) for outcome in outcomes],
    }


def write(
    path: Path, cfg: Config, result: Result, *, model: str, right_at: float = RIGHT_AT
) -> list[Path]:
    """Write what was found as JSON to `path`, and the table beside it, as .txt."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = content(cfg, result, model=model, right_at=right_at)
    path.write_text(json.dumps(found, indent=1) + "\n")
    text = table(result.outcomes, samples=cfg.evaluate.samples, right_at=right_at)
    path.with_suffix(".txt").write_text(text + "\n")
    return [path, path.with_suffix(".txt")]
