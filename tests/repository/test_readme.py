"""What the README shows is there, and its example runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from spmdrl.config import Config, flatten

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLE = "Your data, your reward, your YAML"


def section(name: str) -> str:
    """Return a section of the README."""
    return README.split(f"\n## {name}\n")[1].split("\n## ")[0]


def blocks(text: str) -> list[str]:
    """Return the indented blocks of a page, without their indentation."""
    found = re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", text, re.M)
    return [textwrap.dedent(block).strip("\n") + "\n" for block in found]


def test_it_is_read_in_one_sitting_and_in_this_order():
    assert len(README.splitlines()) <= 180, "move it to a page of docs/"
    assert re.findall(r"^## (.*)", README, re.M) == [
        "Two commands",
        EXAMPLE,
        "What you see",
        "The loop",
        "Experiment",
        "Larger models",
        "Measured",
    ]
    first_screen = "\n".join(README.splitlines()[:15])
    assert "NCCL between GPUs has never run." in first_screen


def test_what_it_names_of_the_loop_stands_in_train_py():
    loop = section("The loop")
    named = [name for name in re.findall(r"`(\w+(?:\.\w+)?)`", loop)]
    text = (ROOT / "train.py").read_text()
    calls = [f"{name}(" for name in named]
    assert len(calls) >= 6 and [call for call in calls if call not in text] == []
    places = [text.index(call, text.index("for step in ")) for call in calls]
    assert places == sorted(places), "it tells the calls in another order"
    marks = re.findall("`(# [a-z]+)`", loop)
    assert marks == ["# all", "# trainers", "# replica"] and all(mark in text for mark in marks)


def test_its_links_files_and_flags_are_there():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    files = re.findall(r"`?((?:configs|docs|slurm|tests|benchmarks)/[\w./-]+\.\w+)", README)
    assert len(links) > 20 and [f for f in links + files if not (ROOT / f).exists()] == []
    configs = re.findall(r"`(demo_\w+\.yaml)`", README)
    assert configs and [name for name in configs if not (ROOT / "configs" / name).exists()] == []
    flags = {flag.replace("-", "_") for flag in re.findall(r"--([a-z]+\.[a-z.-]+[a-z])", README)}
    assert len(flags) > 8 and flags - flatten(Config()).keys() == set()


def test_its_loss_is_one():
    (block,) = [b for b in blocks(section("Experiment")) if "def clipped_reinforce" in b]
    code, flags = block.split("\n\n")
    names: dict = {"torch": torch}
    exec(code, names)
    logprobs = torch.tensor([-1.0, -2.0])
    ones = torch.ones(2)
    terms, _ = names["clipped_reinforce"](logprobs, logprobs - 9.0, 2 * ones, ones > 0, cap=4.0)
    assert terms.tolist() == [8.0, 16.0]  # -4 * 2 * logprob
    assert "--algorithm.loss my_loss.py:clipped_reinforce" in flags and "'{cap: 4.0}'" in flags


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> tuple[Path, list[str]]:
    """Write the files of the README's example and make its model; return their folder and the
    commands that follow."""
    folder = tmp_path_factory.mktemp("example")
    rows, rewards, config, commands = blocks(section(EXAMPLE))
    assert sum(len(block.splitlines()) for block in (rows, rewards, config)) <= 15
    (folder / "problems.jsonl").write_text(rows)
    (folder / "my_rewards.py").write_text(rewards)
    (folder / "mine.yaml").write_text(config)
    shutil.copy(ROOT / "train.py", folder)
    create, *others = commands.splitlines()
    succeed(create, folder)
    return folder, others


def shell(command: str, folder: Path, *, timeout_s: float) -> subprocess.CompletedProcess:
    """Run a command as a person types it, in a shell with this environment activated."""
    bin_folder = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": bin_folder, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def succeed(command: str, folder: Path) -> None:
    done = shell(command, folder, timeout_s=400)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


def test_its_example_is_complete_and_trains(example):
    folder, (dry_run, train) = example
    succeed(dry_run, folder)
    succeed(f"{train} --steps 2", folder)
    lines = (folder / "runs/mine/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    trained = [row for row in rows if "policy/loss" in row]
    assert [row["step"] for row in trained] == [0, 1]
    assert all("reward/grade/mean" in row or "reward/mean" in row for row in trained)


def test_a_mistake_in_its_example_is_found_by_its_dry_run(example, tmp_path):
    whole, (dry_run, _) = example
    folder = shutil.copytree(whole, tmp_path / "example")
    path = folder / "my_rewards.py"
    path.write_text(path.read_text().replace("answer,", "solution,"))
    done = shell(dry_run, folder, timeout_s=200)
    assert done.returncode != 0 and "asks for solution" in done.stdout + done.stderr
