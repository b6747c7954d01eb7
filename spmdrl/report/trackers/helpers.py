"""What several trackers need: the run of an earlier attempt, and tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmdrl.imports import parsed_json
from spmdrl.run_folder import write_file


def remember_run(folder: Path, kind: str, content: dict[str, str]) -> None:
    """Write which run of a tracker is that of an output_dir, for its next attempt."""
    write_file(folder / f"{kind}_run.json", json.dumps(content) + "\n")


def remembered_run(folder: Path, kind: str) -> dict[str, Any]:
    """Return what `remember_run` wrote; {} for nothing."""
    path = folder / f"{kind}_run.json"
    content, _ = parsed_json(path.read_text()) if path.is_file() else (None, "")
    return content if isinstance(content, dict) else {}


def columns_of(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return the names of a table's columns, and its rows as lists of their cells."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return columns, [[row.get(key) for key in columns] for row in rows]
