"""Whether reward functions can be imported, and find what they ask for in a row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from spmdrl.data.rows import ground_truth_of
from spmdrl.errors import RAISED, Refusal, with_line
from spmdrl.imports import attempt, parsed_json
from spmdrl.rewards.forms import KNOWN_LISTS, Parameters, form_of
from spmdrl.rewards.signatures import import_function, load_reward

_CHILD = "from spmdrl.rewards.columns import answer; answer()"


def function_problems(
    specs: Sequence[str],
    row: dict | None,
    *,
    scope: str = "auto",
    has_greedy: bool = False,
    no_step: str = "",
    data: str = "data.train",
) -> list[str]:
    """Return why functions cannot be used, each as `rewards.functions: ...`.

    Args:
        row: the first of the data; None if it is not known.
        scope: rewards.scope.
        has_greedy: a greedy response, which is none of its group, is scored too.
        no_step: why functions cannot see a whole step; empty where they can.
        data: where the row is from, for messages.
    """
    problems, scopes = [], set()
    for spec in specs:
        found, error = attempt(partial(_check, spec, row, scope=scope, data=data), RAISED)
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


def problems_in_child(
    specs: Sequence[str], row: dict | None, *, timeout_s: float, **options: Any
) -> list[str]:
    """Return the same, found in a process of its own: to import what a user wrote may take memory,
    threads and devices that a rank must not share.

    Raises: Refusal when that process says nothing in time.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    asked = json.dumps([specs, row, options]).encode()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CHILD],
            input=asked,
            env=env,
            stdout=subprocess.PIPE,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise Refusal(
            f"rewards.functions: {', '.join(specs)} were not imported within {timeout_s:g} s "
            "(layout.startup_timeout_s)"
        ) from None
    found, reason = parsed_json(done.stdout.decode())
    if reason:
        return [
            f"rewards.functions: importing {', '.join(specs)} ended its process, with status "
            f"{done.returncode}"
        ]
    return found


def answer() -> None:
    """Answer `problems_in_child` on what was the standard output; what functions print goes to the
    standard error."""
    out = os.dup(1)
    os.dup2(2, 1)
    specs, row, options = json.load(sys.stdin)
    os.write(out, json.dumps(function_problems(specs, row, **options)).encode())
    os._exit(0)  # whatever threads they have begun


def _check(spec: str, row: dict | None, *, scope: str, data: str) -> str:
    """Return how many samples a function is called with. Raises: Refusal."""
    found = load_reward(spec, scope=scope).scope
    wanted = Parameters.of(import_function(spec))
    form = form_of(wanted, spec=spec)
    if row is None:
        return found
    if asked := wanted.required & form.offered & {"ground_truth", "ground_truths"}:
        if error := attempt(lambda: ground_truth_of(row))[1]:
            raise Refusal(
                f"rewards.functions: {spec} asks for {min(asked)}, and in the first row of "
                f"{data} {error}"
            )
    elif form.takes_columns and (absent := wanted.required - set(row) - form.offered):
        raise Refusal(
            f"rewards.functions: {spec} asks for {', '.join(sorted(absent))}; the first row of "
            f"{data} has {', '.join(map(str, row))}"
        )
    return found
