"""Everything that only a GPU can show, as one table: `make gpu`.

    python -m benchmarks.gpu                     # all parts for the GPUs of this machine
    python -m benchmarks.gpu --parts grpo push   # these alone
    python -m benchmarks.gpu --rehearse          # all parts, tiny, on the CPU: do they run at all

Each part is a process of its own with a time limit; what fails or does not end is a row, and the
rest goes on. Writes DATE_DEVICE.md and .json into benchmarks/results/gpu. Without a GPU it says of
every part that it was not run, writes nothing and ends with status 0.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import tyro

from benchmarks.gpu.rows import Row, last_words, read_rows
from benchmarks.gpu.train_runs import CASES
from benchmarks.start import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "gpu"


@dataclass(frozen=True)
class Part:
    """One process of the whole."""

    name: str
    command: tuple[str, ...]
    """What follows the interpreter."""
    limit_s: int
    gpus: int = 1
    rehearsal: tuple[str, ...] = ()
    """Further words that make it small and run on the CPU; empty: it does not."""


def _module(name: str, *words: str) -> tuple[str, ...]:
    return "-m", f"benchmarks.gpu.{name}", *words


def _runs(*names: str) -> list[Part]:
    on_cpu = ("--device", "cpu", "--steps", "2")
    return [
        Part(name, _module("train_runs", "--case", name), 160, CASES[name].ranks, on_cpu)
        if name != "shared"
        else Part(name, _module("train_runs", "--case", name), 160, 1, on_cpu)
        for name in names
    ]


_TINY = ("--shape", "tiny", "--device", "cpu", "--rounds", "1")
PARTS = [
    Part("tests", ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"), 150),
    *_runs("grpo"),
    Part("parity", _module("parity"), 150, 1, ("--device", "cpu", "--variants", "no liger")),
    Part("update_1b", _module("update", "--shape", "1b"), 120, 1, (*_TINY, "--length", "64")),
    Part("push", _module("push"), 120, 1, ("--megabytes", "20")),
    *_runs("moe", "shared"),
    Part("engine_1b", _module("engine", "--shape", "1b"), 300, 1,
         (*_TINY, "--requests", "8", "--length", "8")),
    Part("update_4b", _module("update", "--shape", "4b"), 180),
    *_runs("replay", "deepseek", "lora", "resumed", "transformers", "dpo"),
    *_runs("split", "colocated_tp"),
    Part("meshes_2", _module("meshes"), 300, 2, ("--device", "cpu", "--only", "ring")),
    Part("push_2", _module("push", "--ranks", "2"), 150, 2, ("--megabytes", "20")),
    Part("kills", _module("kills"), 300, 2, ("--device", "cpu")),
    *_runs("split_tp", "hsdp"),
    Part("meshes_4", _module("meshes", "--ranks", "4"), 400, 4),
    Part("push_4", _module("push", "--ranks", "4"), 150, 4),
    *_runs("split_8", "experts_8"),
    Part("push_8", _module("push", "--ranks", "8"), 150, 8),
]  # fmt: skip
"""In the order of what is worth most, those for more GPUs last."""


@dataclass(frozen=True)
class Options:
    """What to run."""

    parts: tuple[str, ...] = ()
    """Names of parts; empty: all that the GPUs here are enough for."""
    minutes: float = 10.0
    """For the parts of one GPU, and again for those of more; what is left over is not run."""
    rehearse: bool = False
    """Run tiny versions on the CPU, and write nothing."""
    list: bool = False
    """Name the parts and end."""


def chosen(options: Options) -> list[Part]:
    """Return the parts to consider.

    Raises: SystemExit for a name that is none.
    """
    names = [part.name for part in PARTS]
    for name in options.parts:
        if name not in names:
            raise SystemExit(f"--parts {name}: not a part; known: {', '.join(names)}")
    return [part for part in PARTS if not options.parts or part.name in options.parts]


def why_not(part: Part, options: Options, *, gpus: int, left_s: float) -> str:
    """Return why a part cannot be run here; empty when it can."""
    if options.rehearse:
        return "" if part.rehearsal else "has no rehearsal"
    if gpus < part.gpus:
        return f"needs {part.gpus} GPUs, {gpus} here" if gpus else "no CUDA device"
    if left_s < 20:
        return f"the {options.minutes:g} minutes are over: --parts {part.name}, or --minutes"
    return ""


def run(part: Part, *, words: tuple[str, ...], limit_s: float) -> list[Row]:
    """Run a part to its end or its limit, and return its rows."""
    command = [sys.executable, *part.command, *words]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
        printed, status = done.stdout, done.returncode
        errors = done.stderr
    except subprocess.TimeoutExpired as error:
        printed = (error.stdout or b"").decode(errors="replace")
        errors = (error.stderr or b"").decode(errors="replace")
        status = -1
    rows = [*read_rows(printed)]
    if part.name == "tests":
        verdict = "met" if status in (0, 5) else "failed"
        rows.append(Row("tests marked gpu", last_words(printed), aim="all pass", verdict=verdict))
    elif status:
        why = f"no end in {limit_s:.0f} s" if status < 0 else last_words(printed + errors)
        rows.append(Row(part.name, why, verdict="failed", numbers={"status": status}))
    return rows


def machine() -> dict[str, str]:
    """Return what the figures hold for."""
    from importlib.metadata import PackageNotFoundError, version

    def of(package: str) -> str:
        """Return a package's version."""
        try:
            return version(package)
        except PackageNotFoundError:
            return "none"

    names = ("torch", "vllm", "transformers", "triton", "liger-kernel", "flash-attn")
    found = {name: of(name) for name in names}
    if torch.cuda.is_available():
        found["GPU"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        found["CUDA"] = str(torch.version.cuda)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        asked = subprocess.run(query, capture_output=True, text=True, check=False)
        found["driver"] = asked.stdout.split("\n")[0].strip()
    commit = ["git", "rev-parse", "--short", "HEAD"]
    asked = subprocess.run(commit, cwd=ROOT, capture_output=True, text=True, check=False)
    found["commit"] = asked.stdout.strip() or "unknown"
    return found | {"Python": platform.python_version()}


def page(rows: list[tuple[str, Row]], about: dict[str, str], *, command: str) -> str:
    """Return the table as Markdown."""
    lines = [
        f"# {about.get('GPU', 'no GPU')}, {datetime.date.today()}",
        "",
        f"`{command}`; " + ", ".join(f"{k} {v}" for k, v in about.items() if k != "GPU"),
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


def main(options: Options) -> int:
    """Run the parts, print and keep the table; status 1 when one failed."""
    if options.list:
        print("\n".join(f"{part.name:14}{part.gpus} GPU, {part.limit_s} s" for part in PARTS))
        return 0
    gpus, rows = torch.cuda.device_count(), []
    parts, began = chosen(options), {}
    for number, part in enumerate(parts, 1):
        start = began.setdefault(part.gpus > 1, time.monotonic())
        left = 60 * options.minutes - (time.monotonic() - start)
        if lacking := why_not(part, options, gpus=gpus, left_s=left):
            found = [Row(part.name, lacking, verdict="not run")]
        else:
            about = f"part {number} of {len(parts)}: {part.name}"
            print(f"{about}, {left / 60:.0f} min left", flush=True)
            words = part.rehearsal if options.rehearse else ()
            found = run(part, words=words, limit_s=min(part.limit_s, max(left, 20)))
        rows += [(part.name, row) for row in found]
        for row in found:
            print(f"  {row.verdict:9}{row.what}: {row.found}", flush=True)
    if gpus and not options.rehearse:
        keep(rows)
    return int(any(row.verdict == "failed" for _, row in rows))


def keep(rows: list[tuple[str, Row]]) -> None:
    """Write the table and the raw figures."""
    about = machine()
    device = about["GPU"].split(" x ")[1].replace(" ", "_").replace("/", "_")
    path = RESULTS / f"{datetime.date.today()}_{about['GPU'].split()[0]}x{device}.md"
    RESULTS.mkdir(parents=True, exist_ok=True)
    path.write_text(page(rows, about, command="python -m benchmarks.gpu " + " ".join(sys.argv[1:])))
    raw = [{"part": part} | dataclasses.asdict(row) for part, row in rows]
    told = {"machine": about, "rates": rates_of(rows, about), "rows": raw}
    path.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")
    print(f"{path.relative_to(ROOT)} and .json")


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
