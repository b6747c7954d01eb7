"""Whether values of single settings are right, and sizes fit each other."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spmdrl.config.fields import Config, replay_folder, sequences_together
from spmdrl.config.tree import Bound, bounds, bounds_of, flatten, hints, item_fields, settings
from spmdrl.imports import attempt, is_same_file, nearest
from spmdrl.report.trackers import tracker_problems
from spmdrl.rollout.decision_log import is_timed
from spmdrl.rollout.staleness import least_staleness

MAX_RANK = 512
"""The highest rank of an adapter in vLLM."""
_LONGEST_STOP = 256
_ESCAPES = re.compile(r"(\\[nrt])+")
_MOST_BIAS = 100  # vLLM clamps to it


def range_problems(cfg: Config) -> list[str]:
    """Return which values are out of range, each as `field: what, value seen`."""
    return list(_out_of_range(flatten(cfg), bounds(), settings()))


def _out_of_range(
    flat: Mapping[str, Any], bounded: Mapping[str, Bound], types: Mapping[str, Any]
) -> Iterator[str]:
    for name, value in flat.items():
        fields = item_fields(types[name])
        is_list = isinstance(value, (list, tuple))
        for i, item in enumerate(value if is_list else [value]):
            place = f"{name}[{i}]" if is_list else name
            if fields and isinstance(item, dict):
                inner = _out_of_range(item, bounds_of(fields), hints(fields))
                yield from (f"{place}.{problem}" for problem in inner)
            elif name in bounded and (problem := bounded[name].problem(item)):
                yield f"{place}: {problem}"


def value_problems(cfg: Config) -> Iterator[str]:
    """Yield what is wrong with values in range, each as `field: what, value seen, what to do`."""
    yield from _data_problems(cfg)
    yield from _model_problems(cfg)
    yield from _optimizer_problems(cfg)
    if cfg.objective.samples:
        yield from _sampling_problems(cfg)
        yield from schedule_problems(cfg)
    yield from _replay_problems(cfg)
    yield from _keep_problems(cfg)
    yield from tracker_problems(cfg)
    yield from _profile_problems(cfg)


def _data_problems(cfg: Config) -> Iterator[str]:
    for name, value in (
        ("model.path", cfg.model.path),
        ("data.train", cfg.data.train),
        ("output_dir", cfg.output_dir),
    ):
        if not value:
            yield f"{name}: is required and empty"
    if is_same_file(cfg.output_dir, cfg.model.path):
        yield (
            f"output_dir: {cfg.output_dir} is model.path too, and the run would write among the "
            "model's files; set another --output-dir"
        )
    budget = cfg.batch.tokens_per_microbatch
    if not budget:  # found at start, and no less than it must be
        return
    longest = cfg.longest_sequence
    together = sequences_together(cfg)
    lengths = (
        f"data.max_prompt_tokens {cfg.data.max_prompt_tokens} + sampling.max_response_tokens "
        f"{cfg.sampling.max_response_tokens}"
    )
    if cfg.objective.samples and budget < longest:
        yield (
            f"batch.tokens_per_microbatch: {budget} is below {lengths} = {longest}, so one "
            "sequence may not fit; raise it or lower those"
        )
    if together > 1 and budget < together * longest:
        yield (
            f"batch.tokens_per_microbatch: {budget} is below {together} * ({lengths}) = "
            f"{together * longest}, so one {'group' if cfg.objective.samples else 'pair'}, which "
            "stays together, may not fit; raise it or lower those"
        )


def _model_problems(cfg: Config) -> Iterator[str]:
    memory = cfg.model.memory
    lora = cfg.model.lora
    if memory.optimizer_dtype == "int8" and importlib.util.find_spec("torchao") is None:
        yield (
            "model.memory.optimizer_dtype: int8 takes its quantisation from torchao, "
            "which is not installed: pip install --no-deps torchao==0.18.0"
        )
    pattern = lora.targets if isinstance(lora.targets, str) else ""
    _, error = attempt(lambda: re.compile(pattern), re.error)
    if error or not lora.targets or not all(lora.targets):
        yield (
            "model.lora.targets: expected all-linear, a regular expression of module names, or a "
            f"list of names or their ends, got {lora.targets!r}"
        )
    if lora.pushes_adapter and lora.rank > MAX_RANK:
        yield (
            f"model.lora.push: adapter with rank {lora.rank}: vLLM has adapters up to rank "
            f"{MAX_RANK}; take merged"
        )


def _optimizer_problems(cfg: Config) -> Iterator[str]:
    exponent = math.log2(cfg.optimizer.loss_scale.initial)
    if cfg.model.compute_dtype == "float16" and not exponent.is_integer():
        yield (
            "optimizer.loss_scale.initial: must be a power of 2, so that dividing by it changes "
            f"no bits, got {cfg.optimizer.loss_scale.initial:g}; take {2.0 ** round(exponent):g}"
        )


def _sampling_problems(cfg: Config) -> Iterator[str]:
    for string in cfg.sampling.stop:
        if not 0 < len(string) <= _LONGEST_STOP or "\N{REPLACEMENT CHARACTER}" in string:
            yield (
                f"sampling.stop: {string[:40]!r} cannot end a response; take a text of 1 to "
                f"{_LONGEST_STOP} characters, without U+FFFD, which replaces broken characters"
            )
        # A shell and single quotes of YAML leave `\n` as two characters.
        elif _ESCAPES.fullmatch(string):
            yield (
                f"sampling.stop: {string!r} is a backslash and a letter, which no response ends "
                "with; for the character itself write $'...' in a shell, and double quotes in YAML"
            )
    for token, added in cfg.sampling.logit_bias.items():
        # One spelling for each id: `07` and `7` would be two entries for one token.
        if not (token.isascii() and token.isdigit()) or str(int(token)) != token:
            yield (
                f"sampling.logit_bias: {token!r} is no id of a token; write the id as text, as in "
                "'271'"
            )
        elif isinstance(added, (bool, str)) or not -_MOST_BIAS <= added <= _MOST_BIAS:
            yield (
                f"sampling.logit_bias.{token}: must be a number in [-{_MOST_BIAS}, {_MOST_BIAS}], "
                f"got {added!r}"
            )


def ids_above(cfg: Config, vocab_size: int) -> list[str]:
    """Return which ids of sampling.logit_bias and sampling.stop_token_ids a model with a vocabulary
    of this size does not have."""
    ids = {
        "sampling.logit_bias": [int(token) for token in cfg.sampling.logit_bias],
        "sampling.stop_token_ids": cfg.sampling.stop_token_ids,
    }
    return [
        f"{field}: {token} is no id of this model, which has 0 to {vocab_size - 1}"
        for field, tokens in ids.items()
        for token in tokens
        if token >= vocab_size and cfg.objective.samples
    ]


def schedule_problems(cfg: Config) -> Iterator[str]:
    """Yield that tokens become older than rollout.schedule allows."""
    schedule = cfg.rollout.schedule
    if replay_folder(cfg) or schedule.max_staleness == "auto":
        return
    least = least_staleness(schedule.over_sample, lag=cfg.lag)
    if schedule.max_staleness < least:
        yield (
            f"rollout.schedule.max_staleness: {schedule.max_staleness} is below lag {cfg.lag} + "
            f"ceil(over_sample {schedule.over_sample:g}) - 1 = {least}: groups that are under way "
            "could not all be trained on in time; raise it, or lower those"
        )


def _replay_problems(cfg: Config) -> Iterator[str]:
    """Yield that a run would replay itself."""
    folder = cfg.rollout.record.replay
    schedule = cfg.rollout.replay_schedule
    if schedule and is_timed(cfg) and _is_own(cfg, schedule):
        yield (
            f"rollout.replay_schedule: {schedule} is this run's own output_dir, which a resumed "
            "run follows by itself; leave it out, or set another output_dir"
        )
    elif folder and not schedule and _is_own(cfg, folder):
        yield (
            f"rollout.record.replay: {folder} is this run's own output_dir, whose checkpoints and "
            "metrics are those of the recorded run; set another output_dir"
        )


def _is_own(cfg: Config, folder: str) -> bool:
    path = Path(folder).resolve()
    # A setting may name the run's folder, or the folder of its rollouts or schedule.
    return Path(cfg.output_dir).resolve() in (path, path.parent)


def _profile_problems(cfg: Config) -> Iterator[str]:
    profile = cfg.report.profile
    late = [step for step in profile.steps if step >= cfg.steps]
    missing = [rank for rank in profile.ranks if rank >= cfg.layout.world_size]
    if late:
        yield (
            f"report.profile.steps: {late[0]} is beyond the run, whose steps are 0 to "
            f"{cfg.steps - 1}; name earlier steps, or raise steps"
        )
    if missing:
        yield (
            f"report.profile.ranks: there is no rank {missing[0]}: layout.world_size is "
            f"{cfg.layout.world_size}; name ranks from 0 to {cfg.layout.world_size - 1}"
        )
    if profile.steps and not profile.ranks:
        yield "report.profile.ranks: names no rank to trace report.profile.steps; name one, e.g. 0"


def _keep_problems(cfg: Config) -> Iterator[str]:
    """Yield that checkpoint.keep.best is no metric of the evaluation, as far as this is known
    before the first one."""
    from spmdrl.report.glossary import lookup
    from spmdrl.rollout.outcomes import sizes

    best = cfg.checkpoint.keep.best
    if not best:
        return
    samples = cfg.evaluate.samples
    known = [
        f"eval/{name}" for name in ("reward", "response_length", "truncated_frac", "failed_frac")
    ]
    if samples > 1:
        known += [f"eval/pass_at_{k}" for k in sizes(samples)] + [f"eval/maj_at_{samples}"]
    if not best.startswith("eval/") or not attempt(lambda: lookup(best))[0]:
        yield (
            f"checkpoint.keep.best: expected a metric of the evaluation, got {best!r}"
            f"{nearest(best, known)}"
        )
    elif best.split("_at_")[0] in ("eval/pass", "eval/maj") and best not in known:
        yield (
            f"checkpoint.keep.best: {best} is not measured with evaluate.samples {samples}"
            f"{nearest(best, known)}"
        )
