"""certificate.jsonl: a sealed journal with a line for each start of an attempt and certified step.

Nothing in a line depends on time or place. So two equal runs write the same bytes, and so does a
run that was killed and resumed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl import run_files
from spmdrl.certificate.line_form import Line, problem_of
from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.journal import Journal

NAME = "certificate.jsonl"


def journal_of(run: Path) -> Journal:
    """Return the certificate of a run's output_dir."""
    return Journal(run / NAME, run_files.CERTIFICATE, is_sealed=True)


class StepLines(Mapping[int, Line]):
    """Lines of steps, read from the file at each access, because all may take gigabytes.

    Args:
        path: of a checked file.
        places: {step: offset of its line, bytes}, ascending.
    """

    def __init__(self, path: Path, places: Mapping[int, int]):
        self._path = path
        self._places = places

    def __getitem__(self, step: int) -> Line:
        with run_files.opened(self._path, run_files.CERTIFICATE) as file:
            file.seek(self._places[step])
            line: Line = json.loads(file.readline())
        return line

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


@dataclass(frozen=True)
class RunCertificate:
    """A run's certificate."""

    run: Path
    steps: Mapping[int, Line]
    """{step: its line}, ascending."""
    made_of: dict[int, dict[str, Any]]
    """{first step of an attempt: see same_run.made_of}, ascending."""

    def made_at(self, step: int) -> dict[str, Any]:
        """Return what the run was made of at a step."""
        return self.made_of[max(first for first in self.made_of if first <= step)]


def read(run: Path) -> RunCertificate:
    """Read and check a run's certificate.

    Args:
        run: output_dir.
    Raises: Refusal for the first line that is wrong or in a wrong place, or for missing lines.
    """
    journal = journal_of(run)
    hint = "; name the output_dir of a run that had report.certificate above 0"
    with refusing(f"{journal.path} cannot be read", OSError, hint=hint):
        places, made = _read(journal)
    if not places or not made:
        raise Refusal(f"{journal.path}: certifies no step")
    found = RunCertificate(run, StepLines(journal.path, places), made)
    _check_end(found, journal.path)
    return found


def _read(journal: Journal) -> tuple[dict[int, int], dict[int, dict[str, Any]]]:
    """Return {step: offset of its line}, and {first step of an attempt: `made_of`}."""
    places: dict[int, int] = {}
    made: dict[int, dict[str, Any]] = {}
    order = _Order()
    for entry in journal.read():
        line = entry.row
        if entry.problem:
            raise Refusal(entry.problem)
        if problem := problem_of(line) or order.problem_with(line):
            raise Refusal(f"{journal.path}: line {entry.number} {problem}")
        if "made_of" in line:
            made[line["step"]] = line["made_of"]
        else:
            places[line["step"]] = entry.begin
    return places, made


class _Order:
    """Checks the order of lines.

    The line of an attempt's start has the config, which determines the steps that are certified.
    Each of them must have a line, in order. Only the last ones may be missing, because the run may
    still continue.
    """

    def __init__(self) -> None:
        self._config: dict[str, Any] = {}
        self._attempt = -1
        self._begin = 0

    def problem_with(self, line: Line) -> str:
        """Return the reason why a line cannot be the next one; empty if it can."""
        step = line["step"]
        due = self._next_due()
        if "made_of" in line:
            if step <= self._attempt or step < self._begin:
                return f"begins an attempt at step {step}, but lines before it are of later steps"
            if due is not None and due < step:
                return f"begins an attempt at step {step}, but the line of step {due} is missing"
            self._config = line["made_of"]["config"]
            self._attempt = self._begin = step
            return ""
        if not self._config:
            return "is of a step, but no line before it says what the run was made of"
        if due is None or step < due:
            return f"is of step {step}, which is not due there: it was inserted or moved"
        if step > due:
            return f"is of step {step}, but the line of step {due} before it is missing"
        self._begin = step + 1
        return ""

    def _next_due(self) -> int | None:
        """Return the next step that must be certified; None if there is none."""
        if not self._config or not self._config["report.certificate"]:
            return None
        every = self._config["report.certificate"]
        last = self._config["steps"] - 1
        # The next multiple of `every`, or the last step if that comes first.
        regular = -(-self._begin // every) * every
        return last if self._begin <= last < regular else regular


def has_norms(line: Line) -> bool:
    """Return whether a step's line has norms, which comparing two layouts needs."""
    return any(not isinstance(row, str) for row in line["after"].values())


def is_due(step: int, *, every: int, steps: int) -> bool:
    """Return whether a step is certified: every `every`-th and the last; none if `every` is 0."""
    return every > 0 and (step % every == 0 or step == steps - 1)


def _check_end(found: RunCertificate, path: Path) -> None:
    """Raise Refusal if metrics.jsonl has later steps that should have been certified."""
    last = max(found.steps)
    for row in Journal(found.run / "metrics.jsonl").rows():
        step = row["step"]
        # Only rows of training steps have perf/step_s.
        if step <= last or "perf/step_s" not in row:
            continue
        config = found.made_at(step)["config"]
        if is_due(step, every=config["report.certificate"], steps=config["steps"]):
            raise Refusal(
                f"{path}: ends with step {last}, but metrics.jsonl has step {step}: lines at its "
                "end were removed"
            )
