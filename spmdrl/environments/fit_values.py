"""Check that a value of JSON can be sent to a worker, a chat template and a tokenizer."""

from __future__ import annotations

from typing import Any

_MAX_DEPTH = 64  # pickling and templates recurse, and may be called from a deep stack


def fit_problem(value: Any, *, left: int = _MAX_DEPTH) -> str:
    """Return why a value of JSON cannot be sent; empty if it can.

    The value may be nested too deep, or hold half of a character (a lone surrogate), which no
    tokenizer takes.

    Args:
        left: levels by which lists and mappings may still be nested.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return f"{value[error.start]!r} is half of a character"
        return ""
    if not isinstance(value, (list, dict)):
        return ""
    if not left:
        return f"lists and mappings are nested more than {_MAX_DEPTH} deep"
    parts = value if isinstance(value, list) else [*value, *value.values()]
    for part in parts:
        if problem := fit_problem(part, left=left - 1):
            return problem
    return ""
