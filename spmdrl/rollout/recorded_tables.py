"""Open a file of recorded rollouts that another person may have written, and read its tables.

It must be a regular file with a digest next to it. Its columns must have the types that a run
records, and its header the form that a run writes. The size of a table is checked before memory is
taken for it: numbers by their count, texts after each distinct one was read once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as parquet

from spmdrl import run_files
from spmdrl.columns import column_classes
from spmdrl.errors import Refusal
from spmdrl.imports import attempt, refusing
from spmdrl.rollout.recorder import FORMAT, HEADER, SCHEMA, digest_file, digest_of
from spmdrl.value_forms import (
    Form,
    are_objects,
    are_texts,
    check_values,
    is_bool,
    is_count,
    is_list,
    is_number,
    is_object,
)

# Errors of pyarrow and torch on files that no run wrote.
_UNEXPECTED: tuple[type[Exception], ...] = (
    OSError,
    LookupError,
    TypeError,
    ValueError,
    RuntimeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    MemoryError,
    pa.ArrowException,
)

VIEW_BYTES = 64 * 2**20
"""Most bytes of a table for people to read; as Python objects it takes ten times as many."""
_SMALL_BYTES = 256 * 2**20  # a table of this size is always read
_MAX_RATIO = 200
"""Largest ratio of the size of a table to that of its file; rollouts are not compressed more."""
_END = b"PAR1"
_LARGE_BYTES = 4 * 2**30  # above this, look at the end of a file before its digest
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8}


class RecordedFile:
    """An open file of recorded rollouts, or of what their tokens were trained with.

    Args:
        schema: columns that it must have; those of rollouts may be followed by extra columns.
    Raises (on construction): Refusal if the file cannot be read, was changed, or has another form.
    """

    def __init__(self, path: Path, *, schema: pa.Schema = SCHEMA):
        self.path = path
        self._schema = schema
        with reading(path):
            file = run_files.opened(path, run_files.RECORDING)
            self._size = file.seek(0, 2)
            file.seek(max(0, self._size - len(_END)))
            # Check this before the digest, which would read all of a large sparse file.
            if self._size > _LARGE_BYTES and file.read() != _END:
                raise Refusal(
                    f"{path} does not end as a parquet file: it was cut, changed or damaged; "
                    "record the step again, or restore the file"
                )
            file.seek(0)
            _check_digest(path, digest_of(file, path.name))
            file.seek(0)
            metadata = parquet.read_metadata(file)
            leaves = [metadata.schema.column(i) for i in range(len(metadata.schema))]
            texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
            self._types = {field.name: field.type for field in metadata.schema.to_arrow_schema()}
            self.columns = list(metadata.schema.to_arrow_schema().names)
            self._check_types()
            file.seek(0)
            # Read texts as dictionaries, which hold each distinct text once. So the whole size is
            # known before the texts are copied to their rows.
            self._file = parquet.ParquetFile(file, read_dictionary=texts)
            self.num_groups = metadata.num_row_groups
            self._header = (metadata.metadata or {}).get(HEADER)

    def _check_types(self) -> None:
        known = {field.name: field.type for field in self._schema}
        if self._schema is SCHEMA:
            for column in column_classes().values():
                known |= {field.name: field.type for field in column.arrow_fields()}
        # pyarrow would read one of the two and say nothing.
        if len({*self.columns}) < len(self.columns):
            raise Refusal(f"{self.path}: two of its columns have one name: {self.columns}")
        for name, kind in self._types.items():
            if name in known and not kind.equals(known[name]):
                raise Refusal(
                    f"{self.path}: column {name} is of type {kind!s:.60}, and must be {known[name]}"
                )
        if unknown := self._types.keys() - known.keys():
            raise Refusal(f"{self.path}: has the column {min(unknown)!r:.60}, which no run records")
        if missing := {*self._schema.names} - self._types.keys():
            raise Refusal(f"{self.path}: has no column {min(missing)}")

    def header(self) -> dict[str, Any]:
        """Return the file's header. Raises: Refusal if it has another form."""
        place = f"{self.path}: its header"
        header = run_files.json_object(self._header or b"{}", place=place)
        if header.get("format") != FORMAT:
            raise Refusal(
                f"{self.path}: has format {header.get('format', 'unknown')}, and this program "
                f"reads format {FORMAT}; record again"
            )
        with refusing(place, Refusal):
            check_values(header, _HEADER_FORMS)
        return header

    def groups_with(self, number: int) -> list[int]:
        """Return the row groups that hold the sequences of one group."""
        column = self._schema.names.index("group")
        row_groups = []
        for i in range(self.num_groups):
            statistics = self._file.metadata.row_group(i).column(column).statistics
            # A row group without statistics may hold any group.
            if statistics is None or statistics.min == number:
                row_groups.append(i)
        return row_groups

    def read(
        self, groups: Sequence[int], *, columns: Collection[str] = (), most_bytes: int = 0
    ) -> pa.Table:
        """Return row groups as a table.

        Args:
            columns: columns to read; empty for all.
            most_bytes: limit of the table's size; 0 for a limit by the size of the file.
        Raises: Refusal if the table takes more, or cannot be read.
        """
        most = most_bytes or max(_SMALL_BYTES, _MAX_RATIO * self._size)
        names = [name for name in self.columns if not columns or name in columns]
        with reading(self.path):
            self._check_size(sum(self._sizes(groups, names)), most)
            # One row group after the other: pyarrow cannot join lists of dictionary-encoded texts.
            tables: list[pa.Table] = []
            size = 0
            for group in groups:
                packed = self._file.read_row_group(group, columns=names)
                size += packed.nbytes + sum(map(_unpacked_bytes, packed.columns))
                self._check_size(size, most)
                fields = [pa.field(name, self._types[name]) for name in packed.column_names]
                tables.append(packed.replace_schema_metadata(None).cast(pa.schema(fields)))
            if not tables:
                fields = [pa.field(name, self._types[name]) for name in names]
                return pa.schema(fields).empty_table()
            table = pa.concat_tables(tables)
            table.validate(full=True)
            return table

    def _sizes(self, groups: Sequence[int], names: Collection[str]) -> Iterator[int]:
        """Yield a lower bound of the bytes of each column, from the file's metadata."""
        for place in groups:
            group = self._file.metadata.row_group(place)
            for at in range(group.num_columns):
                column = group.column(at)
                if column.path_in_schema.split(".")[0] not in names:
                    continue
                if column.num_values < 0 or column.total_uncompressed_size < 0:
                    raise Refusal(f"{self.path}: row group {place} has a negative size")
                width = _WIDTHS.get(column.physical_type, 4)
                yield max(column.num_values * width, column.total_uncompressed_size)

    def _check_size(self, size: int, most: int) -> None:
        if size > most:
            raise Refusal(
                f"{self.path}: a table of this file of {self._size} bytes takes more than "
                f"{most >> 20} MiB; to look at it take less at once, such as one group by --group; "
                "if no run recorded so much, the file was made to fill memory"
            )


def _unpacked_bytes(column: pa.ChunkedArray) -> int:
    """Return how many bytes the texts of a dictionary-encoded column take when each is copied to
    its rows."""
    total = 0
    for chunk in column.chunks:
        while pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type):
            chunk = chunk.flatten()
        if not pa.types.is_dictionary(chunk.type):
            continue
        lengths = pa.compute.binary_length(chunk.dictionary).cast(pa.int64())
        own = pa.compute.sum(lengths.take(chunk.indices)).as_py()
        total += own or 0
    return total


# --------------------------------------------------------------------------- the header


def _are_sums(value: Any) -> bool:
    """an object of pairs of numbers"""
    if not is_object(value):
        return False
    return all(
        is_list(pair) and len(pair) == 2 and _is_numerator(pair[0]) and is_number(pair[1])
        for pair in value.values()
    )


def _is_numerator(value: Any) -> bool:
    return is_number(value) or (is_list(value) and all(map(is_number, value)))


_HEADER_FORMS: dict[str, Form] = {
    "step": is_count,
    "replica": is_count,
    "replicas": is_count,
    "part_names": are_texts,
    "is_partial": is_bool,
    "config": is_object,
    "sums": _are_sums,
    "samples": are_objects,
    "columns": is_object,
}


# --------------------------------------------------------------------------- damage


def _check_digest(path: Path, line: str) -> None:
    """Refuse a file that was changed. Raises: OSError; Refusal.

    Args:
        line: the line that sha256sum prints for the file.
    """
    digest = digest_file(path)
    text, _ = attempt(lambda: run_files.read_text(digest, run_files.DIGEST), FileNotFoundError)
    if text is None:
        raise Refusal(
            f"{path} has no {digest.name} beside it, which shows damage; copy that file too, or "
            "record the step again"
        )
    if line not in text.splitlines(keepends=True):
        raise Refusal(
            f"{path} does not match its sha256 in {digest.name}: it was changed or damaged; "
            "record the step again, or restore the file"
        )


@contextmanager
def reading(*paths: Path) -> Iterator[None]:
    """Turn errors of files that no run wrote into a Refusal."""
    try:
        yield
    except Refusal:
        raise
    except _UNEXPECTED as error:
        names = ", ".join(map(str, paths))
        raise Refusal(
            f"{names}: cannot be read as recorded rollouts: {type(error).__name__}: {error}"
        ) from error
