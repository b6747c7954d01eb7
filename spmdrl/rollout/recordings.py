"""Reading recorded rollouts, as recorder.py writes them: whole steps, files, groups, sequences."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import pyarrow as pa
import pyarrow.parquet as parquet
import torch
from torch import Tensor

from spmdrl.data.attachments import FEATURES, recorded_items
from spmdrl.errors import Refusal
from spmdrl.imports import parsed_json
from spmdrl.kept_sets import KeptSets
from spmdrl.rollout.episode import GREEDY
from spmdrl.rollout.packing import cumulative, empty_rollouts, turns_of
from spmdrl.rollout.recorder import (
    FILE_NAME,
    FOLDER,
    FORMAT,
    HEADER,
    NUMBERS,
    SCHEMA,
    digest_file,
    digest_line,
)
from spmdrl.types import TOKEN_COLUMNS, Rollouts, Scalars, add_sums, join_routes

log = logging.getLogger(__name__)
_without_digests: set[Path] = set()
"""Folders of which it was said that files there have no digest."""

# What comes up where a file without digest holds something else than a run records.
_NONSENSE: tuple[type[Exception], ...] = (OSError, LookupError, TypeError, ValueError)
_NONSENSE += (RuntimeError, AttributeError, ArithmeticError, pa.ArrowException)


@dataclass(frozen=True)
class Recorded:
    """The steps that a folder holds."""

    folder: Path
    steps: dict[int, tuple[Path, ...]]
    """Step -> its files, one per replica; whole steps only, ascending."""

    def files_of(self, step: int) -> tuple[Path, ...]:
        """Return the files of a step. Raises: Refusal naming the steps that are there."""
        if step not in self.steps:
            raise Refusal(
                f"{self.folder}: step {step} was not recorded; there are steps {ranges(self.steps)}"
            )
        return self.steps[step]


def find_recorded(path: str | Path) -> Recorded:
    """Return what a folder of rollouts, or a run's output_dir with one, holds.

    Raises: Refusal when there is none, or no step is whole.
    """
    path = Path(path).expanduser()
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    if not folder.is_dir():
        raise Refusal(
            f"{path} is not a folder (looked from {Path.cwd()}); name a run's "
            f"output_dir or its folder {FOLDER}"
        )
    found: dict[tuple[int, int], dict[int, Path]] = defaultdict(dict)
    for file in sorted(folder.iterdir()):
        if parts := FILE_NAME.fullmatch(file.name):
            step, replica, count = map(int, parts.groups())
            found[step, count][replica] = file
    steps = {
        step: tuple(files[replica] for replica in range(count))
        for (step, count), files in sorted(found.items())
        if files.keys() == set(range(count))
    }
    if not steps:
        names = [file.name for files in found.values() for file in files.values()]
        raise Refusal(
            f"{folder} holds no whole step of recorded rollouts"
            + (f", only {names[0]}" if names else "")
            + "; a run with rollout.record.every 1 writes them"
        )
    return Recorded(folder, steps)


def ranges(steps: Collection[int]) -> str:
    """Return steps for people, with what lies evenly between put together: `0 to 20 by 5`."""
    left, texts = sorted(steps), []
    while left:
        gap = left[1] - left[0] if len(left) > 1 else 0
        count = 1
        while count < len(left) and left[count] - left[count - 1] == gap:
            count += 1
        if count < 3:
            count = 1
        by = f" by {gap}" if gap > 1 else ""
        texts.append(f"{left[0]}" if count == 1 else f"{left[0]} to {left[count - 1]}{by}")
        left = left[count:]
    return ", ".join(texts)


def read_header(path: Path) -> dict[str, Any]:
    """Return what a file says of itself. Raises: Refusal when it cannot be read."""
    return _header_of(_open(path), path)


def read_table(
    path: Path,
    *,
    columns: Sequence[str] | None = None,
    group: int | None = None,
    without_features: bool = False,
) -> pa.Table:
    """Return the rows of a file, or those of one group, greedy ones too.

    Args:
        without_features: leave out what towers read, which is large.
    Raises: Refusal when the file cannot be read.
    """
    file = _open(path)
    with reading(path):
        places = list(range(file.num_row_groups))
        if group is not None:
            at = SCHEMA.names.index("group")
            places = [
                i for i in places if file.metadata.row_group(i).column(at).statistics.min == group
            ]
        names = columns or [
            n for n in file.schema_arrow.names if without_features and n != FEATURES
        ]
        return file.read_row_groups(places, columns=list(names) or None)


def read_rollouts(files: Sequence[Path], *, part: int, num_parts: int) -> Rollouts:
    """Return one of `num_parts` shares of a step, whole groups each, as they were sampled.

    The metrics and the shown samples are in share 0; times of the recorded run are left out.

    Raises: Refusal when a file cannot be read.
    """
    tables, sums, shown, number, form, vocab = [], [], (), 0, None, 0
    for path in files:
        file = _open(path)
        header, count = _header_of(file, path), file.num_row_groups
        mine = [i for i in range(count) if (number + i) % num_parts == part]
        number += count
        with reading(path):
            tables.append(file.read_row_groups(mine))
        form = header.get("routes", form)
        vocab = header.get("kept_sets", vocab)
        if part == 0:
            found = header["sums"].items()
            sums.append({name: (*pair,) for name, pair in found if not name.startswith("time/")})
            shown += tuple(header["shown"])
    with reading(*files):
        table = pa.concat_tables(tables, promote_options="default")
        table.validate(full=True)  # of a file without digest: what it says may be nonsense
        table = table.filter(pa.array(table["sample"].to_numpy() != GREEDY, type=pa.bool_()))
        rollouts = _packed(table, form)
        if vocab and len(rollouts):
            sets = _kept_sets(table, vocab)
            sets.check(rollouts.tokens)
            rollouts = replace(rollouts, kept_sets=sets)
        rollouts = replace(rollouts, shown=recorded_items(table))
        return replace(rollouts, sums=add_sums(*sums), samples=shown)


def _packed(table: pa.Table, form: Sequence[Any] | None) -> Rollouts:
    """Return a table's sequences.

    Args:
        form: of the routes, (L, K, name of the dtype); None where none were recorded.
    """
    if not table.num_rows:
        return empty_rollouts()
    tokens = {
        name: _tensor(table[name].combine_chunks().flatten(), kind)
        for name, kind in TOKEN_COLUMNS.items()
    }
    scalars, routes = scalars_of(table), None
    if form is not None:
        layers, chosen, kind = form
        column = table["routes"].combine_chunks()
        sizes = column.value_lengths().fill_null(0).to_pylist()
        parts = _tensor(column.flatten(), getattr(torch, kind)).split(sizes)
        routes = join_routes(
            [
                own.view(-1, layers, chosen) if is_known else None
                for own, is_known in zip(parts, column.is_valid().to_pylist())
            ],
            scalars.lengths.tolist(),
        )
    return Rollouts(
        **tokens, cu_seqlens=cumulative(scalars.lengths), scalars=scalars, routes=routes
    )


def _kept_sets(table: pa.Table, vocab: int) -> KeptSets:
    """Return those of a table's tokens; a replica none of whose samples was cut wrote none."""
    sizes, data = (table[name].combine_chunks() for name in ("kept_set_bytes", "kept_sets"))
    own = _tensor(sizes.flatten(), torch.int32).split(
        sizes.value_lengths().fill_null(0).to_pylist()
    )
    lengths, is_known = table["length"].to_pylist(), sizes.is_valid().to_pylist()
    none = [torch.zeros(length, dtype=torch.int32) for length in lengths]
    whole = torch.cat([a if known else b for a, b, known in zip(own, none, is_known)])
    text = numpy.frombuffer(b"".join(part or b"" for part in data.to_pylist()), numpy.uint8)
    return KeptSets(vocab, whole, torch.from_numpy(text.copy()))


def scalars_of(table: pa.Table) -> Scalars:
    """Return the numbers per sequence of a table, in its order; greedy rows are not left out."""
    parts = _tensor(table["reward_parts"].combine_chunks().flatten())
    return Scalars(
        **{field: _tensor(table[name].combine_chunks()) for name, field in NUMBERS.items()},
        reward_parts=parts.view(table.num_rows, -1),
        turns=turns_of(zip(table["turn_rewards"].to_pylist(), table["turn_states"].to_pylist())),
    )


def _tensor(column: pa.Array, kind: torch.dtype | None = None) -> Tensor:
    values = torch.from_numpy(column.to_numpy(zero_copy_only=False).copy())
    return values if kind is None else values.to(kind)


def _open(path: Path) -> parquet.ParquetFile:
    with reading(path):
        _check_digest(path)
        return parquet.ParquetFile(path)


def _check_digest(path: Path) -> None:
    """Refuse a file that is not as it was written. Raises: OSError; Refusal.

    One without a digest, of an earlier version, is named once per folder and read.
    """
    digest = digest_file(path)
    if not digest.is_file():
        if path.parent not in _without_digests:
            _without_digests.add(path.parent)
            log.warning(
                "%s has no %s: damage to it would not be seen, as of files of earlier versions",
                path,
                digest.name,
            )
        return
    known = digest.read_text(errors="replace").splitlines(keepends=True)
    if digest_line(path, path.name) not in known:
        raise Refusal(
            f"{path} does not match its sha256 in {digest.name}: it was changed or damaged; "
            "record the step anew, or restore the file"
        )


def _header_of(file: parquet.ParquetFile, path: Path) -> dict[str, Any]:
    text = (file.schema_arrow.metadata or {}).get(HEADER)
    header, why = parsed_json(text.decode(errors="replace")) if text else ({}, "")
    if not isinstance(header, dict):
        raise Refusal(f"{path}: its header is no JSON object{f': {why}' if why else ''}")
    if header.get("format") != FORMAT:
        raise Refusal(
            f"{path}: is of format {header.get('format', 'unknown')}, this program "
            f"reads format {FORMAT}; record anew"
        )
    return header


@contextmanager
def reading(*paths: Path) -> Iterator[None]:
    """Say of which files it is that what is read of them makes no sense; a refusal says so."""
    try:
        yield
    except Refusal:
        raise
    except _NONSENSE as error:
        names = ", ".join(map(str, paths))
        raise Refusal(
            f"{names}: cannot be read as recorded rollouts: {type(error).__name__}: {error}"
        ) from error
