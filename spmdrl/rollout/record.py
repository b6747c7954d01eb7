"""Recorded rollouts: what was sampled and rewarded, one parquet file per step and replica.

`Recorder` writes, `read_rollouts` and `read_table` read; docs/rollouts.md describes the columns.
A file appears whole, under its name, or not at all. A run that repeats a step replaces its files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import pyarrow as pa
import pyarrow.parquet as parquet
import torch
from torch import Tensor

from spmdrl.config import Config, ShapingSettings, flatten
from spmdrl.config.former import modernized
from spmdrl.rewards.signatures import part_names, reward_models
from spmdrl.rollout.episode import GREEDY, FinishedEpisode, Group
from spmdrl.rollout.packing import cumulative, empty_rollouts, flat_episodes, turns_of
from spmdrl.types import TOKEN_COLUMNS, Rollouts, Scalars, Tokens, add_sums, join_routes

FORMAT = 1
FOLDER = "rollouts"
"""Of the files, in a run's output_dir."""
KEPT_FIELDS = (
    "batch.prompts_per_step",
    "batch.group_size",
    "sampling.temperature",
    "rewards.functions",
    "rewards.weights",
    *(f"rewards.shaping.{name}" for name in flatten(ShapingSettings())),
)
"""Fields of the config that the recorded numbers already contain."""
_HEADER = b"spmdrl"
_NAME = re.compile(r"step_(\d+)_replica_(\d+)_of_(\d+)\.parquet")

_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("group", pa.int64()),
        ("sample", pa.int64()),
        ("row", pa.int64()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("reward", pa.float64()),
        ("raw_reward", pa.float64()),
        ("reward_parts", pa.list_(pa.float64())),
        ("greedy_reward", pa.float64()),
        ("is_valid", pa.bool_()),
        ("is_truncated", pa.bool_()),
        ("failure", pa.string()),
        ("length", pa.int64()),
        ("response_length", pa.int64()),
        ("turns", pa.int64()),
        ("min_version", pa.int64()),
        ("turn_rewards", pa.list_(pa.float64())),
        ("turn_states", pa.list_(pa.int64())),
        ("tokens", pa.list_(pa.int32())),
        ("response_mask", pa.list_(pa.bool_())),
        ("rollout_logprobs", pa.list_(pa.float32())),
        ("policy_versions", pa.list_(pa.int32())),
    ]
)
_ROUTES = pa.field("routes", pa.large_list(pa.int16()))
"""Of a run with model.moe.replay: [n, L, K] of a sequence, flat; L and K are in the header."""
SEQUENCE_COLUMNS = tuple(name for name in _SCHEMA.names if name not in TOKEN_COLUMNS)
"""All but those with a value per token."""


class Recorder:
    """Writes a replica's share of every N-th step; the replica's leader has one.

    Raises (on construction): ValueError when the folder cannot be written to.
    """

    def __init__(self, cfg: Config, *, replica: int, num_replicas: int):
        self.cfg, self.every = cfg, cfg.rollout.record.every
        self.replica, self.num_replicas = replica, num_replicas
        self.folder = Path(cfg.output_dir) / FOLDER
        probe = self.folder / f".replica_{replica}.partial"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise ValueError(
                f"rollout.record: {self.folder} cannot be written to: {error}; set "
                "another output_dir, or leave rollout.record.every out"
            ) from error

    def record(self, step: int, groups: Sequence[Group], share: Rollouts) -> None:
        """Write a share, if its step is one of those to record.

        Args:
            groups: as they were packed, each with its slot in the step's batch.
            share: what they were packed to.
        Raises: RuntimeError when it cannot be written; nothing is left of it then.
        """
        if step % self.every:
            return
        name = f"step_{step:06d}_replica_{self.replica}_of_{self.num_replicas}.parquet"
        header = {
            "format": FORMAT,
            "step": step,
            "replica": self.replica,
            "replicas": self.num_replicas,
            "model": self.cfg.model.path,
            "seed": self.cfg.seed,
            "lag": self.cfg.lag,
            "part_names": part_names(self.cfg.rewards.functions),
            "is_partial": bool(reward_models(self.cfg.rewards.functions)),
            "config": kept_fields(flatten(self.cfg)),
            "sums": share.sums,
            "shown": share.samples,
        }
        if share.routes is not None:
            header["routes"] = [*share.routes.shape[1:], str(share.routes.dtype)[6:]]
        partial = self.folder / f".{name}.partial"
        try:
            _write(partial, _table(step, groups, share), header)
            self._remove_other_layouts(step)
            os.replace(partial, self.folder / name)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise RuntimeError(
                f"step {step}: its rollouts cannot be recorded as {self.folder / name}: {error}; "
                "make room and resume, or resume without rollout.record"
            ) from error

    def _remove_other_layouts(self, step: int) -> None:
        """Take away files of this step that an attempt with other replicas wrote."""
        for path in self.folder.glob(f"step_{step:06d}_replica_*.parquet"):
            found = _NAME.fullmatch(path.name)
            if found and int(found[3]) != self.num_replicas:
                path.unlink(missing_ok=True)


def kept_fields(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return KEPT_FIELDS of a flattened config, of any version, as JSON has them."""
    flat = flatten(Config()) | modernized(flat)
    return json.loads(json.dumps({name: flat[name] for name in KEPT_FIELDS}))


def _write(path: Path, table: pa.Table, header: dict[str, Any]) -> None:
    """Write a table whose rows are sorted by group, each group a row group of the file."""
    table = table.replace_schema_metadata({_HEADER: json.dumps(header)})
    groups = table["group"].to_numpy()
    starts = [0, *(numpy.flatnonzero(numpy.diff(groups)) + 1).tolist(), len(groups)]
    with path.open("wb") as file:
        with parquet.ParquetWriter(file, table.schema, compression="zstd") as writer:
            for start, end in zip(starts, starts[1:]):
                if end > start:
                    writer.write_table(table.slice(start, end - start))
        file.flush()
        os.fsync(file.fileno())


def _table(step: int, groups: Sequence[Group], share: Rollouts) -> pa.Table:
    """Return the share's sequences, and the greedy ones before those of their group."""
    episodes = [e for group in groups for e in _placed(group)]
    drawn = [e for e in episodes if e.sample != GREEDY]
    greedy = [e for e in episodes if e.sample == GREEDY]
    scalars = share.scalars
    slots = scalars.group_ids.tolist()
    assert [(e.slot, e.sample) for e in drawn] == [*zip(slots, scalars.sample_ids.tolist())]
    found = dict(zip(slots, scalars.greedy_rewards.tolist()))
    own = [found.get(e.slot, numpy.nan) for e in greedy]
    tokens, others = flat_episodes(greedy, rewards=own, greedy_rewards=own, part_names=())
    no_parts = scalars.reward_parts.new_zeros(len(greedy), scalars.reward_parts.shape[1])
    # What a table has not is null in its rows: the greedy ones have no routes.
    rows = [
        _rows(step, drawn, share, scalars=scalars),
        _rows(
            step,
            greedy,
            replace(tokens, routes=None),
            scalars=replace(others, reward_parts=no_parts),
        ),
    ]
    table = pa.concat_tables(rows, promote_options="default")
    return table.sort_by([("group", "ascending"), ("sample", "ascending")])


def _rows(
    step: int, episodes: Sequence[FinishedEpisode], tokens: Tokens, *, scalars: Scalars
) -> pa.Table:
    """Return a table of episodes, each a row."""
    columns = _texts(step, episodes) | {
        "reward": scalars.rewards.numpy(),
        "greedy_reward": scalars.greedy_rewards.numpy(),
        "reward_parts": scalars.reward_parts.tolist(),
        "is_valid": scalars.is_valid.numpy(),
        "is_truncated": scalars.is_truncated.numpy(),
        "length": scalars.lengths.numpy(),
        "response_length": scalars.response_lengths.numpy(),
        "min_version": scalars.min_versions.numpy(),
    }
    starts = cumulative(scalars.lengths)
    for name in TOKEN_COLUMNS:
        kind = _SCHEMA.field(name).type
        values = pa.array(getattr(tokens, name).numpy()).cast(kind.value_type)
        columns[name] = pa.ListArray.from_arrays(pa.array(starts.int().numpy()), values, type=kind)
    table = pa.table(columns, schema=_SCHEMA)
    if tokens.routes is None:
        return table
    per_token = tokens.routes[0].numel() if len(tokens.routes) else 0
    ends = pa.array((starts * per_token).numpy())
    flat = pa.array(tokens.routes.short().flatten().numpy())
    return table.append_column(
        _ROUTES, pa.LargeListArray.from_arrays(ends, flat, type=_ROUTES.type)
    )


def _placed(group: Group) -> list[FinishedEpisode]:
    """Return a group's samples in order, with the slot that the group takes in its step."""
    return [replace(group.samples[i], slot=group.slot) for i in sorted(group.samples)]


def _texts(step: int, samples: Sequence[FinishedEpisode]) -> dict[str, Any]:
    """Return the columns that a sample has and its packed form has not."""
    return {
        "step": [step] * len(samples),
        "group": [s.slot for s in samples],
        "sample": [s.sample for s in samples],
        "row": [s.prompt.index for s in samples],
        "prompt": [s.prompt.text for s in samples],
        "response": [s.text for s in samples],
        "raw_reward": [s.reward.value for s in samples],
        "failure": [
            f"{s.reward.failure}: {s.reward.message}" if s.reward.failure else None for s in samples
        ],
        "turns": [s.trajectory.num_turns for s in samples],
        "turn_rewards": [s.trajectory.earned for s in samples],
        "turn_states": [s.trajectory.states for s in samples],
    }


# --------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Recorded:
    """The steps that a folder holds."""

    folder: Path
    steps: dict[int, tuple[Path, ...]]
    """Step -> its files, one per replica; whole steps only, ascending."""

    def files_of(self, step: int) -> tuple[Path, ...]:
        """Return the files of a step. Raises: ValueError naming the steps that are there."""
        if step not in self.steps:
            raise ValueError(
                f"{self.folder}: step {step} was not recorded; there are steps {ranges(self.steps)}"
            )
        return self.steps[step]


def find_recorded(path: str | Path) -> Recorded:
    """Return what a folder of rollouts, or a run's output_dir with one, holds.

    Raises: ValueError when there is none, or no step is whole.
    """
    path = Path(path).expanduser()
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    if not folder.is_dir():
        raise ValueError(
            f"{path} is not a folder (looked from {Path.cwd()}); name a run's "
            f"output_dir or its folder {FOLDER}"
        )
    found: dict[int, dict[int, dict[int, Path]]] = {}
    for file in sorted(folder.iterdir()):
        if parts := _NAME.fullmatch(file.name):
            step, replica, count = map(int, parts.groups())
            found.setdefault(step, {}).setdefault(count, {})[replica] = file
    steps = {}
    for step in sorted(found):
        for count, files in found[step].items():
            if sorted(files) == list(range(count)):
                steps[step] = tuple(files[replica] for replica in range(count))
    if not steps:
        names = [
            file.name for one in found.values() for files in one.values() for file in files.values()
        ]
        raise ValueError(
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
    """Return what a file says of itself. Raises: ValueError when it cannot be read."""
    return _header_of(_open(path), path)


def read_table(
    path: Path, *, columns: Sequence[str] | None = None, group: int | None = None
) -> pa.Table:
    """Return the rows of a file, or those of one group, greedy ones too.

    Raises: ValueError when the file cannot be read.
    """
    file = _open(path)
    try:
        places = range(file.num_row_groups)
        if group is not None:
            at = _SCHEMA.names.index("group")
            places = [
                i for i in places if file.metadata.row_group(i).column(at).statistics.min == group
            ]
        return file.read_row_groups(list(places), columns=list(columns) if columns else None)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def read_rollouts(files: Sequence[Path], *, part: int, num_parts: int) -> Rollouts:
    """Return one of `num_parts` shares of a step, whole groups each, as they were sampled.

    The metrics and the shown samples are in share 0; times of the recorded run are left out.

    Raises: ValueError when a file cannot be read.
    """
    tables, sums, shown, number, form = [], [], (), 0, None
    for path in files:
        file = _open(path)
        header, count = _header_of(file, path), file.num_row_groups
        mine = [i for i in range(count) if (number + i) % num_parts == part]
        number += count
        try:
            tables.append(file.read_row_groups(mine))
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(path, error) from error
        form = header.get("routes", form)
        if part == 0:
            sums.append(
                {
                    name: tuple(pair)
                    for name, pair in header["sums"].items()
                    if not name.startswith("time/")
                }
            )
            shown += tuple(header["shown"])
    table = pa.concat_tables(tables, promote_options="default")
    table = table.filter(pa.array(table["sample"].to_numpy() != GREEDY, type=pa.bool_()))
    return replace(_packed(table, form), sums=add_sums(*sums), samples=shown)


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


def scalars_of(table: pa.Table) -> Scalars:
    """Return the numbers per sequence of a table, in its order; greedy rows are not left out."""

    def of(name: str) -> Tensor:
        return _tensor(table[name].combine_chunks())

    parts = _tensor(table["reward_parts"].combine_chunks().flatten())
    return Scalars(
        lengths=of("length"),
        response_lengths=of("response_length"),
        group_ids=of("group"),
        sample_ids=of("sample"),
        rewards=of("reward"),
        is_truncated=of("is_truncated"),
        is_valid=of("is_valid"),
        min_versions=of("min_version"),
        reward_parts=parts.view(table.num_rows, -1),
        greedy_rewards=of("greedy_reward"),
        turns=turns_of(zip(table["turn_rewards"].to_pylist(), table["turn_states"].to_pylist())),
        rows=of("row"),
    )


def _tensor(column: pa.Array, kind: torch.dtype | None = None) -> Tensor:
    values = torch.from_numpy(column.to_numpy(zero_copy_only=False).copy())
    return values if kind is None else values.to(kind)


def _open(path: Path) -> parquet.ParquetFile:
    try:
        return parquet.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def _header_of(file: parquet.ParquetFile, path: Path) -> dict[str, Any]:
    text = (file.schema_arrow.metadata or {}).get(_HEADER)
    header = json.loads(text) if text else {}
    if header.get("format") != FORMAT:
        raise ValueError(
            f"{path}: is of format {header.get('format', 'unknown')}, this program "
            f"reads format {FORMAT}; record anew"
        )
    return header


def _unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path}: cannot be read as recorded rollouts: {error}")
