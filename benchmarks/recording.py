"""Measure what a run's recording of itself costs, switched on and off by turns in one run.

    python benchmarks/recording.py
    python benchmarks/recording.py --steps 64 --engine transformers

One run of configs/demo_grpo.yaml on a model of its shape, two ranks: every other step is certified
and its rollouts are recorded, and every eighth step's line has norms too. Prints what the steps of
each kind took, by the clock and of the processors (trainer + engine), what of it the recording's
own calls took, and the bytes that they left (certificate + rollouts). The machine may be shared:
processor time says more than the clock then.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.start import ROOT, as_flags, begin, conditions, header, in_ranks, row

NORMS_EVERY = 8
_FIRST = 4  # steps before it warm up


@dataclass(frozen=True)
class Options:
    """What to run."""

    steps: int = 48
    engine: Literal["vllm", "transformers"] = "vllm"


class Timed:
    """Adds up what some methods take, step after step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self._own: dict[str, float] = defaultdict(float)
        self._last = time.process_time()

    def wrap(self, owner: Any, name: str, *, label: str, ends_step: bool = False) -> None:
        """Have a method's calls timed, by this thread's processor time; after one that ends a step
        keep what the step took of the process."""
        call: Callable = getattr(owner, name)

        @functools.wraps(call)
        def timed(*args: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **options)
            finally:
                self._own[label] += time.thread_time() - began
                if ends_step:
                    now = time.process_time()
                    self.rows.append({**self._own, "processor": now - self._last})
                    self._own.clear()
                    self._last = now

        setattr(owner, name, timed)


def work(folder: Path, flags: list[str]) -> int:
    """Run train.py on this rank, and leave what its steps took."""
    from spmdrl.certificate.fingerprint_collector import FingerprintCollector
    from spmdrl.certificate.writer import Certificate
    from spmdrl.rollout.recorder import Recorder

    timed, rank = Timed(), os.environ["RANK"]
    timed.wrap(FingerprintCollector, "_add_update", label="update")
    timed.wrap(Recorder, "record", label="rollouts")
    timed.wrap(Certificate, "add", label="line", ends_step=True)
    sys.argv = ["train.py", *flags, "--output-dir", str(folder / "run")]
    train = runpy.run_path(str(ROOT / "train.py"))
    status: int = train["main"]()
    (folder / f"rank_{rank}.json").write_text(json.dumps(timed.rows))
    if rank == "0":
        (folder / "found.json").write_text(json.dumps(_left(folder / "run")))
    return status


def _left(run: Path) -> dict[str, Any]:
    """Return seconds and bytes of each step that a run left."""
    metrics = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    lines = [json.loads(line) for line in (run / "certificate.jsonl").read_text().splitlines()]
    recorded = sorted((run / "rollouts").glob("step_*.parquet"))
    last = time.monotonic() + 60
    other = run.parent / "rank_1.json"
    while not other.exists() or not other.read_text():
        assert time.monotonic() < last, "rank 1 left nothing"
        time.sleep(0.05)
    return {
        "seconds": {r["step"]: r["perf/step_s"] for r in metrics if "perf/step_s" in r},
        "line_bytes": {
            line["step"]: len(json.dumps(line)) + 1 for line in lines if "made_of" not in line
        },
        "rollout_bytes": {int(path.name[5:11]): path.stat().st_size for path in recorded},
        "ranks": [json.loads((run.parent / f"rank_{i}.json").read_text()) for i in (0, 1)],
    }


def main(options: Options) -> None:
    """Run, print."""
    from spmdrl.tools.commands.create_model import create_model

    folder = Path("runs/recording_benchmark")
    model = folder / "model"
    if not model.exists():
        create_model(model, initializer_std=0.088, seed=0)
    fields: dict[str, object] = {
        "config": ROOT / "configs" / "demo_grpo.yaml",
        "model.path": model.resolve(),
        "engine.kind": options.engine,
        "steps": options.steps,
        "report.trackers": [],
        "report.certificate": 2,
        "report.certificate-norms": NORMS_EVERY,
        "rollout.record.every": 2,
        "evaluate.every-steps": 0,
        "checkpoint.every-steps": 0,
    }
    found = json.loads(in_ranks(2, __file__, as_flags(fields)))
    steps = range(_FIRST, options.steps - 1)  # the last one is certified whatever it is
    kinds = {
        "off": [s for s in steps if s % 2],
        "on": [s for s in steps if s % 2 == 0 and s % NORMS_EVERY],
        "on, with norms": [s for s in steps if s % NORMS_EVERY == 0],
    }
    header("steps", "number", "s", "CPU s", "update ms", "line ms", "rollouts ms", "bytes")
    own = {kind: _row(kind, some, found) for kind, some in kinds.items()}
    conditions(**own)


def _row(kind: str, steps: list[int], found: dict[str, Any]) -> dict[str, float]:
    trainer, engine = found["ranks"]

    def median(values: list[float]) -> float:
        return statistics.median(values)

    def own(rank: list[dict[str, float]], label: str, *, ahead: int = 0) -> float:
        return median([1e3 * rank[step - ahead].get(label, 0.0) for step in steps])

    def processor(rank: list[dict[str, float]]) -> float:
        return median([rank[step]["processor"] for step in steps])

    numbers = {
        "seconds": median([found["seconds"][str(step)] for step in steps]),
        "trainer_s": processor(trainer),
        "engine_s": processor(engine),
        "update_ms": own(trainer, "update"),
        "line_ms": own(trainer, "line"),
        "rollouts_ms": own(engine, "rollouts", ahead=1),  # lag 1: sampled beside the step before
        "line_bytes": median([found["line_bytes"].get(str(step), 0) for step in steps]),
        "rollout_bytes": median([found["rollout_bytes"].get(str(step), 0) for step in steps]),
    }
    row(
        kind,
        len(steps),
        f"{numbers['seconds']:.3f}",
        f"{numbers['trainer_s']:.3f} + {numbers['engine_s']:.3f}",
        f"{numbers['update_ms']:.1f}",
        f"{numbers['line_ms']:.1f}",
        f"{numbers['rollouts_ms']:.1f}",
        f"{numbers['line_bytes']:.0f} + {numbers['rollout_bytes']:.0f}",
    )
    return numbers


if __name__ == "__main__":
    begin(main, work, Options)
