"""Measure what the timeline costs a rank, for each span and for each step.

    python benchmarks/timeline.py
    python benchmarks/timeline.py --spans 40 --step-s 0.48

Spans are taken as the loop takes them: by `Watch.phase`, and by the same without the recorder.
Each step ends with the line that it writes. Prints the processor time of this thread, as medians of
the rounds. `--step-s` is the step to compare with: by default that of the demo (demo.md).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from spmdrl.report.timeline_writer import TimelineWriter
from spmdrl.world.lost_peers.watch import Watch


@dataclass(frozen=True)
class Options:
    """What to measure."""

    spans: int = 12
    """Spans of a step; the demo's trainer has 9 to 14, its engine's rank 8 to 13."""
    steps: int = 200
    """Steps of a round."""
    rounds: int = 9
    step_s: float = 0.48


class NoSpans:
    """A recorder that keeps nothing."""

    def add(self, name: str, began: float, ended: float) -> None:
        """Do nothing."""


def spans_s(watch: Watch, options: Options) -> float:
    """Return the processor seconds of one span."""
    began = time.thread_time()
    for _ in range(options.steps * options.spans):
        with watch.phase("update", 0):
            pass
    return (time.thread_time() - began) / (options.steps * options.spans)


def lines_s(writer: TimelineWriter, watch: Watch, options: Options) -> float:
    """Return the processor seconds of the line of one step."""
    total = 0.0
    for step in range(options.steps):
        for _ in range(options.spans):
            watch.spans.add("await rollouts", time.monotonic(), time.monotonic())
        began = time.thread_time()
        writer.write(step)
        total += time.thread_time() - began
    return total / options.steps


def main(options: Options) -> None:
    """Measure and print."""
    watch = Watch(dist.HashStore(), rank=0, world_size=1024, timeout_s=1000)  # few heartbeats
    recorder: Any = watch.spans
    rows: dict[str, list[float]] = {"span without": [], "span": [], "line": []}
    with tempfile.TemporaryDirectory() as name:
        attempt = Path(name) / "logs" / "attempt_1"
        world: Any = SimpleNamespace(
            rank=0, world_size=1, replica=-1, watch=watch, gather=lambda own, wait: [own]
        )
        writer = TimelineWriter(world, Path(name), attempt_folder=attempt)
        for _ in range(options.rounds):
            watch.spans = recorder
            rows["span"].append(spans_s(watch, options))
            recorder.take()
            rows["line"].append(lines_s(writer, watch, options))
            watch.spans = NoSpans()
            rows["span without"].append(spans_s(watch, options))
        size = (Path(name) / "timeline" / "rank_0.jsonl").stat().st_size
    watch.close()
    medians = {what: statistics.median(found) for what, found in rows.items()}
    own = options.spans * (medians["span"] - medians["span without"]) + medians["line"]
    for what, seconds in medians.items():
        print(f"{what:14} {1e6 * seconds:8.2f} us")
    print(f"{'bytes':14} {size / options.steps / options.rounds:8.0f} a step")
    print(
        f"a step of {options.spans} spans: {1e6 * own:.0f} us, {own / options.step_s:.4%} of "
        f"{options.step_s} s"
    )


if __name__ == "__main__":
    main(tyro.cli(Options))
