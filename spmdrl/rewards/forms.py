"""The forms of users' reward functions: the parameters that tell each form, the arguments that it
gets, and how its result is read.

Reward workers import this module, so it imports nothing heavy.
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
    """The parameters of a function."""

    names: frozenset[str]
    required: frozenset[str]
    takes_any: bool
    """Whether it has `**columns`."""

    @classmethod
    def of(cls, function: Callable) -> Parameters:
        """Return the parameters of a function; none if it has no readable signature."""
        parameters = parameters_of(function).values()
        kinds = inspect.Parameter
        named = [p for p in parameters if p.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)]
        return Parameters(
            names=frozenset(p.name for p in named),
            required=frozenset(p.name for p in named if p.default is kinds.empty),
            takes_any=any(p.kind is kinds.VAR_KEYWORD for p in parameters),
        )

    def select(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return those of the arguments that the function takes."""
        if self.takes_any:
            return arguments
        return {name: value for name, value in arguments.items() if name in self.names}


@dataclass(frozen=True)
class Form:
    """A form of reward functions."""

    signature: str
    """For messages."""
    marks: frozenset[str]
    """Parameters that tell this form from the others."""
    offered: frozenset[str]
    """Arguments that every call may get, apart from columns of the row."""
    arguments: Callable[[Sequence[RewardSample], Sequence[Score], Parameters], dict[str, Any]]
    """Returns all arguments that a call may get."""
    read_value: Callable[[Any, Score], None]
    """Writes the result of one sample into its score. Raises: BadValue."""
    takes_lists: bool = False
    """Whether a call may have many samples, and returns a list; otherwise it has one."""
    takes_columns: bool = False
    """Whether columns of the row are parameters."""
    unsupported: frozenset[str] = frozenset()
    """Parameters that the form has in its own library and that nothing here can fill."""

    def missing(self, parameters: Parameters) -> frozenset[str]:
        """Return the parameters that a function needs and no row can fill."""
        if self.takes_columns:
            return parameters.required & self.unsupported
        return parameters.required - self.offered

    def read(self, result: Any, scores: Sequence[Score]) -> None:
        """Write the result of a call into the scores.

        A bad value in a list fails its own sample only.

        Raises: BadValue.
        """
        if not self.takes_lists:
            self.read_value(result, scores[0])
            return
        for value, score in zip(_values(result, len(scores)), scores):
            try:
                self.read_value(value, score)
            except BadValue as error:
                score.bad = str(error)


def _values(result: Any, count: int) -> list[Any]:
    """Return the values in the result of a function of lists. Raises: BadValue."""
    is_list = isinstance(result, (list, tuple)) or getattr(result, "ndim", 0) == 1
    if is_list and len(result) == count:
        return list(result)
    if count == 1 and isinstance(result, numbers.Real):
        return [result]
    got = f"a list of {len(result)}: " if is_list else ""
    hint = "; a function that scores one at a time needs rewards.scope sample" if count > 1 else ""
    raise BadValue(
        f"expected a list of values, one for each of {count} completions, got "
        f"{got}{result!r:.100}{hint}"
    )


def form_of(wanted: Parameters, *, spec: str) -> Form:
    """Return the form that a function's parameters fit.

    Raises: Refusal showing the known forms if they fit none, or if the function needs an argument
        that does not exist here.
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


def _verl_arguments(
    samples: Sequence[RewardSample], _: Sequence[Score], wanted: Parameters
) -> dict[str, Any]:
    (sample,) = samples
    row = sample.row
    arguments = {
        "data_source": row.get("data_source"),
        "solution_str": sample.text,
        "extra_info": row.get("extra_info", {}),
    }
    # A function with a default for it, such as a check of the format, can do without.
    ignored = () if "ground_truth" in wanted.required else (Refusal,)
    with contextlib.suppress(*ignored):
        arguments["ground_truth"] = ground_truth_of(row)
    return arguments


def _verl_list_arguments(
    samples: Sequence[RewardSample], scores: Sequence[Score], wanted: Parameters
) -> dict[str, Any]:
    required = frozenset(name.removesuffix("s") for name in wanted.required)
    one = Parameters(wanted.names, required, True)
    calls = [_verl_arguments([sample], scores, one) for sample in samples]
    return {f"{name}s": [call.get(name) for call in calls] for name in _VERL}


def _read_verl(result: Any, score: Score) -> None:
    """Read a number, or verl's dict with `score`."""
    values = dict(result) if isinstance(result, dict) else {"score": result}
    if "score" not in values:
        raise BadValue(f"expected a dict with `score`, got a dict without `score`: {result!r:.100}")
    score.value = finite(values.pop("score"))
    for name, value in values.items():
        score.note(name, value)


# --------------------------------------------------------------------------- reasoning-gym


def _reasoning_gym_arguments(samples: Sequence[RewardSample], *_: Any) -> dict[str, Any]:
    (sample,) = samples
    return {"answer": sample.text, "entry": sample.row}


# --------------------------------------------------------------------------- TRL


def _trl_arguments(
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

    columns = {name: [row.get(name) for row in rows] for name in names}
    arguments = columns | {
        "prompts": prompts,
        "completions": [_reply(sample, prompt) for sample, prompt in zip(samples, prompts)],
        "completion_ids": [sample.tokens for sample in samples],
        "trainer_state": samples[0].state,
        "log_metric": log_metric,
        "log_extra": log_extra,
    }
    absent = wanted.required - set(arguments)
    if absent:
        raise Refusal(
            f"the function asks for column {sorted(absent)[0]!r}, the row has "
            f"{', '.join(map(str, rows[0]))}"
        )
    return arguments


def _reply(sample: RewardSample, prompt: Any) -> Any:
    """Return a response in the form of its prompt."""
    is_chat = isinstance(prompt, list)
    return [{"role": "assistant", "content": sample.text}] if is_chat else sample.text


def _read_trl(value: Any, score: Score) -> None:
    score.value = None if value is None else finite(value)


_TRL = frozenset(
    {"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"}
)
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_FORMS = (
    Form(
        "verl           compute_score(data_source, solution_str, ground_truth, extra_info=None)",
        marks=frozenset({"solution_str", "ground_truth"}),
        offered=frozenset(_VERL),
        arguments=_verl_arguments,
        read_value=_read_verl,
    ),
    Form(
        "verl, lists    compute_score(data_sources, solution_strs, ground_truths, extra_infos)",
        marks=frozenset({"solution_strs", "ground_truths"}),
        offered=frozenset(f"{name}s" for name in _VERL),
        arguments=_verl_list_arguments,
        read_value=_read_verl,
        takes_lists=True,
    ),
    Form(
        "reasoning-gym  score_answer(answer, entry)",
        marks=frozenset({"answer", "entry"}),
        offered=frozenset({"answer", "entry"}),
        arguments=_reasoning_gym_arguments,
        read_value=_read_verl,
    ),
    Form(
        "TRL            f(prompts, completions, **columns) -> one value per completion",
        marks=frozenset({"completions"}),
        offered=_TRL,
        arguments=_trl_arguments,
        read_value=_read_trl,
        takes_lists=True,
        takes_columns=True,
        unsupported=frozenset({"environments"}),
    ),
)
KNOWN_SIGNATURES = "\n".join(f"  {form.signature}" for form in _FORMS)
KNOWN_LISTS = "\n".join(f"  {form.signature}" for form in _FORMS if form.takes_lists)
