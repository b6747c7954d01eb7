"""Reading files and hub datasets row by row, each with its origin, in bounded parts.

Hub datasets are read by `datasets`, files are not: it gives a column one type, so that 3 becomes
3.0, the text "2020-01-01" a date, a long integer infinity and an absent field null; its messages
name no line; and it first writes a copy of the file into its cache.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from spmdrl.data.hub import find_on_hub
from spmdrl.data.row_values import ROW_BYTES
from spmdrl.errors import Refusal
from spmdrl.imports import near_file, refusing

if TYPE_CHECKING:  # reading JSONL needs neither
    import pyarrow
    import pyarrow.parquet

SUFFIXES = (".jsonl", ".json", ".parquet")
_BATCH_BYTES = 64 * 2**20
_MIN_BATCH_ROWS = 16
_MAX_BATCH_ROWS = 4096
# A parquet file may unpack to 64 MiB, or to a thousand times its size: only data that was made to
# fill memory shrinks more than that.
_MAX_RATIO = 1000
_FREE_BYTES = 64 * 2**20
_MIN_ROW_BYTES = 8
# Of a .json file that is one list: parsing it takes several times as much memory.
_MAX_LIST_BYTES = 4 * 2**30


def numbered_rows(spec: str, *, max_bytes: int = ROW_BYTES) -> Iterator[tuple[str, Any]]:
    """Yield each row of a file or hub dataset, unchecked, after its origin for messages.

    Args:
        spec: see `rows.read_rows`.
        max_bytes: of one line.
    Raises: Refusal when it cannot be read: file, line or row, column and the reason.
    """
    path = Path(spec).expanduser()
    if path.suffix not in SUFFIXES:
        return hub_rows(spec)
    if not path.is_file() and path.exists():
        kind = "a folder" if path.is_dir() else "a pipe or device"
        raise Refusal(f"{path}: is {kind}, no data file")
    if not path.is_file():
        raise Refusal(f"{path}: no such data file (looked from {Path.cwd()}){_why_absent(spec)}")
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    return _json_rows(path, max_bytes=max_bytes)


def _why_absent(spec: str) -> str:
    """Return what a user may have meant by the name of a file that is absent, for the end of a
    message."""
    if "://" in spec:
        return f"; {spec} is an address, and nothing is fetched from addresses: download it first"
    if "$" in spec:
        return "; variables of the shell are not replaced here: write the path itself"
    if set("*?[") & set(spec):
        return "; patterns are not expanded here: name each file, as a list"
    names = re.split(r"[,\s]+", spec)
    if len(names) > 1 and all(Path(name).suffix in SUFFIXES for name in names):
        return f"; several files are a list, [{', '.join(names)}], or several words of a flag"
    return near_file(Path(spec).expanduser())


# --------------------------------------------------------------------------- JSON


def _json_rows(path: Path, *, max_bytes: int) -> Iterator[tuple[str, Any]]:
    with refusing(f"{path}: cannot be read", OSError), path.open("rb") as file:
        is_list = _begins_list(file)
        if is_list and path.suffix == ".jsonl":
            raise Refusal(
                f"{path}:1: begins a list, and a .jsonl file has one row on each line, as in "
                '{"prompt": ...}; a file that is one list is called .json'
            )
        if is_list:
            yield from _rows_of_list(file, path)
            return
        for number, _, line in lines_of(file, path, max_bytes=max_bytes):
            place = f"{path}:{number}"
            yield place, value_of(line, place=place)


def _rows_of_list(file: IO[bytes], path: Path) -> Iterator[tuple[str, Any]]:
    size = path.stat().st_size
    if size > _MAX_LIST_BYTES:
        raise Refusal(
            f"{path}: a list of {size / 2**30:.1f} GiB is read as one, and the most is "
            f"{_MAX_LIST_BYTES >> 30} GiB; write its rows as lines of a .jsonl file"
        )
    rows = value_of(file.read(), place=str(path))
    for number, row in enumerate(rows, 1):
        yield f"{path}: row {number}", row


def lines_of(file: IO[bytes], path: Path, *, max_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield the number (from 1), the offset in bytes and the text of each line that is not blank.

    Args:
        max_bytes: of a line.
    Raises: Refusal for a longer line.
    """
    number = 0
    offset = 0
    while line := file.readline(max_bytes + 2):
        number += 1
        if len(line) - line.endswith(b"\n") > max_bytes:
            raise Refusal(
                f"{path}:{number}: the line is longer than data.max_row_mib allows, "
                f"{max_bytes / 2**20:g} MiB; one row is one line: cut it, or raise that"
            )
        if not line.isspace():
            yield number, offset, line
        offset += len(line)


def _begins_list(file: IO[bytes]) -> bool:
    begin = file.read(4096)
    file.seek(0)
    return begin.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def value_of(data: bytes, *, place: str) -> Any:
    """Return the JSON value of a text. Raises: Refusal."""
    try:
        # Without the line feed: json would find what is missing in the next line.
        text = data.decode("utf-8-sig").rstrip()
    except UnicodeDecodeError as error:
        raise Refusal(
            f"{place}: not UTF-8 text: {error.reason} at byte {error.start + 1}; the line begins "
            f"{data[:60]!r}"
        ) from None
    try:
        return json.loads(text, object_pairs_hook=_unique_names)
    except RecursionError:
        raise Refusal(f"{place}: lists and mappings are nested too deep to be read") from None
    except json.JSONDecodeError as error:
        # `place` has the line of a .jsonl file; the error counts lines within the text.
        line = f"line {error.lineno}, " if "\n" in text else ""
        why = f"{error.msg} at {line}column {error.colno}"
    except ValueError as error:  # an integer of too many digits, or `_unique_names`
        why = str(error).partition("; use sys.")[0]
    what = "text" if "\n" in text else "line"
    raise Refusal(f"{place}: not a JSON value: {why}; the {what} begins {text[:60]!r}")


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a mapping. Raises: ValueError for a name that stands twice: json would drop one."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the name {twice!r:.60} stands twice in one mapping")
    return mapping


# --------------------------------------------------------------------------- parquet


@contextlib.contextmanager
def opened_parquet(
    path: Path, *, opened: Any = None, metadata: Any = None
) -> Iterator[pyarrow.parquet.ParquetFile]:
    """Open a parquet file.

    Args:
        opened: the file, if it is open. metadata: of the file, if it was read.
    Raises: Refusal, also for what goes wrong while the file is read.
    """
    import pyarrow
    import pyarrow.parquet

    kinds = (pyarrow.ArrowException, OSError, UnicodeDecodeError, MemoryError)
    what = f"{path}: cannot be read as parquet"
    with (
        refusing(what, *kinds),
        pyarrow.parquet.ParquetFile(opened or path, metadata=metadata) as file,
    ):
        names = file.schema_arrow.names
        if twice := {name for name in names if names.count(name) > 1}:
            raise Refusal(f"{path}: two columns are called {min(twice)!r}")
        for field in file.schema_arrow:
            if "dictionary<" in str(field.type) and not pyarrow.types.is_dictionary(field.type):
                raise Refusal(
                    f"{path}: column {field.name!r} has categories within lists or mappings "
                    f"({field.type!s:.60}), and their size is not known before they are read; "
                    "write them as plain text"
                )
        yield file


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    rows = itertools.chain.from_iterable(_parquet_parts(path))
    for number, row in enumerate(rows, 1):
        yield f"{path}: row {number}", row


def _parquet_parts(path: Path) -> Iterator[list[dict]]:
    """Yield the rows of a file in parts, as long as they unpack to no more than they may."""
    budget = max(_FREE_BYTES, _MAX_RATIO * path.stat().st_size)
    number = 0
    spent = 0
    with opened_parquet(path) as file:
        for group in range(file.num_row_groups):
            metadata = file.metadata.row_group(group)
            # Before it is unpacked, by what it says of itself; then by what it holds.
            claimed = max(metadata.total_byte_size, _MIN_ROW_BYTES * metadata.num_rows)
            _check_unpacked(path, spent + claimed, budget)
            for batch in group_batches(file, group):
                spent += batch.nbytes
                _check_unpacked(path, spent, budget)
                yield values_of(batch, path, number)
                number += batch.num_rows


def _check_unpacked(path: Path, unpacked: int, budget: int) -> None:
    if unpacked > budget:
        raise Refusal(
            f"{path}: its {path.stat().st_size} bytes unpack to more than {budget // 2**20} MiB "
            f"(over {_MAX_RATIO} times its size), as a file does that was made to fill memory; if "
            "it is a real one, write its rows as .jsonl"
        )


def group_batches(file: pyarrow.parquet.ParquetFile, group: int) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows of a row group in parts.

    Categories, each of which a file holds once, become the texts that they stand for.
    """
    import pyarrow

    # By its metadata one row may be as large as the group.
    fitting = _BATCH_BYTES // max(1, file.metadata.row_group(group).total_byte_size)
    rows = min(_MAX_BATCH_ROWS, max(_MIN_BATCH_ROWS, fitting))
    for batch in file.iter_batches(rows, row_groups=[group]):
        columns = [c.dictionary_decode() if hasattr(c, "dictionary") else c for c in batch.columns]
        yield pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names)


def values_of(batch: pyarrow.RecordBatch, path: Path, number: int) -> list[dict]:
    """Return the rows of a batch.

    Args:
        number: of rows in the file before the batch.
    Raises: Refusal naming the row and column that cannot be read.
    """
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError, KeyError) as error:  # bad UTF-8, dates, time zones
        for i, name in itertools.product(range(batch.num_rows), batch.schema.names):
            place = f"{path}: row {number + i + 1}: column {name!r} cannot be read"
            with refusing(place, ValueError, OverflowError, KeyError):
                batch.column(name)[i].as_py()
        raise Refusal(f"{path}: from row {number + 1} on cannot be read: {error}") from error


# --------------------------------------------------------------------------- the hub


def hub_rows(spec: str) -> Iterator[tuple[str, Any]]:
    """Yield each row of a hub dataset, or of a folder in the hub's layout, unchecked, after its
    origin for messages.

    Raises: Refusal when the dataset cannot be read.
    """
    name, *rest = spec.split(":")
    folder = Path(name).expanduser()
    is_path = folder.is_absolute() or name.startswith((".", "~")) or folder.exists()
    if is_path and not folder.exists():
        raise Refusal(
            f"{spec}: no such file or folder (looked from {Path.cwd()}); a data file must end "
            f"in {', '.join(SUFFIXES)}"
        )
    if is_path and not folder.is_dir():
        raise Refusal(
            f"{spec}: a data file must end in {', '.join(SUFFIXES)}; write its rows as one of "
            'these, e.g. pandas.read_csv("a.csv").to_json("a.jsonl", orient="records", lines=True)'
        )
    if len(rest) > 2:
        raise Refusal(f"{spec}: a hub dataset is NAME, NAME:SPLIT or NAME:CONFIG:SPLIT")
    find_on_hub(name, field="data", kind="dataset")
    # Here: it takes a second, and most runs read files.
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    config = rest[0] if len(rest) == 2 else None
    split = rest[-1] if rest else "train"
    # The hub client raises many kinds of errors.
    with refusing(f"hub dataset {name} (config {config}, split {split})", Exception):
        try:
            dataset = load_dataset(str(folder) if is_path else name, config, split=split)
        except DatasetGenerationError as error:
            raise error.__cause__ or error from None  # its own message says nothing
        # As stored: `datasets` would decode images before their size is checked.
        number = 0
        for table in dataset.with_format("arrow").iter(_MIN_BATCH_ROWS):
            for row in table.to_pylist():
                number += 1
                yield f"{spec}: row {number}", row
