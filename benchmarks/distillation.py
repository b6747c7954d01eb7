"""Distil a small model in several ways, and tabulate the held-out reward.

    python benchmarks/distillation.py                  # about a minute a run on two cores
    python benchmarks/distillation.py --only hint_policy --steps 40

Makes a student that adds and subtracts badly (six in ten of its demonstrations are one too high),
and that copies an answer which its prompt begins with. Two teachers, one of sums and one of
differences, are trained from it. Then each run distils on the student's own samples. Prints a
Markdown table; all files are under runs/distillation.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from start import ROOT, as_flags, header, row, torchrun

from spmdrl.config.data import Split
from spmdrl.data.tasks import make_task

FOLDER = ROOT / "runs" / "distillation"
KINDS = {"sums": "+", "differences": "-"}
MISTAKES = 0.6


@dataclass(frozen=True)
class Options:
    """What to run."""

    steps: int = 40
    """Training steps of each run."""
    only: tuple[str, ...] = ()
    """Runs; empty means all."""
    seed: int = 0


def problems(kind: str, count: int, *, split: Split, seed: int) -> list[dict[str, Any]]:
    """Return problems of one kind."""
    task = make_task("task:addition", {"digits": 2, "subtraction": True})
    found: list[dict[str, Any]] = []
    index = 0
    while len(found) < count:
        one = task.row(seed, index, split=split)
        index += 1
        if KINDS[kind] in one["prompt"]:
            found.append({"prompt": one["prompt"], "answer": one["answer"]})
    return found


def write(name: str, rows: list[dict[str, Any]]) -> str:
    """Write rows to a file and return its path."""
    file = FOLDER / f"{name}.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(file)


def careless(rows: list[dict[str, Any]], draw: random.Random) -> list[dict[str, Any]]:
    """Return demonstrations, of which a share is one too high."""
    found = []
    for one in rows:
        wrong = draw.random() < MISTAKES
        found.append({**one, "completion": str(int(one["answer"]) + wrong)})
    return found


def hinted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return right demonstrations whose prompts begin with the answer."""
    return [
        {"prompt": f"{one['answer']};{one['prompt']}", "completion": one["answer"]} for one in rows
    ]


def prepare(options: Options) -> None:
    """Make the rows, the student and the teachers."""
    FOLDER.mkdir(parents=True)
    draw = random.Random(options.seed)
    demonstrations = []
    for kind in KINDS:
        write(f"{kind}_held_out", problems(kind, 256, split="eval", seed=0))
        rows = problems(kind, 20000, split="train", seed=options.seed)
        write(kind, rows)
        write(f"{kind}_right", [{**one, "completion": one["answer"]} for one in rows])
        demonstrations += careless(rows, draw) + hinted(rows)
    draw.shuffle(demonstrations)
    write("demonstrations", demonstrations)
    spmdrl("create_model", FOLDER / "init", "--initializer-std", "0.088")
    imitate("student", FOLDER / "init", "demonstrations", steps=300)
    for kind in KINDS:
        imitate(f"teacher_{kind}", FOLDER / "student", f"{kind}_right", steps=150)
    pad(FOLDER / "teacher_sums", FOLDER / "teacher_padded", by=64)


def spmdrl(command: str, *words: object) -> None:
    """Run a command of the package."""
    line = [sys.executable, "-m", "spmdrl", command, *map(str, words)]
    subprocess.run(line, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def imitate(name: str, start: Path, rows: str, *, steps: int) -> None:
    """Train a model on demonstrations."""
    flags = {
        "model.path": start,
        "data.train": FOLDER / f"{rows}.jsonl",
        "data.task-options": "{}",
        "data.size": 0,
        "output-dir": FOLDER / f"{name}_run",
        "steps": steps,
        "optimizer.lr": 2e-3 if rows == "demonstrations" else 5e-4,
        "report.trackers": [],
    }
    config = ("--config", "configs/demo_sft.yaml")
    torchrun(2, "train.py", *config, *as_flags(flags), timeout_s=3600)
    spmdrl("export", FOLDER / f"{name}_run", "--out", FOLDER / name)


def pad(folder: Path, where: Path, *, by: int) -> None:
    """Write a model with more rows of its vocabulary, which no token has."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    rows = model.get_input_embeddings().weight.shape[0] + by
    model.resize_token_embeddings(rows, mean_resizing=False)
    model.save_pretrained(where)
    AutoTokenizer.from_pretrained(folder).save_pretrained(where)


def sources(**teachers: str) -> str:
    """Return data.train with a source of each kind, and its teacher where one is given."""
    found = []
    for kind in KINDS:
        own = f", teacher: {FOLDER / teachers[kind]}" if kind in teachers else ""
        found.append(f"{{path: {FOLDER / kind}.jsonl, name: {kind}{own}}}")
    return f"[{', '.join(found)}]"


HINT = {
    "data.teacher-prompt": "{answer};{prompt}",
    "data.max-teacher-prompt-tokens": 32,
    "data.train": sources(),
}
SUMS = {"data.train": FOLDER / "sums.jsonl"}
AVERAGED = {"model.reference.sync-every": 1, "model.reference.sync-mix": 0.1}
RUNS: dict[str, dict[str, object]] = {
    "hint_policy": HINT | {"model.teacher": "policy"},
    "hint_frozen": HINT | {"model.teacher": "reference"},
    "hint_averaged": HINT | {"model.teacher": "reference"} | AVERAGED,
    "two_teachers": {"data.train": sources(sums="teacher_sums", differences="teacher_differences")},
    "one_teacher": {"data.train": sources(), "model.teacher": FOLDER / "teacher_sums"},
    "sums": SUMS | {"model.teacher": FOLDER / "teacher_sums"},
    "sums_padded": SUMS | {"model.teacher": FOLDER / "teacher_padded"},
    "sums_top_p": SUMS | {"model.teacher": FOLDER / "teacher_sums", "sampling.top-p": 0.9},
}


def distil(name: str, options: Options) -> dict[int, dict[str, float]]:
    """Run one method and return {steps done: metrics of the evaluation}."""
    folder = FOLDER / name
    held_out = ", ".join(
        f"{{path: {FOLDER / kind}_held_out.jsonl, name: {kind}}}" for kind in KINDS
    )
    flags = {
        "model.path": FOLDER / "student",
        "output-dir": folder,
        "steps": options.steps,
        "seed": options.seed,
        "algorithm.objective": "on_policy_distill",
        "algorithm.loss": "divergence",
        "algorithm.loss-options": "{kind: forward}",
        "algorithm.correction": "tis",
        "batch.group-size": 4,
        "data.eval": f"[{held_out}]",
        "data.task-options": "{}",
        "data.size": 0,
        "rewards.functions": "[spmdrl.rewards.graders:exact]",
        "evaluate.every-steps": options.steps // 4,
        "checkpoint.every-steps": 0,
        "optimizer.lr": 5e-4,
        "report.trackers": [],
        **RUNS[name],
    }
    config = ("--config", "configs/demo_grpo.yaml")
    torchrun(2, "train.py", *config, *as_flags(flags), timeout_s=3600)
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {one["step"]: one for one in rows if "eval/reward" in one}


def main(options: Options) -> None:
    """Run, and print as the runs end."""
    if not FOLDER.exists():
        prepare(options)
    for number, name in enumerate(options.only or RUNS):
        if (FOLDER / name).exists():
            sys.exit(f"{FOLDER / name} exists; remove it to run {name} again")
        found = distil(name, options)
        if not number:
            header("run", "held out", *found)
        for kind in KINDS:
            rewards = [one[f"eval/{kind}/reward"] for one in found.values()]
            row(name, kind, *(f"{reward:.3f}" for reward in rewards))


if __name__ == "__main__":
    main(tyro.cli(Options))
