"""Whether reward functions can be imported, and find what they ask for in a row."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from spmdrl.data.rows import ground_truth_of
from spmdrl.errors import RAISED, Refusal, with_line
from spmdrl.imports import attempt
from spmdrl.rewards.forms import KNOWN_LISTS, Parameters, form_of
from spmdrl.rewards.signatures import import_function, load_reward

_MOST_ROWS = 1000
"""Of a source, that are looked at."""


class RowKind(NamedTuple):
    """What reward functions may ask for in a row."""

    place: str
    """Origin of the first such row, for messages."""
    columns: list[str]
    no_answer: str
    """Why it has no reference answer; empty where it has one."""


def row_kinds(rows: Iterable[tuple[str, dict]]) -> list[RowKind]:
    """Return the kinds that there are among the first 1,000 rows, given with their origins."""
    found: dict[tuple[object, ...], RowKind] = {}
    for place, row in itertools.islice(rows, _MOST_ROWS):
        _, error = attempt(partial(ground_truth_of, row))
        found.setdefault((*row, bool(error)), RowKind(place, [*row], str(error or "")))
    return [*found.values()]


def function_problems(
    specs: Sequence[str],
    kinds: Sequence[RowKind],
    *,
    scope: str = "auto",
    has_greedy: bool = False,
    no_step: str = "",
) -> list[str]:
    """Return why functions cannot be used, each as `rewards.functions: ...`.

    Args:
        kinds: of rows; none where the rows are not known.
        scope: rewards.scope.
        has_greedy: a greedy response, which is none of its group, is scored too.
        no_step: why functions cannot see a whole step; empty where they can.
    """
    problems = []
    scopes = set()
    for spec in specs:
        found, error = attempt(partial(_check, spec, kinds, scope=scope), RAISED)
        if isinstance(error, Refusal):
            problems.append(str(error))
        elif error:  # of its `prepare`, say
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
    """Return how many samples a function is called with. Raises: Refusal."""
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
