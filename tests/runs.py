"""Run train.py as a user does: torchrun in a process of its own, with a deadline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TINY = dict(  # flags that make any demo config small enough for a test
    sft={"batch.prompts-per-step": 16, "report.tracker": "none", "layout.device": "cpu"},
    rl={"batch.prompts-per-step": 8, "batch.group-size": 4, "report.tracker": "none",
        "evaluate.every-steps": 0, "engine.cpu-kv-cache-gib": 0.1, "engine.max-num-seqs": 32,
        "layout.device": "cpu"},
)


@dataclass
class Finished:
    """A finished run: exit status and everything it printed."""

    status: int
    output: str


def command(config: str, world_size: int, **flags) -> list[str]:
    """Return the torchrun command line; flag names are dotted fields."""
    pairs = [x for k, v in flags.items() for x in (f"--{k}", str(v))]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
            str(world_size), str(ROOT / "train.py"), "--config", str(ROOT / "configs" / config),
            "--layout.world-size", str(world_size), *pairs]


def start(config: str, world_size: int, **flags) -> subprocess.Popen:
    """Start a run in a session of its own, so that `kill_all` reaches every rank."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command(config, world_size, **flags), env=env, cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            start_new_session=True)


def finish(process: subprocess.Popen, *, timeout_s: float) -> Finished:
    """Wait for the end, or kill everything and fail."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        kill_all(process)
        output, _ = process.communicate()
        raise AssertionError(f"still running after {timeout_s} s:\n{output[-6000:]}") from None
    return Finished(process.returncode, output)


def run(config: str, world_size: int, *, timeout_s: float = 180, status: int = 0,
        **flags) -> Finished:
    """Run to the end and check the exit status (0: success, else just failure)."""
    finished = finish(start(config, world_size, **flags), timeout_s=timeout_s)
    assert (finished.status == 0) == (status == 0), finished.output[-8000:]
    return finished


def kill_all(process: subprocess.Popen) -> None:
    """SIGKILL the launcher and every rank, which torchrun starts in sessions of their own."""
    import psutil

    family = [psutil.Process(process.pid)]
    family += family[0].children(recursive=True)
    for member in family:
        try:
            member.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            pass


def metrics(folder: Path) -> list[dict]:
    """Return the rows of a run's metrics.jsonl that report a training step."""
    path = Path(folder) / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if "policy/loss" in row]


def wait_for_step(process: subprocess.Popen, folder: Path, step: int, *, timeout_s: float) -> None:
    """Return when metrics.jsonl has a row of `step`; fail when the run ends before."""
    deadline = time.monotonic() + timeout_s
    while not any(row["step"] >= step for row in metrics(folder)):
        assert process.poll() is None, f"ended early:\n{process.communicate()[0][-6000:]}"
        assert time.monotonic() < deadline, f"step {step} not reached in {timeout_s} s"
        time.sleep(0.1)
