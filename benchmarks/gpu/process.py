"""Running one part of `make gpu`: its rows as they come, its log, its end."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu.parts import Part
from benchmarks.gpu.rows import Row, read_rows
from benchmarks.start import ROOT, end_tree, last_words

SHOWN_LINES = 8
"""Lines of a failed part's log that are printed."""


def run(
    part: Part, *, words: tuple[str, ...], limit_s: float, log: Path, tell: Callable[[Row], None]
) -> list[Row]:
    """Run a part to its end or its limit.

    Args:
        words: further ones of its command line.
        log: gets everything that the part prints.
        tell: is called with each row when it is there.
    Returns: all its rows, the last of which says how the part failed, if it did.
    """
    rows: list[Row] = []

    def take(row: Row) -> None:
        rows.append(row)
        tell(row)

    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        command = [sys.executable, *part.command, *words, "--limit-s", f"{limit_s:.0f}"]
        print(" ".join(command), file=file, flush=True)
        job = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=file, text=True, errors="replace"
        )

        def read() -> None:
            assert job.stdout is not None
            for line in job.stdout:
                file.write(line)
                file.flush()
                for row in read_rows(line):
                    take(row)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        ended = True
        try:
            job.wait(limit_s)
        except subprocess.TimeoutExpired:
            ended = False
        finally:
            if job.poll() is None:  # also by Ctrl-C
                end_tree(job.pid)
            status = job.wait()
        reader.join(timeout=5)
    where = log.relative_to(ROOT) if log.is_relative_to(ROOT) else log
    if not ended or status:
        why = f"exit status {status}" if ended else f"no end in {limit_s:.0f} s"
        found = f"{why}: {last_words(_without_rows(log))}"
        take(Row(part.name, found, beside=str(where), verdict="failed", numbers={"status": status}))
    elif not rows:
        take(Row(part.name, "it told nothing", beside=str(where), verdict="failed"))
    return rows


def end_of(log: Path) -> str:
    """Return the last lines of a part's log, without its rows."""
    lines = _without_rows(log).splitlines()
    return "\n".join(f"    {line[:200]}" for line in lines[-SHOWN_LINES:])


def _without_rows(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(line for line in lines if line.strip() and not any(read_rows(line)))
