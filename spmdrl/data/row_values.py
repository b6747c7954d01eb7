"""What the columns of a row hold, as plain data of bounded size and depth."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Mapping
from typing import Any

from spmdrl.data.attachments import COLUMNS
from spmdrl.errors import Refusal

ROW_BYTES = 16 * 2**20
"""Of one row, unless data.max_row_mib says otherwise."""
_DEEPEST = 64
_PLAIN_BYTES = 8  # of a number; a container's own


def plain_row(row: Any, *, place: str, max_bytes: int = ROW_BYTES) -> dict:
    """Return a row as texts, numbers, booleans, None, lists and mappings; dates and decimals, which
    parquet has, become texts. Bytes stay where they are an attachment's.

    Args:
        place: origin of the row, for messages.
        max_bytes: of the row's texts, and 8 for each other value.
    Raises: Refusal naming the column, for a row that is no mapping, too large or too deep, half a
        character, bytes, and what is no plain data.
    """
    if not isinstance(row, dict):
        raise Refusal(f"{place}: a row is a JSON object with columns, got {shown(row)}")
    left = max_bytes
    found = {}
    for column, value in row.items():
        walk = _Walk(f"{place}: column {shown(column)}", left, max_bytes)
        walk.takes_bytes = column in COLUMNS
        walk.text(column)
        found[column] = walk.plain(value, 0)
        left = walk.left
    return found


def renamed(row: dict, columns: Mapping[str, str], *, place: str) -> dict:
    """Return a row with its columns renamed.

    Args:
        columns: {new name: name in the file}, as data.columns; one of the file's may get several.
        place: origin of the row, for messages.
    Raises: Refusal for a column that the row does not have, and a new name that it has already.
    """
    if not columns:
        return row
    for new, old in columns.items():
        if old not in row:
            raise Refusal(
                f"{place}: data.columns: {{{new}: {old}}}: the row has no column {shown(old)}; its "
                f"columns are {', '.join(map(str, row)) or '(none)'}"
                + (f"; the name here comes first, {{{old}: {new}}}" if new in row else "")
            )
    kept = {name: value for name, value in row.items() if name not in columns.values()}
    if twice := kept.keys() & columns.keys():
        new = min(twice)
        raise Refusal(
            f"{place}: data.columns: {{{new}: {columns[new]}}}: the row has a column {shown(new)} "
            f"besides; give that one another name too, e.g. {{own_{new}: {new}}}"
        )
    return {new: row[old] for new, old in columns.items()} | kept


class _Walk:
    """Walks through the value of one column.

    Args:
        what: the column, for messages.
        left: bytes that it may have, of the `most` of a row.
    """

    def __init__(self, what: str, left: int, most: int):
        self.what = what
        self.left = left
        self.most = most
        self.takes_bytes = False
        """Whether the column may hold bytes, besides those that a mapping calls so."""

    def plain(self, value: Any, depth: int) -> Any:
        """Return a value of the column as plain data."""
        if isinstance(value, str):
            return self.text(value)
        self._take(_PLAIN_BYTES)
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if depth >= _DEEPEST:
            raise Refusal(f"{self.what} holds lists or mappings more than {_DEEPEST} deep")
        if isinstance(value, bytes) and self.takes_bytes:
            self._take(len(value))
            return value
        if isinstance(value, dict):
            return {self.text(key): self._held(key, own, depth + 1) for key, own in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.plain(own, depth + 1) for own in value]
        if isinstance(value, (datetime.date, datetime.time)):
            return self.text(value.isoformat())
        if isinstance(value, (decimal.Decimal, datetime.timedelta)):
            return self.text(str(value))
        kind = type(value).__name__
        raise Refusal(
            f"{self.what} holds {kind}, which is neither text nor a number; write it as one of "
            "these, or leave the column out"
        )

    def _held(self, key: str, value: Any, depth: int) -> Any:
        if key == "bytes" and isinstance(value, bytes):  # as datasets stores an attachment
            self._take(len(value))
            return value
        return self.plain(value, depth)

    def text(self, value: Any) -> str:
        """Return a text, counted."""
        if not isinstance(value, str):
            raise Refusal(f"{self.what}: names are texts, got {shown(value)}")
        if value.isascii():
            self._take(len(value))
            return value
        try:
            self._take(len(value.encode()))
        except UnicodeEncodeError as error:
            raise Refusal(
                f"{self.what} holds half of a character, {value[error.start]!r}, at "
                f"{error.start + 1}: the text was cut within it, or wrongly decoded"
            ) from None
        return value

    def _take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise Refusal(
                f"{self.what} makes the row larger than data.max_row_mib allows, "
                f"{self.most / 2**20:g} MiB; cut it, or raise that"
            )


def shown(value: Any) -> str:
    """Return a value for messages, of which there is no long one."""
    if isinstance(value, int) and abs(value) > 10**40:
        return "a whole number of over 40 digits"
    if isinstance(value, (list, dict)):
        return f"a {'list' if isinstance(value, list) else 'mapping'} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}..."
