"""The world and the sbatch files under a real one-node Slurm on loopback."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NODE = Path(__file__).with_name("slurm_node.sh")
SBATCH_FILES = sorted(ROOT.glob("slurm/*.sbatch"))
# What a node of two CPU ranks has instead of eight GPUs; everything else is the file's own.
SMALL = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1"]

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

# Two ranks that find each other, as train.py starts; prints what the collective gave.
WORLD_PROGRAM = """
import torch, torch.distributed as dist
from spmdrl.config import Config, LayoutSettings
from spmdrl.world.world import World
world = World.start(Config(layout=LayoutSettings(world_size=2, trainer_ranks=1, device="cpu")))
total = torch.tensor(world.rank + 1)
dist.all_reduce(total)
line = f"rank {world.rank} trainer {world.is_trainer} engine {world.is_inference} sum {int(total)}"
print(line + "\\n", end="", flush=True)
world.close()
"""

# Stands for train.py where only the sbatch file is under test: the first attempt works for 40 s
# at least and until it is asked to stop, the second finds nothing left to do.
STOPPABLE_PROGRAM = """
import os, signal, sys, time
asked, started = [], time.monotonic()
signal.signal(signal.SIGUSR1, lambda *_: asked.append("USR1"))
print("flags", sys.argv[1:], "threads", os.environ["OMP_NUM_THREADS"], flush=True)
is_first = os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
while is_first and (not asked or time.monotonic() < started + 40):
    assert time.monotonic() < started + 280, "no signal came"
    time.sleep(0.1)
print("asked", asked)
"""

FAILING_PROGRAM = """
import os, sys, time
assert len(os.environ["SPMDRL_SECRET"]) == 64 and int(os.environ["MASTER_PORT"]) >= 20000
time.sleep(0 if os.environ["SLURM_PROCID"] == "1" else 1000)
sys.exit(7)
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """Environment for Slurm's commands, with a node behind it that goes away afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="slurm_"))  # one of pytest's is too long for sockets
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK") and not k.startswith("SLURM_")
    }
    env |= dict(
        SLURM_CONF=str(folder / "slurm.conf"),
        PYTHON=sys.executable,
        PYTHONPATH=str(ROOT),
        OMP_NUM_THREADS="1",
    )
    started = subprocess.run(
        ["bash", NODE, "start", folder], capture_output=True, text=True, timeout=300
    )
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        yield env
    finally:
        pids = [int(path.read_text()) for path in folder.glob("*.pid")]
        subprocess.run(["bash", NODE, "stop", folder], timeout=300, check=True)
        left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        assert not left, f"daemons of the test's Slurm still run: {left}"
        shutil.rmtree(folder)


@dataclass(frozen=True)
class Desk:
    """A folder to submit from: the repository's slurm/, configs/ and train.py, no runs."""

    env: dict[str, str]
    folder: Path

    def run(self, *command: str, timeout_s: float = 200) -> str:
        """Return what a command prints, which must not fail."""
        options = dict(env=self.env, cwd=self.folder, capture_output=True, text=True)
        done = subprocess.run(command, timeout=timeout_s, **options)
        assert done.returncode == 0, (
            f"{command} gave {done.returncode}:\n{done.stdout}{done.stderr}"
        )
        return done.stdout

    def submit(self, *flags: str, options: Sequence[str] = ()) -> str:
        """Return the number of a job of the file for one node."""
        file = str(self.folder / "slurm" / "single_node.sbatch")
        return self.run("sbatch", "--parsable", *SMALL, *options, file, *flags).strip()

    def end_of(self, job: str, *, timeout_s: float = 400) -> str:
        """Return the job's final state; fail with all its output when time is up."""
        deadline, state = time.monotonic() + timeout_s, "UNKNOWN"
        while time.monotonic() < deadline:
            shown = self.run("scontrol", "show", "job", job)
            state = re.search(r"JobState=(\w+)", shown).group(1)
            if state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"):
                return state
            time.sleep(0.5)
        raise AssertionError(f"job {job} is {state} after {timeout_s} s:\n{self.output()}")

    def output(self) -> str:
        """Return what all jobs wrote."""
        logs = sorted(self.folder.glob("runs/slurm/*/*/*.out"))
        files = [*self.folder.glob("slurm-*.out"), *logs]
        return "\n".join(f"--- {f.relative_to(self.folder)}\n{f.read_text()}" for f in files)


@pytest.fixture
def desk(slurm: dict[str, str], tmp_path: Path) -> Desk:
    for name in ("slurm", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "train.py", tmp_path)
    return Desk(slurm, tmp_path)


def test_ranks_find_each_other_from_slurms_own_variables(desk):
    command = ["srun", "--ntasks=2", "--kill-on-bad-exit=1", sys.executable, "-c", WORLD_PROGRAM]
    out = desk.run(*command, timeout_s=300)
    lines = sorted(line for line in out.splitlines() if line.startswith("rank"))
    assert lines == [
        "rank 0 trainer True engine False sum 3",
        "rank 1 trainer False engine True sum 3",
    ], out


@pytest.mark.parametrize("file", SBATCH_FILES, ids=lambda file: file.stem)
def test_slurm_accepts_the_file(file, desk):
    desk.run("sbatch", "--test-only", *SMALL, str(file))


def test_job_out_of_time_is_asked_to_stop_and_queued_again(desk):
    (desk.folder / "train.py").write_text(STOPPABLE_PROGRAM)
    # Of five minutes, the signal comes in the first one; "out of time" is when 30 s have gone,
    # which the first attempt stays and the second does not.
    shared = desk.folder / "slurm" / "attempt.sh"
    shared.write_text(shared.read_text().replace("SPARE_S=240", "SPARE_S=270"))
    own = ["--config", "a file.yaml", "--steps", "3"]
    job = desk.submit(*own, options=["--time=5", "--signal=USR1@290"])
    assert desk.end_of(job) == "COMPLETED", desk.output()
    logs = desk.folder / "runs" / "slurm" / f"spmdrl-{job}"
    flags = f"flags {own} threads 1"
    for rank in range(2):
        first = (logs / "attempt_0" / f"rank_{rank}.out").read_text().splitlines()
        again = (logs / "attempt_1" / f"rank_{rank}.out").read_text().splitlines()
        assert first == [flags, "asked ['USR1']"], desk.output()
        assert again == [flags, "asked []"], desk.output()
    text = (desk.folder / f"slurm-spmdrl-{job}.out").read_text()
    assert "attempt 0" in text and "attempt 1" in text, "the second attempt must append"


def test_failing_rank_ends_the_job_which_is_not_queued_again(desk):
    (desk.folder / "train.py").write_text(FAILING_PROGRAM)
    assert desk.end_of(desk.submit(), timeout_s=200) == "FAILED", desk.output()
    assert not list(desk.folder.glob("runs/slurm/*/attempt_1"))


REFUSING_PROGRAM = """
import os, time
from spmdrl.errors import Refusal
from spmdrl.world.leaving import report_end
is_first = os.environ["SLURM_PROCID"] == "0"
os._exit(report_end(Refusal("of no use"), None) if is_first else time.sleep(1000))
"""


@pytest.mark.parametrize(
    "program, attempts",
    [(FAILING_PROGRAM, [0, 1]), (REFUSING_PROGRAM, [0])],
    ids=["fail", "refuse"],
)
def test_a_failed_job_is_queued_again_as_often_as_is_asked_for(program, attempts, desk):
    (desk.folder / "train.py").write_text(program)
    options = ["--export=ALL,SPMDRL_MAX_REQUEUES=1"]
    assert desk.end_of(desk.submit(options=options)) == "FAILED", desk.output()
    found = sorted(path.name for path in desk.folder.glob("runs/slurm/*/attempt_*"))
    assert found == [f"attempt_{n}" for n in attempts], desk.output()


def test_submitting_from_elsewhere_says_where_to_submit_from(desk):
    (desk.folder / "train.py").unlink()
    assert desk.end_of(desk.submit(), timeout_s=200) == "FAILED"
    assert "submit from the repository root" in desk.output()


def test_train_runs_from_the_sbatch_file(desk, tiny_model):
    out = desk.folder / "out"
    flags = {
        "config": "configs/demo_sft.yaml",
        "steps": "3",
        "model.path": tiny_model,
        "output-dir": out,
        "batch.prompts-per-step": "16",
    }
    job = desk.submit(
        *(word for name, value in flags.items() for word in (f"--{name}", str(value)))
    )
    assert desk.end_of(job) == "COMPLETED", desk.output()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "policy/loss" in row] == [0, 1, 2], rows
