"""Whether checkpoint.keep names a metric that the evaluation gives."""

from __future__ import annotations

from spmdrl.config.fields import Config
from spmdrl.imports import attempt, nearest


def keep_problems(cfg: Config) -> list[str]:
    """Return what is wrong with checkpoint.keep, as far as it shows before the first evaluation."""
    keep = cfg.checkpoint.keep
    if not keep.best:
        return (
            [f"checkpoint.keep.mode: {keep.mode} without best, the metric that it is about"]
            if keep.mode != "max"
            else []
        )
    return [f"checkpoint.keep.best: {problem}" for problem in _metric_problems(cfg, keep.best)]


def _metric_problems(cfg: Config, name: str) -> list[str]:
    from spmdrl.report.glossary import lookup

    known = _usual_metrics(cfg.evaluate.samples)
    if not name.startswith("eval/") or not attempt(lambda: lookup(name))[0]:
        return [f"expected a metric of the evaluation, got {name!r}{nearest(name, known)}"]
    if name.split("_at_")[0] in ("eval/pass", "eval/maj") and name not in known:
        return [
            f"{name} is not measured with evaluate.samples {cfg.evaluate.samples}"
            f"{nearest(name, known)}"
        ]
    if not cfg.layout.roles.has_engines:
        return [
            f"{name} is measured by sampling held-out problems, and under placement "
            "offline nothing samples; take it out"
        ]
    if not cfg.evaluate.every_steps:
        return [
            f"{name}, but evaluate.every_steps is 0, so nothing measures it; set that "
            "(a new best is saved when it is found, whatever checkpoint.every_steps says)"
        ]
    return []


def _usual_metrics(samples: int) -> list[str]:
    """Return the metrics that every evaluation has, or may have."""
    from spmdrl.rollout.outcomes import sizes

    names = ["reward", "response_length", "truncated_frac", "failed_frac"]
    if samples > 1:
        names += [f"pass_at_{k}" for k in sizes(samples)] + [f"maj_at_{samples}"]
    return [f"eval/{name}" for name in names]
