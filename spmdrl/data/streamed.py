"""Rows of a .jsonl or .parquet file that stay on disk: read when they are asked for."""

from __future__ import annotations

import bisect
import functools
import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy

from spmdrl.data.row_files import group_batches, opened_parquet, too_long, value_of, values_of
from spmdrl.data.rows import Need, checked_row
from spmdrl.errors import Refusal
from spmdrl.imports import refusing

if TYPE_CHECKING:
    import pyarrow

SUFFIXES = (".jsonl", ".parquet")
_CHUNK_BYTES = 16 * 2**20
_GROUP_BYTES = 512 * 2**20
"""Of a row group, unpacked: one is held."""
_NEWLINE = 10
_SPACE = 32


def stream_rows(path: Path, **how: Any) -> StreamedRows:
    """Open a file whose rows stay on disk; see StreamedRows."""
    return (_Lines if path.suffix == ".jsonl" else _RowGroups)(path, **how)


class StreamedRows:
    """Rows of a file that must stay as it is: rows of another file under the same numbers would be
    taken for the old ones.

    Args:
        path: of the file. size, need, most_bytes, columns: as of `rows.read_rows`.
    Raises: Refusal naming file and line, as `read_rows`; what is wrong with a row, when it is read.
    """

    is_held = False
    """Whether all rows are in memory, and were checked."""

    def __init__(
        self, path: Path, *, size: int, need: Need, most_bytes: int, columns: Mapping[str, str]
    ):
        self.path = path
        self._need = need
        self._most = most_bytes
        self._columns = columns
        with self._reading():
            self._file = path.open("rb", buffering=0)
            self._identity = self._stat()
            found = self._go_through(size)
        self._count = min(size or found, found)
        if not found:
            raise Refusal(f"{path}: the dataset is empty (0 rows); give it at least one")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict:
        if not 0 <= index < len(self):
            raise IndexError(index)
        with self._reading():
            if self._stat() != self._identity:
                raise Refusal(
                    f"{self.path}: was changed while it is in use, so that its rows are not where "
                    "they were; leave it as it is, and resume the run"
                )
            row = self._read(index)
        return checked_row(
            row,
            place=self.where(index),
            need=self._need,
            most_bytes=self._most,
            columns=self._columns,
        )

    def __iter__(self) -> Iterator[dict]:
        return (self[index] for index in range(len(self)))

    def where(self, index: int) -> str:
        """Return the origin of a row for error messages, e.g. `train.jsonl:12`."""
        raise NotImplementedError

    def _go_through(self, size: int) -> int:
        """Find where rows are, `size` of them or all; return their number."""
        raise NotImplementedError

    def _read(self, index: int) -> Any:
        """Return a row as it stands in the file."""
        raise NotImplementedError

    def _reading(self) -> AbstractContextManager[None]:
        return refusing(f"{self.path}: cannot be read", OSError)

    def _stat(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns


class _RowGroups(StreamedRows):
    """Rows of a parquet file, of which one row group is held."""

    def where(self, index: int) -> str:
        return f"{self.path}: row {index + 1}"

    def _go_through(self, size: int) -> int:
        with opened_parquet(self.path, opened=self._file) as file:
            self._metadata = file.metadata
        groups = [self._metadata.row_group(i) for i in range(self._metadata.num_row_groups)]
        self._begins = [0, *itertools.accumulate(group.num_rows for group in groups)]
        for number, group in enumerate(groups):
            self._check_size(number, group.total_byte_size)
        self._held = functools.lru_cache(maxsize=1)(self._batches)
        return self._begins[-1]

    def _read(self, index: int) -> Any:
        group = bisect.bisect_right(self._begins, index) - 1
        batches = self._held(group)
        begins = [0, *itertools.accumulate(batch.num_rows for batch in batches)]
        number = index - self._begins[group]
        at = bisect.bisect_right(begins, number) - 1
        return values_of(batches[at].slice(number - begins[at], 1), self.path, index)[0]

    def _batches(self, group: int) -> list[pyarrow.RecordBatch]:
        batches = []
        spent = 0
        with opened_parquet(self.path, opened=self._file, metadata=self._metadata) as file:
            for batch in group_batches(file, group):
                batches.append(batch)
                spent += batch.nbytes
                self._check_size(group, spent)
        return batches

    def _check_size(self, group: int, unpacked: int) -> None:
        if unpacked > _GROUP_BYTES:
            raise Refusal(
                f"{self.path}: row group {group + 1} unpacks to {unpacked / 2**20:.0f} MiB, and to "
                f"read one row all of its group is read, of at most {_GROUP_BYTES >> 20} MiB; "
                "write it with smaller ones (row_group_size=1000), or raise data.stream_above_mib "
                "to hold the file in memory"
            )


class _Lines(StreamedRows):
    """Rows of a .jsonl file: 8 bytes of memory for each, a read for each use."""

    def where(self, index: int) -> str:
        blank = int(numpy.searchsorted(self._blanks, index, side="right"))
        return f"{self.path}:{index + 1 + blank}"

    def _go_through(self, size: int) -> int:
        parts = list(_lines(self._file, self.path, size=size, most_bytes=self._most))
        self._begins = numpy.concatenate([begins for begins, _ in parts] or [numpy.empty(0, int)])
        self._blanks = numpy.concatenate([blanks for _, blanks in parts] or [numpy.empty(0, int)])
        if size:
            self._begins = self._begins[:size].copy()
        return len(self._begins)

    def _read(self, index: int) -> Any:
        begin = int(self._begins[index])
        data = os.pread(self._file.fileno(), self._end(index) - begin, begin)
        return value_of(data.partition(b"\n")[0], place=self.where(index))

    def _end(self, index: int) -> int:
        """Return where a row ends at the latest: where the next begins, or as long as it may be."""
        begin = int(self._begins[index])
        size = self._identity[0]
        following = self._begins[index + 1] if index + 1 < len(self) else size
        return min(int(following), begin + self._most + 2)


def _lines(
    file: IO[bytes], path: Path, *, size: int, most_bytes: int
) -> Iterator[tuple[numpy.ndarray, numpy.ndarray]]:
    """Yield, part by part of a file, the offsets of the lines that are not blank, and of those that
    are how many rows come before them: [rows] and [blank lines] int64.

    Raises: Refusal for a line above `most_bytes`.
    """
    rest = b""
    offset = 0
    rows = 0
    lines = 0
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
        rows = rows + int((~is_blank).sum())
        lines = lines + len(ends)
        offset += len(data) - len(rest)
        if not chunk or (size and rows >= size):
            return
