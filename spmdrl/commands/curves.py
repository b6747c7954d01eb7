"""Draw the curves of one or more runs into one chart.

python -m spmdrl curves RUN [RUN ...] --out curves.png
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro

from spmdrl.errors import Refusal
from spmdrl.imports import attempt, refusing
from spmdrl.report.curves import Rows, draw
from spmdrl.report.jsonl import read_rows

_OUT = Path("curves.png")


def curves(runs: Annotated[list[Path], tyro.conf.Positional], *, out: Path = _OUT) -> str:
    """Draw the curves of one or more runs into one chart.

    Args:
        runs: output_dir of each.
        out: chart to write; .png, .svg or .pdf by its ending.
    Returns: what is to be printed.
    Raises: Refusal for what cannot be read, drawn or written.
    """
    if not runs:
        raise Refusal("name the output_dir of at least one run")
    rows: dict[str, Rows] = {}
    for run in runs:
        path = run / "metrics.jsonl"
        with refusing(f"{path} cannot be read", OSError, hint="; name the output_dir of a run"):
            rows[run.name if run.name not in rows else str(run)] = read_rows(path)
    # Of an ending that it does not know, matplotlib says which it does.
    with refusing(f"--out {out}: no chart can be written there", OSError, ValueError):
        has_any = draw(rows, out=out)
    if not has_any:
        raise Refusal("nothing to draw: the runs have no steps yet")
    return f"wrote {out}"


def main(argv: list[str] | None = None) -> int:
    """Draw the runs named on the command line; return the exit status."""
    text, error = attempt(lambda: tyro.cli(curves, prog="python -m spmdrl curves", args=argv))
    print(error or text, file=sys.stderr if error else sys.stdout)
    return 2 if error else 0
