"""Everything that only a GPU can show, as one table: `make gpu`.

    python -m benchmarks.gpu                     # all parts for the GPUs of this machine
    python -m benchmarks.gpu --parts grpo push   # these alone
    python -m benchmarks.gpu --rehearse          # all parts, tiny, on the CPU: do they run at all

Each part is a process of its own with a time limit; what fails or does not end is a row, and the
rest goes on. What is left of the minutes decides whether a part starts. Writes DATE_DEVICE.md and
.json into benchmarks/results/gpu after each part, and what a part prints into runs/gpu. Without a
GPU it says of every part that it was not run, writes nothing and ends with status 0.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import tyro

from benchmarks.gpu import table
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.process import end_of, run
from benchmarks.gpu.rows import Row, lacking_time
from benchmarks.start import ROOT

LOGS = ROOT / "runs" / "gpu"
CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
}
"""{variable that names a cache of compiled kernels: its folder in runs/gpu/compiled}.

All parts share them, so that the second engine of one model does not compile again, which takes
half a minute. They are in one folder that is kept, on the disk of this checkout: torch's own
default is in /tmp and the others are in the home folder, which is slow or small on many clusters.
The next `make gpu` starts warm, and who wants it cold removes one folder. A variable that is set
already stays.
"""


@dataclass(frozen=True)
class Options:
    """What to run."""

    parts: tuple[str, ...] = ()
    """Names of parts; empty: all that the GPUs here are enough for."""
    minutes: float = 10.0
    """For the parts of one GPU, and again for those of more."""
    rehearse: bool = False
    """Run tiny versions on the CPU, without a limit of minutes, and write no table."""
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
        return ""
    if gpus < part.gpus:
        return f"needs {part.gpus} GPUs, {gpus} here" if gpus else "no CUDA device"
    if left_s < part.needs_s:
        return f"{lacking_time(left_s, part.needs_s)}: --parts {part.name}, or --minutes"
    return ""


def share_caches() -> str:
    """Set the folders of compiled kernels for all parts, and return what is in them already."""
    folder = LOGS / "compiled"
    is_warm = folder.is_dir() and any(path.is_file() for path in folder.rglob("*"))
    for variable, name in CACHES.items():
        os.environ.setdefault(variable, str(folder / name))
    return "the kernels of an earlier table" if is_warm else "nothing"


def show(row: Row) -> None:
    """Print a row."""
    print(f"  {row.verdict:9}{row.what}: {row.found}", flush=True)


def main(options: Options) -> int:
    """Run the parts, print and keep the table; status 1 when one failed."""
    if options.list:
        for part in PARTS:
            print(f"{part.name:14}{part.gpus} GPU, {part.needs_s:.0f} to {part.limit_s:.0f} s")
        return 0
    parts = chosen(options)
    gpus = torch.cuda.device_count()
    is_kept = gpus > 0 and not options.rehearse
    command = "python -m benchmarks.gpu " + " ".join(sys.argv[1:])
    about = table.machine(caches=share_caches()) if is_kept or options.rehearse else {}
    rows: list[tuple[str, Row]] = []
    began = psutil.Process().create_time()  # importing torch takes seconds too
    has_several = False
    path: Path | None = None
    for number, part in enumerate(parts, 1):
        if part.gpus > 1 and not has_several:
            has_several = True
            began = time.time()
        left = began + 60 * options.minutes - time.time()
        if reason := why_not(part, options, gpus=gpus, left_s=left):
            found = [Row(part.name, reason, verdict="not run")]
            show(found[0])
        else:
            until = "" if options.rehearse else f", {left:.0f} s left"
            print(f"part {number} of {len(parts)}: {part.name}{until}", flush=True)
            found = run_part(part, options, left_s=left)
        rows += [(part.name, row) for row in found]
        if is_kept:
            path = table.keep(rows, about, command=command)
    if path is not None:
        print(f"{path.relative_to(ROOT)} and .json")
    return int(any(row.verdict == "failed" for _, row in rows))


def run_part(part: Part, options: Options, *, left_s: float) -> list[Row]:
    """Run a part, and print the end of its log if it failed."""
    words = part.rehearsal if options.rehearse else ()
    # CPUs are slow, and a rehearsal has no aim in seconds.
    limit_s = 4 * part.limit_s if options.rehearse else min(part.limit_s, left_s)
    log = LOGS / ("rehearsal" if options.rehearse else "logs") / f"{part.name}.log"
    log.unlink(missing_ok=True)
    found = run(part, words=words, limit_s=limit_s, log=log, tell=show)
    if any(row.verdict == "failed" for row in found):
        print(f"    {log.relative_to(ROOT)} ends:\n{end_of(log)}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
