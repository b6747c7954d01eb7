"""Draw the curves of one or more runs into one picture.

python -m spmdrl curves RUN [RUN ...] --out curves.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from spmdrl.errors import Refusal
from spmdrl.imports import attempt, refusing
from spmdrl.report.curves import Rows, draw
from spmdrl.report.jsonl import read_rows


def main(argv: list[str] | None = None) -> int:
    """Draw the runs named on the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m spmdrl curves", description=__doc__.splitlines()[0]
    )
    parser.add_argument("runs", nargs="+", type=Path, help="output_dir of a run")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("curves.png"),
        help="picture to write; .png, .svg or .pdf by its ending",
    )
    args = parser.parse_args(argv)
    _, error = attempt(lambda: _draw(args.runs, args.out))
    print(error or f"wrote {args.out}", file=sys.stderr if error else sys.stdout)
    return 2 if error else 0


def _draw(folders: list[Path], out: Path) -> None:
    runs: dict[str, Rows] = {}
    for run in folders:
        path = run / "metrics.jsonl"
        with refusing(f"{path} cannot be read", OSError, hint="; name the output_dir of a run"):
            runs[run.name if run.name not in runs else str(run)] = read_rows(path)
    # Of an ending that it does not know, matplotlib says which it does.
    with refusing(f"--out {out}: no picture can be written there", OSError, ValueError):
        has_any = draw(runs, out=out)
    if not has_any:
        raise Refusal("nothing to draw: the runs have no steps yet")
