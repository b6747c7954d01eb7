"""Show on two CPU cores what is particular to the methods of configs/recipes/: a twin of each.

    python -m benchmarks.recipes                     # some ten minutes on two cores
    python -m benchmarks.recipes --only dapo gspo    # and what these are compared with

A twin trains a model of 0.67 M parameters on two-digit sums by the method of its recipe. Its
figures are compared with those of another run that differs in the method alone. Models and runs are
under runs/recipes; a run that is there already is not repeated. Prints a Markdown table and draws
curves.png.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.start import ROOT, as_flags, header, row, torchrun
from spmdrl.data.tasks import make_task

FOLDER = ROOT / "runs" / "recipes"
_LAST = 10
"""Steps at the end of a run whose mean is shown."""

Flags = dict[str, object]

ALONE: Flags = {
    "layout.placement": "colocated",
    "layout.world-size": 1,
    "engine.kind": "transformers",
    "lag": 0,
}
"""One rank that trains and generates in turns."""
SUMS: Flags = {
    **ALONE,
    "model.path": FOLDER / "warm",
    "steps": 40,
    "batch.prompts-per-step": 32,
    "batch.updates-per-step": 4,
    "algorithm.loss-options": "{clip_low: 0.2, clip_high: 0.2}",
    "evaluate.every-steps": 0,
    "checkpoint.every-steps": 0,
}
DOTS: Flags = {
    **SUMS,
    "model.path": FOLDER / "dots",
    "data.eval": "",
    "sampling.max-response-tokens": 40,
    "rewards.functions": "benchmarks/dotted.py:after_dots",
    "batch.updates-per-step": 1,
}
PROGRAMS: Flags = {
    **ALONE,
    "model.path": FOLDER / "programs",
    "steps": 30,
    "data.train": FOLDER / "programs.jsonl",
    "data.eval": "",
    "data.task-options": "{}",
    "data.size": 0,
    "batch.prompts-per-step": 8,
    "batch.group-size": 8,
    "sampling.max-response-tokens": 48,
    "rewards.functions": "configs/recipes/rewards.py:fenced_program",
    "rewards.timeout-s": 30,
    "evaluate.every-steps": 0,
    "checkpoint.every-steps": 0,
}
SCORED: Flags = {
    **ALONE,
    "model.path": FOLDER / "warm",
    "critic.path": FOLDER / "scorer",
    "rewards.functions": f"[model:{FOLDER / 'scorer'}, task:addition]",
    "rewards.weights": "[1, 0]",  # the second, what is true, is only measured
    "steps": 60,
    "batch.prompts-per-step": 128,
    "batch.group-size": 1,
    "algorithm.kl": "k1",
    "algorithm.kl-in": "reward",
    "algorithm.kl-coef": 0.3,
    "evaluate.every-steps": 0,
}


@dataclass(frozen=True)
class TwinRun:
    """One run of train.py."""

    flags: Flags
    config: str = "demo_grpo.yaml"
    ranks: int = 1


RUNS: dict[str, TwinRun] = {
    "grpo": TwinRun(SUMS),
    "dapo": TwinRun(
        {
            **SUMS,
            "algorithm.loss-options": "{clip_low: 0.2, clip_high: 0.28}",
            "rollout.schedule.dynamic": 20,
            "rewards.shaping.overlong-tokens": 2,
        }
    ),
    "gspo": TwinRun(
        {
            **SUMS,
            "algorithm.loss": "gspo",
            "algorithm.loss-options": "{clip_low: 3.0e-3, clip_high: 4.0e-3}",
            "algorithm.aggregation": "seq_mean_token_mean",
        }
    ),
    "lora": TwinRun({**SUMS, "model.lora.rank": 16, "optimizer.lr": 1.5e-3}),
    "grpo_dots": TwinRun({**DOTS, "algorithm.aggregation": "seq_mean_token_mean"}),
    "dr_grpo_dots": TwinRun(
        {
            **DOTS,
            "algorithm.advantage": "dr_grpo",
            "algorithm.aggregation": "seq_mean_token_sum_norm",
        }
    ),
    "async_dots": TwinRun(
        {
            **DOTS,
            "layout.placement": "split",
            "layout.world-size": 2,
            "engine.kind": "vllm",
            "lag": 2,
            "rollout.schedule.in-flight": "true",
            "rollout.schedule.kv-cache": "keep",
            "algorithm.loss": "decoupled_ppo",
            "algorithm.correction": "none",
        },
        ranks=2,
    ),
    "ppo": TwinRun(
        {
            **ALONE,
            "model.path": FOLDER / "warm",
            "steps": 25,
            "batch.prompts-per-step": 128,
            "evaluate.every-steps": 0,
        },
        config="demo_ppo_digits.yaml",
    ),
    "ppo_reward_model": TwinRun(SCORED, config="demo_ppo.yaml"),
    "ppo_reward_model_no_kl": TwinRun({**SCORED, "algorithm.kl-coef": 0}, config="demo_ppo.yaml"),
    "code": TwinRun(PROGRAMS),
    "dpo": TwinRun(
        {"layout.world-size": 1, "model.path": FOLDER / "warm", "steps": 60}, config="demo_dpo.yaml"
    ),
    "distill": TwinRun(
        {
            **SUMS,
            "steps": 30,
            "model.teacher": FOLDER / "teacher",
            "algorithm.objective": "on_policy_distill",
            "algorithm.loss": "divergence",
            "algorithm.loss-options": "{kind: reverse}",
            "batch.updates-per-step": 1,
            "optimizer.lr": 5e-4,
        }
    ),
}


@dataclass(frozen=True)
class Twin:
    """What the run of a recipe shows."""

    run: str
    metrics: tuple[str, ...]
    against: str = ""
    """The run that has another method; empty where the run's own first steps say it."""


TWINS: dict[str, Twin] = {
    "dapo": Twin(
        "dapo",
        (
            "reward/zero_spread_groups_frac",
            "reward/std",
            "rollout/dropped_groups",
            "policy/entropy",
        ),
        against="grpo",
    ),
    "dr_grpo": Twin(
        "dr_grpo_dots", ("reward/wrong_length/mean", "reward/mean"), against="grpo_dots"
    ),
    "gspo": Twin("gspo", ("policy/clip_frac", "reward/mean"), against="grpo"),
    "ppo": Twin("ppo", ("value/explained_variance", "reward/mean")),
    "ppo_reward_model": Twin(
        "ppo_reward_model",
        ("reward/scorer/mean", "reward/addition/mean", "policy/kl_ref", "value/explained_variance"),
        against="ppo_reward_model_no_kl",
    ),
    "code": Twin(
        "code", ("reward/fenced_program/mean", "reward/timed_out/mean", "time/engine_idle_reward")
    ),
    "async": Twin(
        "async_dots",
        ("policy/carried_frac", "policy/staleness", "reward/mean"),
        against="dr_grpo_dots",
    ),
    "lora": Twin("lora", ("reward/mean",), against="grpo"),
    "dpo": Twin("dpo", ("preference/accuracy", "preference/margin", "policy/loss")),
    "distill": Twin("distill", ("policy/distill", "reward/mean")),
}
"""{first part of a recipe's name: its twin}. The others have figures elsewhere, see
results/recipes.md."""


@dataclass(frozen=True)
class Options:
    """What to run."""

    only: tuple[str, ...] = ()
    """Twins; empty means all."""
    steps: int = 0
    """Of each run; 0 means its own number."""
    seed: int = 0
    """Of the runs; the models that they begin with have seed 0."""


def spmdrl(command: str, *words: object) -> None:
    """Run a command of the package."""
    line = [sys.executable, "-m", "spmdrl", command, *map(str, words)]
    subprocess.run(line, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def imitate(name: str, start: str, flags: Flags) -> None:
    """Train a model on demonstrations and export it."""
    own = {
        "layout.world-size": 1,
        "model.path": FOLDER / start,
        "output-dir": FOLDER / f"{name}_run",
        "report.trackers": "[]",
        **flags,
    }
    torchrun(1, "train.py", "--config", "configs/demo_sft.yaml", *as_flags(own), timeout_s=3600)
    spmdrl("export", FOLDER / f"{name}_run", "--out", FOLDER / name)


def make_init() -> None:
    """Make the model of random weights that all begin with."""
    spmdrl("create_model", FOLDER / "init", "--initializer-std", "0.088")


def make_warm() -> None:
    """Teach sums, 60% of which are too high by one."""
    imitate("warm", "init", {})


def imitate_rows(name: str, rows: list[dict], *, max_tokens: int) -> None:
    """Train the model of random weights on rows of demonstrations."""
    file = FOLDER / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags: Flags = {
        "data.train": file,
        "data.task-options": "{}",
        "data.size": 0,
        "sampling.max-response-tokens": max_tokens,
    }
    imitate(name, "init", flags)


def make_dots() -> None:
    """Teach the same sums after up to twelve dots, which say nothing."""
    task = make_task("task:addition", {"digits": 2, "mistakes": 0.6})
    draw = random.Random(0)
    rows = []
    for index in range(40000):
        one = task.row(0, index, split="train")
        text = "." * draw.randrange(13) + one.get("completion", one["answer"])
        rows.append({"prompt": one["prompt"], "completion": text})
    imitate_rows("dots", rows, max_tokens=24)


def make_programs() -> None:
    """Teach programs that compute a * x + b; 60% of them have another a or b."""
    draw = random.Random(0)
    rows = []
    for _ in range(40000):
        a, b = (draw.randrange(10, 100) for _ in range(2))
        tests = {"inputs": ["0\n", "1\n", "7\n"], "outputs": [f"{a * x + b}\n" for x in (0, 1, 7)]}
        wrong = [draw.randrange(10, 100) if draw.random() < 0.37 else right for right in (a, b)]
        text = f"```\nx=int(input())\nprint({wrong[0]}*x+{wrong[1]})\n```"
        rows.append({"prompt": f"{a}*x+{b}\n", "completion": text, "answer": json.dumps(tests)})
    imitate_rows("programs", rows, max_tokens=48)


def make_teacher() -> None:
    """Teach right sums alone, from the warm model on."""
    flags: Flags = {"data.task-options": "{digits: 2}", "steps": 100, "optimizer.lr": 5e-4}
    imitate("teacher", "warm", flags)


def make_scorer() -> None:
    """Teach a reward model to tell right sums from wrong ones."""
    folder = FOLDER / "scorer_run"
    flags: Flags = {
        "layout.world-size": 1,
        "model.path": FOLDER / "warm",
        "output-dir": folder,
        "report.trackers": "[]",
        "steps": 300,
    }
    words = ("--config", "configs/demo_reward_model.yaml", *as_flags(flags))
    torchrun(1, "train.py", *words, timeout_s=3600)
    spmdrl("export", folder, "--out", FOLDER / "scorer")


MODELS: dict[str, Callable[[], None]] = {
    "init": make_init,
    "warm": make_warm,
    "dots": make_dots,
    "teacher": make_teacher,
    "programs": make_programs,
    "scorer": make_scorer,
}
"""Models by their names, each after those that it begins with."""


def folder_of(name: str, *, seed: int) -> Path:
    """Return the output_dir of a run."""
    return FOLDER / (f"{name}_seed{seed}" if seed else name)


def train(name: str, *, steps: int, seed: int) -> None:
    """Run one to its end."""
    own = RUNS[name]
    folder = folder_of(name, seed=seed)
    flags = {**own.flags, "output-dir": folder, "seed": seed, "report.trackers": "[]"}
    if steps:
        flags["steps"] = steps
    words = ("--config", f"configs/{own.config}", *as_flags(flags))
    torchrun(own.ranks, "train.py", *words, timeout_s=3600)


def rows_of(folder: Path) -> list[dict]:
    """Return the metrics of a run's steps."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if "perf/step_s" in one]


def mean_of(rows: list[dict], metric: str) -> str:
    """Return the mean of a metric, or `-` where no row has it."""
    found = [one[metric] for one in rows if metric in one]
    return f"{statistics.fmean(found):.3f}" if found else "-"


def show(name: str, twin: Twin, *, seed: int) -> None:
    """Print the rows of a twin."""
    for run in filter(None, (twin.run, twin.against)):
        rows = rows_of(folder_of(run, seed=seed))
        seconds = sum(one["perf/step_s"] for one in rows)
        for metric in twin.metrics:
            first = mean_of(rows[:_LAST], metric)
            last = mean_of(rows[-_LAST:], metric)
            row(name, run, f"`{metric}`", first, last, len(rows), f"{seconds:.0f}")


def main(options: Options) -> None:
    """Run, and print at the end."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    seed = options.seed
    chosen = {name: TWINS[name] for name in options.only or TWINS}
    both = [run for twin in chosen.values() for run in (twin.run, twin.against)]
    runs = [run for run in dict.fromkeys(both) if run]
    needed = {str(value) for run in runs for value in RUNS[run].flags.values()}
    needed |= {str(FOLDER / name) for name in ("init", "warm")}
    for name, make in MODELS.items():
        if str(FOLDER / name) in needed and not (FOLDER / name).exists():
            make()
    for run in runs:
        if not (folder_of(run, seed=seed) / "metrics.jsonl").exists():
            print(run, file=sys.stderr)
            train(run, steps=options.steps, seed=seed)
    header("twin", "run", "metric", f"first {_LAST} steps", f"last {_LAST}", "steps", "seconds")
    for name, twin in chosen.items():
        show(name, twin, seed=seed)
    folders = [folder_of(run, seed=seed) for run in runs]
    spmdrl("curves", *folders, "--out", folder_of("curves", seed=seed).with_suffix(".png"))


if __name__ == "__main__":
    main(tyro.cli(Options))
