"""All schedules of schedules.py against TRL's GRPOTrainer, in turns in one run.

    make .venv/trl && make demo                 # TRL beside the environment; runs/demo/warm
    python benchmarks/duel.py                   # both parts, about an hour on two cores
    python benchmarks/duel.py --parts speed     # or: reward

- `speed`: sequences per second on the long-tailed workload. A round runs every schedule and every
  setting of TRL once, so that they share the machine's moods. Medians over the rounds, with the
  lowest and the highest; ratios are of the same round.
- `reward`: the demo's task, from the same weights, by the same method and learning rate. Held-out
  reward after as many samples, and after as many seconds of training.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import tyro
from schedules import SCHEDULES, Workload, measured
from schedules import check as check_lengths
from start import ROOT, as_flags, header, output_of, row, torchrun

TRL: dict[str, dict[str, int]] = {
    "TRL, 128 sequences per batch": {"ranks": 1, "sequences_per_device_batch": 128},
    "TRL, 32 sequences per batch": {"ranks": 1, "sequences_per_device_batch": 32},
    "TRL, two processes": {"ranks": 2, "sequences_per_device_batch": 64},
}
OURS = {
    "lag 0": {"lag": "0"},
    "lag 1": {"lag": "1"},
    "over_sample 1.5, in-flight, lag 1": SCHEDULES["partial (over_sample 1.5), in-flight, lag 1"],
}
"""Schedules whose reward is compared."""


@dataclass(frozen=True)
class Options(Workload):
    """What to run."""

    steps: int = 14
    """Of the part `speed`."""
    rounds: int = 3
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the part `reward`."""
    reward_steps: int = 100
    evaluate_every: int = 25
    lr: float = 1.5e-4
    parts: tuple[Literal["speed", "reward"], ...] = ("speed", "reward")
    trl: Path = Path(".venv/trl")
    """Folder with TRL's packages."""


@dataclass(frozen=True)
class Curve:
    """Held-out reward of one training run."""

    rewards: dict[int, float]  # {steps done: mean reward}
    seconds: dict[int, float]  # {steps done: seconds of training, evaluations left out}

    def after(self, seconds: float) -> float:
        """Return the reward after so many seconds, on the line between two evaluations; the last
        reward where training took less."""
        points = sorted(self.rewards)
        for before, steps in zip(points, points[1:]):
            start = self.seconds[before]
            end = self.seconds[steps]
            if start <= seconds < end:
                share = (seconds - start) / (end - start)
                return self.rewards[before] + share * (self.rewards[steps] - self.rewards[before])
        return self.rewards[points[-1]]


def trl(options: Options, *, ranks: int, **own: Any) -> dict[str, Any]:
    """Train with TRL; return what trl_grpo.py prints."""
    folder = (ROOT / options.trl).resolve()
    if not (folder / "trl").is_dir():
        sys.exit(f"{folder} has no TRL: run `make .venv/trl`")
    workload = {field.name: getattr(options, field.name) for field in dataclasses.fields(Workload)}
    words = as_flags({name.replace("_", "-"): value for name, value in (workload | own).items()})
    program = str(ROOT / "benchmarks" / "trl_grpo.py")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    paths = [str(folder), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    printed = output_of(
        [sys.executable, *(launcher if ranks > 1 else []), program, *words],
        timeout_s=1800,
        variables={"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
    )
    return json.loads(printed.strip().splitlines()[-1])


def trl_speed(options: Options, *, ranks: int, sequences_per_device_batch: int) -> dict[str, float]:
    """Return sequences/s and seconds of a step of TRL, means from the first step that counts."""
    found = trl(options, ranks=ranks, sequences_per_device_batch=sequences_per_device_batch)
    ends = found["ends"][options.first - 1 :]
    step_s = statistics.fmean(b - a for a, b in zip(ends, ends[1:]))
    return {"sequences_per_s": options.prompts * options.group_size / step_s, "step_s": step_s}


def speed(options: Options) -> None:
    """Run all contestants in turns, and print a table."""
    ours: dict[str, Callable[[], dict[str, float]]] = {
        name: lambda flags=flags: measured(options, flags) for name, flags in SCHEDULES.items()
    }
    theirs: dict[str, Callable[[], dict[str, float]]] = {
        name: lambda own=own: trl_speed(options, **own) for name, own in TRL.items()
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ours | theirs}
    for turn in range(options.rounds):
        for name, run in (ours | theirs).items():
            found[name].append(run())
            rate = found[name][-1]["sequences_per_s"]
            print(f"round {turn + 1}: {name}: {rate:.1f} sequences/s", file=sys.stderr, flush=True)
    check_lengths(options, {name: found[name] for name in ours})
    best = [
        max(found[name][turn]["sequences_per_s"] for name in theirs)
        for turn in range(options.rounds)
    ]
    header("", "sequences/s", "lowest to highest", "of TRL's best", "lowest to highest", "step s")
    for name, runs in found.items():
        rates = [run["sequences_per_s"] for run in runs]
        ratios = [rate / of for rate, of in zip(rates, best)]
        step_s = statistics.median(run["step_s"] for run in runs)
        row(name, *_spread(rates, ".1f"), *_spread(ratios, ".2f"), f"{step_s:.3f}")


def _spread(values: Sequence[float], form: str) -> tuple[str, str]:
    middle = f"{statistics.median(values):{form}}"
    return middle, f"{min(values):{form}} to {max(values):{form}}"


def our_curve(options: Options, flags: dict[str, str], *, seed: int) -> Curve:
    """Train the demo and return its curve."""
    with TemporaryDirectory() as folder:
        own = {
            "output-dir": Path(folder) / "run",
            "model.path": options.model.resolve(),
            "seed": seed,
            "steps": options.reward_steps,
            "optimizer.lr": options.lr,
            "evaluate.every-steps": options.evaluate_every,
            "checkpoint.every-steps": 0,
            "report.trackers": [],
        }
        words = ["--config", str(ROOT / "configs" / "demo_grpo.yaml"), *as_flags(own | flags)]
        torchrun(2, ROOT / "train.py", *words, timeout_s=1800)
        rows = [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").open()]
    rewards = {one["step"]: one["eval/reward"] for one in rows if "eval/reward" in one}
    # The time of an evaluation is in the row of the step before it.
    steps = [one for one in rows if "perf/step_s" in one]
    seconds = {0: 0.0}
    for one in steps:
        waited = one.get("time/evaluate", 0.0) + one.get("time/gather_evaluation", 0.0)
        seconds[one["step"] + 1] = seconds[one["step"]] + one["perf/step_s"] - waited
    return Curve(rewards, seconds)


def trl_curve(options: Options, *, seed: int) -> Curve:
    """Train with TRL on the demo's prompts and return its curve."""
    found = trl(
        options,
        ranks=1,
        lengths="own",
        sequences_per_device_batch=512,
        prompts=64,
        group_size=8,
        limit=8,
        steps=options.reward_steps,
        lr=options.lr,
        seed=seed,
        evaluate_every=options.evaluate_every,
    )
    seconds = {0: 0.0} | {i + 1: end for i, end in enumerate(found["ends"])}
    return Curve({int(steps): value for steps, value in found["rewards"].items()}, seconds)


def reward(options: Options) -> None:
    """Train with each of OURS and with TRL from each seed, and print two tables."""
    curves: dict[str, list[Curve]] = {name: [] for name in (*OURS, "TRL")}
    for seed in options.seeds:
        for name, flags in OURS.items():
            curves[name].append(our_curve(options, flags, seed=seed))
        curves["TRL"].append(trl_curve(options, seed=seed))
        for name, own in curves.items():
            print(f"seed {seed}: {name}: {own[-1].rewards}", file=sys.stderr, flush=True)
    marks = range(0, options.reward_steps + 1, options.evaluate_every)
    header("held-out reward after steps of 512 samples", *marks, "seconds")
    for name, own in curves.items():
        cells = [_mean([curve.rewards[steps] for curve in own]) for steps in marks]
        ends = statistics.fmean(curve.seconds[options.reward_steps] for curve in own)
        row(name, *cells, f"{ends:.0f}")
    print()
    shortest = min(c.seconds[options.reward_steps] for own in curves.values() for c in own)
    times = [shortest * share for share in (0.25, 0.5, 0.75, 1.0)]
    header("held-out reward after seconds of training", *(f"{s:.0f}" for s in times))
    for name, own in curves.items():
        row(name, *(_mean([curve.after(s) for curve in own]) for s in times))


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    options = tyro.cli(Options)
    for name in options.parts:
        {"speed": speed, "reward": reward}[name](options)
