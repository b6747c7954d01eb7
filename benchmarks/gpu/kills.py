"""Part of `make gpu`, for several GPUs: kill a rank of a running job; who speaks, and how soon.

python -m benchmarks.gpu.kills                                # a trainer, then an engine
python -m benchmarks.gpu.kills --device cpu                   # a rehearsal
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro

from benchmarks.gpu.rows import Clock, attempt, judged
from benchmarks.gpu.train_runs import CASES, EAGER, flags_of
from benchmarks.gpu.train_runs import Options as RunOptions
from benchmarks.start import ROOT, as_flags, end_tree, last_words
from spmdrl.tools.commands.create_model import create_model

_AIM_S = 60.0  # the deadline of a wait below, and what torchrun takes to end the ranks
_WAIT_S = 30
_NEEDS_S = 80.0  # of one kill: to start a job, and for what comes after the kill
_AFTER_S = 45.0  # the wait, and what ends the other ranks and torchrun


@dataclass(frozen=True)
class Options:
    """What to run."""

    device: str = "cuda"
    limit_s: float = 280.0
    """Seconds of this process; see `rows.Clock`."""


def kill(rank: int, options: Options, scratch: Path, *, timeout_s: float) -> None:
    """Start a split job of two ranks, kill one in its third step, and tell how the job ends.

    Args:
        timeout_s: for all of it.
    """
    deadline = time.monotonic() + timeout_s
    model = create_model(scratch / "model", hidden_size=256, heads=4, initializer_std=256**-0.5)
    out, printed = scratch / f"run_{rank}", scratch / f"printed_{rank}"
    flags = flags_of(
        CASES["split"], RunOptions("split", options.device, 1000), model=model, out=out
    )
    flags |= {"layout.wait-timeout-s": _WAIT_S, "engine.options": EAGER}
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    with printed.open("w") as file:
        job = subprocess.Popen(
            [sys.executable, *words, *as_flags(flags)], cwd=ROOT, stdout=file,
            stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        metrics = out / "metrics.jsonl"
        while not metrics.exists() or metrics.read_text().count("policy/loss") < 3:
            printed_now = printed.read_text()
            assert job.poll() is None, f"{last_words(printed_now)}\n{printed_now}"
            assert time.monotonic() < deadline - _AFTER_S, f"no three steps yet\n{printed_now}"
            time.sleep(0.1)
        victim = next(
            p for p in psutil.Process(job.pid).children(recursive=True)
            if p.environ().get("RANK") == str(rank) and "train.py" in " ".join(p.cmdline())
        )  # fmt: skip
        victim.kill()
        began = time.monotonic()
        job.wait(timeout=max(1.0, deadline - began))
        seconds = time.monotonic() - began
        said = printed.read_text()
        named = [line for line in said.splitlines() if "peer" in line or "missing" in line]
        judged(
            f"{'an engine' if rank else 'a trainer'} killed in step 3: the job ends",
            f"after {seconds:.1f} s with status {job.returncode}",
            beside=(named or [last_words(said)])[0][-160:],
            met=seconds < _AIM_S and job.returncode != 0,
            aim=f"{_AIM_S:.0f} s, not 0",
            seconds=seconds,
            said=said[-2000:],
        ).tell()
    finally:
        if job.poll() is None:
            end_tree(job.pid)
            job.wait()


def main(options: Options) -> None:
    """Kill a trainer, then an engine."""
    clock = Clock(options.limit_s)
    for rank in (0, 1):
        what = f"rank {rank} of 2 killed"
        if not clock.has(_NEEDS_S, what=what):
            continue
        timeout_s = clock.left_s / (2 - rank)
        with tempfile.TemporaryDirectory() as scratch, attempt(what):
            kill(rank, options, Path(scratch), timeout_s=timeout_s)


if __name__ == "__main__":
    main(tyro.cli(Options))
