"""Whether checkpoint.keep names a metric that the evaluation gives."""

from __future__ import annotations

from collections.abc import Iterator

from spmdrl.config.fields import Config
from spmdrl.imports import attempt, nearest


def keep_problems(cfg: Config) -> Iterator[str]:
    """Yield what is wrong with checkpoint.keep, as far as it shows before the first evaluation."""
    keep = cfg.checkpoint.keep
    if keep.best:
        yield from (f"checkpoint.keep.best: {text}" for text in _metric_problems(cfg, keep.best))


def _metric_problems(cfg: Config, name: str) -> Iterator[str]:
    from spmdrl.report.glossary import lookup

    known = _usual_metrics(cfg.evaluate.samples)
    if not name.startswith("eval/") or not attempt(lambda: lookup(name))[0]:
        yield f"expected a metric of the evaluation, got {name!r}{nearest(name, known)}"
    elif name.split("_at_")[0] in ("eval/pass", "eval/maj") and name not in known:
        yield (
            f"{name} is not measured with evaluate.samples {cfg.evaluate.samples}"
            f"{nearest(name, known)}"
        )


def _usual_metrics(samples: int) -> list[str]:
    """Return the metrics that every evaluation has, or may have."""
    from spmdrl.rollout.outcomes import sizes

    names = ["reward", "response_length", "truncated_frac", "failed_frac"]
    if samples > 1:
        names += [f"pass_at_{k}" for k in sizes(samples)] + [f"maj_at_{samples}"]
    return [f"eval/{name}" for name in names]
