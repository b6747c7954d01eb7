"""Records this rank's timeline, a line for each step; see timeline.py for the format."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any, NamedTuple

from spmdrl.journal import Journal
from spmdrl.report.glossary import clean_name
from spmdrl.report.timeline import FOLDER, Waiting, rank_files
from spmdrl.run_folder import make_folder
from spmdrl.world.clock import clock_lead
from spmdrl.world.world import World


class Phase(NamedTuple):
    """Where a phase or wait happens, and which ranks wait for each other in it."""

    call: str
    """The line of train.py's loop, by what it calls."""
    waits: Waiting


PHASES = {
    "generate": Phase("source.generate", "replica"),
    "await the replica's leader": Phase("source.generate", "replica"),
    "exchange drawn tokens": Phase("source.generate", "replica"),
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
            ranks += [rank for rank in rank_files(self._folder) if rank >= self._world_size]
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
            spans.append([clean, round(start - began, 7), round(end - start, 7), waits])
        unix_s = round(began + self._to_unix_s, 6)
        row: dict[str, Any] = {"step": step, **self._head, "began_unix_s": unix_s, "spans": spans}
        if left_out:
            row["left_out"] = left_out
        self._file.append(row)
