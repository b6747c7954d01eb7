"""From their settings to fields of our config, by a table and rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from spmdrl.config import Config, flatten
from spmdrl.config.other_frameworks import in_other_frameworks
from spmdrl.config.tree import settings
from spmdrl.errors import describe
from spmdrl.tools.import_config.table import Counterpart, SettingsTable

_SHOWN_KEYS = 3
_MAY_STAY = ("report.", "output_dir")
"""Fields that change no result: their defaults do where only their shell knows the value."""


@dataclass(frozen=True)
class ShellValue:
    """A value that only the shell that runs their script would know."""

    text: str

    def __str__(self) -> str:
        return self.text


class _OnlyInShell(Exception):
    """A rule asked for a value that only their shell knows."""


class Theirs:
    """Their settings, with their defaults."""

    def __init__(self, values: Mapping[str, Any], table: SettingsTable, *, gpus: int, rows: int):
        self.values = values
        self._table = table
        self.gpus = gpus
        """Number of GPUs; 0 if it was not said."""
        self.rows = rows
        """Rows of the training data; 0 if it was not said."""

    def __getitem__(self, key: str) -> Any:
        """Return the value of a setting in the table, their default where it is not set."""
        row = self._table.row_of(key)
        assert row is not None, f"the table has no {key}"
        value = self.values.get(key, row.default)
        if isinstance(value, ShellValue):
            raise _OnlyInShell(f"{key} is {value}, which only the shell that runs it knows")
        return value

    def is_set(self, key: str) -> bool:
        """Return whether their config sets it."""
        return key in self.values


@dataclass
class Ours:
    """Fields of our config, and what is left to people."""

    fields: dict[str, Any] = field(default_factory=dict)
    """{field: value}"""
    asked: dict[str, str] = field(default_factory=dict)
    """{field that has to be set by hand: why}"""
    translated: list[str] = field(default_factory=list)
    """Settings of theirs that became fields here."""
    notes: list[tuple[str, str]] = field(default_factory=list)
    """(setting of theirs with its value, what differs here)"""
    dropped: list[tuple[str, str]] = field(default_factory=list)
    """(setting of theirs with its value that has no counterpart, what to do)"""
    unknown: list[tuple[str, str]] = field(default_factory=list)
    """(setting of theirs that the table does not have, with its value; what to do)"""
    nothing: list[str] = field(default_factory=list)
    """Settings of theirs that need no counterpart."""

    def set(self, **values: Any) -> None:
        """Set fields; a dot in a name is written as two underscores."""
        self.fields |= {name.replace("__", "."): value for name, value in values.items()}

    def ask(self, name: str, why: str) -> None:
        """Leave a field to people: until it is set, the config is refused."""
        self.fields.pop(name, None)
        self.asked[name] = why

    def tell(self, key: str, why: str) -> None:
        """Say what differs here from a setting of theirs."""
        self.notes.append((key, why))


Rule = Callable[[Theirs, Ours], None]


def translate(theirs: Theirs, table: SettingsTable, rules: Mapping[str, Rule]) -> Ours:
    """Return what their settings are here."""
    ours = Ours()
    for row in table.rows:
        if not row.rule and row.fields and "*" not in row.key:
            _same(theirs, row, ours)
    for name in dict.fromkeys(row.rule for row in table.rows if row.rule):
        try:
            rules[name](theirs, ours)
        except _OnlyInShell as missing:
            asked = {own for row in table.rows if row.rule == name for own in row.fields}
            for own in sorted(asked - ours.fields.keys()):
                ours.ask(own, str(missing))
    for key, value in theirs.values.items():
        _account(key, value, table.row_of(key), ours)
    return ours


def _same(theirs: Theirs, row: Counterpart, ours: Ours) -> None:
    """Set the field of a row that one setting decides."""
    (name,) = row.fields
    try:
        value = theirs[row.key]
    except _OnlyInShell as missing:
        if name.startswith(_MAY_STAY):
            ours.tell(row.key, f"set {name} by hand: {missing}")
        else:
            ours.ask(name, str(missing))
        return
    if value is not None:
        ours.fields[name] = CONVERSIONS[row.how](value) if row.how else value


def _account(key: str, value: Any, row: Counterpart | None, ours: Ours) -> None:
    """List a setting that becomes no field."""
    said = f"{key} = {value if isinstance(value, ShellValue) else describe(value)}"
    if row is None:
        hint = in_other_frameworks(key)
        ours.unknown.append((said, hint or "not in the table: see whether your run needs it"))
    elif row.how == "nothing":
        ours.nothing.append(key)
    elif row.fields or row.rule:
        ours.translated.append(key)
    elif value in (row.default, None):
        ours.nothing.append(key)
    else:
        ours.dropped.append((said, row.note))


TRACKERS = ("mlflow", "wandb", "tensorboard", "trackio")


def _listed(value: Any) -> list[Any]:
    """Return a list; a single value becomes a list of one."""
    return value if isinstance(value, list) else [value]


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "0 if negative": lambda value: max(0, value),
    "full if true": lambda value: "full" if value else "none",
    "dtype": lambda value: {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(
        str(value), str(value)
    ),
    "text": str,
    "trackers": lambda value: [own for own in _listed(value) if own in TRACKERS],
}
"""Conversions of one value that a table names."""


def yaml_of(ours: Ours, theirs: Theirs, table: SettingsTable, *, head: str) -> str:
    """Return the config as YAML, each field with the settings that it comes from.

    A field that neither their config sets nor their defaults change is left out. One that has to be
    set by hand is null, which every run refuses.
    """
    defaults = flatten(Config())
    sources: dict[str, list[str]] = {}
    for row in table.rows:
        for name in row.fields:
            sources.setdefault(name, []).append(row.key)
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    lines += [f"# Differs here: {said}: {why}" for said, why in ours.notes]
    lines += [f"# Not translated: {said}: {why}" for said, why in ours.dropped + ours.unknown]
    open_sections: list[str] = []
    for name in settings():
        keys = sources.get(name, [])
        is_set = any(theirs.is_set(key) for key in keys)
        if name in ours.asked:
            text = f"null  # SET THIS: {ours.asked[name]}"
        elif name in ours.fields and (is_set or ours.fields[name] != defaults[name]):
            text = _flow(ours.fields[name])
            own = [key for key in keys if theirs.is_set(key)]
            more = ", ..." if len(own) > _SHOWN_KEYS else ""
            text += f"  # {', '.join(own[:_SHOWN_KEYS])}{more}" if own else "  # their default"
        else:
            continue
        *above, last = name.split(".")
        kept = 0
        while kept < min(len(above), len(open_sections)) and above[kept] == open_sections[kept]:
            kept += 1
        lines += [f"{'  ' * i}{above[i]}:" for i in range(kept, len(above))]
        open_sections = above
        lines.append(f"{'  ' * len(above)}{last}: {text}")
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    """Return a value as YAML in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("...\n").strip()
