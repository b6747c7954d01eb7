"""Train the demo's warm model by several methods and tabulate the held-out reward.

    make demo                           # once: leaves runs/demo/warm
    python benchmarks/methods.py        # about a minute a method on two cores
    python benchmarks/methods.py --only gspo --only cispo --steps 150

Each method is the demo's GRPO config with other flags, in a run of its own under runs/methods.
Prints a Markdown table; draws the curves of all runs into runs/methods/curves.png.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from start import ROOT, as_flags, header, row, torchrun

METHODS: dict[str, dict[str, str]] = {
    "grpo": {},
    "dr_grpo": {
        "algorithm.advantage": "dr_grpo",
        "algorithm.aggregation": "seq_mean_token_sum_norm",
    },
    "rloo": {
        "algorithm.advantage": "rloo",
        "algorithm.loss": "reinforce",
        "algorithm.loss-options": "{}",
    },
    "reinforce_plus_plus": {
        "algorithm.advantage": "reinforce_plus_plus",
        "algorithm.kl": "k1",
        "algorithm.kl-in": "reward",
        "algorithm.kl-coef": "0.001",
    },
    "gspo": {
        "algorithm.loss": "gspo",
        "algorithm.aggregation": "seq_mean_token_mean",
        "algorithm.loss-options": "{clip_low: 3.0e-3, clip_high: 4.0e-3}",
        "batch.updates-per-step": "2",
    },
    "cispo": {
        "algorithm.loss": "cispo",
        "algorithm.loss-options": "{}",
        "batch.updates-per-step": "2",
    },
    # Clip-higher is the demo's own. Late in training few groups have a spread.
    "dapo": {
        "batch.updates-per-step": "2",
        "rewards.shaping.overlong_tokens": "2",
        "rollout.schedule.dynamic": "20",
    },
    "ppo": {"config": "demo_ppo.yaml"},
}


@dataclass(frozen=True)
class Options:
    """What to run."""

    warm: str = "runs/demo/warm"
    """Hugging Face folder that every method starts from."""
    steps: int = 75
    """Training steps of each method."""
    only: tuple[str, ...] = ()
    """Methods to run; empty means all."""


def train(name: str, options: Options, folder: Path) -> None:
    """Run one method to its end."""
    flags = dict(METHODS[name])
    config = flags.pop("config", "demo_grpo.yaml")
    flags |= {
        "model.path": options.warm,
        "output-dir": str(folder),
        "steps": str(options.steps),
        "checkpoint.resume": "never",
        "report.trackers": [],
    }
    torchrun(2, "train.py", "--config", f"configs/{config}", *as_flags(flags), timeout_s=3600)


def curve(folder: Path) -> dict[int, float]:
    """Return {steps done: held-out reward}."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["eval/reward"] for row in rows if "eval/reward" in row}


def main(options: Options) -> None:
    """Run, and print as the runs end."""
    folders = {name: ROOT / "runs" / "methods" / name for name in options.only or METHODS}
    for number, (name, folder) in enumerate(folders.items()):
        if folder.exists():
            sys.exit(f"{folder} exists; remove it to run {name} again")
        train(name, options, folder)
        rewards = curve(folder)
        if not number:
            header("method", *rewards)
        row(name, *(f"{v:.3f}" for v in rewards.values()))
    picture = str(ROOT / "runs" / "methods" / "curves.png")
    command = ["spmdrl", "curves", *map(str, folders.values()), "--out", picture]
    subprocess.run([sys.executable, "-m", *command], check=True, cwd=ROOT)


if __name__ == "__main__":
    main(tyro.cli(Options))
