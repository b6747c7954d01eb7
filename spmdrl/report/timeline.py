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
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.journal import Journal
from spmdrl.report.glossary import clean_name
from spmdrl.run_folder import make_folder
from spmdrl.value_forms import check_values, is_number, is_text, is_whole
from spmdrl.world.clock import clock_lead
from spmdrl.world.world import World

FOLDER = "timeline"
Waiting = Literal["", "all", "trainers", "replica"]


class Phase(NamedTuple):
    """Where a phase or wait happens, and which ranks wait for each other in it."""

    call: str
    """The line of train.py's loop, by what it calls."""
    waits: Waiting


PHASES = {
    "generate": Phase("source.generate", "replica"),
    "await the replica's leader": Phase("source.generate", "replica"),
    "await other replicas": Phase("source.generate", "replica"),
    "await rollouts": Phase("rl.exchange", "all"),
    "exchange scalars": Phase("rl.exchange", "all"),
    "exchange tokens": Phase("rl.exchange", "all"),
    "reward model": Phase("trainer.annotate", "trainers"),
    "annotate": Phase("trainer.annotate", "trainers"),
    "advantages": Phase("rl.advantages_of", "trainers"),
    "update": Phase("trainer.update", "trainers"),
    "await peers": Phase("stream.push", "all"),
    "push": Phase("stream.push", "all"),
    "verify push": Phase("stream.push", "all"),
    "evaluate": Phase("rl.evaluate", "replica"),
    "gather evaluation": Phase("rl.evaluate", "all"),
    "certificate": Phase("report.step", "trainers"),
    "agree to stop": Phase("checkpoints.save_or_stop", "all"),
    "checkpoint": Phase("checkpoints.save_or_stop", "all"),
    "begin checkpoint": Phase("checkpoints.save_or_stop", "all"),
    "copy checkpoint": Phase("checkpoints.save_or_stop", ""),
    "write checkpoint": Phase("checkpoints.save_or_stop", ""),
}
"""The phases of train.py's loop. The comment at the end of a line there says who waits in it."""
_WAITS = {clean_name(name): phase.waits for name, phase in PHASES.items()}


@dataclass(frozen=True)
class Span:
    """A stretch of time that a rank spent in a phase or wait."""

    name: str
    start_s: float
    """Seconds since the step began on this rank."""
    seconds: float
    waits: Waiting
    """Which ranks wait for each other in it; empty for none."""


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
    def ended_unix_s(self) -> float:
        """When the last span ended."""
        return self.began_unix_s + max((s.start_s + s.seconds for s in self.spans), default=0.0)


# --------------------------------------------------------------------------- writing


class TimelineWriter:
    """Writes this rank's timeline. Every rank makes one at the same place: clocks are compared.

    Args:
        folder: output_dir.
        attempt_folder: log folder of this attempt, which gets the lines of steps done again.
    """

    def __init__(self, world: World, folder: Path, *, attempt_folder: Path):
        self._spans = world.watch.spans
        self._rank = world.rank
        self._world_size = world.world_size
        self._folder = folder / FOLDER
        self._attempt_folder = attempt_folder
        make_folder(self._folder, within=folder)
        self._file = self._journal(world.rank)
        self._head = {
            "attempt": int(attempt_folder.name.removeprefix("attempt_")),
            "host": socket.gethostname(),
            "replica": world.replica,
        }
        # From time.monotonic(), in which spans are measured, to the clock of rank 0's machine.
        self._to_unix_s = time.time() - time.monotonic() - clock_lead(world)
        self._began = time.monotonic()

    def _journal(self, rank: int) -> Journal:
        return Journal(self._folder / f"rank_{rank}.jsonl", within=self._folder.parent)

    def start(self, step: int) -> None:
        """Remove the lines that this attempt writes again. The first step begins now."""
        ranks = [self._rank]
        if self._rank == 0:  # also for ranks that an earlier attempt had
            ranks += [rank for rank in _files(self._folder) if rank >= self._world_size]
        for rank in ranks:
            removed = self._attempt_folder / f"removed_timeline_{rank}.jsonl"
            self._journal(rank).keep(lambda row: row["step"] < step, removed=removed)
        self._spans.take()
        self._began = time.monotonic()

    def write(self, step: int) -> None:
        """Write the spans since the last call as those of this step."""
        stretches, left_out = self._spans.take()
        began = self._began
        self._began = time.monotonic()
        spans = []
        for name, start, end in sorted(stretches, key=lambda one: (one.began, -one.ended)):
            clean = clean_name(name)
            waits = _WAITS.get(clean, "")
            spans.append([clean, round(start - began, 6), round(end - start, 6), waits])
        unix_s = round(began + self._to_unix_s, 6)
        row: dict[str, Any] = {"step": step, **self._head, "began_unix_s": unix_s, "spans": spans}
        if left_out:
            row["left_out"] = left_out
        self._file.append(row)


# --------------------------------------------------------------------------- reading


def read_timeline(folder: Path, *, first: int = 0, last: int | None = None) -> list[list[RankStep]]:
    """Return the steps of a run, each as the ranks that recorded it, in order.

    Args:
        folder: output_dir.
        first, last: steps to return, both included; None: to the end.
    Returns: empty without a timeline. A last line that breaks off is left out.
    Raises: OSError; Refusal for a line that no rank wrote.
    """
    steps: dict[int, list[RankStep]] = {}
    for rank, path in sorted(_files(folder / FOLDER).items()):
        for found in _read_rank(path, rank=rank):
            if found.step >= first and (last is None or found.step <= last):
                steps.setdefault(found.step, []).append(found)
    return [steps[step] for step in sorted(steps)]


def _files(folder: Path) -> dict[int, Path]:
    """Return {rank: its file}."""
    matches = {path: re.fullmatch(r"rank_(\d{1,9})\.jsonl", path.name) for path in folder.glob("*")}
    return {int(match[1]): path for path, match in matches.items() if match}


def _read_rank(path: Path, *, rank: int) -> Iterator[RankStep]:
    for entry in Journal(path).read():
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
