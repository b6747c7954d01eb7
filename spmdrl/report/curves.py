"""A chart of one or more runs: the usual metrics, or chosen ones."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from spmdrl.run_folder import write_file

Panel = tuple[str, str | None, str | None]

_PANELS: tuple[Panel, ...] = (
    ("reward", "reward/mean", None),
    ("evaluation: reward", None, "eval/reward"),
    ("spread of rewards within a group", "reward/std", None),
    ("loss", "policy/loss", "eval/loss"),
    ("response length, tokens", "rollout/response_length", "eval/response_length"),
    ("KL engine/trainer (k3), nats", "policy/mismatch_k3", None),
    ("entropy, nats", "policy/entropy", None),
    ("gradient norm", "policy/grad_norm", None),
    ("seconds per step", "perf/step_s", None),
)
"""(title, metric per step or None, metric per evaluation or None)"""

Rows = list[dict[str, Any]]


def series(rows: Rows, name: str) -> tuple[list[int], list[float]]:
    """Return (steps, values) of one metric; the last of several rows of a step counts."""
    points = {row["step"]: row[name] for row in rows if isinstance(row.get(name), (int, float))}
    return sorted(points), [points[step] for step in sorted(points)]


def smooth(values: list[float], *, window: int) -> list[float]:
    """Return the running mean over up to `window` values."""
    return [fmean(values[max(0, i - window) : i]) for i in range(1, len(values) + 1)]


def metric_names(runs: dict[str, Rows]) -> list[str]:
    """Return the names of the metrics that have a number in any row, sorted."""
    return sorted(
        {
            name
            for rows in runs.values()
            for row in rows
            for name, value in row.items()
            if isinstance(value, (int, float)) and name not in ("step", "unix_s")
        }
    )


def _panels(known: list[str], metrics: Sequence[str]) -> list[Panel]:
    """Return a panel for each of `metrics`; without any, the usual ones and the user's own."""
    chosen = metrics or [name for name in known if name.startswith("my/")]
    own: list[Panel] = []
    for name in chosen:
        is_evaluation = name.startswith("eval/")
        own.append((name, None, name) if is_evaluation else (name, name, None))
    usual = () if metrics else _PANELS
    return [panel for panel in (*usual, *own) if not {*panel[1:]}.isdisjoint(known)]


def draw(runs: dict[str, Rows], *, out: Path, metrics: Sequence[str] = ()) -> bool:
    """Draw metrics of {label: rows} into the chart `out`.

    Pale lines are steps, strong ones their running mean, dots evaluations on held-out rows.
    Panels without data are left out. Returns False, and draws nothing, when none has any.

    Args:
        metrics: one panel each, by name. By default reward, loss, length, KL, entropy and time,
            and all metrics whose names begin with `my/`.
    """
    panels = _panels(metric_names(runs), metrics)
    if not panels:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot: that keeps figures in a global

    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * columns, 3.2 * lines + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    for i, (title, name, eval_name) in enumerate(panels):
        axes = figure.add_subplot(lines, columns, i + 1)
        for k, (label, rows) in enumerate(runs.items()):
            _draw_run(axes, rows, name=name, eval_name=eval_name, label=label, color=f"C{k % 10}")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.grid(alpha=0.3)
        if i == 0:
            axes.legend(fontsize=7)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, format=out.suffix[1:] or "png")
    write_file(out, drawn.getvalue())
    return True


def _draw_run(
    axes: Any, rows: Rows, *, name: str | None, eval_name: str | None, label: str, color: str
) -> None:
    steps, values = series(rows, name) if name else ([], [])
    if steps:
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
        axes.plot(steps, smooth(values, window=max(1, len(values) // 20)), color=color, label=label)
    steps, values = series(rows, eval_name) if eval_name else ([], [])
    if steps:
        style = dict(color=color, markersize=4, linewidth=0.8)
        axes.plot(steps, values, "o--", label=f"{label}, held out", **style)
