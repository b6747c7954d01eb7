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
"""Rows of one source, which can say where they came from."""
# Evaluations of runs with different seeds ask the same questions, so that they compare.
_EVAL_SEED = 0
_CACHED_ROWS = 16384
_CACHED_ON_DISK = 1024


class Chain(Sequence[int]):
    """Whole numbers of several sequences, one after the other, as they are: ranges stay ranges."""

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
        """Return which part an index lies in, and its place there."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = bisect.bisect_right(self._begins, index) - 1
        return part, index - self._begins[part]


class SourcesRows:
    """Rows of several sources under one numbering; where there is one source, its own.

    Args:
        sources: as data.sources says.
        parts: the rows of each.
        first: number of the first source among all of the run's: those of data.eval stand behind
            those of data.train.
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
        """Return of how many rows to keep what was made: few where rows stay on disk, since these
        may be large."""
        return _CACHED_ON_DISK if self.is_on_disk else _CACHED_ROWS

    @property
    def is_on_disk(self) -> bool:
        """Whether rows of some source stay on disk."""
        return any(isinstance(part, StreamedRows) for part in self.parts)

    def __getitem__(self, index: int) -> dict:
        part, i = self._chain.place(index)
        return self.parts[part][i]

    def where(self, index: int) -> str:
        """Return the origin of a row for error messages."""
        part, i = self._chain.place(index)
        return self.parts[part].where(i)

    def source(self, index: int) -> int:
        """Return the number of the source that a row is of."""
        return self._first + self._chain.place(index)[0]

    def folder(self, index: int) -> Path | None:
        """Return the folder of the file that a row is of; None for what is made, or on the hub."""
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
    parts = [_opened(cfg, source, split=split, need=need) for source in sources]
    first = len(cfg.data.sources("train")) if split == "eval" else 0
    return SourcesRows(sources, parts, first=first)


def _opened(cfg: Config, source: SourceSettings, *, split: Split, need: Need) -> SourceRows:
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
    """Return what is made of rows, made in the order of their files: rows that stay on disk are
    read by row groups."""
    made = {index: make(index) for index in sorted(set(indices))}
    return [made[index] for index in indices]
