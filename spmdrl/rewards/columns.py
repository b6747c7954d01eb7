"""Whether reward functions can be imported, and rows have the columns that they need."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from spmdrl.data.rows import ground_truth_of
from spmdrl.errors import RAISED, Refusal, with_line
from spmdrl.imports import attempt
from spmdrl.rewards.forms import KNOWN_LISTS, Parameters, form_of
from spmdrl.rewards.samples import JUDGE_KEY, JUDGE_URL
from spmdrl.rewards.signatures import import_function, load_reward

_MAX_ROWS = 1000
"""Of a source, that are examined."""


class RowKind(NamedTuple):
    """The columns of a row, and whether it has a reference answer."""

    place: str
    """Origin of the first such row, for messages."""
    columns: list[str]
    no_answer: str
    """Why it has no reference answer; empty if it has one."""


def row_kinds(rows: Iterable[tuple[str, dict]]) -> list[RowKind]:
    """Return the different kinds among the first 1,000 rows.

    Args:
        rows: (origin, row).
    """
    found: dict[tuple[object, ...], RowKind] = {}
    for place, row in itertools.islice(rows, _MAX_ROWS):
        _, error = attempt(partial(ground_truth_of, row))
        kind = (*row, bool(error))  # its columns, and whether it has an answer
        if kind not in found:
            found[kind] = RowKind(place, list(row), str(error or ""))
    return [*found.values()]


def function_problems(
    specs: Sequence[str],
    kinds: Sequence[RowKind],
    *,
    scope: str = "auto",
    has_greedy: bool = False,
    no_step: str = "",
    has_judge: bool = False,
) -> list[str]:
    """Return why functions cannot be used, each as `rewards.functions: ...`.

    Args:
        kinds: of rows; empty if the rows are not known.
        scope: rewards.scope.
        has_greedy: whether a greedy response, which is not in its group, is scored too.
        no_step: why functions cannot see a whole step; empty if they can.
        has_judge: whether the run's engines judge.
    """
    if has_judge:  # functions that ask it find it in their environment
        os.environ |= {JUDGE_URL: "http://127.0.0.1:1/v1", JUDGE_KEY: "none"}
    problems = []
    scopes = set()
    for spec in specs:
        found, error = attempt(partial(_check, spec, kinds, scope=scope), RAISED)
        if isinstance(error, Refusal):
            problems.append(str(error))
        elif error:  # raised by its `prepare`, for instance
            problems.append(f"rewards.functions: {spec}: {with_line(error)}")
        elif found != "sample" and has_greedy:
            problems.append(
                f"rewards.functions: {spec} is called with whole groups, and the greedy response "
                "that algorithm.advantage compares them with is in none; set rewards.scope to "
                "sample if it scores each by itself, or take another advantage"
            )
        elif found == "step" and no_step:
            problems.append(f"rewards.functions: {spec} is called with whole steps, and {no_step}")
        scopes.add(found)
    if scope not in ("auto", "sample") and scopes == {"sample"}:
        problems.append(
            f"rewards.scope: {scope}, and {', '.join(specs)} take one sample at a time; leave it "
            f"out, or name a function of lists:\n{KNOWN_LISTS}"
        )
    return problems


def _check(spec: str, kinds: Sequence[RowKind], *, scope: str) -> str:
    """Return the scope of a function. Raises: Refusal."""
    found = load_reward(spec, scope=scope).scope
    wanted = Parameters.of(import_function(spec))
    form = form_of(wanted, spec=spec)
    asked = wanted.required & form.offered & {"ground_truth", "ground_truths"}
    for place, columns, no_answer in kinds:
        if asked and no_answer:
            raise Refusal(f"rewards.functions: {spec} asks for {min(asked)}; {place}: {no_answer}")
        absent = wanted.required - set(columns) - form.offered
        if form.takes_columns and absent:
            raise Refusal(
                f"rewards.functions: {spec} asks for {', '.join(sorted(absent))}; {place} has "
                f"{', '.join(columns)}"
            )
    return found
