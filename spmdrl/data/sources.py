"""Rows of all sources of data.train or data.eval, one source after the other."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, overload

from spmdrl.config import Config, SourceSettings
from spmdrl.config.data import Split
from spmdrl.data.rows import Need, RowRules, Rows, read_rows
from spmdrl.data.streamed import SUFFIXES as STREAMED
from spmdrl.data.streamed import StreamedRows, stream_rows
from spmdrl.data.tasks import GeneratedRows, is_generated

T = TypeVar("T")

SourceRows = Rows | GeneratedRows | StreamedRows
# Runs with different seeds are evaluated on the same problems, so that they can be compared.
_EVAL_SEED = 0
_CACHED_ROWS = 16384
_CACHED_ON_DISK = 1024


class Chain(Sequence[int]):
    """Several sequences of whole numbers, one after the other; a range takes no memory."""

    def __init__(self, parts: Sequence[Sequence[int]]):
        self.parts = parts
        self._begins = [0, *itertools.accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._begins[-1]

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        part, i = self.place(index)
        return int(self.parts[part][i])

    def place(self, index: int) -> tuple[int, int]:
        """Return the part that an index lies in, and its index there."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = bisect.bisect_right(self._begins, index) - 1
        return part, index - self._begins[part]


class SourcesRows:
    """Rows of several sources, numbered one source after the other.

    Args:
        sources: of data.train or data.eval.
        parts: the rows of each.
        first: number of the first source in the run: sources of data.eval come after those of
            data.train.
    """

    def __init__(
        self, sources: Sequence[SourceSettings], parts: Sequence[SourceRows], *, first: int = 0
    ):
        self.sources = sources
        self.parts = parts
        self._first = first
        self._chain = Chain([range(len(part)) for part in parts])

    def __len__(self) -> int:
        return len(self._chain)

    @property
    def cache_size(self) -> int:
        """Return how many processed rows to keep: few if rows stay on disk, since they may be
        large."""
        return _CACHED_ON_DISK if self.is_on_disk else _CACHED_ROWS

    @property
    def is_on_disk(self) -> bool:
        """Whether the rows of a source stay on disk."""
        return any(isinstance(part, StreamedRows) for part in self.parts)

    def __getitem__(self, index: int) -> dict:
        part, i = self._chain.place(index)
        return self.parts[part][i]

    def where(self, index: int) -> str:
        """Return the origin of a row for error messages."""
        part, i = self._chain.place(index)
        return self.parts[part].where(i)

    def source(self, index: int) -> int:
        """Return the number of a row's source."""
        return self._first + self._chain.place(index)[0]

    def folder(self, index: int) -> Path | None:
        """Return the folder of a row's file; None for generated and hub rows."""
        return self.sources[self._chain.place(index)[0]].folder

    def indices(self, part: int) -> range:
        """Return the indices of the rows of a part."""
        begin = sum(map(len, self.parts[:part]))
        return range(begin, begin + len(self.parts[part]))


def load_rows(cfg: Config, *, split: Split, need: Need = "prompt") -> SourcesRows:
    """Open the rows of data.train or data.eval.

    Raises: Refusal naming file and line, task, or option; see `read_rows`, `make_task`.
    """
    sources = cfg.data.sources(split)
    parts = [_open_source(cfg, source, split=split, need=need) for source in sources]
    first = len(cfg.data.sources("train")) if split == "eval" else 0
    return SourcesRows(sources, parts, first=first)


def _open_source(cfg: Config, source: SourceSettings, *, split: Split, need: Need) -> SourceRows:
    if is_generated(source.path):
        seed = cfg.seed if split == "train" else _EVAL_SEED
        return GeneratedRows(
            source.path, source.task_options, size=source.size, seed=seed, split=split
        )
    path = Path(source.path).expanduser()
    rules = row_rules(cfg, source, need=need)
    if path.suffix in STREAMED and path.is_file():
        if path.stat().st_size > cfg.data.stream_above_mib * 2**20:
            return stream_rows(path, size=source.size, rules=rules)
    return read_rows(source.path, size=source.size, rules=rules)


def row_rules(cfg: Config, source: SourceSettings, *, need: Need) -> RowRules:
    """Return how the rows of a source that is no generated task are read."""
    return RowRules(need, int(cfg.data.max_row_mib * 2**20), source.columns)


def in_file_order(make: Callable[[int], T], indices: Sequence[int]) -> list[T]:
    """Return `make(index)` for each index. They are made in ascending order, so that a row group
    of a parquet file is read once."""
    made = {index: make(index) for index in sorted(set(indices))}
    return [made[index] for index in indices]
