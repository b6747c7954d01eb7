"""The tables of other frameworks' settings, read from the pages beside this file."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Counterpart:
    """What a setting of theirs becomes."""

    key: str
    """Its dotted name, or a pattern."""
    default: Any
    """Its value where their config does not set it."""
    fields: tuple[str, ...]
    """Fields here; empty without a counterpart."""
    how: str
    """Empty: the same value; a conversion of one value; `rule NAME`; or `nothing`, if there is
    nothing to do."""
    note: str
    """Why there is no counterpart, and what to do."""

    @property
    def rule(self) -> str:
        """The rule that reads it; empty if none does."""
        return self.how.removeprefix("rule ") if self.how.startswith("rule ") else ""


@dataclass(frozen=True)
class SettingsTable:
    """The settings of a framework."""

    version: str
    """Whose defaults these are."""
    rows: tuple[Counterpart, ...]

    def row_of(self, key: str) -> Counterpart | None:
        """Return the row of a setting; None for one that the table does not have."""
        return self._exact.get(key) or next(
            (row for row in self.rows if "*" in row.key and fnmatchcase(key, row.key)), None
        )

    @functools.cached_property
    def _exact(self) -> dict[str, Counterpart]:
        return {row.key: row for row in self.rows}


@functools.cache
def table_of(framework: str) -> SettingsTable:
    """Return the table on the page of a framework."""
    text = Path(__file__).with_name(f"{framework}.md").read_text(encoding="utf-8")
    found = re.search(r"defaults of \S+ (\S+)", text)
    assert found, f"{framework}.md names no version"
    rows = []
    for line in text.splitlines():
        if line.startswith("| `"):
            keys, default, here, how, note = (cell.strip() for cell in line.split("|")[1:-1])
            rows += [
                Counterpart(
                    key=key,
                    default=yaml.safe_load(default.strip("`")),
                    fields=tuple(re.findall("`(.+?)`", here)),
                    how=how,
                    note=note,
                )
                for key in re.findall("`(.+?)`", keys)
            ]
    return SettingsTable(found[1], tuple(rows))
