"""The forms that users' reward functions have: by which parameters each is known, what it is given,
and how what it returns is read.

Runs inside a reward worker, so it imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import inspect
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spmdrl.data.rows import ground_truth_of, prompt_of
from spmdrl.errors import Refusal
from spmdrl.imports import parameters_of
from spmdrl.rewards.samples import BadValue, RewardSample, Score, finite


@dataclass(frozen=True)
class Parameters:
    """What a function may be called with."""

    names: frozenset[str]
    required: frozenset[str]
    takes_any: bool
    """It has `**columns`."""

    @classmethod
    def of(cls, function: Callable) -> Parameters:
        """Return those of a function; none where it tells nothing."""
        parameters = parameters_of(function).values()
        kinds = inspect.Parameter
        named = [p for p in parameters if p.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)]
        return Parameters(
            names=frozenset(p.name for p in named),
            required=frozenset(p.name for p in named if p.default is kinds.empty),
            takes_any=any(p.kind is kinds.VAR_KEYWORD for p in parameters),
        )

    def select(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return what of this the function takes."""
        return {k: v for k, v in given.items() if k in self.names or self.takes_any}


@dataclass(frozen=True)
class Form:
    """A form of reward functions."""

    shown: str
    marks: frozenset[str]
    """Parameters that it is known by."""
    offered: frozenset[str]
    """All that it is given, besides columns of the row."""
    given: Callable[[Sequence[RewardSample], Sequence[Score], Parameters], dict[str, Any]]
    """Returns what a call is given, of which the function takes its part."""
    read: Callable[[Any, Sequence[Score]], None]
    """Writes what a call returned into the scores. Raises: BadValue."""
    takes_lists: bool = False
    """A call may have many samples; otherwise it has one."""
    takes_columns: bool = False
    """The row's columns are parameters."""
    lacks: frozenset[str] = frozenset()
    """Names of its parameters elsewhere that nothing here stands behind."""

    def missing(self, wanted: Parameters) -> frozenset[str]:
        """Return the parameters of a function that it needs and no row can give it."""
        return (
            wanted.required & self.lacks if self.takes_columns else wanted.required - self.offered
        )


def form_of(wanted: Parameters, *, spec: str) -> Form:
    """Return the form that a function's parameters fit.

    Raises: Refusal showing the known ones where they fit none, or it needs what is not there.
    """
    form = next((form for form in _FORMS if form.marks <= wanted.names), None)
    if form is None:
        shown = ", ".join(sorted(wanted.names)) or "none that can be read"
        raise Refusal(
            f"rewards.functions: {spec} has parameters ({shown}), which fit none of the "
            f"known signatures:\n{KNOWN_SIGNATURES}"
        )
    if missing := form.missing(wanted):
        raise Refusal(
            f"rewards.functions: {spec} requires {', '.join(sorted(missing))}, which "
            f"is not available here; give a default. Known:\n{KNOWN_SIGNATURES}"
        )
    return form


# --------------------------------------------------------------------------- verl


def _given_verl(
    samples: Sequence[RewardSample], _: Sequence[Score], wanted: Parameters
) -> dict[str, Any]:
    (sample,) = samples
    row = sample.row
    given = {
        "data_source": row.get("data_source"),
        "solution_str": sample.text,
        "extra_info": row.get("extra_info", {}),
    }
    # A format check, say, can do without.
    absent = () if "ground_truth" in wanted.required else (Refusal,)
    with contextlib.suppress(*absent):
        given["ground_truth"] = ground_truth_of(row)
    return given


def _given_verl_lists(
    samples: Sequence[RewardSample], scores: Sequence[Score], wanted: Parameters
) -> dict[str, Any]:
    asked = Parameters(
        wanted.names, frozenset(name.removesuffix("s") for name in wanted.required), True
    )
    single = [_given_verl([s], [score], asked) for s, score in zip(samples, scores)]
    return {f"{name}s": [given.get(name) for given in single] for name in _VERL}


def _read_one(result: Any, scores: Sequence[Score]) -> None:
    (score,) = scores
    _read_verl(result, score)


def _read_verl(result: Any, score: Score) -> None:
    """Read a number, or verl's dict with `score`."""
    found = dict(result) if isinstance(result, dict) else {"score": result}
    if "score" not in found:
        raise BadValue(f"expected a dict with `score`, got a dict without `score`: {result!r:.100}")
    score.value = finite(found.pop("score"))
    for name, value in found.items():
        score.note(name, value)


# --------------------------------------------------------------------------- reasoning-gym


def _given_reasoning_gym(samples: Sequence[RewardSample], *_: Any) -> dict[str, Any]:
    (sample,) = samples
    return {"answer": sample.text, "entry": sample.row}


# --------------------------------------------------------------------------- TRL


def _given_trl(
    samples: Sequence[RewardSample], scores: Sequence[Score], wanted: Parameters
) -> dict[str, Any]:
    rows = [sample.row for sample in samples]
    prompts = [prompt_of(row) for row in rows]
    names = dict.fromkeys(k for row in rows for k in row if k not in ("prompt", "completion"))

    def log_metric(name: str, value: Any) -> None:
        for score in scores:
            score.note(name, value)

    def log_extra(name: str, values: Sequence[Any]) -> None:
        if len(values) != len(scores):
            raise Refusal(
                f"log_extra({name!r}, ...): expected one value for each of {len(scores)} "
                f"completions, got {len(values)}"
            )
        for score, value in zip(scores, values):
            score.note(name, value)

    given = {name: [row.get(name) for row in rows] for name in names} | {
        "prompts": prompts,
        "completions": [_reply(sample, prompt) for sample, prompt in zip(samples, prompts)],
        "completion_ids": [sample.tokens for sample in samples],
        "trainer_state": samples[0].state,
        "log_metric": log_metric,
        "log_extra": log_extra,
    }
    absent = wanted.required - set(given)
    if absent:
        raise Refusal(
            f"the function asks for column {sorted(absent)[0]!r}, the row has "
            f"{', '.join(map(str, rows[0]))}"
        )
    return given


def _reply(sample: RewardSample, prompt: Any) -> Any:
    """Return a response in the form of its prompt."""
    is_chat = isinstance(prompt, list)
    return [{"role": "assistant", "content": sample.text}] if is_chat else sample.text


def _read_trl(value: Any, score: Score) -> None:
    score.value = None if value is None else finite(value)


def _reading_each(read: Callable[[Any, Score], None]) -> Callable[[Any, Sequence[Score]], None]:
    """Return how to read a list whose items are read so: one that is none costs its sample."""

    def read_list(result: Any, scores: Sequence[Score]) -> None:
        is_list = isinstance(result, (list, tuple)) or getattr(result, "ndim", 0) == 1
        is_one = len(scores) == 1 and isinstance(result, numbers.Real)
        values = []
        if is_list:
            values = list(result)
        elif is_one:
            values = [result]
        if len(values) != len(scores):
            got = f"a list of {len(values)}: " if is_list else ""
            hint = "; a function that scores one at a time needs rewards.scope sample"
            raise BadValue(
                f"expected a list of values, one for each of {len(scores)} completions, got "
                f"{got}{result!r:.100}{hint if len(scores) > 1 else ''}"
            )
        for value, score in zip(values, scores):
            try:
                read(value, score)
            except BadValue as error:
                score.bad = str(error)

    return read_list


_TRL = frozenset(
    {"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"}
)
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_FORMS = (
    Form(
        "verl           compute_score(data_source, solution_str, ground_truth, extra_info=None)",
        marks=frozenset({"solution_str", "ground_truth"}),
        offered=frozenset(_VERL),
        given=_given_verl,
        read=_read_one,
    ),
    Form(
        "verl, lists    compute_score(data_sources, solution_strs, ground_truths, extra_infos)",
        marks=frozenset({"solution_strs", "ground_truths"}),
        offered=frozenset(f"{name}s" for name in _VERL),
        given=_given_verl_lists,
        read=_reading_each(_read_verl),
        takes_lists=True,
    ),
    Form(
        "reasoning-gym  score_answer(answer, entry)",
        marks=frozenset({"answer", "entry"}),
        offered=frozenset({"answer", "entry"}),
        given=_given_reasoning_gym,
        read=_read_one,
    ),
    Form(
        "TRL            f(prompts, completions, **columns) -> one value per completion",
        marks=frozenset({"completions"}),
        offered=_TRL,
        given=_given_trl,
        read=_reading_each(_read_trl),
        takes_lists=True,
        takes_columns=True,
        lacks=frozenset({"environments"}),
    ),
)
KNOWN_SIGNATURES = "\n".join(f"  {form.shown}" for form in _FORMS)
KNOWN_LISTS = "\n".join(f"  {form.shown}" for form in _FORMS if form.takes_lists)
