"""Compare PPO's value model with a group's mean, at equal samples and updates, over seeds.

    python benchmarks/ppo.py            # makes runs/ppo/warm if it is not there
    python benchmarks/ppo.py --seeds 0 --rates 3.0e-5

Both train the same warm model on sums whose reward is the share of right digits. `ppo` is
configs/demo_ppo_digits.yaml; `grpo` is the same config with groups of 8 and their mean as the
baseline, so that a step has as many samples and updates, and no warm-up. Prints a Markdown table.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
import yaml
from start import ROOT, as_flags, header, row, torchrun

CONFIG = "configs/demo_ppo_digits.yaml"
RUNS = ROOT / "runs" / "ppo"
GROUP = 8
EXPLAINED = "value/explained_variance"


@dataclass(frozen=True)
class Options:
    """What to run."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the runs; the warm model is one."""
    rates: tuple[str, ...] = ()
    """Learning rates of the policy, for both; empty: the config's."""
    steps: int = 0
    """Of each run; 0: the config's."""


def warm_up() -> None:
    """Make the model that all start from."""
    spmdrl = [sys.executable, "-m", "spmdrl"]
    init = ["create_model", str(RUNS / "init"), "--initializer-std", "0.088"]
    subprocess.run([*spmdrl, *init], check=True, cwd=ROOT)
    torchrun(2, "train.py", "--config", "configs/demo_ppo_digits_sft.yaml", timeout_s=3600)
    export = ["export", str(RUNS / "sft"), "--out", str(RUNS / "warm")]
    subprocess.run([*spmdrl, *export], check=True, cwd=ROOT)


def flags_of(method: str) -> dict[str, object]:
    """Return what a method changes in the config."""
    if method == "ppo":
        return {}
    prompts = yaml.safe_load((ROOT / CONFIG).read_text())["batch"]["prompts_per_step"]
    return {
        "algorithm.advantage": "grpo",
        "algorithm.advantage-options": "{}",
        "batch.prompts-per-step": prompts // GROUP,
        "batch.group-size": GROUP,
    }


def train(method: str, *, seed: int, rate: str, steps: int) -> list[dict]:
    """Run one to its end and return the rows of its metrics."""
    folder = RUNS / f"{method}_{rate or 'config'}_{seed}"
    if folder.exists():
        sys.exit(f"{folder} exists; remove it to run it again")
    flags = flags_of(method) | {"seed": seed, "output-dir": folder, "report.trackers": []}
    flags |= {"optimizer.lr": rate} if rate else {}
    flags |= {"steps": steps} if steps else {}
    torchrun(2, "train.py", "--config", CONFIG, *as_flags(flags), timeout_s=3600)
    return list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))


def mean_of(rows: list[dict], name: str, *, steps: range) -> str:
    """Return the mean of a metric over some steps, or `-` without any."""
    found = [row[name] for row in rows if name in row and row["step"] in steps]
    return f"{statistics.fmean(found):.3f}" if found else "-"


def main(options: Options) -> None:
    """Run, and print as the runs end."""
    if not Path(RUNS / "warm").exists():
        warm_up()
    is_first = True
    for rate in options.rates or ("",):
        for seed in options.seeds:
            for method in ("ppo", "grpo"):
                rows = train(method, seed=seed, rate=rate, steps=options.steps)
                rewards = {r["step"]: r["eval/reward"] for r in rows if "eval/reward" in r}
                last = max(rewards)
                parts = [range(at, at + 10) for at in range(0, last, 10)]
                if is_first:
                    header(
                        "method", "lr", "seed", *rewards, *(f"explained {p[0]} on" for p in parts)
                    )
                    is_first = False
                cells = (f"{value:.3f}" for value in rewards.values())
                known = (mean_of(rows, EXPLAINED, steps=part) for part in parts)
                row(method, rate or "config", seed, *cells, *known)


if __name__ == "__main__":
    main(tyro.cli(Options))
