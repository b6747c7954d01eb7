"""What benchmarks share: starting ranks as a user's shell would, reading metrics, printing."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import tyro

ROOT = Path(__file__).resolve().parent.parent


def torchrun(ranks: int, program: Path | str, *arguments: str, timeout_s: float) -> str:
    """Run a program under torchrun to its end, one thread to a rank, in this checkout, and return
    what it printed; see `output_of`."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node"]
    words = [sys.executable, "-m", *launcher, str(ranks), str(program), *arguments]
    # Before what is there already: packages may be found only by it.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return output_of(words, timeout_s=timeout_s, variables=own)


def output_of(
    words: list[str], *, timeout_s: float, variables: Mapping[str, str] | None = None
) -> str:
    """Run a program to its end, in this checkout, and return what it printed to stdout.

    If it does not end in time, its children are killed too: ranks that outlive their launcher would
    hold a GPU.

    Args:
        variables: of the environment, beside this process's own.
    Raises: RuntimeError when it fails or does not end in time. Its first line holds the last words
        of the program, the lines after it all that the program printed.
    """
    problem = ""
    # Files, since a pipe would stay open where a process that left the tree holds it.
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
        job = subprocess.Popen(
            words, cwd=ROOT, env=os.environ | (variables or {}), stdout=printed, stderr=errors
        )
        try:
            job.wait(timeout_s)
        except subprocess.TimeoutExpired:
            problem = f"no end in {timeout_s:.0f} s; last words: "
            end_tree(job.pid)
            job.wait()
        printed.seek(0)
        errors.seek(0)
        found = printed.read()
        everything = f"{found}\n{errors.read()}"
    if job.returncode or problem:
        raise RuntimeError(f"{problem}{last_words(everything)}\n{everything}")
    return found


def end_tree(pid: int) -> None:
    """Kill a process, and all that it started and that they started; wait until these are gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        others = first.children(recursive=True)
        for process in (first, *others):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(others, timeout=5)  # then their GPUs are free


# Of torchrun, after the ranks' own words.
_LAUNCHER = ("ChildFailedError", "torch/distributed/", "torch.distributed.elastic", "error_file")


def last_words(printed: str) -> str:
    """Return the end of what a failed process printed: its error, in most cases, with files of this
    tree by their paths in it."""
    shown = printed.replace(f"{ROOT}/", "")
    lines = [line.strip() for line in shown.splitlines() if line.strip()]
    own = [line for line in lines if not any(word in line for word in _LAUNCHER)]
    errors = [line for line in own if re.search(r"Error\b|Refusal\b|\berror:", line)]
    return (errors or own or lines or ["nothing printed"])[-1].removeprefix("traceback : ")[:300]


def quick_folder(nbytes: float) -> str | None:
    """Return a folder in memory with room for so many bytes, of temporary files; None where there
    is none. In containers it is often too small."""
    shm = Path("/dev/shm")
    has_room = shm.is_dir() and shutil.disk_usage(shm).free > 1.2 * nbytes
    return str(shm) if has_room else None


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


def draw_all(engine: Any, asked: list[Any]) -> tuple[float, list[list[int]]]:
    """Return the seconds that an engine takes for requests, each drawn to its full length, and the
    tokens of each."""
    done: dict[str, Any] = {}
    began = time.perf_counter()
    for request in asked:
        engine.add(request)
    while engine.is_busy:
        for completion in engine.step():
            done[completion.key] = completion.tokens
    seconds = time.perf_counter() - began
    tokens = [done[request.key].tolist() for request in asked]
    lengths = [len(own) for own in tokens]
    assert lengths == [request.max_tokens for request in asked], f"{sum(lengths)} tokens were drawn"
    return seconds, tokens


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
