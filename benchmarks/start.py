"""What benchmarks share: starting ranks as a user's shell would, reading metrics, printing."""

from __future__ import annotations

import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tyro

ROOT = Path(__file__).resolve().parent.parent


def torchrun(ranks: int, program: Path | str, *arguments: str, timeout_s: float) -> str:
    """Run a program under torchrun to its end, one thread to a rank, in this checkout, and return
    what it printed.

    Raises: RuntimeError with the end of what it printed, when it fails.
    """
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node"]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, str(ranks), str(program), *arguments],
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


def in_ranks(ranks: int, program: str, *given: object, found: str = "found.json") -> str:
    """Have the ranks of a program that is started by `begin` work, and return what they found.

    Args:
        program: its `__file__`.
        given: to its `work`, after a new folder; what JSON can hold.
        found: file in that folder.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = Path(program).resolve()
        torchrun(ranks, own, "--worker", folder, json.dumps(given), timeout_s=900)
        return (Path(folder) / found).read_text()


def begin(main: Callable, work: Callable, options: type) -> None:
    """Call `main` with the options of the command line; or in a rank, `work`, and leave."""
    if sys.argv[1:2] != ["--worker"]:
        main(tyro.cli(options))
        return
    folder, given = sys.argv[2:]
    leave(work(Path(folder), *json.loads(given)) or 0)


def leave(status: int = 0) -> None:
    """End this process, whatever threads of libraries there are."""
    sys.stdout.flush()
    os._exit(status)


def steps_of(metrics: str, *, first: int) -> tuple[int, dict[str, float]]:
    """Return the number of steps from `first` on in metrics.jsonl, and the means of each metric;
    one that is absent counts as 0."""
    rows = map(json.loads, metrics.splitlines())
    rows = [row for row in rows if "perf/step_s" in row and row["step"] >= first]
    names = {name for row in rows for name, value in row.items() if isinstance(value, float | int)}
    return len(rows), {n: statistics.fmean(row.get(n, 0.0) for row in rows) for n in names}


def draw_all(engine: Any, asked: list[Any]) -> float:
    """Return the seconds that an engine takes for requests, each drawn to its full length."""
    began, tokens = time.perf_counter(), 0
    for request in asked:
        engine.add(request)
    while engine.is_busy:
        tokens += sum(len(done.tokens) for done in engine.step())
    seconds = time.perf_counter() - began
    assert tokens == sum(request.max_tokens for request in asked), f"{tokens} tokens were drawn"
    return seconds


def scalars_of(lengths: Any, response_lengths: Any) -> Any:
    """Return the scalars of valid sequences without rewards, each a group of its own.

    Args:
        lengths, response_lengths: [S] int64, tokens.
    """
    import torch

    from spmdrl.types import Scalars

    ids = torch.arange(len(lengths))
    return Scalars(
        lengths=lengths,
        response_lengths=response_lengths,
        group_ids=ids,
        sample_ids=0 * ids,
        rewards=torch.zeros(len(ids)).double(),
        is_truncated=ids < 0,
        is_valid=ids >= 0,
        min_versions=0 * ids,
    )


def commit() -> str:
    """Return the commit of this checkout, with a mark for changes beside it."""
    words = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def row(*cells: object) -> None:
    """Print a row of a Markdown table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


@functools.cache
def say_commit() -> None:
    """Print once what is measured."""
    print(f"commit {commit()}, python {platform.python_version()}, load {os.getloadavg()}\n")


def header(*names: object) -> None:
    """Print the head of a Markdown table; before the first one, what is measured."""
    say_commit()
    row(*names)
    row(*("---" for _ in names))


def conditions(**more: Any) -> None:
    """Print what figures depend on, and the figures, for whoever reads them by program."""
    import torch

    own = {"commit": commit(), "load": os.getloadavg(), "torch": torch.__version__}
    print(json.dumps({**own, "threads": torch.get_num_threads(), **more}))
