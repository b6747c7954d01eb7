"""Measure what the loss of an engine costs, and what it takes to go on and to take in another.

    python benchmarks/survive.py

One trainer and three engines of one rank. Behind some steps an engine is killed, and behind as
many more a process is started that joins in its place; a second run loses nothing. The engines of
a small machine share its cores, so that what is left would be faster by what the lost one does not
take: hence nearly all the time of a step is a wait. Each sample's reward takes a fixed latency, one
at a time in each replica, so a replica's seconds are its share of the samples times the latency.
Both runs must have taken the same steps, to the last digit of loss and reward: asserted.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.start import ROOT, as_flags, begin, conditions, header, row

ENGINES, SAMPLES, VICTIM = 3, 24, 2
_WARM = 3  # steps that do not count, at the start and behind each change
_REWARD = """
import time

def slow(prompts, completions, **columns):
    time.sleep({latency_s} * len(completions))
    return [sum(map(ord, completion)) % 7 / 7 for completion in completions]
"""
_SAME = ("policy/loss", "reward/mean", "policy/grad_norm")


@dataclass(frozen=True)
class Options:
    """What to run."""

    stretch: int = 10
    """Steps with all engines, and as many before another is started; twice as many follow."""
    latency_s: float = 0.2
    """Seconds of a sample's reward."""


def work(folder: Path, flags: list[str]) -> int:
    """Be a rank of train.py that writes down when it has gone on, and taken in an engine."""
    from spmdrl.world.lost_engines.going_on import Survival

    moments: dict[str, list[tuple[float, float]]] = {"_go_on": [], "_take_in": []}

    def kept(name: str) -> None:
        call: Callable = getattr(Survival, name)

        @functools.wraps(call)
        def timed(*args: Any, **options: Any) -> Any:
            began = time.time()
            found = call(*args, **options)
            moments[name].append((began, time.time()))
            return found

        setattr(Survival, name, timed)

    for name in moments:
        kept(name)
    sys.argv = ["train.py", *flags, "--output-dir", str(folder / "run")]
    status: int = runpy.run_path(str(ROOT / "train.py"))["main"]()
    if os.environ["RANK"] == "0":
        (folder / "moments.json").write_text(json.dumps(moments))
    return status


class Run:
    """A run under `launch`, in a folder of its own."""

    def __init__(self, folder: Path, flags: list[str]):
        self.folder = folder
        folder.mkdir()
        own = [str(Path(__file__).resolve()), "--worker", str(folder), json.dumps([flags])]
        self._own = [sys.executable, *own]
        launch = ["-m", "spmdrl", "launch", "--survive-engines", "--nproc-per-node"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        printed = os.open(folder / "printed.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._options: dict[str, Any] = {"cwd": ROOT, "stdout": printed, "stderr": printed}
        command = [sys.executable, *launch, str(1 + ENGINES), *own]
        self._launcher = subprocess.Popen(command, env=environment, **self._options)

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics of the steps so far."""
        path = self.folder / "run" / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [own for own in map(json.loads, lines) if "perf/step_s" in own]

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for something that the run does."""
        deadline = time.monotonic() + 600
        while not is_so():
            self._check(self._launcher.poll() is None and time.monotonic() < deadline)
            time.sleep(0.02)

    def lose(self, rank: int) -> tuple[float, dict[str, str]]:
        """Kill a rank; return when, and its environment."""
        every = psutil.Process(self._launcher.pid).children()
        process = next(one for one in every if one.environ().get("RANK") == str(rank))
        environment = process.environ()
        process.kill()
        return time.time(), environment

    def replace(self, environment: dict[str, str]) -> subprocess.Popen:
        """Start a process that joins in the place of the lost one."""
        own = environment | {"SPMDRL_JOINS": "1"}
        return subprocess.Popen(self._own, env=own, **self._options)

    def end(self) -> dict[str, Any]:
        """Wait for the end; return the rows and when rank 0 went on."""
        status = self._launcher.wait(timeout=600)
        self._check(status == 0)
        moments = json.loads((self.folder / "moments.json").read_text())
        return {"rows": self.rows(), "moments": moments}

    def _check(self, is_well: bool) -> None:
        if not is_well:
            self._launcher.terminate()
            raise RuntimeError((self.folder / "printed.log").read_text()[-4000:])


def main(options: Options) -> None:
    """Run both, print."""
    with tempfile.TemporaryDirectory() as name:
        folder, stretch = Path(name), options.stretch
        flags = _flags(folder, options)
        whole = Run(folder / "whole", flags).end()
        run = Run(folder / "loses", flags)
        run.until(lambda: len(run.rows()) >= stretch)
        died, environment = run.lose(VICTIM)
        run.until(lambda: len(run.rows()) >= 2 * stretch)
        with run.replace(environment) as other:
            found = run.end()
            assert other.wait(timeout=60) == 0
    _check_same(whole["rows"], found["rows"])
    (went_on,) = (end - died for _, end in found["moments"]["_go_on"])
    ((began, joined),) = found["moments"]["_take_in"]
    step = next(i for i, own in enumerate(found["rows"]) if own["unix_s"] > joined)
    stretches = {
        "3 engines": range(_WARM, stretch),
        "2 engines, behind the loss": range(stretch + _WARM, 2 * stretch),
        "3 engines, behind the arrival": range(step + _WARM, len(found["rows"]) - 1),
    }
    header("steps", "number", "median s", "steps/s", "of before", "whole run, same steps: s")
    medians = {n: _median(found["rows"], steps) for n, steps in stretches.items()}
    before = medians["3 engines"]
    for name, steps in stretches.items():
        seconds, other_s = medians[name], _median(whole["rows"], steps)
        cells = f"{seconds:.3f}", f"{1 / seconds:.3f}", f"{before / seconds:.3f}"
        row(name, len(steps), *cells, f"{other_s:.3f}")
    conditions(
        seconds_to_go_on=round(went_on, 3),
        seconds_to_take_in=round(joined - began, 3),
        slowest_step_s=round(max(own["perf/step_s"] for own in found["rows"][stretch:]), 3),
    )


def _flags(folder: Path, options: Options) -> list[str]:
    from spmdrl.commands.create_model import create_model

    create_model(folder / "model", initializer_std=0.088, seed=0)
    (folder / "slow.py").write_text(_REWARD.format(latency_s=options.latency_s))
    fields: dict[str, object] = {
        "config": ROOT / "configs" / "demo_grpo.yaml",
        "model.path": folder / "model",
        "engine.kind": "transformers",
        "layout.world-size": 1 + ENGINES,
        "layout.trainer-ranks": 1,
        "layout.survive-engines": "true",
        "lag": 0,
        "steps": 4 * options.stretch,
        "batch.prompts-per-step": SAMPLES // 2,
        "batch.group-size": 2,
        "batch.tokens-per-microbatch": 512,
        "rewards.functions": f"{folder / 'slow.py'}:slow",
        "rewards.timeout-s": 60,
        "algorithm.correction": "none",
        "report.tracker": "none",
        "evaluate.every-steps": 0,
        "checkpoint.every-steps": 0,
    }
    return as_flags(fields)


def _check_same(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    assert len(rows) == len(others)
    for own, other in zip(rows, others, strict=True):
        assert [own[name] for name in _SAME] == [other[name] for name in _SAME], own["step"]


def _median(rows: list[dict[str, Any]], steps: range) -> float:
    return statistics.median(rows[step]["perf/step_s"] for step in steps)


if __name__ == "__main__":
    begin(main, work, Options)
