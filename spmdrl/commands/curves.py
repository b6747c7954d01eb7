"""Draw the curves of one or more runs into one picture.

python -m spmdrl curves RUN [RUN ...] --out curves.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

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
    runs: dict[str, Rows] = {}
    for run in args.runs:
        path = run / "metrics.jsonl"
        if not path.exists():
            print(f"{path}: no such file; name the output_dir of a run", file=sys.stderr)
            return 2
        runs[run.name if run.name not in runs else str(run)] = read_rows(path)
    if not draw(runs, out=args.out):
        print("nothing to draw: the runs have no steps yet", file=sys.stderr)
        return 2
    print(f"wrote {args.out}")
    return 0
