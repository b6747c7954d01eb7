"""Whether reward functions can be imported, and find what they ask for in a row."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

from spmdrl.data.rows import ground_truth_of
from spmdrl.errors import RAISED, Refusal, with_line
from spmdrl.imports import attempt, parsed_json
from spmdrl.rewards.signatures import import_function, load_reward

_TRL_GIVEN = {"prompts", "completions", "completion_ids", "log_metric", "log_extra"}
_CHILD = "from spmdrl.rewards.columns import answer; answer()"


def function_problems(specs: Sequence[str], row: dict | None) -> list[str]:
    """Return why functions cannot be used, each as `rewards.functions: ...`.

    Args:
        row: the first of data.train; None if it is not known.
    """
    problems = []
    for spec in specs:
        _, error = attempt(partial(_check, spec, row), RAISED)
        if isinstance(error, Refusal):
            problems.append(str(error))
        elif error:  # of its `prepare`, say
            problems.append(f"rewards.functions: {spec}: {with_line(error)}")
    return problems


def problems_in_child(specs: Sequence[str], row: dict | None, *, timeout_s: float) -> list[str]:
    """Return the same, found in a process of its own: to import what a user wrote may take memory,
    threads and devices that a rank must not share.

    Raises: Refusal when that process says nothing in time.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    asked = json.dumps([*specs, row]).encode()
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
    *specs, row = json.load(sys.stdin)
    os.write(out, json.dumps(function_problems(specs, row)).encode())
    os._exit(0)  # whatever threads they have begun


def _check(spec: str, row: dict | None) -> None:
    load_reward(spec)
    parameters = inspect.signature(import_function(spec)).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    names, required = {p.name for p in named}, {p.name for p in named if p.default is p.empty}
    if row is None:
        return
    if "ground_truth" in required and "solution_str" in names:
        if error := attempt(lambda: ground_truth_of(row))[1]:
            raise Refusal(
                f"rewards.functions: {spec} asks for ground_truth, and in the first row of "
                f"data.train {error}"
            )
    elif "completions" in names and (absent := required - set(row) - _TRL_GIVEN):
        raise Refusal(
            f"rewards.functions: {spec} asks for {', '.join(sorted(absent))}; the first row of "
            f"data.train has {', '.join(map(str, row))}"
        )
