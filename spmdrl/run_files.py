"""Reading files of a run, which somebody else may have written.

Only regular files are opened, each kind up to a size. JSON is read up to a depth and a number of
values, with numbers that fit into 64 bits. It imports nothing of ours but `errors`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from spmdrl.errors import Refusal

_MIB = 2**20
_DEEPEST = 64
_MOST_VALUES = 4 * 10**6
_LARGEST_INTEGER = 2**63


@dataclass(frozen=True)
class Kind:
    """A kind of file, and how large it may be."""

    name: str
    """For messages: `a config`."""
    most_bytes: int
    most_line_bytes: int = 0
    """Of a file of lines."""


CONFIG = Kind("a config", 4 * _MIB)
SMALL = Kind("a small JSON file", 16 * _MIB)
DIGEST = Kind("a digest", _MIB)
MANIFEST = Kind("a manifest", 64 * _MIB)
INDEX = Kind("an index of tensors", 256 * _MIB)
TENSORS = Kind("a file of tensors", 2**50)
STATE = Kind("a rank's state", 64 * 1024 * _MIB)
RECORDING = Kind("recorded rollouts", 256 * 1024 * _MIB)
METRICS = Kind("metrics", 64 * 1024 * _MIB, most_line_bytes=16 * _MIB)
CERTIFICATE = Kind("a certificate", 1024 * 1024 * _MIB, most_line_bytes=64 * _MIB)
DECISIONS = Kind("decisions", 4 * 1024 * _MIB, most_line_bytes=16 * _MIB)


class NotJson(Refusal):
    """A text that is no JSON. It may have been cut off."""


def opened(path: str | Path, kind: Kind) -> BufferedReader:
    """Open a regular file for reading; a link to one is followed.

    Raises: OSError if it cannot be opened; Refusal for a folder, pipe, socket or device, which may
        have no end, and for a file that is too large for its kind.
    """
    # A pipe that nobody writes to would block the call that opens it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Refusal(
                f"{path} is {_kind_of(status.st_mode)}, and {kind.name} must be a regular file; "
                "replace it by the file that the run wrote"
            )
        if status.st_size > kind.most_bytes:
            raise _too_large(path, kind, size=status.st_size)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _kind_of(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    if stat.S_ISFIFO(mode):
        return "a pipe"
    if stat.S_ISSOCK(mode):
        return "a socket"
    return "a device"


def _too_large(path: str | Path, kind: Kind, *, size: int) -> Refusal:
    return Refusal(
        f"{path} has {size} bytes, and {kind.name} has at most {kind.most_bytes}: it is damaged, "
        "or no file that a run wrote"
    )


def read_bytes(path: str | Path, kind: Kind) -> bytes:
    """Return the bytes of a file. Raises: as `opened`."""
    with opened(path, kind) as file:
        size = os.fstat(file.fileno()).st_size
        # Not to the end: the file may grow beyond its limit meanwhile.
        data = file.read(size)
    return data


def read_text(path: str | Path, kind: Kind) -> str:
    """Return the text of a UTF-8 file; a mark replaces bytes that are no UTF-8. Raises: as
    `opened`."""
    return read_bytes(path, kind).decode(errors="replace")


def read_lines(path: str | Path, kind: Kind, *, newest_bytes: int = 0) -> Iterator[bytes]:
    """Yield the lines of a file, each with its end; the last one may have none.

    Args:
        newest_bytes: yield only the lines that begin within the last so many bytes; 0: all.
    Raises: as `opened`; Refusal for a line that is longer than its kind may be.
    """
    with opened(path, kind) as file:
        size = os.fstat(file.fileno()).st_size
        if 0 < newest_bytes < size:
            file.seek(size - newest_bytes - 1)
            file.readline(kind.most_line_bytes + 1)  # the rest of the line before
        number = 0
        while line := file.readline(kind.most_line_bytes + 1):
            number += 1
            if len(line) > kind.most_line_bytes:
                raise Refusal(
                    f"{path}: line {number} has more than {kind.most_line_bytes} bytes, the most "
                    f"that a line of {kind.name} has: it is damaged, or no file that a run wrote"
                )
            yield line


def json_of(text: bytes | str, *, place: str) -> Any:
    """Return the value of a JSON text.

    Args:
        place: the place of the text, for messages.
    Raises: NotJson for a text that is none; Refusal where it is nested too deep, holds too many
        values, or a number that does not fit into 64 bits.
    """
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    # Before parsing, which would make all of these objects.
    if text.count(",") + text.count("[") + text.count("{") > _MOST_VALUES:
        raise Refusal(f"{place}: holds more than {_MOST_VALUES} values")
    try:
        value = json.loads(text, parse_int=_integer, parse_float=_number)
    except _BeyondRange as error:
        field = _field_beyond_range(text)
        where = f"{place}: {field}" if field else place
        raise Refusal(f"{where}: the number {error!s:.40} does not fit into 64 bits") from None
    except RecursionError:
        raise _too_deep(place) from None
    except ValueError as error:
        raise NotJson(f"{place}: is no JSON: {error}") from None
    _check_depth(value, place=place)
    return value


def json_object(text: bytes | str, *, place: str) -> dict[str, Any]:
    """Return the object that a JSON text holds. Raises: Refusal for anything else."""
    value = json_of(text, place=place)
    if not isinstance(value, dict):
        raise Refusal(f"{place}: holds a JSON {type(value).__name__}, and must hold an object")
    return value


class _BeyondRange(ValueError):
    pass


def _integer(text: str) -> int:
    # 64 bits take a sign and 19 digits. Converting very long texts is slow, or fails.
    if len(text) > 20:
        raise _BeyondRange(text)
    value = int(text)
    if not -_LARGEST_INTEGER <= value < _LARGEST_INTEGER:
        raise _BeyondRange(text)
    return value


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _BeyondRange(text)
    return value


def _field_beyond_range(text: str) -> str:
    """Return the key of the first value in a JSON text that does not fit into 64 bits."""
    names: list[str] = []

    def look(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for name, value in pairs:
            if not names and _has_mark(value):
                names.append(name)
        return dict(pairs)

    with contextlib.suppress(ValueError, RecursionError):  # from text after the first such number
        json.loads(text, parse_int=_marked, parse_float=_marked, object_pairs_hook=look)
    return names[0] if names else ""


class _Mark:
    pass


def _marked(text: str) -> Any:
    try:
        return _number(text) if set(text) & set(".eE") else _integer(text)
    except _BeyondRange:
        return _Mark()


def _has_mark(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_has_mark, value))
    return isinstance(value, _Mark)


def _too_deep(place: str) -> Refusal:
    return Refusal(f"{place}: lists and objects stand more than {_DEEPEST} deep in each other")


def _check_depth(value: Any, *, place: str) -> None:
    level = [value]
    for _ in range(_DEEPEST + 1):
        level = [inner for outer in level for inner in _containers(outer)]
        if not level:
            return
    raise _too_deep(place)


def _containers(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [inner for inner in value.values() if isinstance(inner, (dict, list))]
    if isinstance(value, list):
        return [inner for inner in value if isinstance(inner, (dict, list))]
    return []
