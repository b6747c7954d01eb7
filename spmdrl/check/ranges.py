"""Whether values are in range, each by itself, and sizes fit each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spmdrl.check.sources import source_problems
from spmdrl.config.fields import Config, sequences_together
from spmdrl.config.tree import Bound, bounds, bounds_of, flatten, hints, item_fields, settings
from spmdrl.imports import is_same_file


def range_problems(cfg: Config) -> list[str]:
    """Return which values are out of range, each as `field: what, value seen`."""
    return list(_out_of_range(flatten(cfg), bounds(), settings()))


def _out_of_range(
    flat: Mapping[str, Any], bounded: Mapping[str, Bound], types: Mapping[str, Any]
) -> Iterator[str]:
    for name, value in flat.items():
        fields = item_fields(types[name])
        for place, own in _places(value):
            if fields and isinstance(own, dict):
                inner = _out_of_range(own, bounds_of(fields), hints(fields))
                yield from (f"{name}{place}.{problem}" for problem in inner)
            elif name in bounded and (problem := bounded[name].problem(own)):
                yield f"{name}{place}: {problem}"


def _places(value: Any) -> list[tuple[str, Any]]:
    """Return the items of a list, each with its place, or the one value."""
    if not isinstance(value, (list, tuple)):
        return [("", value)]
    return [(f"[{i}]", own) for i, own in enumerate(value)]


def data_problems(cfg: Config) -> Iterator[str]:
    """Yield what is missing, and which sizes do not go together."""
    for name in ("model.path", "data.train", "output_dir"):
        if not flatten(cfg)[name]:
            yield f"{name}: is required and empty"
    if is_same_file(cfg.output_dir, cfg.model.path):
        yield (
            f"output_dir: {cfg.output_dir} is model.path too, and the run would write among the "
            "model's files; set another --output-dir"
        )
    yield from source_problems(cfg)
    longest = cfg.longest_sequence
    budget = cfg.batch.tokens_per_microbatch  # 0: found at start, no less than it must be
    if budget and cfg.objective.samples and budget < longest:
        yield (
            f"batch.tokens_per_microbatch: {budget} is below "
            f"data.max_prompt_tokens {cfg.data.max_prompt_tokens} + "
            f"sampling.max_response_tokens {cfg.sampling.max_response_tokens} = {longest}, so "
            "one sequence may not fit; raise it or lower those"
        )
    together = sequences_together(cfg)
    if budget and together > 1 and budget < together * longest:
        yield (
            f"batch.tokens_per_microbatch: {budget} is below {together} * "
            f"(data.max_prompt_tokens {cfg.data.max_prompt_tokens} + sampling.max_response_tokens "
            f"{cfg.sampling.max_response_tokens}) = {together * longest}, so one "
            f"{'group' if cfg.objective.samples else 'pair'}, which stays together, may not fit; "
            "raise it or lower those"
        )
