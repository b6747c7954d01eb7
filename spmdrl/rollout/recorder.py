"""Record rollouts: samples and rewards, in one parquet file for each step and replica.

docs/rollouts.md describes the columns; recordings.py reads them. A file gets its name when it is
whole. A run that repeats a step replaces the step's files.

Each file has its sha256 in a file next to it, so that a single step can be copied and then checked
by `sha256sum -c`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial as partial_of
from io import BufferedReader
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pyarrow as pa
import pyarrow.parquet as parquet
from torch import Tensor

from spmdrl.config import Config, ShapingSettings
from spmdrl.errors import RunFailed
from spmdrl.imports import attempt, refusing
from spmdrl.rewards.signatures import part_names, reward_models
from spmdrl.rollout.episode import GREEDY, FinishedEpisode, Group
from spmdrl.rollout.packing import cumulative, flat_episodes
from spmdrl.run_folder import make_folder, open_file, remove, rename, write_file
from spmdrl.same_run.differences import config_of
from spmdrl.types import TOKEN_COLUMNS, Rollouts, Scalars, Tokens

FORMAT = 2
FOLDER = "rollouts"
"""Name of the folder of these files in a run's output_dir."""
FIXED_FIELDS = (
    "batch.prompts_per_step",
    "batch.group_size",
    "sampling.temperature",
    "sampling.top_p",
    "sampling.top_k",
    "sampling.min_p",
    "sampling.repetition_penalty",
    "sampling.presence_penalty",
    "sampling.frequency_penalty",
    "sampling.logit_bias",
    "rollout.agent",
    "rollout.agent_command",
    "rewards.functions",
    "rewards.weights",
    "rewards.scope",
    *(f"rewards.shaping.{name}" for name in vars(ShapingSettings())),
)
"""Fields of the config that the recorded numbers depend on; a replay must have the same values."""
ORIGIN_FIELDS = ("model.path", "seed", "lag")
"""More fields by which a file is matched to its run; a replay may have other values."""
HEADER = b"spmdrl"
FILE_NAME = re.compile(r"step_(\d+)_replica_(\d+)_of_(\d+)\.parquet")

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("group", pa.int64()),
        ("sample", pa.int64()),
        ("trace", pa.int64()),
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
NUMBERS = {
    "group": "group_ids",
    "sample": "sample_ids",
    "trace": "traces",
    "row": "rows",
    "reward": "rewards",
    "greedy_reward": "greedy_rewards",
    "is_valid": "is_valid",
    "is_truncated": "is_truncated",
    "length": "lengths",
    "response_length": "response_lengths",
    "min_version": "min_versions",
}
"""{column: field of Scalars} of columns with one number per sequence."""
ORDER = [("group", "ascending"), ("sample", "ascending"), ("trace", "ascending")]
"""Order of the rows, for `pyarrow.Table.sort_by`."""
SEQUENCE_COLUMNS = tuple(name for name in SCHEMA.names if name not in TOKEN_COLUMNS)
"""All columns but those with a value per token."""

_MEASURED = ("time/", "perf/")
"""Prefixes of sums that are not recorded, so that equal runs write equal bytes."""


class Recorder:
    """Writes a replica's share of every N-th step. Only the replica's leader has one.

    Raises (on construction): Refusal if the folder cannot be written to.
    """

    def __init__(self, cfg: Config, *, replica: int, num_replicas: int):
        self.cfg = cfg
        self.every = cfg.rollout.record.every
        self.replica = replica
        self.num_replicas = num_replicas
        self._within = Path(cfg.output_dir)
        self.folder = self._within / FOLDER
        probe = self.folder / f".replica_{replica}.partial"
        what = f"rollout.record: {self.folder} cannot be written to"
        hint = "; set another output_dir, or leave rollout.record.every out"
        with refusing(what, OSError, hint=hint):
            make_folder(self.folder, within=self._within)
            write_file(probe, b"", within=self._within)
            remove(probe, within=self._within)

    def record(self, step: int, groups: Sequence[Group], share: Rollouts) -> None:
        """Write a share if its step is one to record.

        Args:
            groups: groups of the share, each with its slot in the step's batch.
            share: the packed groups.
        Raises: RunFailed if the share cannot be written; then no part of it is left.
        """
        if step % self.every:
            return
        name = f"step_{step:06d}_replica_{self.replica}_of_{self.num_replicas}.parquet"
        header = {
            "format": FORMAT,
            "step": step,
            "replica": self.replica,
            "replicas": self.num_replicas,
            "part_names": part_names(self.cfg.reward_functions),
            "is_partial": bool(reward_models(self.cfg.rewards.functions)),
            "config": header_fields(self.cfg),
            "sums": {n: pair for n, pair in share.sums.items() if not n.startswith(_MEASURED)},
            "samples": share.samples,
        }
        table, forms = _table(step, groups, share)
        publish(self.folder / name, table, header | {"columns": forms})


def publish(path: Path, table: pa.Table, header: dict[str, Any]) -> None:
    """Write a table, whose rows are sorted by group, as a file in output_dir/rollouts.

    Args:
        path: named `step_N_KIND_K_of_M.parquet`. Files of this step and kind with another M, of an
            attempt on another layout, are removed.
    Raises: RunFailed if it cannot be written; then no part of it is left.
    """
    partial = path.with_name(f".{path.name}.partial")
    within = path.parents[1]
    start, _, count = path.name.rpartition("_of_")
    kind = start.rpartition("_")[0]
    try:
        _write(partial, table, header)
        for other in path.parent.glob(f"{kind}_*_of_*.parquet"):
            if other.name.rpartition("_of_")[2] != count:
                remove(other, within=within)
                remove(digest_file(other), within=within)
        _publish(partial, path)
    except OSError as error:
        for left in (partial, _draft_of(partial)):
            attempt(partial_of(remove, left, within=within), OSError)
        raise RunFailed(
            f"{path}: the step's rollouts cannot be recorded: {error}; make room and resume, or "
            "resume without rollout.record"
        ) from error


def digest_file(path: Path) -> Path:
    """Return the path of the file with a recorded file's sha256, for `sha256sum -c`."""
    return path.with_suffix(".sha256")


def digest_line(path: Path, name: str) -> str:
    """Return the line that sha256sum prints for a file, with another name. Raises: OSError."""
    with path.open("rb") as file:
        return digest_of(file, name)


def digest_of(file: BufferedReader, name: str) -> str:
    """Return the line that sha256sum prints for the rest of an open file, with this name."""
    return f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n"


def _draft_of(partial: Path) -> Path:
    return partial.with_suffix(".draft")


def _publish(partial: Path, path: Path) -> None:
    """Write a partial file's digest and give the file its name.

    The process may be killed between two renames. So while a file is replaced, the digest file has
    a line for the old one and a line for the new one.

    Raises: OSError.
    """
    digest = digest_file(path)
    new_line = digest_line(partial, path.name)
    old_lines = digest.read_text() if digest.is_file() and path.is_file() else ""
    draft = _draft_of(partial)
    _write_digest(draft, digest, new_line + old_lines)
    rename(partial, path, within=path.parents[1])
    if old_lines:
        _write_digest(draft, digest, new_line)


def _write_digest(draft: Path, path: Path, text: str) -> None:
    """Write a digest file as a draft, and rename it when it is on the disk. Raises: OSError."""
    within = path.parents[1]
    with open_file(draft, "w", within=within) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    rename(draft, path, within=within)


def header_fields(cfg: Config) -> dict[str, Any]:
    """Return {field: value} of a config, for the header of a recorded file."""
    config = config_of(cfg)
    return {name: config[name] for name in (*ORIGIN_FIELDS, *FIXED_FIELDS)}


def _write(path: Path, table: pa.Table, header: dict[str, Any]) -> None:
    """Write a table whose rows are sorted by group; each group becomes a row group of the file."""
    table = table.replace_schema_metadata({HEADER: json.dumps(header)})
    groups = table["group"].to_numpy()
    inner = (numpy.flatnonzero(numpy.diff(groups)) + 1).tolist()
    starts = [0, *inner, len(groups)] if len(groups) else []
    with open_file(path, "wb", within=path.parents[1]) as file:
        with parquet.ParquetWriter(file, table.schema, compression="zstd") as writer:
            for start, end in pairwise(starts):
                writer.write_table(table.slice(start, end - start))
        file.flush()
        os.fsync(file.fileno())


def _table(step: int, groups: Sequence[Group], share: Rollouts) -> tuple[pa.Table, dict[str, Any]]:
    """Return a table of the share's sequences and the greedy ones, in ORDER.

    Returns: the table, and {key: form} of the tokens' extra columns.
    """
    episodes = [e for group in groups for e in group.all_samples]
    drawn = [e for e in episodes if e.sample != GREEDY]
    greedy = [e for e in episodes if e.sample == GREEDY]
    scalars = share.scalars
    slots = scalars.group_ids.tolist()
    owners = [(e.slot, e.sample) for e in drawn for _ in e.traces]
    assert owners == [*zip(slots, scalars.sample_ids.tolist())]
    # The share has the rewards of greedy sequences, but not their tokens.
    reward_of_slot = dict(zip(slots, scalars.greedy_rewards.tolist()))
    rewards = [reward_of_slot.get(e.slot, numpy.nan) for e in greedy]
    greedy_tokens, greedy_scalars = flat_episodes(
        greedy, rewards=rewards, greedy_rewards=rewards, part_names=()
    )
    no_parts = scalars.reward_parts.new_zeros(len(greedy_scalars), scalars.reward_parts.shape[1])
    greedy_scalars = replace(greedy_scalars, reward_parts=no_parts)
    table = pa.concat_tables(
        [
            _rows(step, drawn, share, scalars=scalars),
            _rows(step, greedy, greedy_tokens, scalars=greedy_scalars),
        ]
    )
    lengths = table["length"].to_pylist()
    slots = table["group"].to_pylist()
    forms = {}
    for key, column in Tokens.concat([share, greedy_tokens]).extra_columns.items():
        arrays = column.to_arrow(lengths, slots)
        if any(array.null_count < len(array) for array in arrays):
            forms[key] = column.arrow_form()
            for field, array in zip(column.arrow_fields(), arrays, strict=True):
                table = table.append_column(field, array)
    return table.sort_by(ORDER), forms


def _rows(
    step: int, episodes: Sequence[FinishedEpisode], tokens: Tokens, *, scalars: Scalars
) -> pa.Table:
    """Return a table of episodes, each trace a row."""
    columns = _texts(step, episodes) | {"reward_parts": scalars.reward_parts.tolist()}
    columns |= {name: getattr(scalars, field).numpy() for name, field in NUMBERS.items()}
    starts = cumulative(scalars.lengths)
    for name in TOKEN_COLUMNS:
        columns[name] = _list_array(getattr(tokens, name), starts, kind=SCHEMA.field(name).type)
    return pa.table(columns, schema=SCHEMA)


def _list_array(values: Tensor, starts: Tensor, *, kind: pa.DataType) -> pa.Array:
    """Return values [n] as a column of S lists; `starts` [S + 1] int64 has their bounds."""
    own = pa.array(values.numpy()).cast(kind.value_type)
    return pa.ListArray.from_arrays(pa.array(starts.int().numpy()), own, type=kind)


def _texts(step: int, samples: Sequence[FinishedEpisode]) -> dict[str, Any]:
    """Return the columns of traces that `Rollouts` lacks."""
    traces = [trace for s in samples for trace in s.traces]
    owners = [s for s in samples for _ in s.traces]
    return {
        "step": [step] * len(traces),
        "prompt": [s.prompt.text for s in owners],
        "response": [s.text for s in owners],
        "raw_reward": [s.reward.value for s in owners],
        "failure": [
            f"{s.reward.failure}: {s.reward.message}" if s.reward.failure else None for s in owners
        ],
        "turns": [trace.num_turns for trace in traces],
        "turn_rewards": [trace.earned for trace in traces],
        "turn_states": [trace.states for trace in traces],
    }
