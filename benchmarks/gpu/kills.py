"""Part of `make gpu`, for several GPUs: kill a rank of a running job; who speaks, and how soon.

python -m benchmarks.gpu.kills                                # a trainer, then an engine
python -m benchmarks.gpu.kills --device cpu                   # a rehearsal
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro

from benchmarks.gpu.rows import attempt, judged, last_words
from benchmarks.gpu.train_runs import CASES, flags_of
from benchmarks.gpu.train_runs import Options as RunOptions
from benchmarks.start import ROOT, as_flags
from spmdrl.tools.commands.create_model import create_model

_AIM_S = 60.0  # the deadline of a wait below, and what torchrun takes to end the ranks
_WAIT_S = 30


@dataclass(frozen=True)
class Options:
    """What to run."""

    device: str = "cuda"
    timeout_s: float = 150.0


def kill(rank: int, options: Options, scratch: Path) -> None:
    """Start a split job of two ranks, kill one in its third step, and tell how the job ends."""
    model = create_model(scratch / "model", hidden_size=256, heads=4, initializer_std=256**-0.5)
    out, printed = scratch / f"run_{rank}", scratch / f"printed_{rank}"
    flags = flags_of(
        CASES["split"], RunOptions("split", options.device, 1000), model=model, out=out
    )
    flags |= {"layout.wait-timeout-s": _WAIT_S}
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    with printed.open("w") as file:
        job = subprocess.Popen(
            [sys.executable, *words, *as_flags(flags)], cwd=ROOT, stdout=file,
            stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        metrics, deadline = out / "metrics.jsonl", time.monotonic() + options.timeout_s
        while not metrics.exists() or metrics.read_text().count("policy/loss") < 3:
            assert job.poll() is None, last_words(printed.read_text())
            assert time.monotonic() < deadline, "three steps took too long"
            time.sleep(0.1)
        victim = next(
            p for p in psutil.Process(job.pid).children(recursive=True)
            if p.environ().get("RANK") == str(rank) and "train.py" in " ".join(p.cmdline())
        )  # fmt: skip
        victim.kill()
        began = time.monotonic()
        job.wait(timeout=options.timeout_s)
        seconds, said = time.monotonic() - began, printed.read_text()
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
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*psutil.Process(job.pid).children(recursive=True)]:
                process.kill()
        job.kill()
        job.wait()


def main(options: Options) -> None:
    """Kill a trainer, then an engine."""
    for rank in (0, 1):
        with tempfile.TemporaryDirectory() as scratch, attempt(f"rank {rank} of 2 killed"):
            kill(rank, options, Path(scratch))


if __name__ == "__main__":
    main(tyro.cli(Options))
