"""Rows of a .jsonl file that stay on disk: 8 bytes of memory for each, a read for each use."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import numpy

from spmdrl.data.row_files import too_long, value_of
from spmdrl.data.rows import Need, checked_row
from spmdrl.errors import Refusal
from spmdrl.imports import refusing

_CHUNK_BYTES = 16 * 2**20
_NEWLINE, _SPACE = 10, 32


class StreamedRows:
    """Rows that are read, and checked, when they are asked for.

    The file is gone through once, for where its lines begin. It must stay as it is: rows of another
    file under the same numbers would be taken for the old ones.

    Args:
        path: of a .jsonl file. size, need, most_bytes, columns: as of `rows.read_rows`.
    Raises: Refusal naming file and line, as `read_rows`; what is wrong with a row, when it is read.
    """

    is_held = False
    """Whether all rows are in memory, and were checked."""

    def __init__(
        self, path: Path, *, size: int, need: Need, most_bytes: int, columns: Mapping[str, str]
    ):
        self.path, self._need, self._most, self._columns = path, need, most_bytes, columns
        with refusing(f"{path}: cannot be read", OSError):
            self._file = path.open("rb", buffering=0)
            self._identity = self._stat()
            parts = list(_lines(self._file, path, size=size, most_bytes=most_bytes))
        self._begins = numpy.concatenate([begins for begins, _ in parts] or [numpy.empty(0, int)])
        self._blanks = numpy.concatenate([blanks for _, blanks in parts] or [numpy.empty(0, int)])
        if size:
            self._begins = self._begins[:size].copy()
        if not len(self):
            raise Refusal(f"{path}: the dataset is empty (0 rows); give it at least one")

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: int) -> dict:
        if not 0 <= index < len(self):
            raise IndexError(index)
        with refusing(f"{self.path}: cannot be read", OSError):
            if self._stat() != self._identity:
                raise Refusal(
                    f"{self.path}: was changed while it is in use, so that its rows are not where "
                    "they were; leave it as it is, and resume the run"
                )
            begin = int(self._begins[index])
            data = os.pread(self._file.fileno(), self._end(index) - begin, begin)
        place = self.where(index)
        row = value_of(data.partition(b"\n")[0], place=place)
        return checked_row(
            row, place=place, need=self._need, most_bytes=self._most, columns=self._columns
        )

    def __iter__(self) -> Iterator[dict]:
        return (self[index] for index in range(len(self)))

    def where(self, index: int) -> str:
        """Return the origin of a row for error messages, e.g. `train.jsonl:12`."""
        blank = int(numpy.searchsorted(self._blanks, index, side="right"))
        return f"{self.path}:{index + 1 + blank}"

    def _end(self, index: int) -> int:
        """Return where a row ends at the latest: where the next begins, or as long as it may be."""
        begin, size = int(self._begins[index]), self._identity[0]
        following = self._begins[index + 1] if index + 1 < len(self) else size
        return min(int(following), begin + self._most + 2)

    def _stat(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns


def _lines(
    file: IO[bytes], path: Path, *, size: int, most_bytes: int
) -> Iterator[tuple[numpy.ndarray, numpy.ndarray]]:
    """Yield, part by part of a file, the offsets of the lines that are not blank, and of those that
    are how many rows come before them: [rows] and [blank lines] int64.

    Raises: Refusal for a line above `most_bytes`.
    """
    rest, offset, rows, lines = b"", 0, 0, 0
    while (chunk := file.read(_CHUNK_BYTES)) or rest:
        data = rest + chunk if chunk else rest + b"\n"  # the last line may have no end
        values = numpy.frombuffer(data, numpy.uint8)
        ends = numpy.flatnonzero(values == _NEWLINE)
        begins = numpy.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
        rest = data[ends[-1] + 1 :] if len(ends) else data
        long = numpy.flatnonzero(ends - begins > most_bytes)
        if len(long) or len(rest) > most_bytes:
            number = int(long[0]) if len(long) else len(ends)
            raise too_long(f"{path}:{lines + number + 1}", most_bytes)
        is_blank = values[begins] <= _SPACE
        for i in numpy.flatnonzero(is_blank):
            is_blank[i] = not data[begins[i] : ends[i]].strip()
        before = rows + numpy.cumsum(~is_blank)
        yield offset + begins[~is_blank], before[is_blank]
        rows, lines = rows + int((~is_blank).sum()), lines + len(ends)
        offset += len(data) - len(rest)
        if not chunk or (size and rows >= size):
            return
