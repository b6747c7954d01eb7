"""Say where the time of a run's steps went: `python benchmarks/breakdown.py runs/demo/grpo`.

Means over the steps from --first on, of metrics.jsonl: rank 0's clock. `other` is the share of
wall time outside max(generate, update) and push.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro
from start import steps_of


@dataclass(frozen=True)
class Options:
    """What to read."""

    run: tyro.conf.Positional[Path]
    """Output folder of a run."""
    first: int = 10
    """First step that counts: those before it warm up."""


def main(options: Options) -> None:
    """Print one line for each phase and wait, longest first."""
    number, mean = steps_of((options.run / "metrics.jsonl").read_text(), first=options.first)
    print(f"{number} steps of {mean['perf/step_s']:.3f} s; other {mean['perf/other_frac']:.1%}")
    for name in sorted((n for n in mean if n.startswith("time/")), key=mean.get, reverse=True):
        print(f"  {name.removeprefix('time/'):24}{1e3 * mean[name]:9.1f} ms")


if __name__ == "__main__":
    main(tyro.cli(Options))
