"""The timeline of a run: when each rank was in which phase, and which rank the others waited for.

Every rank writes output_dir/timeline/rank_R.jsonl, a line for each step:

    {"step": 12, "attempt": 1, "host": "node-3", "replica": 0, "began_unix_s": 1764180000.123456,
     "spans": [["generate", 0.0, 0.412, "replica"], ["exchange_scalars", 0.412, 0.051, "all"], ...]}

A span has a name (that of its metric `time/NAME`), its begin in seconds after `began_unix_s`, its
seconds, and who waits in it: `all` ranks, the `trainers`, the ranks of a `replica`, or nobody
(empty). A span that lies inside another is a part of it. `began_unix_s` is when the step began on
this rank, by the clock of rank 0's machine. `replica` is -1 on ranks without an engine. `left_out`,
if it is there, is the number of spans that were left out because a name had too many.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.journal import Journal
from spmdrl.value_forms import check_values, is_number, is_text, is_whole

FOLDER = "timeline"
Waiting = Literal["", "all", "trainers", "replica"]


@dataclass(frozen=True)
class Span:
    """A stretch of time that a rank spent in a phase or wait."""

    name: str
    start_s: float
    """Seconds since the step began on this rank."""
    seconds: float
    waits: Waiting
    """Which ranks wait for each other in it; empty for none."""

    @property
    def end_s(self) -> float:
        """Seconds since the step began on this rank."""
        return self.start_s + self.seconds


@dataclass(frozen=True)
class RankStep:
    """What one rank did in one step, from the report of the step before to that of this one."""

    rank: int
    step: int
    attempt: int
    host: str
    replica: int
    """Index of the rank's engine replica; -1 without an engine."""
    began_unix_s: float
    """By the clock of rank 0's machine."""
    spans: tuple[Span, ...]
    """In order of their begin."""
    left_out: int = 0
    """Spans that were not recorded."""

    @property
    def seconds(self) -> float:
        """From the begin of the step to the end of the last span."""
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def ended_unix_s(self) -> float:
        """When the last span ended."""
        return self.began_unix_s + self.seconds


def read_timeline(
    folder: Path, *, first: int = 0, last: int | None = None, newest_bytes: int = 0
) -> list[list[RankStep]]:
    """Return the steps of a run, each as the ranks that recorded it, in order.

    Args:
        folder: output_dir.
        first, last: steps to return, both included; None: to the end.
        newest_bytes: read only the end of each file, so many bytes; 0: all.
    Returns: empty without a timeline. A last line that breaks off is left out.
    Raises: OSError; Refusal for a line that no rank wrote.
    """
    steps: dict[int, list[RankStep]] = {}
    for rank, path in sorted(rank_files(folder / FOLDER).items()):
        for found in _read_rank(path, rank=rank, newest_bytes=newest_bytes):
            if found.step >= first and (last is None or found.step <= last):
                steps.setdefault(found.step, []).append(found)
    return [steps[step] for step in sorted(steps)]


def rank_files(folder: Path) -> dict[int, Path]:
    """Return {rank: its file}."""
    matches = {path: re.fullmatch(r"rank_(\d{1,9})\.jsonl", path.name) for path in folder.glob("*")}
    return {int(match[1]): path for path, match in matches.items() if match}


def _read_rank(path: Path, *, rank: int, newest_bytes: int) -> Iterator[RankStep]:
    for entry in Journal(path).read(newest_bytes=newest_bytes):
        if not entry.problem:
            yield _rank_step(entry.row, rank=rank, place=f"{path}: line {entry.number}")


def _rank_step(row: dict[str, Any], *, rank: int, place: str) -> RankStep:
    with refusing(place, Refusal, hint="; no run writes this: remove the file"):
        check_values(row, _FORMS)
    return RankStep(
        rank=rank,
        step=row["step"],
        attempt=row["attempt"],
        host=row["host"],
        replica=row["replica"],
        began_unix_s=row["began_unix_s"],
        spans=tuple(Span(*span) for span in row["spans"]),
        left_out=row.get("left_out", 0),
    )


def _are_spans(value: Any) -> bool:
    """a list of [name, start_s, seconds, who waits]"""
    return isinstance(value, list) and all(map(_is_span, value))


def _is_span(value: Any) -> bool:
    if not (isinstance(value, list) and len(value) == 4):
        return False
    name, start_s, seconds, waits = value
    has_times = is_number(start_s) and is_number(seconds)
    return is_text(name) and has_times and waits in get_args(Waiting)


_FORMS = {
    "attempt": is_whole,
    "host": is_text,
    "replica": is_whole,
    "began_unix_s": is_number,
    "spans": _are_spans,
}
