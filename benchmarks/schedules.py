"""Compare schedules of generation on a long-tailed workload: sequences per second of each.

    python benchmarks/schedules.py --model runs/demo/warm

One trainer and one engine rank (torchrun is started for every schedule). Response lengths are
drawn from a lognormal distribution, cut at the limit, whatever the model would say: they are a
function of the sample alone, so all schedules do the same work, to the token; over-sampling alone
chooses among more samples, and its mean length must be within a twentieth. Both are asserted.
Rewards are a generated task's. The engine's steps and its rank's CPU seconds do not depend on other
work of the machine, or hardly.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from start import ROOT, as_flags, begin, header, in_ranks, row, steps_of

SCHEDULES: dict[str, dict[str, str]] = {
    "lag 0": {"lag": "0"},
    "lag 1": {"lag": "1"},
    "in-flight, lag 1": {"lag": "1", "rollout.schedule.in_flight": "true"},
    "in-flight, lag 1, cache kept": {
        "lag": "1",
        "rollout.schedule.in_flight": "true",
        "rollout.schedule.kv_cache": "keep",
    },
    "in-flight, lag 2": {"lag": "2", "rollout.schedule.in_flight": "true"},
    "in-flight, lag 2, cache kept": {
        "lag": "2",
        "rollout.schedule.in_flight": "true",
        "rollout.schedule.kv_cache": "keep",
    },
    "partial (over_sample 1.5), lag 0": {"lag": "0", "rollout.schedule.over_sample": "1.5"},
    "partial (over_sample 1.5), in-flight, lag 1": {
        "lag": "1",
        "rollout.schedule.over_sample": "1.5",
        "rollout.schedule.in_flight": "true",
    },
}


@dataclass(frozen=True)
class Workload:
    """What is sampled and trained on."""

    model: Path = Path("runs/demo/warm")
    """Folder of a small model, e.g. the demo's."""
    steps: int = 20
    first: int = 4
    """First step that counts: those before it warm up."""
    prompts: int = 32
    group_size: int = 4
    limit: int = 256
    """Longest response in tokens."""
    median: float = 32.0
    """Median length in tokens; the logarithm's standard deviation is 1."""

    def length(self, key: str) -> int:
        """Return how long the response of a sample (`train-STEP-SLOT-SAMPLE`) is to be, tokens."""
        drawn = random.Random(key).lognormvariate(math.log(self.median), 1.0)
        return max(1, min(int(drawn), self.limit))


@dataclass(frozen=True)
class Options(Workload):
    """What to run."""

    rounds: int = 2
    """Times to run every schedule; the best is reported."""
    only: str = ""
    """Part of a schedule's name, to run that alone."""


def main(options: Options) -> None:
    """Run all schedules, in turns, and print a table."""
    found: dict[str, list[dict]] = {name: [] for name in SCHEDULES if options.only in name}
    for _ in range(options.rounds):
        for name in found:
            found[name].append(measured(options, SCHEDULES[name]))
            last = found[name][-1]
            print(f"{name}: {last['sequences_per_s']:.1f} sequences/s", file=sys.stderr)
    check(options, found)
    best = {name: max(runs, key=lambda r: r["sequences_per_s"]) for name, runs in found.items()}
    base = best.get("lag 0", next(iter(best.values())))["sequences_per_s"]
    seconds = ("step_s", "generate_s", "update_s")
    header(
        "schedule",
        "sequences/s",
        "of lag 0",
        *(n.replace("_", " ") for n in seconds),
        "engine steps",
        "engine CPU s",
        "staleness",
        "length",
    )
    for name, own in best.items():
        rate = own["sequences_per_s"]
        row(
            name,
            f"{rate:.1f}",
            f"{rate / base:.2f}",
            *(f"{own[n]:.3f}" for n in seconds),
            f"{own['engine_steps']:.0f}",
            f"{own['engine_cpu_s']:.3f}",
            f"{own['staleness']:.2f}",
            f"{own['length']:.1f}",
        )


def check(options: Workload, found: dict[str, list[dict]]) -> None:
    """Raise AssertionError unless all schedules trained on as many tokens, see above."""
    lengths = [
        options.length(f"train-{step}-{slot}-{sample}")
        for step in range(options.first, options.steps)
        for slot in range(options.prompts)
        for sample in range(options.group_size)
    ]
    expected = statistics.fmean(lengths)
    for name, runs in found.items():
        tolerance = 0.05 if "over_sample" in str(SCHEDULES[name]) else 1e-6
        for own in runs:
            gap = abs(own["length"] / expected - 1)
            assert gap <= tolerance, f"{name}: mean length {own['length']}, expected {expected}"


def measured(options: Workload, flags: dict[str, str]) -> dict[str, float]:
    """Train by one schedule; return means over the steps from the first that counts.

    Args:
        flags: of the schedule, for train.py.
    """
    workload = {field.name: getattr(options, field.name) for field in dataclasses.fields(Workload)}
    workload |= {"model": str(options.model.resolve())}
    found = json.loads(in_ranks(2, __file__, workload, flags))
    _, mean = steps_of(found["metrics"], first=options.first)
    per_step = options.prompts * options.group_size
    return {
        "sequences_per_s": per_step / mean["perf/step_s"],
        "step_s": mean["perf/step_s"],
        "generate_s": mean["time/generate"],
        "update_s": mean["time/update"],
        "engine_steps": found["engine_steps"] / options.steps,
        "engine_cpu_s": found["engine_cpu_s"] / options.steps,
        "staleness": mean["policy/staleness"],
        "length": mean["rollout/response_length"],
    }


def work(folder: Path, workload: dict, flags: dict[str, str]) -> int:
    """Train as train.py does, with an engine whose responses have given lengths; the trainer writes
    the metrics, and what the engine took from its first step to its last."""
    import spmdrl.engine.vllm.engine as vllm_engine
    from spmdrl.engine.protocol import Request

    options = Workload(**workload)
    taken: list[float] = []  # CPU seconds of this process before each step of its engine

    class LongTailed(vllm_engine.VllmEngine):
        """Draws to a length of its own choice, and stops for nothing else."""

        def add(self, request: Request) -> None:
            """Ask for what is left of the response's own length."""
            key = request.key.split("@")[0]  # the same for every part of a response
            left = options.length(key) - (options.limit - request.max_tokens)
            super().add(dataclasses.replace(request, max_tokens=max(1, left), stop_token_ids=()))

        def step(self) -> list:
            """Count it."""
            taken.append(time.process_time())
            return super().step()

        def close(self) -> None:
            """Write down what was taken; the ranks wait for each other here."""
            if taken:
                own = {"engine_steps": len(taken), "engine_cpu_s": taken[-1] - taken[0]}
                (folder / "engine.json").write_text(json.dumps(own))
            super().close()

    vllm_engine.VllmEngine = LongTailed
    own = {
        "output-dir": folder,
        "model.path": options.model,
        "steps": options.steps,
        "sampling.max-response-tokens": options.limit,
        "batch.prompts-per-step": options.prompts,
        "batch.group-size": options.group_size,
        "engine.max-num-seqs": options.prompts * options.group_size,
        "evaluate.every-steps": 0,
        "checkpoint.every-steps": 0,
        "report.trackers": [],
        "optimizer.lr": "1e-6",
    }
    config = str(ROOT / "configs" / "demo_grpo.yaml")
    sys.argv = ["train.py", "--config", config, *as_flags(own | flags)]
    sys.path.insert(0, str(ROOT))
    import train

    status = train.main()
    if not taken:
        found = json.loads((folder / "engine.json").read_text())
        found["metrics"] = (folder / "metrics.jsonl").read_text()
        (folder / "found.json").write_text(json.dumps(found))
    return status


if __name__ == "__main__":
    begin(main, work, Options)
