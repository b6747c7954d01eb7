"""Read the rollouts that recorder.py wrote: whole steps, files, groups, sequences."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute
import torch
from torch import Tensor

from spmdrl.columns import column_class
from spmdrl.errors import Refusal
from spmdrl.model_inputs import PICTURE_FEATURES
from spmdrl.rollout.episode import GREEDY
from spmdrl.rollout.packing import cumulative, empty_rollouts, turns_of
from spmdrl.rollout.recorded_tables import VIEW_BYTES, RecordedFile, reading
from spmdrl.rollout.recorder import FILE_NAME, FOLDER, NUMBERS
from spmdrl.rollout.trained_tokens import FILE_NAME as TRAINED_NAME
from spmdrl.types import TOKEN_COLUMNS, Rollouts, Scalars, join_sums


@dataclass(frozen=True)
class RecordedSteps:
    """The recorded steps of a folder."""

    folder: Path
    steps: dict[int, tuple[Path, ...]]
    """{step: its files, one per replica}, ascending; only steps with the files of all replicas."""
    trained: dict[int, tuple[Path, ...]]
    """{step: files of what its tokens were trained with}, only whole steps."""

    def files_of(self, step: int) -> tuple[Path, ...]:
        """Return the files of a step. Raises: Refusal naming the recorded steps."""
        if step not in self.steps:
            raise Refusal(
                f"{self.folder}: step {step} was not recorded; there are steps {ranges(self.steps)}"
            )
        return self.steps[step]


def find_recorded(path: str | Path) -> RecordedSteps:
    """Return the recorded steps of a run's output_dir, or of its folder of rollouts.

    Raises: Refusal if there is no folder, or no step with the files of all replicas.
    """
    path = Path(path).expanduser()
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    if not folder.is_dir():
        raise Refusal(
            f"{path} is not a folder (looked from {Path.cwd()}); name a run's "
            f"output_dir or its folder {FOLDER}"
        )
    names = sorted(file.name for file in folder.iterdir())
    steps = _whole_steps(folder, names, FILE_NAME)
    if not steps:
        parts = [name for name in names if FILE_NAME.fullmatch(name)]
        raise Refusal(
            f"{folder} holds no whole step of recorded rollouts"
            + (f", only {parts[0]}" if parts else "")
            + "; a run with rollout.record.every 1 writes them"
        )
    return RecordedSteps(folder, steps, _whole_steps(folder, names, TRAINED_NAME))


def _whole_steps(
    folder: Path, names: Sequence[str], pattern: re.Pattern[str]
) -> dict[int, tuple[Path, ...]]:
    """Return {step: its files}, ascending, of the steps of which all parts are there."""
    # {(step, number of parts): {part: file}}
    files_of: dict[tuple[int, int], dict[int, Path]] = defaultdict(dict)
    for name in names:
        if match := pattern.fullmatch(name):
            step, part, count = map(int, match.groups())
            files_of[step, count][part] = folder / name
    return {
        step: tuple(files[part] for part in range(count))
        for (step, count), files in sorted(files_of.items())
        if len(files) == count and files.keys() == set(range(count))
    }


def ranges(steps: Collection[int]) -> str:
    """Return steps as text, with evenly spaced ones in short form: `0 to 20 by 5`."""
    left = sorted(steps)
    texts = []
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
    """Return a file's header. Raises: Refusal if it cannot be read."""
    return RecordedFile(path).header()


def read_table(
    path: Path,
    *,
    columns: Sequence[str] | None = None,
    group: int | None = None,
    without_features: bool = False,
) -> pa.Table:
    """Return the rows of a file, or those of one group, with the greedy ones.

    Args:
        columns: columns to read; by default all.
        group: None for all groups.
        without_features: leave out the features that towers read, which are large.
    Raises: Refusal if the file cannot be read.
    """
    file = RecordedFile(path)
    names = list(columns or file.columns)
    if without_features and not columns:
        names = [name for name in names if name != PICTURE_FEATURES]
    if group is None:
        return file.read(range(file.num_groups), columns=names, most_bytes=VIEW_BYTES)
    table = file.read(file.groups_with(group), columns=names, most_bytes=VIEW_BYTES)
    return table.filter(pa.compute.field("group") == group)


def read_rollouts(files: Sequence[Path], *, part: int, num_parts: int) -> Rollouts:
    """Return one of `num_parts` shares of a step, each of whole groups.

    Share 0 also has the metrics, without times, and the samples for people to read.

    Raises: Refusal if a file cannot be read.
    """
    tables = []
    sums = []
    samples = ()
    forms: dict[str, Any] = {}
    number = 0
    for path in files:
        file = RecordedFile(path)
        header = file.header()
        count = file.num_groups
        mine = [i for i in range(count) if (number + i) % num_parts == part]
        number += count
        tables.append(file.read(mine))
        forms |= header["columns"]
        if part == 0:
            sums.append({name: (*pair,) for name, pair in header["sums"].items()})
            samples += tuple(header["samples"])
    with reading(*files):
        table = pa.concat_tables(tables, promote_options="default")
        _check_lengths(table)
        table = table.filter(pa.array(table["sample"].to_numpy() != GREEDY, type=pa.bool_()))
        rollouts = _to_rollouts(table, forms)
        return replace(rollouts, sums=join_sums(*sums), samples=samples)


def _check_lengths(table: pa.Table) -> None:
    """Refuse columns that do not have one value per token, since lengths become sizes of tensors.

    Raises: ValueError.
    """
    lengths = table["length"].combine_chunks()
    for name in TOKEN_COLUMNS:
        if not table[name].combine_chunks().value_lengths().cast(pa.int64()).equals(lengths):
            raise ValueError(f"lists in the column {name} differ in length from the column length")


def _to_rollouts(table: pa.Table, forms: Mapping[str, Any]) -> Rollouts:
    """Return a table's sequences as rollouts.

    Args:
        forms: {key: form} of the tokens' extra columns.
    """
    if not table.num_rows:
        return empty_rollouts()
    tokens = {
        name: _tensor(table[name].combine_chunks().flatten(), kind)
        for name, kind in TOKEN_COLUMNS.items()
    }
    scalars = scalars_of(table)
    extra = {key: column_class(key).from_arrow(table, form) for key, form in forms.items()}
    return Rollouts(
        **tokens, cu_seqlens=cumulative(scalars.lengths), scalars=scalars, extra_columns=extra
    )


def scalars_of(table: pa.Table) -> Scalars:
    """Return the numbers per sequence of a table, in its order, greedy rows included."""
    parts = _tensor(table["reward_parts"].combine_chunks().flatten())
    return Scalars(
        **{field: _tensor(table[name].combine_chunks()) for name, field in NUMBERS.items()},
        reward_parts=parts.view(table.num_rows, -1),
        turns=turns_of(zip(table["turn_rewards"].to_pylist(), table["turn_states"].to_pylist())),
    )


def _tensor(column: pa.Array, kind: torch.dtype | None = None) -> Tensor:
    values = torch.from_numpy(column.to_numpy(zero_copy_only=False).copy())
    return values if kind is None else values.to(kind)
