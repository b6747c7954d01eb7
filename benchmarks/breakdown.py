"""Say where the time of a run's steps went: `python benchmarks/breakdown.py runs/demo/grpo`.

Means over the steps from --first on, of metrics.jsonl: rank 0's clock. `other` is the share of
wall time outside max(generate, update) and push.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Options:
    """What to read."""

    run: tyro.conf.Positional[Path]
    """Output folder of a run."""
    first: int = 10
    """First step that counts: those before it warm up."""


def main(options: Options) -> None:
    """Print one line for each phase and wait, longest first."""
    lines = (options.run / "metrics.jsonl").read_text().splitlines()
    rows = [
        row
        for row in map(json.loads, lines)
        if "perf/step_s" in row and row["step"] >= options.first
    ]

    def mean(name: str) -> float:
        return statistics.fmean(row.get(name, 0.0) for row in rows)

    print(f"{len(rows)} steps of {mean('perf/step_s'):.3f} s; other {mean('perf/other_frac'):.1%}")
    names = {name for row in rows for name in row if name.startswith("time/")}
    for name in sorted(names, key=mean, reverse=True):
        print(f"  {name.removeprefix('time/'):24}{1e3 * mean(name):9.1f} ms")


if __name__ == "__main__":
    main(tyro.cli(Options))
