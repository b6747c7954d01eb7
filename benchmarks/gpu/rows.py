"""What a part of `make gpu` found: rows of its table, printed as it goes, a JSON object a line."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil

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


@contextmanager
def attempt(what: str) -> Iterator[None]:
    """Tell a failure inside as a row of its own, and go on: the other rows are worth having. The
    traceback goes to stderr, and so into the part's log."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        # What a process that failed says, `output_of` writes into the first line.
        first = (str(error).strip() or "no message").split("\n")[0]
        Row(what, f"{type(error).__name__}: {first[:300]}", verdict="failed").tell()


_MARGIN_S = 8.0
"""What is left, at the end of a part, for ending its processes and telling their rows."""


@dataclass(frozen=True)
class Clock:
    """The time that a part has.

    What a part starts gets `left_s` as its own limit. So it ends, and its row is told, before the
    whole part is ended from outside.
    """

    limit_s: float
    """Seconds of the part, from the start of its process."""
    began: float = field(default_factory=lambda: psutil.Process().create_time())
    """By `time.time()`."""

    @property
    def left_s(self) -> float:
        """Seconds that something may take which starts now; 1 at least."""
        return max(1.0, self.began + self.limit_s - _MARGIN_S - time.time())

    def has(self, needs_s: float, *, what: str) -> bool:
        """Return whether there are so many seconds left; tell a row where there are not."""
        if self.left_s >= needs_s:
            return True
        Row(what, lacking_time(self.left_s, needs_s), verdict="not run").tell()
        return False


def lacking_time(left_s: float, needs_s: float) -> str:
    """Return why something was not run."""
    return f"{left_s:.0f} s left, needs {needs_s:.0f}"


def median_seconds(step: Callable[[], object], *, warm: int, rounds: int, wait: Any) -> float:
    """Return the median seconds of one call, everything that it put on the device done.

    Args:
        warm: calls before those that count. wait: returns when the device has nothing to do.
    """
    took = []
    for turn in range(warm + rounds):
        wait()
        began = time.perf_counter()
        step()
        wait()
        took += [time.perf_counter() - began] if turn >= warm else []
    return statistics.median(took)
