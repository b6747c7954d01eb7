"""Held-out evaluation: sample the problems of data.eval with the current weights.

`python -m spmdrl evaluate` does the same outside of training, with a model, a run or a checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from spmdrl.algorithms.shaping import RIGHT_AT
from spmdrl.config import Config
from spmdrl.config.data import Split
from spmdrl.config.fields import replay_folder
from spmdrl.engine.protocol import EngineProtocol
from spmdrl.errors import Refusal
from spmdrl.exchange import exchange_rollouts
from spmdrl.rewards.signatures import part_names, reward_models
from spmdrl.rollout.episode import FinishedEpisode
from spmdrl.rollout.outcomes import (
    Estimate,
    ProblemOutcome,
    by_source,
    eval_sums,
    evaluation_file,
    part_means,
    summarize,
)
from spmdrl.rollout.packing import pack
from spmdrl.rollout.source import Source
from spmdrl.run_folder import make_folder, write_file
from spmdrl.types import Batch, Sums
from spmdrl.workers.messages import RewardResult
from spmdrl.world.comm import gather_objects
from spmdrl.world.world import World


@dataclass(frozen=True)
class Result:
    """The result of an evaluation."""

    step: int
    """Steps that the checkpoint was trained; 0 for a model folder."""
    outcomes: list[ProblemOutcome]


class ModelScorer(Protocol):
    """Scores samples with a run's reward models: a trainer or a NullTrainer."""

    world: World

    def scores(self, batch: Batch, *, step: int, split: Split) -> dict[int, Tensor]:
        """Return {position in rewards.functions: [S] float64, task units} on trainer ranks."""


def evaluate(source: Source, engine: EngineProtocol, trainer: ModelScorer, *, step: int) -> Sums:
    """Sample the held-out prompts with the current weights, if an evaluation is due.

    An evaluation is due at multiples of evaluate.every_steps and at the last step. Every rank must
    call this; the engine replicas share the prompts. Rank 0 writes
    output_dir/evaluations/evaluation_STEP.json and .txt.

    Returns: eval/ sums over all replicas, the same on every rank; empty if no evaluation is due.
    """
    world = trainer.world
    cfg = trainer.world.cfg
    every = cfg.evaluate.every_steps
    if not every or (step % every and step != cfg.steps):
        return {}
    outcomes = sample(source, engine, trainer=trainer, world=world, step=step)
    if outcomes and world.rank == 0:
        result = Result(step, outcomes)
        file = evaluation_file(cfg.output_dir, step)
        output = Path(cfg.output_dir)
        write(file, cfg, result, model=cfg.output_dir, within=output)
    return eval_sums(outcomes, samples=cfg.evaluate.samples)


def sample(
    source: Source,
    engine: EngineProtocol,
    *,
    world: World,
    step: int,
    trainer: ModelScorer | None = None,
) -> list[ProblemOutcome]:
    """Sample and reward the held-out prompts, and return their outcomes in order, on every rank.

    Args:
        trainer: scores with the reward models of rewards.functions; None leaves them out.
    Raises: Refusal, on all ranks, for a model's score that is not finite under on_failure=fail.
    """
    with world.watch.phase("evaluate", step):
        samples = source.evaluate(engine, step=step)
    cfg = world.cfg
    has_samples = cfg.objective.samples and not replay_folder(cfg)
    if trainer is not None and has_samples and reward_models(cfg.rewards.functions):
        samples = _with_scores(samples, trainer=trainer, world=world, step=step)
    own = source.outcomes(samples)
    with world.watch.wait("gather evaluation", step):
        gathered = gather_objects(own, group=world.control)
    return sorted((o for part in gathered for o in part), key=lambda outcome: outcome.index)


def _with_scores(
    samples: Sequence[FinishedEpisode], *, trainer: ModelScorer, world: World, step: int
) -> list[FinishedEpisode]:
    """Return this rank's samples with the scores of reward models added to their rewards.

    Every rank must call it. It sends the samples to the trainers as it would those of a step, and
    the scores to all ranks.
    """
    rewards = world.cfg.rewards
    # Samples whose reward failed are sent too; the outcomes leave them out later. Each sample is
    # sent as a group of its own: the exchange may have to keep groups together, and a group of the
    # evaluation may be larger than one of training.
    most = world.cfg.evaluate.samples
    blank = [
        replace(s, slot=s.slot * most + s.sample, reward=RewardResult(s.reward.key, 0.0))
        for s in samples
    ]
    batch = exchange_rollouts(pack(blank, sums={}, num_shown=0), world, step=step)
    scores_of_model = trainer.scores(batch, step=step, split="eval")
    sender = world.trainer_ranks[0]
    own = {}
    if world.rank == sender:
        own = {i: scores.tolist() for i, scores in scores_of_model.items()}
    with world.watch.wait("gather evaluation", step):
        gathered = gather_objects(own, group=world.control)[sender]
    names = part_names(rewards.functions)
    weights = rewards.weights or (1.0,) * len(names)
    pairs = [divmod(group, most) for group in batch.scalars.group_ids.tolist()]
    scores = {}
    for row, pair in enumerate(pairs):
        scores[pair] = {i: values[row] for i, values in gathered.items()}
    for (slot, number), of_sample in scores.items():
        bad = [i for i, score in of_sample.items() if not math.isfinite(score)]
        if bad and rewards.on_failure == "fail":
            raise Refusal(
                f"evaluation after {step} steps: {rewards.functions[bad[0]]} of rewards.functions "
                f"gave {of_sample[bad[0]]} for sample {number} of held-out problem {slot}; a "
                "sequence may be too long for it, or its weights or model.compute_dtype are wrong. "
                "Fix it, or set rewards.on_failure=drop to leave such samples out"
            )
    return [
        replace(s, reward=_added(s.reward, scores[s.slot, s.sample], names=names, weights=weights))
        for s in samples
    ]


def _added(
    reward: RewardResult,
    scores: Mapping[int, float],
    *,
    names: Sequence[str],
    weights: Sequence[float],
) -> RewardResult:
    """Return a reward with the scores of models added; it fails if a score is not finite."""
    if reward.value is None:
        return reward
    if not all(map(math.isfinite, scores.values())):
        message = "a reward model gave no finite number"
        return replace(reward, value=None, failure="bad_value", message=message)
    value = reward.value + sum(weights[i] * score for i, score in scores.items())
    parts = reward.parts | {names[i]: score for i, score in scores.items()}
    return replace(reward, value=value, parts=parts)


# --------------------------------------------------------------------------- tables and files


def table(outcomes: Sequence[ProblemOutcome], *, samples: int, right_at: float) -> str:
    """Return the estimates as text, one row for all problems and one per data source."""
    sources = by_source(outcomes)
    parts = {"all": list(outcomes)}
    if len(sources) > 1:
        parts |= {name or "(none)": own for name, own in sources.items()}
    columns = list(summarize(outcomes, samples=samples, right_at=right_at))
    if _is_binary(outcomes):  # with rewards of 0 and 1, best@k equals pass@k
        columns = [column for column in columns if not column.startswith("best_at_")]
    rows = [["data source", "problems", *(c.replace("_at_", "@") for c in columns)]]
    for name, own in parts.items():
        estimates = summarize(own, samples=samples, right_at=right_at)
        rows.append([name, str(len(own)), *(_cell(estimates.get(c)) for c in columns)])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for name, *cells in rows:
        aligned = map(str.rjust, cells, widths[1:])
        lines.append("  ".join([name.ljust(widths[0]), *aligned]))
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
    """Return the result as JSON data."""
    samples = cfg.evaluate.samples
    outcomes = result.outcomes

    def plain(own: Sequence[ProblemOutcome]) -> dict:
        estimates = summarize(own, samples=samples, right_at=right_at)
        return {name: asdict(estimate) for name, estimate in estimates.items()}

    return {
        "model": model,
        "step": result.step,
        "data": ", ".join(cfg.data.paths("eval")),
        "samples": samples,
        **{n: getattr(cfg.evaluate, n) for n in ("temperature", "top_p", "top_k", "min_p")},
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
    path: Path,
    cfg: Config,
    result: Result,
    *,
    model: str,
    right_at: float = RIGHT_AT,
    within: Path | None = None,
) -> list[Path]:
    """Write the result as JSON to `path`, and its table to the same name with .txt.

    Args:
        within: the output_dir that holds `path`; see `open_file`.
    Raises: OSError.
    """
    within = within or path.parent
    make_folder(path.parent, within=within)
    data = content(cfg, result, model=model, right_at=right_at)
    write_file(path, json.dumps(data, indent=1) + "\n", within=within)
    text = table(result.outcomes, samples=cfg.evaluate.samples, right_at=right_at)
    write_file(path.with_suffix(".txt"), text + "\n", within=within)
    return [path, path.with_suffix(".txt")]
