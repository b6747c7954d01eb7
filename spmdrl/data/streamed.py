"""Rows of a .jsonl or .parquet file that stay on disk and are read when they are needed."""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmdrl.data.row_files import group_batches, lines_of, opened_parquet, value_of, values_of
from spmdrl.data.rows import RowRules
from spmdrl.errors import Refusal
from spmdrl.imports import refusing

if TYPE_CHECKING:
    import pyarrow

SUFFIXES = (".jsonl", ".parquet")
# Unpacked: the row group of the row that was read last is held in memory.
_MAX_GROUP_BYTES = 512 * 2**20


class StreamedRows:
    """Rows of a file, which must not change: row numbers would mean other rows.

    Args:
        path: of the file.
        size: rows to take from the start, at most; 0 takes all.
        rules: what a row must hold; a row is checked when it is read.
    Raises: Refusal naming file and line.
    """

    is_held = False
    """Whether all rows are in memory and were checked."""

    def __init__(self, path: Path, *, size: int, rules: RowRules):
        self.path = path
        self._rules = rules
        with self._reading():
            self._file = path.open("rb")
            self._identity = self._size_and_time()
            found = self._find_rows(size)
        if not found:
            raise Refusal(f"{path}: the dataset is empty (0 rows); give it at least one")
        self._count = min(size or found, found)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict:
        if not 0 <= index < len(self):
            raise IndexError(index)
        with self._reading():
            if self._size_and_time() != self._identity:
                raise Refusal(
                    f"{self.path}: was changed while the run uses it, so that its rows are not "
                    "where they were; leave it as it is, and resume the run"
                )
            row = self._read(index)
        return self._rules.check(row, place=self.where(index))

    def __iter__(self) -> Iterator[dict]:
        return (self[index] for index in range(len(self)))

    def where(self, index: int) -> str:
        """Return the origin of a row for error messages, e.g. `train.jsonl:12`."""
        raise NotImplementedError

    def _find_rows(self, size: int) -> int:
        """Find where the first `size` rows are, or all; return how many there are."""
        raise NotImplementedError

    def _read(self, index: int) -> Any:
        """Return a row as it is in the file."""
        raise NotImplementedError

    def _reading(self) -> contextlib.AbstractContextManager[None]:
        return refusing(f"{self.path}: cannot be read", OSError)

    def _size_and_time(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns


class _Lines(StreamedRows):
    """Rows of a .jsonl file: 16 bytes of memory for each."""

    def where(self, index: int) -> str:
        return f"{self.path}:{self._numbers[index]}"

    def _find_rows(self, size: int) -> int:
        self._numbers = array("q")
        self._offsets = array("q")
        lines = lines_of(self._file, self.path, max_bytes=self._rules.max_bytes)
        for number, offset, _ in itertools.islice(lines, size or None):
            self._numbers.append(number)
            self._offsets.append(offset)
        return len(self._offsets)

    def _read(self, index: int) -> Any:
        begin = self._offsets[index]
        most = self._rules.max_bytes
        if index + 1 < len(self):
            most = min(most, self._offsets[index + 1] - begin)
        data = os.pread(self._file.fileno(), most, begin)
        # The data may also hold blank lines, or, for the last of `size` rows, the rows after it.
        return value_of(data.partition(b"\n")[0], place=self.where(index))


class _RowGroups(StreamedRows):
    """Rows of a parquet file."""

    def where(self, index: int) -> str:
        return f"{self.path}: row {index + 1}"

    def _find_rows(self, size: int) -> int:
        with opened_parquet(self.path, opened=self._file) as file:
            self._metadata = file.metadata
        self._begins = [0]
        for number in range(self._metadata.num_row_groups):
            group = self._metadata.row_group(number)
            self._check_unpacked(number, group.total_byte_size)
            self._begins.append(self._begins[-1] + group.num_rows)
        self._batches = functools.lru_cache(maxsize=1)(self._read_group)
        return self._begins[-1]

    def _read(self, index: int) -> Any:
        group = bisect.bisect_right(self._begins, index) - 1
        number = index - self._begins[group]
        for batch in self._batches(group):
            if number < batch.num_rows:
                break
            number -= batch.num_rows
        return values_of(batch.slice(number, 1), self.path, index)[0]

    def _read_group(self, group: int) -> list[pyarrow.RecordBatch]:
        batches = []
        unpacked = 0
        with opened_parquet(self.path, opened=self._file, metadata=self._metadata) as file:
            for batch in group_batches(file, group):
                batches.append(batch)
                unpacked += batch.nbytes
                self._check_unpacked(group, unpacked)
        return batches

    def _check_unpacked(self, group: int, unpacked: int) -> None:
        if unpacked > _MAX_GROUP_BYTES:
            raise Refusal(
                f"{self.path}: row group {group + 1} unpacks to {unpacked / 2**20:.0f} MiB, and "
                "reading one row reads its whole group, which may be of "
                f"{_MAX_GROUP_BYTES >> 20} MiB; write it with smaller ones (row_group_size=1000), "
                "or raise data.stream_above_mib to hold the file in memory"
            )


def stream_rows(path: Path, *, size: int, rules: RowRules) -> StreamedRows:
    """Open a file whose rows stay on disk; see StreamedRows."""
    kind = _Lines if path.suffix == ".jsonl" else _RowGroups
    return kind(path, size=size, rules=rules)
