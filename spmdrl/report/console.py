"""The console of rank 0: a progress line with time left, a table, samples.

Pure functions make the text; `Console` writes it.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TextIO

from spmdrl.errors import printable

WIDTH = 80
"""Characters of a line, unless a terminal is wider."""
TREND = 6
_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"  # eighth blocks, low to full
_ASCII_BLOCKS = "_.-=+*#@"
_HEADER_EVERY = 20

Values = dict[str, float]


# --------------------------------------------------------------------------- pure text


def number(value: float | None, *, width: int) -> str:
    """Return a number right-aligned in at most `width` (>= 6) characters; `-` for None."""
    if value is None:
        return "-".rjust(width)
    size = abs(value)
    if value == 0 or (size >= 1000 and size < 10 ** (width - 1)):
        text = f"{value:.0f}"
    elif 0.01 <= size < 10:
        text = f"{value:.3f}"
    elif 10 <= size < 100:
        text = f"{value:.2f}"
    elif 100 <= size < 1000:
        text = f"{value:.1f}"
    else:
        text = f"{value:.1e}"
    return (text if len(text) <= width else f"{value:.0e}").rjust(width)


def duration(seconds: float | None) -> str:
    """Return seconds as `0:07`, `12:30`, `3h05m` or `2d04h`; `-` for None."""
    if seconds is None:
        return "-"
    total = int(seconds + 0.5)
    if total < 3600:
        return f"{total // 60}:{total % 60:02d}"
    minutes = total // 60
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes // 1440}d{minutes % 1440 // 60:02d}h"


def sparkline(history: Sequence[float], *, width: int, blocks: str = _BLOCKS) -> str:
    """Draw a history in `width` characters, lowest value to highest, oldest first.

    A longer history is cut into `width` parts of equal length, and each shows its mean.
    """
    count = min(width, len(history))
    if not count:
        return ""
    means = []
    for i in range(count):
        part = history[i * len(history) // count : (i + 1) * len(history) // count]
        means.append(sum(part) / len(part))
    low = min(means)
    high = max(means)
    if not high > low:
        return blocks[0] * count
    top = len(blocks) - 1
    heights = [(mean - low) / (high - low) for mean in means]
    return "".join(blocks[round(height * top)] for height in heights)


def progress_line(done: int, total: int, *, left_s: float | None, step_s: float | None) -> str:
    """Return `[####----] step 40/200  20%  1:44 left  0.65 s/step`."""
    share = done / total if total else 1.0
    filled = int(share * 30)
    bar = "#" * filled + "-" * (30 - filled)
    speed = f"  {step_s:.2f} s/step" if step_s is not None else ""
    return f"[{bar}] step {done}/{total} {share:5.0%}  {duration(left_s)} left{speed}"


def time_left(step_seconds: Sequence[float], steps_left: int) -> float | None:
    """Return seconds until the end: steps left times the mean of the last 20 steps.

    The first step of an attempt, which includes compilation and warm-up, is left out once there
    are others. None before any step.
    """
    known = list(step_seconds[1:] if len(step_seconds) > 1 else step_seconds)[-20:]
    return steps_left * sum(known) / len(known) if known else None


def sample_text(sample: dict, *, limit: int = 600) -> str:
    """Return one sample as a short block of prompt, response and reward."""
    lines = []
    for key, value in sample.items():
        if value == {}:
            continue
        if isinstance(value, dict):
            text = ", ".join(f"{name} {number:.3f}" for name, number in value.items())
        else:
            text = f"{value:.3f}" if isinstance(value, float) else str(value)
        if len(text) > limit:
            text = f"{text[:limit]} ... ({len(text)} characters)"
        lines.append(f"  | {key:<9} " + text.replace("\n", "\n  |           "))
    return "\n".join(lines)


def wrap(text: str, *, width: int) -> str:
    """Return text in lines of at most `width` characters, the later ones indented."""
    return textwrap.fill(
        text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def pairs_text(pairs: Mapping[str, str]) -> str:
    """Return names and values as an aligned block."""
    wide = max((len(name) for name in pairs), default=0)
    return "\n".join(f"  {name:<{wide}}  {value}" for name, value in pairs.items())


# --------------------------------------------------------------------------- the table


class Column(NamedTuple):
    """One column of the table."""

    title: str
    width: int
    text: Callable[[Values], str]
    metric: str = ""
    """The metric that the column shows. Without any value of it the column is left out."""


def _metric_column(title: str, metric: str, width: int) -> Column:
    """Return a column that shows a metric."""
    return Column(title, width, lambda values: number(values.get(metric), width=width), metric)


def table_columns(
    samples: bool, *, spark: Callable[[], str], has_ratio: bool = True
) -> list[Column]:
    """Return the columns for an objective, the most useful first; `fit_columns` cuts off the last.

    Args:
        samples: whether the objective samples; else it fits rows.
        spark: draws the trend of the metric in the column before it.
        has_ratio: whether the policy moves between sampling and loss. Else nothing is clipped.
    """
    done = Column("done", 6, lambda values: f"{int(values['step']):>6}")
    left = Column("left", 6, lambda values: duration(values.get("left_s")).rjust(6))
    trend = Column("trend", TREND, lambda _: spark().ljust(TREND))
    if not samples:
        return [
            done,
            left,
            _metric_column("loss", "policy/loss", 9),
            trend,
            _metric_column("accuracy", "preference/accuracy", 8),
            _metric_column("accuracy", "reward_model/accuracy", 8),
            _metric_column("lr", "policy/lr", 8),
            _metric_column("update s", "time/update", 8),
            _metric_column("tok/s", "perf/tokens_per_s", 7),
            _metric_column("entropy", "policy/entropy", 8),
            _metric_column("grad norm", "policy/grad_norm", 9),
        ]
    columns = [
        done,
        left,
        _metric_column("reward", "reward/mean", 7),
        trend,
        _metric_column("length", "rollout/response_length", 6),
        _metric_column("KL e/t", "policy/mismatch_k3", 7),
        _metric_column("entropy", "policy/entropy", 7),
        _metric_column("gen s", "time/generate", 6),
        _metric_column("upd s", "time/update", 6),
        _metric_column("tok/s", "perf/tokens_per_s", 7),
        _metric_column("push s", "time/push", 6),
        _metric_column("spread", "reward/std", 6),
        _metric_column("grad", "policy/grad_norm", 6),
    ]
    if has_ratio:
        columns.append(_metric_column("clip", "policy/clip_frac", 6))
    return columns


def drop_empty(columns: Sequence[Column], seen: set[str]) -> list[Column]:
    """Return the columns without those whose metric has had no value yet."""
    return [c for c in columns if not c.metric or c.metric in seen]


def fit_columns(columns: Sequence[Column], width: int) -> list[Column]:
    """Return as many of the first columns as fit into `width` characters."""
    fitted: list[Column] = []
    taken = -1  # the first has no space before it
    for column in columns:
        taken += 1 + column.width
        if taken > width:
            break
        fitted.append(column)
    return fitted


def header(columns: Sequence[Column]) -> str:
    """Return the table's title row."""
    return " ".join(c.title.rjust(c.width) for c in columns)


def row(columns: Sequence[Column], values: Values) -> str:
    """Return one row of the table."""
    return " ".join(c.text(values).rjust(c.width) for c in columns)


# --------------------------------------------------------------------------- the stream


class Console:
    """Writes lines, and keeps a progress line below them when the stream is a terminal."""

    def __init__(self, *, stream: TextIO | None = None):
        self._stream = stream
        self._rows = 0
        self._seen: set[str] = set()
        self._columns: list[Column] = []
        self._live = ""
        self._lock = threading.RLock()  # the tracker's thread logs too

    @property
    def stream(self) -> TextIO:
        """The stream of text: the current sys.stdout, unless one was passed."""
        return self._stream or sys.stdout

    @property
    def is_live(self) -> bool:
        """Whether lines can be redrawn."""
        return self.stream.isatty()

    @property
    def width(self) -> int:
        """Characters of a line: WIDTH, or the width of a wider terminal."""
        if not self.is_live:
            return WIDTH
        return max(WIDTH, shutil.get_terminal_size().columns)

    def blocks(self) -> str:
        """Return the characters that sparklines are drawn with on this stream."""
        return _BLOCKS if self._encodes(_BLOCKS) else _ASCII_BLOCKS

    def line(self, text: str) -> None:
        """Write text above the progress line."""
        with self._lock:
            self._write(f"{self._erase()}{printable(text)}\n{self._live}")

    def table_row(self, columns: Sequence[Column], values: Values, *, every: int = 1) -> bool:
        """Write a row, with a header above it if one is due; return whether one was due.

        Args:
            values: means over the steps since the last row.
            every: steps between two rows.
        """
        is_due = self._rows % _HEADER_EVERY == 0
        self._seen |= values.keys()
        if not self._rows:
            each = f"means over the {every} steps since the row before" if every > 1 else "one step"
            self.line(f"done: steps done; each row: {each}")
        if is_due:
            self._columns = fit_columns(drop_empty(columns, self._seen), self.width)
            self.line(header(self._columns))
        self._rows += 1
        self.line(row(self._columns, values))
        return is_due

    def progress(self, text: str) -> None:
        """Replace the progress line of a terminal; do nothing on other streams."""
        if not self.is_live:
            return
        with self._lock:
            erase = self._erase()
            self._live = text[: self.width]
            self._write(erase + self._live)

    def _erase(self) -> str:
        return "\r\x1b[K" if self._live else ""

    def _encodes(self, text: str) -> bool:
        encoding = self.stream.encoding or "ascii"
        return text.encode(encoding, "ignore").decode(encoding) == text

    def _write(self, text: str) -> None:
        encoding = self.stream.encoding or "ascii"
        self.stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        self.stream.flush()
