"""Seconds and lengths that a run measured, read from its folder."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.config import Config
from spmdrl.config.read import read
from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.journal import read_rows
from spmdrl.run_files import SMALL, read_bytes
from spmdrl.tools.plan.seconds import Seconds
from spmdrl.value_forms import is_number
from spmdrl.world.machine.hardware import known_gpu

_PHASES = ("generate", "update", "push")
_BESIDE = ("time/evaluate", "time/copy_checkpoint")  # parts of a step that are not planned


@dataclass(frozen=True)
class MeasuredRun:
    """What a run measured: medians over its steps without the first, which warms up."""

    cfg: Config
    gpu: str
    """Of the planner's table; empty on the CPU."""
    prompt_tokens: float
    response_tokens: float
    seconds: Mapping[str, float]
    """Of generate, update and push."""
    step: float
    """Seconds of a step, without evaluation and the copy for a checkpoint."""

    def scales(self, planned: Seconds) -> dict[str, float]:
        """Return {phase: measured seconds over planned ones}, and the same for `step`.

        The planned seconds of `step` are those of the phases after they are scaled.

        Args:
            planned: for this run's config and lengths, not scaled.
        """
        found = {}
        for name, took in self.seconds.items():
            own = getattr(planned, name)
            found[name] = took / own if own else 1.0
        return found | {"step": self.step / planned.scaled(found).step}


def read_run(folder: Path) -> MeasuredRun:
    """Read config.yaml, environment.json and metrics.jsonl of a run.

    Raises: Refusal for a folder without them, a run of fewer than two steps, or a GPU that is not
        in the planner's table.
    """
    place = f"--measured {folder}"
    for name in ("config.yaml", "environment.json", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise Refusal(f"{place}: no {name} in it; give the output_dir of a run")
    found = read_rows(folder / "metrics.jsonl")
    # The row of the probe and the evaluation before the first step has no perf/step_s.
    rows = [row for row in found if is_number(row.get("perf/step_s"))][1:]
    step = _median(rows, "perf/step_s", less=_BESIDE)
    if not step:
        raise Refusal(
            f"{place}: metrics.jsonl has no step after the first with perf/step_s; the first warms "
            "up, so let the run take at least two more"
        )
    seconds = {name: _median(rows, f"time/{name}") for name in _PHASES}
    return MeasuredRun(
        cfg=read(["--config", str(folder / "config.yaml")], prog="python -m spmdrl plan"),
        gpu=_gpu(folder),
        prompt_tokens=_median(rows, "rollout/prompt_length"),
        response_tokens=_median(rows, "rollout/response_length"),
        seconds={name: took for name, took in seconds.items() if took},
        step=step,
    )


def _median(rows: list[dict[str, Any]], name: str, *, less: tuple[str, ...] = ()) -> float:
    """Return the median of a metric over the rows that have it, without others; 0 if none has."""
    values = []
    for row in rows:
        if is_number(row.get(name)):
            values.append(row[name] - sum(row.get(other) or 0.0 for other in less))
    return statistics.median(values) if values else 0.0


def _gpu(folder: Path) -> str:
    """Return the table's name of the GPU that a run had; empty without one."""
    path = folder / "environment.json"
    with refusing(f"--measured {folder}: environment.json", ValueError, KeyError, TypeError):
        names = json.loads(read_bytes(path, SMALL))["gpus"]
    if not names:
        return ""
    gpu = known_gpu(names[0])
    if gpu is None:
        raise Refusal(
            f"--measured {folder}: the run had a {names[0]!r}, which is not in the planner's "
            "table; leave it out and give rates by flags"
        )
    return gpu.name
