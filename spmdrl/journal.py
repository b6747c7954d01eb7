"""A journal: a file of JSON lines that a run appends to, over kills, full disks and resumes."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl import run_files
from spmdrl.errors import Refusal
from spmdrl.imports import attempt
from spmdrl.run_folder import open_file, write_file
from spmdrl.value_forms import is_number

log = logging.getLogger(__name__)

Row = dict[str, Any]
_SEAL = b', "sha256": "'
_END = b'"}\n'
_MAX_BYTES = 2**30  # of all rows of a file in memory
# About how many bytes of memory a row takes, and each of its values.
_ROW_BYTES = 300
_VALUE_BYTES = 40


@dataclass(frozen=True)
class Entry:
    """A line of a journal."""

    number: int
    """Line number, from 1."""
    row: Row
    line: bytes
    begin: int
    """Number of bytes before the line."""
    seal: str = ""
    """In a sealed journal: sha256 of the line and of all earlier lines."""
    problem: str = ""
    """What is wrong with the line, with its place; empty if nothing is."""


class Journal:
    """A file of JSON objects, one on each line.

    A line that cannot be written (disk full) stays in memory and is written with the next one.

    Args:
        kind: the file's name in messages, and its limits.
        is_sealed: whether each line ends in a digest of itself and of all earlier lines, which
            shows whether a line was changed, inserted, moved or removed.
        must_write: whether to raise OSError for a line that cannot be written.
        within: the folder that the user named, above the file; None for the file's own folder.
    """

    def __init__(
        self,
        path: Path,
        kind: run_files.Kind = run_files.METRICS,
        *,
        is_sealed: bool = False,
        must_write: bool = False,
        within: Path | None = None,
    ):
        self.path = path
        self._kind = kind
        self._is_sealed = is_sealed
        self._must_write = must_write
        self._within = within
        self._seal = ""
        self._waiting: list[bytes] = []

    def append(self, row: Row) -> None:
        """Write one row at the end of the file; numbers that are not finite become null.

        For a sealed journal that exists, call `keep` first: it finds the last seal.
        Raises: OSError if `must_write`.
        """
        line = json.dumps(_replace_infinite(row)).encode()
        if self._is_sealed:
            self._seal = _seal_of(self._seal, line)
            # The seal becomes the last field of the object.
            line = line[:-1] + _SEAL + self._seal.encode() + b'"}'
        self._waiting.append(line + b"\n")
        # A full disk or a lost mount must not end a training run. () lets every error through.
        _, error = attempt(self._write_waiting, () if self._must_write else OSError)
        if error is None:
            self._waiting.clear()
        elif len(self._waiting) == 1:
            # Log this once, not for each row that waits.
            log.error("%s: cannot write (%s); rows stay in memory until it can", self.path, error)

    def _write_waiting(self) -> None:
        with open_file(self.path, "ab", within=self._within, buffering=0) as file:
            good = os.fstat(file.fileno()).st_size
            data = b"".join(self._waiting)
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError:
                # The next call writes all of these lines again, so no part of one may stay.
                os.ftruncate(file.fileno(), good)
                raise

    def read(self, *, newest_bytes: int = 0) -> Iterator[Entry]:
        """Yield the rows of the file, up to the first damaged line.

        Args:
            newest_bytes: of a file that is not sealed, only the lines that begin within the last
                so many bytes, whose numbers and places count from there; 0: all.

        A file that is not sealed shows only one kind of damage: a last line that breaks off. Other
        lines without a row of a step are skipped.

        Raises: OSError; Refusal for a file that is not a regular one, a line that is too long, or,
            in a file that is not sealed, a number that does not fit into 64 bits.
        """
        seal = ""
        begin = 0
        lines = run_files.read_lines(self.path, self._kind, newest_bytes=newest_bytes)
        for number, line in enumerate(lines, 1):
            place = f"{self.path}: line {number}"
            if self._is_sealed:
                row, seal, problem = _read_sealed_row(line, before=seal, place=place)
            else:
                row = _row_of_step(line, place=place)
                # The process may have been killed while it wrote the line.
                breaks_off = not row and not line.endswith(b"\n")
                problem = f"{place} breaks off" if breaks_off else ""
            entry = Entry(number, row, line, begin, seal, problem)
            if entry.row or entry.problem:
                yield entry
            if entry.problem:
                return
            begin += len(line)

    def keep(self, wanted: Callable[[Row], bool], *, removed: Path | None = None) -> list[Row]:
        """Cut the file before the first row that is not wanted or is damaged.

        Args:
            wanted: called for each row in order, up to the first for which it returns False.
            removed: path of a file for the lines that are cut off.
        Returns: the rows that are cut off, as far as they can be read.
        """
        cut: list[Row] = []
        if not self.path.exists():
            return cut
        cut_at: int | None = None
        last = b"\n"
        for entry in self.read():
            if cut_at is None and (entry.problem or not wanted(entry.row)):
                cut_at = entry.begin
            if cut_at is None:
                self._seal = entry.seal
                last = entry.line
            elif not entry.problem:
                cut.append(entry.row)
            if entry.problem and self._is_sealed:
                log.warning("%s; this line and all later ones are removed", entry.problem)
        if cut_at is not None:
            self._cut(cut_at, removed)
        elif not last.endswith(b"\n"):
            # The process was killed right before the end of the line.
            with open_file(self.path, "ab", within=self._within) as file:
                file.write(b"\n")
        return cut

    def _cut(self, length: int, removed: Path | None) -> None:
        if removed is not None:
            with run_files.opened(self.path, self._kind) as file:
                file.seek(length)
                write_file(removed, file.read())
        with open_file(self.path, "ab", within=self._within) as file:
            os.ftruncate(file.fileno(), length)

    def rows(self, *, newest: int = 0, holds_texts: bool = False) -> list[Row]:
        """Return the rows of the file, see `read_rows`; none if there is no file."""
        if not self.path.exists():
            return []
        return read_rows(self.path, newest=newest, holds_texts=holds_texts)


def read_rows(path: Path, *, newest: int = 0, holds_texts: bool = False) -> list[Row]:
    """Return the rows of a journal that is not sealed.

    Args:
        newest: number of rows to return, from the end; 0 for all.
        holds_texts: whether values may be anything. If not, they must be numbers or null.
    Raises: as `Journal.read`; Refusal for a value that is not a number, or for more rows than fit
        into memory.
    """
    rows: deque[Row] = deque(maxlen=newest or None)
    size = 0
    for entry in Journal(path).read():
        if entry.problem:
            break
        row = entry.row
        place = f"{path}: line {entry.number}"
        if not holds_texts:
            _check_numbers(row, place=place)
        rows.append(row)
        size += _ROW_BYTES + _VALUE_BYTES * len(row)
        if holds_texts:
            size += len(entry.line)
        if size > _MAX_BYTES and not newest:
            raise Refusal(
                f"{place}: the rows up to here take more than {_MAX_BYTES >> 20} MiB, the limit "
                "for one file; cut the file into several"
            )
    return list(rows)


def _row_of_step(line: bytes, *, place: str) -> Row:
    """Return the row of a line; {} for a line without a row of a step."""
    row = _object_of(line, place=place)
    return row if type(row.get("step")) is int else {}


def _read_sealed_row(line: bytes, *, before: str, place: str) -> tuple[Row, str, str]:
    """Return the row of a sealed line, its seal, and what is wrong with it.

    Args:
        before: seal of the previous line; empty for the first line.
    """
    if not line.endswith(_END):
        return {}, "", f"{place} breaks off"
    content, _, seal_bytes = line[: -len(_END)].rpartition(_SEAL)
    content += b"}"
    seal = seal_bytes.decode(errors="replace")
    row, error = attempt(lambda: _object_of(content, place=place))
    problem = str(error or "")
    if not row and not error:
        problem = f"{place} holds no object"
    if seal != _seal_of(before, content):
        problem = (
            f"{place} does not follow from the lines before it: it was changed or moved, or lines "
            "were removed or inserted"
        )
    return row or {}, seal, problem


def _seal_of(before: str, content: bytes) -> str:
    return hashlib.sha256(before.encode() + content).hexdigest()


def _object_of(text: bytes, *, place: str) -> Row:
    """Return the object in a JSON text; {} if it is not one."""
    try:
        row = run_files.json_of(text, place=place)
    except run_files.NotJson:
        return {}
    return row if isinstance(row, dict) else {}


def _check_numbers(row: Row, *, place: str) -> None:
    for name, value in row.items():
        if value is not None and not is_number(value):
            raise Refusal(f"{place}: {name} is {value!r:.60}, and must be a number or null")


def _replace_infinite(row: Row) -> Row:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
