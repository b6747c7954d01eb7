"""The console's view of the steps: a table, a line with the time left, a few samples."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import spmdrl.report.console as text
from spmdrl.config import Config
from spmdrl.journal import Journal
from spmdrl.report.console import Console
from spmdrl.report.glossary import values_of
from spmdrl.types import Sums, add_sums

_LOST = {
    "rollout/failed_rewards": "rewards failed",
    "policy/skipped_updates": "updates were skipped: not finite",
}
"""Totals that a run's last line shows if they are not 0."""
_SAMPLES_SHOWN = 3
SAMPLES_KEPT = 200  # the tracker writes the whole table again each time
_CELL_CHARS = 4000


class Progress:
    """The table of steps with the line below it, and the trend of one metric."""

    def __init__(self, cfg: Config, console: Console):
        self._console = console
        self._num_steps = cfg.steps
        self._every = cfg.report.console.table_every
        self._headline = cfg.objective.headline
        self._trend: list[float] = []
        self._lost = dict.fromkeys(_LOST, 0.0)
        self._step_seconds: list[float] = []
        self._window: Sums = {}
        self._columns = text.table_columns(
            cfg.objective.samples, spark=self._spark, has_ratio=cfg.batch.optimizer_steps > 1
        )

    def resume(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take the metrics of earlier attempts."""
        values = [row.get(self._headline) for row in rows]
        self._trend = [value for value in values if value is not None]
        self._lost = {name: sum(row.get(name) or 0 for row in rows) for name in _LOST}

    def show(self, step: int, sums: Sums, *, step_s: float) -> None:
        """Take one finished step; write a row of the table if one is due, and the progress line."""
        self._step_seconds.append(step_s)
        self._window = add_sums(self._window, sums)
        values = values_of(sums)
        self._lost = {name: lost + values.get(name, 0) for name, lost in self._lost.items()}
        if self._headline in values:
            self._trend.append(values[self._headline])
        done = step + 1
        left_s = text.time_left(self._step_seconds, self._num_steps - done)
        line = text.progress_line(done, self._num_steps, left_s=left_s, step_s=step_s)
        if done % self._every == 0 or done == self._num_steps or done == 1:
            row = values_of(self._window) | {"step": done}
            self._window = {}
            row |= {} if left_s is None else {"left_s": left_s}
            had_header = self._console.table_row(self._columns, row, every=self._every)
            if had_header and not self._console.is_live:
                self._console.line(line)
        self._console.progress(line)

    def summary(self) -> str:
        """Return the first and the last value of the headline metric over all attempts, and what
        was lost; empty without any."""
        parts = []
        if self._step_seconds and self._trend:
            ends = f"{self._trend[0]:.3f} in the first step, {self._trend[-1]:.3f} in the last"
            parts.append(f"{self._headline} {ends}")
        for name, lost in self._lost.items():
            if lost:
                parts.append(f"{lost:.0f} {_LOST[name]}")
        return "; ".join(parts)

    def _spark(self) -> str:
        return text.sparkline(self._trend, width=text.TREND, blocks=self._console.blocks())


class Samples:
    """Samples of the run: some on the console, all of a due step in a file and a table."""

    def __init__(self, cfg: Config, console: Console, *, file: Journal):
        self._file = file
        self._console = console
        self._shown_every = cfg.report.console.samples_every
        self._every = self._shown_every or cfg.report.console.table_every
        self._rows: deque[dict[str, Any]] = deque(maxlen=SAMPLES_KEPT)

    def resume(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take the samples of earlier attempts."""
        for row in rows:
            self._keep(row)

    def add(self, step: int, samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Show and write the samples of a step, if they are due.

        Returns: the newest samples of the run, for a table; empty if none are new.
        """
        if not samples or step % self._every:
            return []
        for sample in samples[:_SAMPLES_SHOWN] if self._shown_every else ():
            self._console.line(text.sample_text(dict(sample)))
        for sample in samples:
            self._file.append({"step": step, **sample})
            self._keep({"step": step, **sample})
        return list(self._rows)

    def _keep(self, row: dict[str, Any]) -> None:
        short: dict[str, Any] = {}
        for name, value in row.items():
            cell = json.dumps(value) if isinstance(value, dict) else value
            short[name] = cell[:_CELL_CHARS] if isinstance(cell, str) else cell
        self._rows.append(short)
