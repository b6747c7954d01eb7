"""Draw the curves of one or more runs into one chart, and forecast their held-out reward.

python -m spmdrl curves RUN [RUN ...] --out curves.png
python -m spmdrl curves RUN --metrics reward/mean my/longest
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.journal import read_rows
from spmdrl.report.curves import Rows, draw, metric_names
from spmdrl.report.forecast import forecast, held_out_points
from spmdrl.tools.commands import run_command

_OUT = Path("curves.png")


def curves(
    runs: Annotated[list[Path], tyro.conf.Positional],
    *,
    metrics: tuple[str, ...] = (),
    out: Path = _OUT,
) -> str:
    """Draw the curves of one or more runs into one chart.

    Args:
        runs: output_dir of each.
        metrics: one panel each, by its name in metrics.jsonl, e.g. reward/mean my/longest. By
            default reward, loss, length, KL, entropy and time, and all metrics named my/...
        out: chart to write; .png, .svg or .pdf by its ending.
    Returns: the text to print.
    Raises: Refusal for a run that cannot be read, an unknown metric, and a chart that cannot be
        written.
    """
    if not runs:
        raise Refusal("name the output_dir of at least one run")
    rows: dict[str, Rows] = {}
    for run in runs:
        path = run / "metrics.jsonl"
        with refusing(f"{path} cannot be read", OSError, hint="; name the output_dir of a run"):
            rows[run.name if run.name not in rows else str(run)] = read_rows(path)
    known = metric_names(rows)
    for name in metrics:
        if known and name not in known:
            near = get_close_matches(name, known, n=1)
            raise Refusal(
                f"--metrics {name}: no run has it"
                + (f"; did you mean {near[0]}?" if near else "")
                + f"; there are {', '.join(known)}"
            )
    # Of an ending that it does not know, matplotlib says which it does.
    with refusing(f"--out {out}: no chart can be written there", OSError, ValueError):
        has_any = draw(rows, out=out, metrics=metrics)
    if not has_any:
        raise Refusal("nothing to draw: the runs have no steps yet")
    lines = [f"wrote {out}"]
    for label, own in rows.items():
        points = held_out_points(own)
        if points:
            lines.append(f"{label}: {_forecast(points)}")
    return "\n".join(lines)


def _forecast(points: list[tuple[float, float]]) -> str:
    """Return what more steps would give, or why that cannot be said."""
    try:
        return forecast(points).sentence
    except Refusal as refusal:
        return str(refusal)


main = partial(run_command, "curves", curves)
