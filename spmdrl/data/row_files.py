"""Reading files and hub datasets row by row, each with its origin, in bounded parts."""

from __future__ import annotations

import contextlib
import importlib.util
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

if TYPE_CHECKING:  # what reads lines alone needs none of it
    import pyarrow
    import pyarrow.parquet

SUFFIXES = (".jsonl", ".json", ".parquet")
_BATCH_BYTES = 64 * 2**20
_LEAST_ROWS = 16
_MOST_ROWS = 4096
# No data shrinks a thousandfold but such as was made to fill memory.
_MOST_TIMES = 1000
_FREE_BYTES = 64 * 2**20
_ROW_BYTES = 8  # at least
_LIST_BYTES = 4 * 2**30  # of a .json file that is one list, which takes several times that


def numbered_rows(
    spec: str, *, size: int = 0, most_bytes: int = ROW_BYTES
) -> Iterator[tuple[str, Any]]:
    """Yield each row of a file or hub dataset with its origin for messages, unchecked.

    Args:
        spec, size: see `rows.read_rows`.
        most_bytes: of one row.
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
        return _parquet_rows(path, size=size)
    return _json_rows(path, most_bytes=most_bytes)


def _why_absent(spec: str) -> str:
    """Return what a name of a data file may be that names none, for the end of a message."""
    if "://" in spec:
        return f"; {spec} is an address, from which nothing is fetched: download it first"
    if "$" in spec:
        return "; variables of the shell are not filled in here: write the path itself"
    if set("*?[") & set(spec):
        return "; patterns are not filled in here: name each file, as a list"
    names = re.split(r"[,\s]+", spec)
    if len(names) > 1 and all(Path(name).suffix in SUFFIXES for name in names):
        return f"; several files are a list, [{', '.join(names)}], or several words of a flag"
    return near_file(Path(spec).expanduser())


# --------------------------------------------------------------------------- JSON


def _json_rows(path: Path, *, most_bytes: int) -> Iterator[tuple[str, Any]]:
    with refusing(f"{path}: cannot be read", OSError), path.open("rb") as file:
        if path.suffix == ".json" and _begins_list(file):
            if (size := path.stat().st_size) > _LIST_BYTES:
                raise Refusal(
                    f"{path}: a list of {size / 2**30:.1f} GiB is read as one, and the most is "
                    f"{_LIST_BYTES >> 30} GiB; write its rows as lines of a .jsonl file"
                )
            rows = value_of(file.read(), place=str(path))
            yield from ((f"{path}: row {i}", row) for i, row in enumerate(rows, 1))
            return
        if path.suffix == ".jsonl" and _begins_list(file):
            raise Refusal(
                f"{path}:1: begins a list, and a .jsonl file has one row on each line, as in "
                '{"prompt": ...}; a file that is one list is called .json'
            )
        number = 0
        while line := file.readline(most_bytes + 2):
            number += 1
            place = f"{path}:{number}"
            if len(line) > most_bytes + 1:
                raise too_long(place, most_bytes)
            if line.strip():
                yield place, value_of(line, place=place)


def too_long(place: str, most_bytes: int) -> Refusal:
    """Return why a line is not read."""
    return Refusal(
        f"{place}: the line is longer than data.max_row_mib allows, {most_bytes / 2**20:g} MiB; "
        "one row is one line: cut it, or raise that"
    )


def _begins_list(file: IO[bytes]) -> bool:
    begin = file.read(4096)
    file.seek(0)
    return begin.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def value_of(data: bytes, *, place: str) -> Any:
    """Return the JSON value of a text. Raises: Refusal."""
    try:
        text = data.decode("utf-8-sig").rstrip()  # else what is missing is missed in the next line
    except UnicodeDecodeError as error:
        raise Refusal(
            f"{place}: not UTF-8 text: {error.reason} at byte {error.start + 1}; the line begins "
            f"{data[:60]!r}"
        ) from None
    try:
        return json.loads(text, object_pairs_hook=_named_once)
    except RecursionError:
        raise Refusal(f"{place}: lists and mappings are nested too deep to be read") from None
    except json.JSONDecodeError as error:
        # `place` has the line of a .jsonl file; that of the error is within the text.
        line = f"line {error.lineno}, " if "\n" in text else ""
        raise Refusal(
            f"{place}: not a JSON value: {error.msg} at {line}column {error.colno}; the "
            f"{'text' if line else 'line'} begins {text[:60]!r}"
        ) from None
    except ValueError as error:  # integers of more digits than Python reads, and our own
        why = str(error).partition("; use sys.")[0]
        raise Refusal(f"{place}: not a JSON value: {why}; the line begins {text[:60]!r}") from None


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a mapping. Raises: ValueError for a name that stands twice, of which one is lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the name {twice!r:.60} stands twice in one mapping")
    return found


# --------------------------------------------------------------------------- parquet


@contextlib.contextmanager
def opened_parquet(
    path: Path, *, opened: Any = None, metadata: Any = None
) -> Iterator[pyarrow.parquet.ParquetFile]:
    """Open a parquet file whose columns can be read.

    Args:
        opened: the file where it is open already. metadata: the file's, read before.
    Raises: Refusal, also for what goes wrong while it is read.
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
                    f"({field.type!s:.60}), whose size is not known before they are read; write it "
                    "as plain text"
                )
        yield file


def _parquet_rows(path: Path, *, size: int) -> Iterator[tuple[str, Any]]:
    with opened_parquet(path) as file:
        budget = max(_FREE_BYTES, _MOST_TIMES * path.stat().st_size)
        number = spent = 0
        for group, rows in _group_sizes(file, size=size):
            claimed = file.metadata.row_group(group).total_byte_size
            _check_size(path, spent + max(claimed, _ROW_BYTES * rows), budget)
            for batch in group_batches(file, group, most_rows=size):
                spent += batch.nbytes
                _check_size(path, spent, budget)
                values = values_of(batch, path, number)
                yield from ((f"{path}: row {number + i}", row) for i, row in enumerate(values, 1))
                number += batch.num_rows


def group_batches(
    file: pyarrow.parquet.ParquetFile, group: int, *, most_rows: int = 0
) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows of a row group in parts, with texts in place of categories, each of which
    stands in a file once.

    Args:
        most_rows: of a part; 0 for any number.
    """
    import pyarrow

    # By its metadata one row may be as large as the group.
    fitting = _BATCH_BYTES // max(1, file.metadata.row_group(group).total_byte_size)
    rows = min(_MOST_ROWS, max(_LEAST_ROWS, fitting), most_rows or _MOST_ROWS)
    for batch in file.iter_batches(rows, row_groups=[group]):
        columns = [c.dictionary_decode() if hasattr(c, "dictionary") else c for c in batch.columns]
        yield pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _group_sizes(file: pyarrow.parquet.ParquetFile, *, size: int) -> Iterator[tuple[int, int]]:
    """Yield the row groups that are read, each with the rows that it says it has."""
    begun = 0
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if rows:
            yield group, min(rows, size - begun) if size else rows
        begun += rows
        if size and begun >= size:
            return


def _check_size(path: Path, spent: int, budget: int) -> None:
    if spent > budget:
        raise Refusal(
            f"{path}: its {path.stat().st_size} bytes unpack to more than {budget // 2**20} MiB, a "
            f"file of over {_MOST_TIMES} times its size, as one that is made to fill memory; if it "
            "is meant so, write its rows as .jsonl"
        )


def values_of(batch: pyarrow.RecordBatch, path: Path, number: int) -> list[dict]:
    """Return the rows of a batch, before which there are `number`.

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
    """Yield each row of a hub dataset, or of a folder in the hub's layout, with its origin for
    messages, unchecked.

    Raises: Refusal when `datasets` is not installed, or the dataset cannot be read.
    """
    name, *rest = spec.split(":")
    folder = Path(name).expanduser()
    is_path = folder.is_absolute() or name.startswith((".", "~")) or folder.exists()
    if is_path and not folder.is_dir():
        if not folder.exists():
            raise Refusal(
                f"{spec}: no such file or folder (looked from {Path.cwd()}); a data file must end "
                f"in {', '.join(SUFFIXES)}"
            )
        raise Refusal(
            f"{spec}: a data file must end in {', '.join(SUFFIXES)}; write its rows as one of "
            'these, e.g. pandas.read_csv("a.csv").to_json("a.jsonl", orient="records", lines=True)'
        )
    if len(rest) > 2:
        raise Refusal(f"{spec}: a hub dataset is NAME, NAME:SPLIT or NAME:CONFIG:SPLIT")
    if not has_datasets():
        raise Refusal(
            f"{spec}: not a data file ({', '.join(SUFFIXES)}) nor a generated task (task:NAME, "
            "reasoning_gym:NAME), so it names a hub dataset, which needs `pip install datasets`"
        )
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    find_on_hub(name, field="data", kind="dataset")
    config = rest[0] if len(rest) == 2 else None
    split = rest[-1] if rest else "train"
    # The hub client raises many kinds; all mean "not readable".
    with refusing(f"hub dataset {name} (config {config}, split {split})", Exception):
        try:
            dataset = load_dataset(str(folder) if is_path else name, config, split=split)
        except DatasetGenerationError as error:
            raise error.__cause__ or error from None  # it says nothing itself
        # As stored: its own attachments would be decoded here, before their size is looked at.
        tables = dataset.with_format("arrow").iter(_LEAST_ROWS)
        rows = (row for table in tables for row in table.to_pylist())
        yield from ((f"{spec}: row {i}", row) for i, row in enumerate(rows, 1))


def has_datasets() -> bool:
    """Return whether the package that reads hub datasets is installed."""
    return importlib.util.find_spec("datasets") is not None
