"""The table of `make gpu`: as Markdown for people, as JSON for the planner."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.gpu.rows import Row
from benchmarks.start import ROOT, commit

RESULTS = ROOT / "benchmarks" / "results" / "gpu"

_PACKAGES = ("torch", "vllm", "transformers", "triton", "liger-kernel", "flash-attn")


def machine(*, caches: str) -> dict[str, str]:
    """Return what the figures hold for.

    Args:
        caches: what was compiled before the first part.
    """
    found = {name: _version(name) for name in _PACKAGES}
    if torch.cuda.is_available():
        memory_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        found["GPU"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        found["GPU memory"] = f"{memory_gib:.1f} GiB"
        found["CUDA"] = str(torch.version.cuda)
        found["driver"] = _driver()
    found["commit"] = commit() or "unknown"
    found["compiled before"] = caches
    return found | {"Python": platform.python_version()}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return asked.stdout.split("\n")[0].strip()


def page(rows: list[tuple[str, Row]], about: dict[str, str], *, command: str) -> str:
    """Return the table as Markdown."""
    others = ", ".join(f"{name} {value}" for name, value in about.items() if name != "GPU")
    lines = [
        f"# {about.get('GPU', 'no GPU')}, {datetime.date.today()}",
        "",
        f"`{command}`; {others}",
        "",
        "| part | what | found | beside | aim | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for part, row in rows:
        cells = (part, row.what, row.found, row.beside, row.aim, row.verdict)
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


_RATES: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "matmul_frac": ("mfu", max),
    "link_frac": ("link_frac", max),
    "engine_step_s": ("engine_step_s", min),
}
"""Rate of the planner: the number of a row of that kind, and which of several."""


def rates_of(rows: list[tuple[str, Row]], about: dict[str, str]) -> dict[str, float | str]:
    """Return what the planner can take from here, by the names of `spmdrl.tools.plan.run.Rates`."""
    found: dict[str, float | str] = {"gpu": about.get("GPU", "")}
    # The best of several, as plans compare layouts that are each at their best.
    for rate, (number, best) in _RATES.items():
        own = [row.numbers[number] for _, row in rows if row.numbers.get("kind") == rate]
        found |= {rate: best(own)} if own else {}
    return found


def keep(rows: list[tuple[str, Row]], about: dict[str, str], *, command: str) -> Path:
    """Write the table and the raw figures, and return the table's path."""
    count, _, device = about["GPU"].partition(" x ")
    name = device.replace(" ", "_").replace("/", "_")
    path = RESULTS / f"{datetime.date.today()}_{count}x{name}.md"
    RESULTS.mkdir(parents=True, exist_ok=True)
    path.write_text(page(rows, about, command=command))
    raw = [{"part": part} | dataclasses.asdict(row) for part, row in rows]
    content = {"machine": about, "rates": rates_of(rows, about), "rows": raw}
    path.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    return path
