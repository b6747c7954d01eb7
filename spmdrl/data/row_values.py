"""The values of a row as plain data, of bounded size and depth."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Mapping
from typing import Any

from spmdrl.data.attachments import COLUMNS
from spmdrl.errors import Refusal, describe

ROW_BYTES = 16 * 2**20
"""Of one row; the default of data.max_row_mib."""
_MAX_DEPTH = 64
_VALUE_BYTES = 8  # that a number or a container counts


def plain_row(row: Any, *, place: str, max_bytes: int = ROW_BYTES) -> dict:
    """Return a row as texts, numbers, booleans, None, lists and mappings.

    Dates and decimals of parquet become texts. Bytes of attachments stay bytes.

    Args:
        place: origin of the row, for messages.
        max_bytes: of the row; a text counts its UTF-8 bytes, any other value 8.
    Raises: Refusal naming the column, for a row that is no mapping, is too large or nested too
        deep, or holds a lone surrogate, bytes, or a value of another type.
    """
    if not isinstance(row, dict):
        raise Refusal(f"{place}: a row is a JSON object with columns, got {describe(row)}")
    left = max_bytes
    found = {}
    for column, value in row.items():
        walk = _Walk(f"{place}: column {describe(column)}", left, max_bytes)
        walk.takes_bytes = column in COLUMNS
        walk.text(column)
        found[column] = walk.plain(value, 0)
        left = walk.left
    return found


def rename_columns(row: dict, columns: Mapping[str, str], *, place: str) -> dict:
    """Return a row with its columns renamed.

    Args:
        columns: {new name: name in the file}, as data.columns; a column may get several names.
        place: origin of the row, for messages.
    Raises: Refusal for a column that the row does not have, and for a new name that it already has.
    """
    if not columns:
        return row
    for new, old in columns.items():
        if old not in row:
            raise Refusal(
                f"{place}: data.columns: {{{new}: {old}}}: the row has no column {describe(old)}; "
                f"its columns are {', '.join(map(str, row)) or '(none)'}"
                + (f"; write the new name first, {{{old}: {new}}}" if new in row else "")
            )
    kept = {name: value for name, value in row.items() if name not in columns.values()}
    if twice := kept.keys() & columns.keys():
        new = min(twice)
        raise Refusal(
            f"{place}: data.columns: {{{new}: {columns[new]}}}: the row also has a column "
            f"{describe(new)}; give that one another name too, e.g. {{own_{new}: {new}}}"
        )
    return {new: row[old] for new, old in columns.items()} | kept


class _Walk:
    """Walks through the value of one column and counts its bytes.

    Args:
        what: the column, for messages.
        left: bytes that it may have, of the `most` that a row may have.
    """

    def __init__(self, what: str, left: int, most: int):
        self.what = what
        self.left = left
        self.most = most
        self.takes_bytes = False
        """Whether the column may hold bytes; a field `bytes` of a mapping may in any column."""

    def plain(self, value: Any, depth: int) -> Any:
        """Return a value of the column as plain data."""
        if isinstance(value, str):
            return self.text(value)
        self._take(_VALUE_BYTES)
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if depth >= _MAX_DEPTH:
            raise Refusal(f"{self.what} holds lists or mappings more than {_MAX_DEPTH} deep")
        if isinstance(value, bytes) and self.takes_bytes:
            self._take(len(value))
            return value
        if isinstance(value, dict):
            found = {}
            for key, own in value.items():
                found[self.text(key)] = self._field(key, own, depth + 1)
            return found
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

    def _field(self, key: str, value: Any, depth: int) -> Any:
        if key == "bytes" and isinstance(value, bytes):  # as datasets stores an attachment
            self._take(len(value))
            return value
        return self.plain(value, depth)

    def text(self, value: Any) -> str:
        """Count a text and return it."""
        if not isinstance(value, str):
            raise Refusal(f"{self.what}: names are texts, got {describe(value)}")
        if value.isascii():
            self._take(len(value))
            return value
        try:
            self._take(len(value.encode()))
        except UnicodeEncodeError as error:
            raise Refusal(
                f"{self.what} holds half of a character, {value[error.start]!r}, at "
                f"{error.start + 1}: the text was cut within a character, or decoded wrongly"
            ) from None
        return value

    def _take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise Refusal(
                f"{self.what} makes the row larger than data.max_row_mib allows, "
                f"{self.most / 2**20:g} MiB; cut it, or raise that"
            )
