"""Run train.py as users do, to its end or to a fault, with a deadline."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from spmdrl.tools.proof.ranks import launch_env, start_rank
from tests.helpers.ranks import free_port

ROOT = Path(__file__).resolve().parents[2]
TINY = dict(  # flags that make any demo config small enough for a test
    sft={"batch.prompts-per-step": 16, "report.trackers": [], "layout.device": "cpu"},
    rl={
        "batch.prompts-per-step": 8,
        "batch.group-size": 4,
        "report.trackers": [],
        "evaluate.every-steps": 0,
        "engine.cpu-kv-cache-gib": 0.1,
        "engine.max-num-seqs": 32,
        "layout.device": "cpu",
    },
)


@dataclass
class Finished:
    """A finished run: exit status and everything it printed."""

    status: int
    output: str


@dataclass
class Run:
    """A run that may be under way."""

    pids: list[int]
    """Of the launcher, or of the ranks if there is none."""
    poll: Callable[[], int | None]
    """Returns the exit status, the worst of all ranks', or None while one runs."""
    printed: Path
    """What all of them write."""


def arguments(
    config: str, world_size: int, *, script: Path = ROOT / "train.py", **flags: Any
) -> list[str]:
    """Return what follows the interpreter; flag names are dotted fields."""
    pairs = [x for k, v in flags.items() for x in (f"--{k}", str(v))]
    return [
        str(script),
        "--config",
        str(ROOT / "configs" / config),
        "--layout.world-size",
        str(world_size),
        *pairs,
    ]


def start(config: str, world_size: int, **flags: Any) -> Run:
    """Start ranks that no launcher watches: each is told its place, as srun tells it."""
    return _start(world_size, _be_rank, arguments(config, world_size, **flags))


def command(
    *words: Any, ranks: int = 1, status: int | None = 0, timeout_s: float = 300
) -> Finished:
    """Run `python -m spmdrl` with these words to its end and check the exit status.

    Each rank is a fork in which the slow imports are done: a new process takes 5 to 15 s for them.

    Args:
        status: that it has to end with; None: any.
    """
    under_way = _start(ranks, _be_command, [*map(str, words)], is_launched=ranks > 1)
    finished = finish(under_way, timeout_s=timeout_s)
    assert status in (None, finished.status), finished.output[-8000:]
    return finished


def _start(
    world_size: int, target: Callable[..., Any], argv: list[str], *, is_launched: bool = True
) -> Run:
    printed, port = _file(), free_port()
    processes = []
    for rank in range(world_size):
        place = launch_env(rank, world_size, port) if is_launched else {"OMP_NUM_THREADS": "1"}
        processes.append(start_rank(os.environ | place, target, argv, printed))

    def poll() -> int | None:
        states = [process.exitcode for process in processes]
        return None if None in states else max(states, key=abs)

    return Run([process.pid for process in processes], poll, printed)


def _be_rank(argv: list[str], printed: Path) -> None:
    """Become `python train.py`, writing to a file.

    Its chart has one panel: all of them take half of the time of a short run. What users see,
    runs under torchrun and tests/report show.
    """
    from spmdrl.report import report

    report.draw = functools.partial(report.draw, metrics=("policy/loss",))
    _print_to(printed)
    sys.argv, sys.path[0] = argv, str(ROOT)
    runpy.run_path(argv[0], run_name="__main__")


def _be_command(words: list[str], printed: Path) -> None:
    """Become `python -m spmdrl`, writing to a file."""
    _print_to(printed)
    sys.argv = ["spmdrl", *words]
    runpy.run_module("spmdrl", run_name="__main__")


def _print_to(printed: Path) -> None:
    file = os.open(printed, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(ROOT)


def torchrun(config: str, world_size: int, *, restarts: int = 0, **flags: Any) -> Run:
    """Start a run as the README does, with a launcher and fresh processes, which it starts anew so
    many times."""
    printed = _file()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(world_size),
        "--max-restarts",
        str(restarts),
        *arguments(config, world_size, **flags),
    ]
    with open(printed, "a") as out:
        process = subprocess.Popen(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Run([process.pid], process.poll, printed)


def finish(run: Run, *, timeout_s: float) -> Finished:
    """Wait for the end, or kill everything and fail."""
    deadline = time.monotonic() + timeout_s
    try:
        while run.poll() is None:
            assert time.monotonic() < deadline, (
                f"still running after {timeout_s} s:\n{read(run)[-6000:]}"
            )
            time.sleep(0.05)
        return Finished(run.poll(), read(run))
    finally:
        kill_all(run)


def run(
    config: str,
    world_size: int,
    *,
    by: Callable[..., Run] = start,
    timeout_s: float = 400,
    status: int = 0,
    **flags: Any,
) -> Finished:
    """Run to the end and check the exit status (0: success, else just failure)."""
    finished = finish(by(config, world_size, **flags), timeout_s=timeout_s)
    assert (finished.status == 0) == (status == 0), finished.output[-8000:]
    return finished


def read(run: Run) -> str:
    """Return what was printed so far."""
    return run.printed.read_text(errors="replace")


def call(*arguments: Any, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments and more environment to its end; return what it printed."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=300,
    )


HELD = """
import pathlib, time
def wait_to_be_killed():
    hold = pathlib.Path(__file__).with_name("hold")
    while hold.exists() and pathlib.Path(hold.read_text()).exists(): time.sleep(0.1)
"""
"""To begin a file of rewards with, which call it; see `run_killed`."""


def run_killed(
    config: str,
    world_size: int,
    *,
    rewards: Path,
    step: int,
    hold: int,
    timeout_s: float = 300,
    **flags: Any,
) -> None:
    """Kill a run that has saved the checkpoint of `step` and gone on from there.

    Its rewards wait when the checkpoint of a later step, `hold`, stands, so that it does not come
    to its end first. Give the whole run the same rewards.timeout-s, a long one.
    """
    folder, held = Path(flags["output-dir"]), rewards.with_name("hold")
    saved = folder / "checkpoints" / f"step_{step}"
    held.write_text(str(saved.with_name(f"step_{hold}")))
    under_way = start(config, world_size, **flags)
    wait_for_step(under_way, folder, step, timeout_s=timeout_s)
    wait_for(under_way, saved.exists, f"{saved.name} is not saved", timeout_s=timeout_s)
    kill_all(under_way)
    held.unlink()
    assert saved.exists() and not saved.with_name(f"step_{flags['steps']}").exists()


def kill_all(run: Run) -> None:
    """SIGKILL the launcher and every rank, which torchrun starts in sessions of their own."""
    for pid in run.pids if run.poll() is None else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            for member in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
    while run.poll() is None:
        time.sleep(0.05)
    run.printed.unlink(missing_ok=True)


def metrics(folder: Path) -> list[dict]:
    """Return the rows of a run's metrics.jsonl that report a training step."""
    path = Path(folder) / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    rows = map(json.loads, text.rpartition("\n")[0].splitlines())  # whole lines: it may be written
    return [row for row in rows if "policy/loss" in row]


DELTA = {"stream.delta": "always", "stream.verify-every": 1}
"""Flags of a run whose later pushes send what changed, and compare checksums each time."""


def check_deltas(folder: Path) -> None:
    """Check that later pushes sent a part of the weights, and that no checksum differed."""
    shares = [row["sync/changed_frac"] for row in metrics(folder) if "sync/changed_frac" in row]
    assert shares and any(0 < share < 1 for share in shares), shares
    logs = [file.read_text() for file in folder.glob("logs/**/rank_*.log")]
    assert logs and not any("everything is sent again" in text for text in logs)


def wait_for_step(run: Run, folder: Path, step: int, *, timeout_s: float) -> None:
    """Return when metrics.jsonl has a row of `step`; fail when the run ends before."""
    wait_for(
        run,
        lambda: any(row["step"] >= step for row in metrics(folder)),
        f"step {step} not reached",
        timeout_s=timeout_s,
    )


def wait_for(run: Run, condition: Callable[[], bool], otherwise: str, *, timeout_s: float) -> None:
    """Return when a condition holds; fail when the run ends before."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert run.poll() is None, f"ended early:\n{read(run)[-6000:]}"
        assert time.monotonic() < deadline, f"{otherwise} in {timeout_s} s"
        time.sleep(0.1)


def _file() -> Path:
    file, name = tempfile.mkstemp(prefix="spmdrl-", suffix=".log")
    os.close(file)
    return Path(name)
