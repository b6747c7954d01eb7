"""What a run's folder says of the run, for its page. What cannot be read becomes a note."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from spmdrl.config import Config, flatten
from spmdrl.config.files import load_yaml
from spmdrl.errors import Refusal
from spmdrl.imports import attempt
from spmdrl.journal import Journal, Row
from spmdrl.report.bottleneck import MEAN_STEPS, causes_by_step
from spmdrl.report.forecast import forecast
from spmdrl.report.page.step_time import causes_of, engine_causes_of
from spmdrl.report.timeline import RankStep
from spmdrl.run_files import SMALL, json_of, read_bytes
from spmdrl.value_forms import is_number

T = TypeVar("T")
_BROKEN = (OSError, Refusal, KeyError, TypeError, ValueError, AttributeError, IndexError)
"""Errors of a file that somebody else wrote, or that was damaged."""
_DIGITS = 7
_MOST_PROBLEMS = 5000
_MOST_NOTES = 50
_NOT_METRICS = ("step", "unix_s")


@dataclass
class Notes:
    """Sentences on what of a run cannot be read, in order."""

    lines: list[str] = field(default_factory=list)

    def attempt(self, what: str, work: Callable[[], T]) -> T | None:
        """Return the result of `work`, or None with a note that names `what`."""
        result, error = attempt(work, _BROKEN)
        if error is not None:
            self.add(f"{what}: {error or type(error).__name__}")
        return result

    def add(self, line: str) -> None:
        """Add a note; after a number of them only say that there are more."""
        if len(self.lines) < _MOST_NOTES:
            self.lines.append(line)
        elif len(self.lines) == _MOST_NOTES:
            self.lines.append("there are more such lines, which are left out")


def config_of(folder: Path, notes: Notes) -> Config | None:
    """Return the config of a run; None, with a note, if it cannot be read."""
    return notes.attempt("the config cannot be shown", lambda: load_yaml(folder / "config.yaml"))


def config_values(cfg: Config | None) -> dict[str, str]:
    """Return {setting: its value as text}; empty for None."""
    return {name: _text(value) for name, value in flatten(cfg).items()} if cfg else {}


def environment_values(folder: Path, notes: Notes) -> dict[str, str]:
    """Return {name: text} of what the run says of its machine, versions and code."""
    path = folder / "environment.json"
    if not path.exists():
        return {}
    read = notes.attempt(path.name, lambda: json_of(read_bytes(path, SMALL), place=path.name))
    found: dict[str, str] = {}
    for name, value in read.items() if isinstance(read, dict) else ():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        found |= {f"{name}.{key}".rstrip("."): _text(own) for key, own in inner}
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def metric_tables(folder: Path, notes: Notes) -> dict[str, Any]:
    """Return the metrics of a run by column.

    Returns:
        `training` and `evaluation`: {"steps", "columns": {name: values, None where a step lacks
            it}}; of several rows of a step the last counts.
        `start`: {name: value} of the measurements before the first step.
    """
    rows: dict[str, dict[int, Row]] = {"training": {}, "evaluation": {}}
    start: Row = {}
    path = folder / "metrics.jsonl"
    if not path.exists():
        notes.add(f"there is no {path.name}: no step was recorded")
    else:
        notes.attempt(path.name, lambda: _read_rows(path, rows, start, notes))
    tables: dict[str, Any] = {name: _table(own) for name, own in rows.items()}
    return tables | {"start": _numbers(start)}


def _read_rows(path: Path, rows: dict[str, dict[int, Row]], start: Row, notes: Notes) -> None:
    before = 0
    for entry in Journal(path).read():
        for number in range(before + 1, entry.number):
            notes.add(f"{path.name}: line {number} holds no row of a step, and is left out")
        before = entry.number
        if entry.problem:
            notes.add(f"{path.name}: line {entry.number} breaks off, and is left out")
            return
        row = entry.row
        odd = [name for name, value in row.items() if not (value is None or is_number(value))]
        if odd:
            notes.add(f"{path.name}: line {entry.number}: {odd[0]:.60} is no number")
        if any(name.startswith("eval/") for name in row):
            rows["evaluation"][row["step"]] = row
        elif any(name.startswith(("proof/", "sync/probe")) for name in row):
            start.update(row)
        else:
            rows["training"][row["step"]] = row


def _numbers(row: Row) -> dict[str, float | None]:
    return {
        name: rounded(value)
        for name, value in row.items()
        if name not in _NOT_METRICS and is_number(value)
    }


def _table(rows: Mapping[int, Row]) -> dict[str, Any]:
    steps = sorted(rows)
    numbers = [_numbers(rows[step]) for step in steps]
    names = sorted({name for row in numbers for name in row})
    columns = {name: [row.get(name) for row in numbers] for name in names}
    return {"steps": steps, "columns": columns, "unix_s": [rows[s].get("unix_s") for s in steps]}


def rounded(value: Any) -> float | None:
    """Return a number with seven digits; None for one that is not finite, or is none."""
    if not is_number(value) or not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")


def path_causes(
    timeline: Sequence[Sequence[RankStep]], training: Mapping[str, Any]
) -> dict[int, dict[str, float]]:
    """Return {step: seconds by cause along its critical path}.

    Args:
        timeline: its steps.
        training: see `metric_tables`.
    """
    rows = [{"step": step, **row} for step, row in zip(training["steps"], _rows(training))]
    return causes_by_step(timeline, rows)


def step_times(
    training: Mapping[str, Any], path: Mapping[int, Mapping[str, float]]
) -> dict[str, Any]:
    """Return where the time of steps goes.

    Args:
        training: see `metric_tables`.
        path: see `path_causes`.
    Returns:
        `steps`: {cause: seconds of each step} of rank 0; `engines`: the same of the engines;
        `path`: the same along the critical path of the steps `path_steps`; `mean_steps`: the number
        of newest steps over which means are.
    """
    rows = _rows(training)
    own = [causes_of(row) for row in rows]
    engines = [engine_causes_of(row) for row in rows]
    return {
        "steps": _by_cause(own),
        "engines": _by_cause(engines),
        "path": _by_cause([*path.values()]),
        "path_steps": [*path],
        "mean_steps": MEAN_STEPS,
    }


def _rows(training: Mapping[str, Any]) -> list[dict[str, float]]:
    columns = training["columns"].items()
    return [
        {name: values[i] for name, values in columns if values[i] is not None}
        for i in range(len(training["steps"]))
    ]


def _by_cause(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for row in rows for name in row)
    by_cause = {name: [float(f"{row.get(name, 0.0):.4g}") for row in rows] for name in names}
    return {name: values for name, values in by_cause.items() if any(values)}


def evaluations(folder: Path, notes: Notes) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the evaluations of a run, by step, and their problems.

    Returns: a list of {"step", "samples", "temperature", "data", "all", "sources"}; and
        {"steps", "problems": {index: [source, [reward of each step, null if it has none], mean
        length of each step, answers of the last step]}}.
    """
    found = []
    for path in (folder / "evaluations").glob("evaluation_*.json"):
        read = notes.attempt(f"evaluations/{path.name}", partial(_evaluation, path))
        if read:
            found.append(read)
    found.sort(key=lambda one: one["step"])
    problems: dict[int, list[Any]] = {}
    for at, one in enumerate(found):
        for index, source, reward, length, answers in one.pop("problems"):
            if index not in problems and len(problems) >= _MOST_PROBLEMS:
                notes.add(f"only {_MOST_PROBLEMS} problems of the evaluations are shown")
                break
            row = problems.setdefault(index, [source, [None] * len(found), [None] * len(found), []])
            row[1][at] = reward
            row[2][at] = length
            row[3] = answers
    return found, {"steps": [one["step"] for one in found], "problems": problems}


def forecast_of(evaluation: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what more training would give by a run's evaluations; None if there are none.

    Args:
        evaluation: see `metric_tables`.
    Returns: {"text"}, and "curve", [[steps, reward, low, high]], if there is a forecast.
    """
    rewards = evaluation["columns"].get("eval/reward", [])
    points = [(x, y) for x, y in zip(evaluation["steps"], rewards) if y is not None]
    if not points:
        return None
    fitted, error = attempt(lambda: forecast(points))
    if fitted is None:
        return {"text": str(error), "curve": []}
    curve = [[rounded(value) for value in point] for point in fitted.curve]
    return {"text": fitted.sentence, "curve": curve}


def _evaluation(path: Path) -> dict[str, Any]:
    content = json_of(read_bytes(path, SMALL), place=path.name)
    problems = []
    for one in content["problems"]:
        rewards = [rounded(value) for value in one["rewards"]]
        known = [value for value in rewards if value is not None]
        lengths = [value for value in one["lengths"] if is_number(value)]
        problems.append(
            (
                int(one["index"]),
                str(one["source"])[:200],
                rounded(sum(known) / len(known)) if known else None,
                rounded(sum(lengths) / len(lengths)) if lengths else None,
                [str(answer)[:200] for answer in one["answers"][:8]],
            )
        )
    return {
        "step": int(content["step"]),
        "samples": int(content["samples"]),
        "temperature": rounded(content["temperature"]),
        "data": str(content["data"])[:500],
        "all": _estimates(content["all"]),
        "sources": {str(name)[:200]: _estimates(own) for name, own in content["sources"].items()},
        "problems": problems,
    }


def _estimates(own: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """Return {name: [mean, half of the 95% interval, number of problems]}."""
    return {
        str(name)[:200]: [
            rounded(one["mean"]), rounded(one["half_width"]), rounded(one["num_problems"])
        ]
        for name, one in own.items()
    }  # fmt: skip
