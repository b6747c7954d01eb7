"""Rates that were measured: what `python -m benchmarks.gpu` writes, read for a plan."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.plan.run import FORMULA_RATES
from spmdrl.world.hardware import GPUS, known_gpu


@dataclass(frozen=True)
class MeasuredRates:
    """The rates of one file."""

    path: str
    gpu: str  # of the table
    rates: dict[str, float]  # by the names of the fields of Rates

    @property
    def source(self) -> str:
        """What a page says of them."""
        return f"measured: {self.path}"


def read_measured(path: str) -> MeasuredRates:
    """Read the rates of a file of benchmarks/results/gpu.

    Raises: Refusal for another kind of file, a rate that is unknown or cannot be, a GPU that
        is not in the table.
    """
    told = _told(path)
    name = str(told["gpu"])
    gpu = known_gpu(name)
    if gpu is None:
        raise Refusal(
            f"--measured {path}: it was measured on {name!r}, which is not in the table "
            f"({', '.join(GPUS)}), and its rates are fractions of what a row there says; leave it "
            "out and give rates by flags"
        )
    rates = {field: value for field, value in told.items() if field != "gpu"}
    if not rates:
        raise Refusal(
            f"--measured {path}: it holds no rate, only the GPU; the parts that measure some are "
            "update_1b, update_4b, engine_1b and push_2: python -m benchmarks.gpu --parts ..."
        )
    for field, value in rates.items():
        _check_rate(path, field, value)
    return MeasuredRates(path, gpu.name, rates)


def _told(path: str) -> dict[str, Any]:
    """Return the object `rates` of a file."""
    kinds = (OSError, UnicodeDecodeError, json.JSONDecodeError)
    with refusing(f"--measured {path}: cannot be read as JSON", *kinds):
        found = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    told = found.get("rates") if isinstance(found, dict) else None
    if not isinstance(told, dict) or not isinstance(told.get("gpu"), str):
        raise Refusal(
            f"--measured {path}: not what `python -m benchmarks.gpu` writes: expected an object "
            "with `machine`, `rates` and `rows`, and in `rates` the `gpu`; give the .json beside "
            "a table of benchmarks/results/gpu"
        )
    return told


def _check_rate(path: str, field: str, value: Any) -> None:
    if field not in FORMULA_RATES:
        raise Refusal(
            f"--measured {path}: rates.{field}: unknown; known: gpu, {', '.join(FORMULA_RATES)}"
        )
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    most = 1.0 if field.endswith("_frac") else math.inf
    if not is_number or not 0 < value <= most or not math.isfinite(value):
        what = "a fraction, in (0, 1]" if most == 1 else "seconds above 0"
        raise Refusal(f"--measured {path}: rates.{field}: {value!r}: expected {what}")
