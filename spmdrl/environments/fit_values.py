"""Which values of JSON can go on: to a worker, into a chat template and a tokenizer."""

from __future__ import annotations

from typing import Any

_DEEPEST = 64  # pickling and templates recurse, from wherever they are called


def unfit(value: Any, *, left: int = _DEEPEST) -> str:
    """Return why a value of JSON cannot go on: nested too deep, or half of a character, which no
    tokenizer takes; empty where it can.

    Args:
        left: how deep lists and mappings may stand in each other.
    """
    if isinstance(value, str):
        halves = (c for c in value if "\ud800" <= c <= "\udfff")
        half = "" if value.isascii() else next(halves, "")
        return f"{half!r} is half of a character" if half else ""
    if not isinstance(value, (list, dict)):
        return ""
    if not left:
        return f"lists and mappings stand more than {_DEEPEST} deep in each other"
    parts = value if isinstance(value, list) else [*value, *value.values()]
    return next(filter(None, (unfit(part, left=left - 1) for part in parts)), "")
