"""Append-only JSON lines that survive kills, full disks and resumes."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spmdrl import run_files
from spmdrl.errors import Refusal
from spmdrl.imports import attempt
from spmdrl.run_folder import open_file, replace_file, write_file

log = logging.getLogger(__name__)

_MOST_BYTES = 2**30
# What a row takes in memory, about: itself, and each of its values.
_ROW_BYTES = 300
_VALUE_BYTES = 40


class JsonLines:
    """One file of JSON rows, each with a `step`.

    A row that cannot be written (disk full) is kept in memory and written with the next one.

    Args:
        holds_texts: a row's values may be anything; else they are numbers.
    """

    def __init__(self, path: Path, *, holds_texts: bool = False):
        self.path = path
        self._holds_texts = holds_texts
        self._waiting: list[bytes] = []

    def append(self, row: dict[str, Any]) -> None:
        """Write one row at the end of the file; numbers that are not finite become null."""
        self._waiting.append((json.dumps(_finite(row)) + "\n").encode())
        _, error = attempt(self._write_waiting, OSError)
        if error:  # disk full or a lost mount must not end a training run
            if len(self._waiting) == 1:
                log.error(
                    "%s: cannot write (%s); rows are kept in memory until it can", self.path, error
                )
            return
        self._waiting.clear()

    def _write_waiting(self) -> None:
        with open_file(self.path, "ab", buffering=0) as file:
            good = os.fstat(file.fileno()).st_size
            data = b"".join(self._waiting)
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError:
                os.ftruncate(file.fileno(), good)
                raise

    def cut(self, length: int, *, removed: Path) -> None:
        """Move what the file holds from `length` bytes on into the file `removed`."""
        with run_files.opened(self.path, run_files.CERTIFICATE) as file:
            file.seek(length)
            write_file(removed, file.read())
        with open_file(self.path, "ab") as file:
            os.ftruncate(file.fileno(), length)

    def rows(self, *, newest: int = 0) -> list[dict[str, Any]]:
        """Return what the file holds, or its `newest` rows; nothing where there is none. Raises: as
        `read_rows`."""
        if not self.path.exists():
            return []
        return read_rows(self.path, newest=newest, holds_texts=self._holds_texts)

    def keep(self, wanted: Callable[[dict[str, Any]], bool], *, removed: Path) -> int:
        """Drop the rows that are not `wanted`, and a half-written last line.

        What is dropped goes to the file `removed`, so that nothing is lost.
        Returns: the number of rows dropped.
        """
        if not self.path.exists():
            return 0
        kept: list[bytes] = []
        dropped: list[bytes] = []
        is_whole = True
        for number, line in enumerate(run_files.read_lines(self.path, run_files.METRICS), 1):
            row = _parse(line, place=f"{self.path}: line {number}")
            is_whole = line.endswith(b"\n")
            own = line.rstrip(b"\r\n") + b"\n"
            (kept if row is not None and wanted(row) else dropped).append(own)
        if not dropped and is_whole:
            return 0
        if dropped:
            write_file(removed, b"".join(dropped))
        replace_file(self.path, b"".join(kept))
        return len(dropped)


def read_rows(path: Path, *, newest: int = 0, holds_texts: bool = False) -> list[dict[str, Any]]:
    """Return the rows of a JSON-lines file; a half-written last line, and any other that is no row
    of a step, is left out.

    Args:
        newest: rows to return, from the end; 0 returns all.
        holds_texts: its values may be anything; else they are numbers, or null.
    Raises: OSError; Refusal for a file that is no regular one, a line that is too long, a number
        that does not fit into 64 bits, a value that is no number, or more rows than fit into
        memory.
    """
    rows: deque[dict[str, Any]] = deque(maxlen=newest or None)
    held = 0
    for number, line in enumerate(run_files.read_lines(path, run_files.METRICS), 1):
        place = f"{path}: line {number}"
        row = _parse(line, place=place)
        if row is None:
            continue
        if not holds_texts:
            _check_numbers(row, place=place)
        rows.append(row)
        held += _ROW_BYTES + _VALUE_BYTES * len(row) + (len(line) if holds_texts else 0)
        if held > _MOST_BYTES and not newest:
            raise Refusal(
                f"{place}: the rows up to here take more than {_MOST_BYTES >> 20} MiB, the most "
                "that is read at once; cut the file into several"
            )
    return list(rows)


def _parse(line: bytes, *, place: str) -> dict[str, Any] | None:
    try:
        row = run_files.json_of(line, place=place)
    except run_files.NotJson:  # it may be cut: the process was killed
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def _check_numbers(row: dict[str, Any], *, place: str) -> None:
    for name, value in row.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number and value is not None:
            raise Refusal(f"{place}: {name} is {value!r:.60}, and must be a number or null")


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
