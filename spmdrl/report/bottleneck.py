"""What a run's steps spent their time on, by cause, and what to try against the largest one.

All but `explain_run` are pure functions of the timeline, the metrics and the config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmdrl.config import Config
from spmdrl.journal import read_rows
from spmdrl.report.timeline import RankStep, read_timeline
from spmdrl.report.waits import OTHER, critical_path
from spmdrl.world.axes import axes_of

CAUSES = {
    "generate": ("generate", "await_the_replica_s_leader", "exchange_drawn_tokens"),
    "tail": (),  # a part of `generate` that only the metrics know
    "reward": ("engine_idle_reward",),
    "environment": ("engine_idle_environment",),
    "replicas": ("await_other_replicas", "engine_idle_replicas"),
    "exchange": ("await_rollouts", "exchange_scalars", "exchange_tokens"),
    "annotate": ("reward_model", "annotate", "advantages"),
    "update": ("update",),
    "push": ("await_peers", "push", "verify_push"),
    "evaluate": ("evaluate", "gather_evaluation"),
    "save": (
        "agree_to_stop",
        "checkpoint",
        "begin_checkpoint",
        "copy_checkpoint",
        "write_checkpoint",
    ),
    OTHER: ("certificate",),
}
"""{cause: phases}. Every other phase belongs to `other`."""
_WHAT = {
    "generate": "sampling",
    "tail": "sampling the last, long sequences while the engines have empty places",
    "reward": "waiting for rewards",
    "environment": "waiting for environments or agents",
    "replicas": "waiting for other replicas",
    "exchange": "sending rollouts to the trainers",
    "annotate": "the columns before the update (reference, teacher, values, reward models)",
    "update": "the update",
    "push": "pushing the weights",
    "evaluate": "evaluating",
    "save": "saving checkpoints",
    OTHER: "work outside of all phases",
}
MEAN_STEPS = 50
"""Steps over which a run's time is explained: its newest ones."""
_OF_CAUSE = {phase: cause for cause, phases in CAUSES.items() for phase in phases}


def step_causes(
    steps: Sequence[Sequence[RankStep]], rows: Sequence[Mapping[str, Any]] = ()
) -> dict[str, float]:
    """Return the mean seconds of a step by cause, along the critical path. They add up to a step.

    Args:
        steps: of the timeline, as `read_timeline` returns them.
        rows: of metrics.jsonl, for the same steps: what share of `generate` is the tail. Without
            them `tail` is 0.
    """
    seconds = dict.fromkeys(CAUSES, 0.0)
    for ranks in steps:
        for part in critical_path(ranks):
            seconds[_OF_CAUSE.get(part.name, OTHER)] += part.seconds / len(steps)
    tail = seconds["generate"] * _tail_share(rows)
    seconds["generate"] -= tail
    seconds["tail"] = tail
    return seconds


def _tail_share(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of the time in which engines drew tokens that was lost to empty places."""
    names = ("generate", "engine_idle_tail", "engine_idle_reward", "engine_idle_environment")
    totals = [sum(row.get(f"time/{name}") or 0.0 for row in rows) for name in names]
    generate, tail, reward, environment = totals
    drawing = generate - reward - environment
    return min(1.0, tail / drawing) if drawing > 0 else 0.0


def explain_run(folder: Path, cfg: Config, *, newest_bytes: int = 0) -> str:
    """Return a sentence on what the steps of a run spent their time on; see `bottleneck`.

    Args:
        folder: output_dir, with its timeline and metrics.jsonl.
        newest_bytes: as for `read_timeline`.
    Returns: empty without a timeline, or if nothing was measured.
    Raises: as `read_timeline` and `read_rows`.
    """
    steps = _complete(read_timeline(folder, newest_bytes=newest_bytes))[-MEAN_STEPS:]
    path = folder / "metrics.jsonl"
    # A step may also have the row of an evaluation.
    rows = read_rows(path, newest=2 * len(steps)) if steps and path.exists() else []
    return explain(causes_by_step(steps, rows), cfg)


def causes_by_step(
    steps: Sequence[Sequence[RankStep]], rows: Sequence[Mapping[str, Any]] = ()
) -> dict[int, dict[str, float]]:
    """Return {step: `step_causes` of it} of the steps that all ranks recorded, in order.

    Args:
        steps: of the timeline, as `read_timeline` returns them.
        rows: of metrics.jsonl.
    """
    rows_of: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        rows_of.setdefault(row["step"], []).append(row)
    return {
        ranks[0].step: step_causes([ranks], rows_of.get(ranks[0].step, ()))
        for ranks in _complete(steps)
    }


def _complete(steps: Sequence[Sequence[RankStep]]) -> list[Sequence[RankStep]]:
    """Return the steps of which no rank's line is cut off."""
    most = max(map(len, steps), default=0)
    return [ranks for ranks in steps if len(ranks) == most]


def explain(causes: Mapping[int, Mapping[str, float]], cfg: Config) -> str:
    """Return a sentence on the mean of the newest MEAN_STEPS steps; see `bottleneck`.

    Args:
        causes: of `causes_by_step`.
        cfg: of the run.
    Returns: empty if nothing was measured.
    """
    newest = [*causes][-MEAN_STEPS:]
    if not newest:
        return ""
    means = {name: sum(causes[step][name] for step in newest) / len(newest) for name in CAUSES}
    sentence = bottleneck(means, cfg)
    return f"mean of steps {newest[0]} to {newest[-1]}: {sentence}" if sentence else ""


def bottleneck(seconds: Mapping[str, float], cfg: Config) -> str:
    """Return a sentence that names the largest cause of a step's time and the settings to try.

    Args:
        seconds: of `step_causes`.
        cfg: of the run.
    Returns: empty if nothing was measured.
    """
    total = sum(seconds.values())
    if total <= 0:
        return ""
    cause = max(seconds, key=lambda name: seconds[name])
    own = seconds[cause]
    return (
        f"a step takes {total:.3g} s, and {own / total:.0%} of it ({own:.3g} s) is "
        f"{_WHAT[cause]}; try {', or '.join(advice(cause, seconds, cfg))}"
    )


def advice(cause: str, seconds: Mapping[str, float], cfg: Config) -> list[str]:
    """Return what may make a cause's share smaller, with settings by name; the most promising is
    the first.

    Args:
        cause: one of CAUSES.
        seconds: of `step_causes`.
        cfg: of the run.
    """
    sampling = sum(seconds.get(name, 0.0) for name in _SAMPLING)
    shorter = min(sampling, seconds.get("update", 0.0))
    takes_turns = cfg.objective.samples and cfg.layout.roles.overlaps and cfg.lag == 0
    found = []
    if takes_turns and cause in (*_SAMPLING, "update") and shorter > 0.1 * sum(seconds.values()):
        found.append("lag 1, with which engines sample while the trainers update")
    for of_cause, applies, text in _ADVICE:
        if of_cause == cause and applies(cfg):
            found.append(text.format(cfg=cfg))
    return [*found, "report.profile, which shows the operations of a step"]


_SAMPLING = ("generate", "tail", "reward", "environment", "replicas")


def _always(cfg: Config) -> bool:
    return True


def _is_split(cfg: Config) -> bool:
    return cfg.layout.roles.overlaps


def _has_rounds(cfg: Config) -> bool:
    """Return whether a replica has more sequences of a step than its engine draws at once."""
    sequences = cfg.batch.prompts_per_step * cfg.sequences_per_row
    return sequences > axes_of(cfg).replicas * cfg.engine.max_num_seqs


_ADVICE: tuple[tuple[str, Callable[[Config], bool], str], ...] = (
    (
        "generate",
        _is_split,
        "more ranks that sample (now layout.world_size is {cfg.layout.world_size} and "
        "layout.trainer_ranks {cfg.layout.trainer_ranks})",
    ),
    ("generate", _has_rounds, "engine.max_num_seqs above {cfg.engine.max_num_seqs}"),
    (
        "tail",
        lambda cfg: _is_split(cfg) and cfg.lag > 0 and not cfg.rollout.schedule.in_flight,
        "rollout.schedule.in_flight",
    ),
    (
        "tail",
        lambda cfg: cfg.rollout.schedule.over_sample <= 1,
        "rollout.schedule.over_sample above 1",
    ),
    ("tail", _always, "sampling.max_response_tokens below {cfg.sampling.max_response_tokens}"),
    ("reward", _always, "rewards.workers above {cfg.rewards.workers}"),
    ("environment", _always, "rewards.workers above {cfg.rewards.workers}"),
    ("replicas", _has_rounds, "engine.max_num_seqs above {cfg.engine.max_num_seqs}"),
    (
        "annotate",
        lambda cfg: not cfg.objective.samples and not cfg.model.reference.cache,
        "model.reference.cache",
    ),
    (
        "update",
        _is_split,
        "more ranks that train (now layout.world_size is {cfg.layout.world_size} and "
        "layout.trainer_ranks {cfg.layout.trainer_ranks})",
    ),
    (
        "update",
        lambda cfg: cfg.batch.tokens_per_microbatch > 0,
        "batch.tokens_per_microbatch 0, which finds the largest that fits",
    ),
    (
        "update",
        lambda cfg: cfg.model.memory.activation_checkpointing != "none",
        "less model.memory.activation_checkpointing",
    ),
    (
        "push",
        lambda cfg: cfg.model.lora.is_on and cfg.model.lora.push == "merged",
        "model.lora.push adapter",
    ),
    ("push", lambda cfg: cfg.stream.delta != "always", "stream.delta always"),
    ("evaluate", _always, "evaluate.every_steps above {cfg.evaluate.every_steps}"),
    ("evaluate", lambda cfg: cfg.evaluate.samples > 1, "fewer evaluate.samples"),
    (
        "save",
        lambda cfg: cfg.checkpoint.every_steps > 0,
        "checkpoint.every_steps above {cfg.checkpoint.every_steps}",
    ),
)
"""(cause, whether it applies to a config, what to try)."""
