"""Starting ranks for a benchmark, as a user's shell would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def torchrun(ranks: int, program: Path | str, *arguments: str, timeout_s: float) -> str:
    """Run a program under torchrun to its end, one thread to a rank, in this checkout, and return
    what it printed.

    Raises: RuntimeError with the end of what it printed, when it fails.
    """
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            str(program),
            *arguments,
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-4000:])
    return done.stdout


def as_flags(fields: Mapping[str, object]) -> list[str]:
    """Return the words of a command line that set fields of the config."""
    return [word for name, value in fields.items() for word in (f"--{name}", str(value))]
