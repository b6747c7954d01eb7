"""Reward functions as users have them, recognised by their parameter names.

Runs inside a reward worker, so it imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import PurePath
from typing import Any

from spmdrl.data.rows import ground_truth_of, prompt_of
from spmdrl.errors import Refusal
from spmdrl.imports import import_object, parameters_of, ran

KNOWN_SIGNATURES = """\
  verl           compute_score(data_source, solution_str, ground_truth, extra_info=None)
  TRL            f(prompts, completions, **columns) -> one value per completion
  reasoning-gym  score_answer(answer, entry)"""
ASYNC_CONCURRENCY = 32
"""Calls of an `async def` function under way in one worker, unless it says otherwise."""
_MODEL = "model:"
_VERL_GIVEN = {"data_source", "solution_str", "ground_truth", "extra_info"}
_TRL_MISSING = {"trainer_state", "environments"}
_MAX_EXTRA_CHARS = 500


class BadValue(Exception):
    """A reward function returned something that is not a finite number."""


@dataclass(frozen=True)
class RewardSample:
    """One response to score."""

    row: dict
    text: str
    tokens: list[int]
    is_truncated: bool


@dataclass
class Score:
    """What one function said of one sample."""

    value: float | None = None
    """None: the function does not apply to this row (TRL)."""
    metrics: dict[str, float] = field(default_factory=dict)
    extras: dict[str, str] = field(default_factory=dict)

    def note(self, name: str, value: Any) -> None:
        """Keep a finite number as a metric, anything else as text."""
        name = str(name)[:_MAX_EXTRA_CHARS]
        if (number := as_finite(value)) is None:
            self.extras[name] = str(value)[:_MAX_EXTRA_CHARS]
        else:
            self.metrics[name] = number


@dataclass(frozen=True)
class Reward:
    """A reward function of any signature: `reward(sample)` gives its Score."""

    call: Callable[[RewardSample, Score], Any]
    """Call the function; what it notes beside its result goes into the Score. The result may be
    awaitable."""
    read: Callable[[Any, Score], Score]
    """Read the result. Raises: BadValue."""
    concurrency: int = 1
    """Samples that one worker may have under way; 1: one at a time, in the main thread."""
    is_async: bool = False
    """The result is awaitable, and calling takes no time."""

    def __call__(self, sample: RewardSample) -> Score:
        score = Score()
        return self.read(ran(self.call(sample, score)), score)


@dataclass(frozen=True)
class _Parameters:
    names: frozenset[str]
    required: frozenset[str]
    takes_any: bool

    def select(self, given: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in given.items() if k in self.names or self.takes_any}


def load_reward(spec: str) -> Reward:
    """Import a reward function and adapt it to one call per sample.

    A function may carry an attribute `prepare`, a function that is called once per worker before
    any deadline runs: for slow imports, or files to read. It gets no arguments, or those that
    functools.partial bound. An attribute `concurrency`, a number, lets so many samples of a
    worker be under way in threads: for functions that wait, and are safe in threads. `async def`
    functions need none: they share one event loop per worker, ASYNC_CONCURRENCY at a time.

    Args:
        spec: `module:function` or `path/file.py:function`.
    Raises: Refusal when it cannot be found or imported, or its parameters fit no known
        signature.
    """
    function = import_function(spec)
    reward = adapt(function, spec=spec)
    inner, bound = function, {}
    if isinstance(function, functools.partial):
        inner, bound = function.func, function.keywords
    prepare = getattr(inner, "prepare", None)
    if callable(prepare):
        prepare(**bound)
    return reward


def reward_models(specs: Sequence[str]) -> dict[int, str]:
    """Return {position: folder or hub name} of the entries `model:PATH`.

    Trainer ranks score with these, see `policy.reward_model`; workers have the other entries.
    """
    return {i: spec.removeprefix(_MODEL) for i, spec in enumerate(specs) if spec.startswith(_MODEL)}


def part_names(specs: Sequence[str]) -> tuple[str, ...]:
    """Return one name per entry: the function's, the task's or the model folder's own, with its
    position where two share one."""
    names = [_own_name(spec) for spec in specs]
    return tuple(name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names))


def _own_name(spec: str) -> str:
    if spec.startswith(_MODEL):
        return PurePath(spec.removeprefix(_MODEL)).name or "model"
    return spec.rpartition(":")[2]


def import_function(spec: str) -> Callable:
    """Return the function that `module:function` or `path/file.py:function` names.

    Raises: Refusal when module, file or function does not exist, or importing fails.
    """
    return import_object(spec, kind="function", field="rewards.functions")


def adapt(function: Callable, *, spec: str) -> Reward:
    """Wrap a function of a known signature into `RewardSample -> Score`.

    Raises: Refusal showing the known signatures when the parameter names fit none.
    """
    given: Callable[[RewardSample, Score, _Parameters], dict[str, Any]]
    wanted, read = _read_parameters(function), _read_one
    if {"solution_str", "ground_truth"} <= wanted.names:
        unknown, given = wanted.required - _VERL_GIVEN, _given_verl
    elif {"answer", "entry"} <= wanted.names:
        unknown, given = wanted.required - {"answer", "entry"}, _given_reasoning_gym
    elif "completions" in wanted.names:
        unknown, given, read = wanted.required & _TRL_MISSING, _given_trl, _read_list
    else:
        shown = ", ".join(sorted(wanted.names)) or "none that can be read"
        raise Refusal(
            f"rewards.functions: {spec} has parameters ({shown}), which fit none of the "
            f"known signatures:\n{KNOWN_SIGNATURES}"
        )
    if unknown:
        raise Refusal(
            f"rewards.functions: {spec} requires {', '.join(sorted(unknown))}, which "
            f"is not available here; give a default. Known:\n{KNOWN_SIGNATURES}"
        )

    def call(sample: RewardSample, score: Score) -> Any:
        """Call the function with what it takes of what there is."""
        return function(**wanted.select(given(sample, score, wanted)))

    is_async = _is_async(function)
    return Reward(call, read, _concurrency(function, is_async=is_async, spec=spec), is_async)


def _read_parameters(function: Callable) -> _Parameters:
    parameters, kinds = parameters_of(function).values(), inspect.Parameter
    named = [p for p in parameters if p.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)]
    return _Parameters(
        names=frozenset(p.name for p in named),
        required=frozenset(p.name for p in named if p.default is kinds.empty),
        takes_any=any(p.kind is kinds.VAR_KEYWORD for p in parameters),
    )


def _is_async(function: Callable) -> bool:
    method = getattr(function, "__call__", None)  # noqa: B004, that of an object may be async
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


def _concurrency(function: Callable, *, is_async: bool, spec: str) -> int:
    default = ASYNC_CONCURRENCY if is_async else 1
    inner = function.func if isinstance(function, functools.partial) else function
    chosen = getattr(function, "concurrency", getattr(inner, "concurrency", default))
    if type(chosen) is not int or chosen < 1:
        raise Refusal(
            f"rewards.functions: {spec} has concurrency {chosen!r}; expected the "
            "number of samples under way at once in a worker, 1 or more"
        )
    return chosen


def _given_verl(sample: RewardSample, _: Score, wanted: _Parameters) -> dict[str, Any]:
    row = sample.row
    given = {
        "data_source": row.get("data_source"),
        "solution_str": sample.text,
        "extra_info": row.get("extra_info"),
    }
    # A format check, say, can do without.
    absent = () if "ground_truth" in wanted.required else (Refusal,)
    with contextlib.suppress(*absent):
        given["ground_truth"] = ground_truth_of(row)
    return given


def _given_reasoning_gym(sample: RewardSample, *_: Any) -> dict[str, Any]:
    return {"answer": sample.text, "entry": sample.row}


def _read_one(result: Any, score: Score) -> Score:
    """Read a number, or verl's dict with `score`."""
    found = dict(result) if isinstance(result, dict) else {"score": result}
    if "score" not in found:
        raise BadValue(f"a dict without `score`: {result!r:.100}")
    score.value = finite(found.pop("score"))
    for name, value in found.items():
        score.note(name, value)
    return score


def _given_trl(sample: RewardSample, score: Score, wanted: _Parameters) -> dict[str, Any]:
    row, prompt = sample.row, prompt_of(sample.row)
    is_chat = isinstance(prompt, list)
    reply = [{"role": "assistant", "content": sample.text}] if is_chat else sample.text
    columns = {k: [v] for k, v in row.items() if k not in ("prompt", "completion")}
    given = columns | {
        "prompts": [prompt],
        "completions": [reply],
        "completion_ids": [sample.tokens],
        "log_metric": score.note,
        "log_extra": lambda name, values: score.note(name, values[0]),
    }
    absent = wanted.required - set(given)
    if absent:
        raise Refusal(
            f"the function asks for column {sorted(absent)[0]!r}, the row has "
            f"{', '.join(map(str, row))}"
        )
    return given


def _read_list(result: Any, score: Score) -> Score:
    """Read TRL's list of one value."""
    is_list = isinstance(result, (list, tuple)) or getattr(result, "ndim", 0) == 1
    values = list(result) if is_list else []
    if len(values) != 1:
        raise BadValue(f"expected a list of one value for one completion, got {result!r:.100}")
    score.value = None if values[0] is None else finite(values[0])
    return score


def finite(value: Any, *, what: str = "") -> float:
    """Return a number as a finite float.

    Args:
        what: said first where it is none.
    Raises: BadValue for anything else: None, text, NaN, infinity, arrays.
    """
    if (number := as_finite(value)) is None:
        value = _scalar(value)
        raise BadValue(
            f"{what}expected a finite number, got {value!r:.100} ({type(value).__name__})"
        )
    return number


def as_finite(value: Any) -> float | None:
    """Return a number as a finite float; None for anything else."""
    value = _scalar(value)
    if not isinstance(value, numbers.Real):
        return None
    with contextlib.suppress(OverflowError):  # of an integer above all floats
        number = float(value)
        return number if isfinite(number) else None
    return None


def _scalar(value: Any) -> Any:
    """Return what a scalar of numpy or torch holds; anything else as it is."""
    if not isinstance(value, (numbers.Real, str, bytes)) and hasattr(value, "item"):
        if getattr(value, "size", 1) in (0, 1) or getattr(value, "ndim", 1) == 0:
            return value.item()
    return value
