"""Append-only JSON lines that survive kills, full disks and resumes."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spmdrl.imports import attempt, parsed_json
from spmdrl.run_folder import open_file, replace_file, write_file

log = logging.getLogger(__name__)


class JsonLines:
    """One file of JSON rows, each with a `step`.

    A row that cannot be written (disk full) is kept in memory and written with the next one.
    """

    def __init__(self, path: Path):
        self.path = path
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
            good, data = os.fstat(file.fileno()).st_size, b"".join(self._waiting)
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError:
                os.ftruncate(file.fileno(), good)
                raise

    def cut(self, length: int, *, removed: Path) -> None:
        """Move what the file holds from `length` bytes on into the file `removed`."""
        with self.path.open("rb") as file:
            file.seek(length)
            write_file(removed, file.read())
        with open_file(self.path, "ab") as file:
            os.ftruncate(file.fileno(), length)

    def rows(self) -> list[dict[str, Any]]:
        """Return what the file holds; nothing where there is none."""
        return read_rows(self.path) if self.path.exists() else []

    def keep(self, wanted: Callable[[dict[str, Any]], bool], *, removed: Path) -> int:
        """Drop the rows that are not `wanted`, and a half-written last line.

        What is dropped goes to the file `removed`, so that nothing is lost.
        Returns: the number of rows dropped.
        """
        if not self.path.exists():
            return 0
        kept: list[str] = []
        dropped: list[str] = []
        for line in self.path.read_text(errors="replace").splitlines():
            row = _parse(line)
            (kept if row is not None and wanted(row) else dropped).append(line)
        if not dropped and self.path.read_bytes().endswith(b"\n"):
            return 0
        if dropped:
            write_file(removed, "".join(line + "\n" for line in dropped))
        replace_file(self.path, "".join(line + "\n" for line in kept))
        return len(dropped)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON-lines file; a half-written last line, and any other that is no row
    of a step, is left out. Raises: OSError."""
    rows = [_parse(line) for line in path.read_text(errors="replace").splitlines()]
    return [row for row in rows if row is not None]


def _parse(line: str) -> dict[str, Any] | None:
    row, _why = parsed_json(line)  # it may be cut: the process was killed
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
