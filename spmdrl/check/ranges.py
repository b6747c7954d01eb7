"""Whether values are in range, each by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spmdrl.config.fields import Config
from spmdrl.config.tree import bounds, flatten
from spmdrl.data.tasks import is_generated


def range_problems(cfg: Config) -> list[str]:
    """Return which values are out of range, each as `field: what, value seen`."""
    flat = flatten(cfg)
    found = {name: bound.problem(flat[name]) for name, bound in bounds().items()}
    problems = [f"{name}: {problem}" for name, problem in found.items() if problem]
    return [*problems, *_data_problems(cfg, flat)]


def _data_problems(cfg: Config, flat: dict[str, Any]) -> Iterator[str]:
    if not cfg.sampling.temperature > 0:
        yield (
            f"sampling.temperature: must be above 0, got {cfg.sampling.temperature}; greedy "
            "samples of one prompt are all the same and carry no signal"
        )
    if 0 < cfg.stream.bucket_bytes < 1024:
        yield (
            "stream.bucket_bytes: must be at least 1024, or 0 to have it chosen, got "
            f"{cfg.stream.bucket_bytes}"
        )
    for name in ("model.path", "data.train"):
        if not flat[name]:
            yield f"{name}: is required and empty"
    if is_generated(cfg.data.train) and not cfg.data.size:
        yield (
            f"data.size: a generated task ({cfg.data.train}) has no size of its own; "
            "set how many problems to make"
        )
    longest = cfg.data.max_prompt_tokens + cfg.sampling.max_response_tokens
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
