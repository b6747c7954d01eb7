"""What a part of `make gpu` found: rows of its table, printed as it goes, a JSON object a line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

_MARK = "ROW "
Verdict = Literal["met", "missed", "measured", "failed", "not run"]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    found: str
    """Measured, with its unit; or why there is nothing."""
    beside: str = "-"
    """What it is compared with."""
    aim: str = "-"
    verdict: Verdict = "measured"
    """met or missed: the aim; failed: the part broke there."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """The raw figures, for the JSON file."""

    def tell(self) -> None:
        """Print it where the parent looks for it."""
        print(_MARK + json.dumps(dataclasses.asdict(self)), flush=True)


def judged(what: str, found: str, *, met: bool, aim: str, beside: str = "-", **numbers: Any) -> Row:
    """Return a row that met its aim or missed it."""
    return Row(what, found, beside, aim, "met" if met else "missed", numbers)


def read_rows(printed: str) -> Iterator[Row]:
    """Yield the rows in what a part printed."""
    for line in printed.splitlines():
        if line.startswith(_MARK):
            yield Row(**json.loads(line.removeprefix(_MARK)))


def last_words(printed: str) -> str:
    """Return the end of what a failed process printed: its error, in most cases."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return (errors or lines or ["nothing printed"])[-1][-300:]


@contextmanager
def attempt(what: str) -> Iterator[None]:
    """Tell a failure inside as a row of its own, and go on: the other rows are worth having."""
    try:
        yield
    except Exception as error:
        first = str(error).strip().split("\n")
        Row(what, f"{type(error).__name__}: {' '.join(first)[:300]}", verdict="failed").tell()


def median_seconds(step: Callable[[], object], *, warm: int, rounds: int, wait: Any) -> float:
    """Return the median seconds of one call, everything that it put on the device done.

    Args:
        warm: calls before those that count. wait: returns when the device has nothing to do.
    """
    import statistics
    import time

    took = []
    for turn in range(warm + rounds):
        wait()
        began = time.perf_counter()
        step()
        wait()
        took += [time.perf_counter() - began] if turn >= warm else []
    return statistics.median(took)
