"""Whether values are in range, each by itself, and sizes fit each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spmdrl.config.fields import Config
from spmdrl.config.tree import bounds, flatten
from spmdrl.data.tasks import is_generated


def range_problems(cfg: Config) -> list[str]:
    """Return which values are out of range, each as `field: what, value seen`."""
    flat = flatten(cfg)
    return [
        f"{name}{place}: {problem}"
        for name, bound in bounds().items()
        for place, value in _places(flat[name])
        if (problem := bound.problem(value))
    ]


def _places(value: Any) -> list[tuple[str, Any]]:
    """Return the items of a list, each with its place, or the one value."""
    if not isinstance(value, (list, tuple)):
        return [("", value)]
    return [(f"[{i}]", own) for i, own in enumerate(value)]


def data_problems(cfg: Config) -> Iterator[str]:
    """Yield what is missing, and which sizes do not go together."""
    for name in ("model.path", "data.train"):
        if not flatten(cfg)[name]:
            yield f"{name}: is required and empty"
    if is_generated(cfg.data.train) and not cfg.data.size:
        yield (
            f"data.size: a generated task ({cfg.data.train}) has no size of its own; "
            "set how many problems to make"
        )
    if cfg.data.columns and all(is_generated(s) for s in (cfg.data.train, cfg.data.eval) if s):
        yield (
            f"data.columns: {cfg.data.columns} renames columns of files, and {cfg.data.train} is "
            "generated, with names of its own; leave it out"
        )
    longest = cfg.longest_sequence
    budget = cfg.batch.tokens_per_microbatch  # 0: found at start, no less than it must be
    if budget and cfg.objective.samples and budget < longest:
        yield (
            f"batch.tokens_per_microbatch: {budget} is below "
            f"data.max_prompt_tokens {cfg.data.max_prompt_tokens} + "
            f"sampling.max_response_tokens {cfg.sampling.max_response_tokens} = {longest}, so "
            "one sequence may not fit; raise it or lower those"
        )
    if budget and cfg.objective.trains_on_pairs and budget < 2 * longest:
        yield (
            f"batch.tokens_per_microbatch: {budget} is below 2 * "
            f"(data.max_prompt_tokens {cfg.data.max_prompt_tokens} + sampling.max_response_tokens "
            f"{cfg.sampling.max_response_tokens}) = {2 * longest}, so one pair, which stays "
            "together, may not fit; raise it or lower those"
        )
    if cfg.evaluate.every_steps and not cfg.data.eval:
        yield (
            f"evaluate.every_steps: {cfg.evaluate.every_steps}, but data.eval is "
            "empty; name held-out rows"
        )
