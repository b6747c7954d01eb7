"""Runs in which time decides: rewards and answers that come late by chance, small models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers.built import small_model
from tests.helpers.runs import TINY, run

STEPS = 4
REWARDS = """
import pathlib, random, time
from spmdrl.environments.calculator import calculator
from spmdrl.environments.protocol import Turn, opening_messages

LATE = pathlib.Path(__file__).with_name("late")  # seconds, in a file: no field of the config

def wait():
    time.sleep(random.SystemRandom().random() * float(LATE.read_text()))

def varied(prompts, completions, **columns):
    wait()
    return [sum(map(ord, completion)) % 7 / 7 for completion in completions]

class Sums:
    \"\"\"Answers each turn by what a tool makes of it.\"\"\"

    def __init__(self):
        self.turns, self.total = 0, 0

    def reset(self, row):
        return opening_messages(row)

    def step(self, response):
        wait()
        self.turns += 1
        self.total = int(calculator(f"({self.total} + {sum(map(ord, response.text))}) % 97"))
        reply = [{"role": "user", "content": str(self.total)}]
        return Turn(messages=reply, reward=self.total / 97, is_done=self.turns == 3)
"""
ALL = TINY["rl"] | {
    "steps": STEPS,
    "engine.kind": "transformers",
    "data.eval-size": 8,
    "evaluate.every-steps": 2,
    "checkpoint.every-steps": 2,
    "checkpoint.keep.last": 9,
    "layout.trainer-ranks": 1,
    "batch.tokens-per-microbatch": 1024,
    "rewards.workers": 2,
    "rewards.timeout-s": 300.0,
    "sampling.max-response-tokens": 32,
    "rollout.record.every": 1,
}
IN_FLIGHT = {"lag": 2, "rollout.schedule.in-flight": "true", "rollout.schedule.balance": "even"}
OVER_SAMPLED = {"lag": 1, "rollout.schedule.over-sample": "1.5"}
TWO_RANKS = {"layout.trainer-ranks": 2, "layout.inference-tp": 2}
KINDS: dict[str, tuple[int, Mapping[str, Any]]] = {
    "in flight": (2, IN_FLIGHT),
    "over-sampled": (2, OVER_SAMPLED),
    "in flight, engine of two ranks": (4, IN_FLIGHT | TWO_RANKS),
    "stolen": (3, IN_FLIGHT | OVER_SAMPLED | {"lag": 2, "rollout.schedule.balance": "steal"}),
    # Each of its samples waits for several answers.
    "environment": (2, {"lag": 1, "batch.prompts-per-step": 4, "data.eval-size": 4}),
    "dynamic": (2, {"lag": 1, "rollout.schedule.dynamic": 30, "batch.group-size": 2}),
}
"""Of each kind its ranks and its flags."""


class TimedRuns:
    """Runs that share a model and rewards, which may come late.

    Args:
        folder: of all of them.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.model = small_model(
            folder / "model", hidden_size=64, heads=2, initializer_std=0.2, chat_template=True
        )
        (folder / "r.py").write_text(REWARDS)

    def flags(self, kind: str, name: str, **more: Any) -> dict[str, Any]:
        """Return the flags of a run, by its name."""
        own = ALL | KINDS[kind][1] | {"model.path": self.model, "output-dir": self.folder / name}
        if kind == "environment":
            own |= {"rollout.environment": f"{{name: '{self.folder}/r.py:Sums'}}"}
            own |= {"sampling.max-response-tokens": 64, "data.max-prompt-tokens": 40}
        return own | {"rewards.functions": f"{self.folder}/r.py:varied"} | more

    def run(self, kind: str, name: str, *, late_s: float, again: str = "", **more: Any) -> Path:
        """Run to the end; return its folder.

        Args:
            late_s: seconds by which answers come late at most.
            again: name of the run whose schedule is replayed.
        """
        self.be_late(late_s)
        if again:
            more |= {"rollout.replay-schedule": self.folder / again}
        out = self.folder / name
        run("demo_grpo.yaml", KINDS[kind][0], **self.flags(kind, name, **more))
        return out

    def be_late(self, seconds: float) -> None:
        """Have answers come late by chance, by so many seconds at most."""
        draft = self.folder / "late.draft"
        draft.write_text(str(seconds))
        draft.rename(self.folder / "late")


def back_to(out: Path, step: int) -> None:
    """Take away the checkpoints of a run after a step, as if it had been killed there."""
    for path in (out / "checkpoints").glob("step_*"):
        if int(path.name.partition("_")[2]) > step:
            shutil.rmtree(path)


def rollouts_of(out: Path) -> list[str]:
    """Return the recorded rollouts of a run, each sequence with all its columns as text."""
    import pyarrow.parquet as parquet

    paths = sorted((out / "rollouts").glob("*.parquet"))
    return [repr(row) for path in paths for row in parquet.read_table(path).to_pylist()]


def decisions_of(out: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's schedule, without seals and what says of what run they are."""
    rows = [
        json.loads(line)
        for path in sorted((out / "schedule").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    for row in rows:
        del row["sha256"]
    return [row for row in rows if "run" not in row]
