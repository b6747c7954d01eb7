"""The reports of a worker to its parent: plain data, which the parent does not trust.

The worker's process runs users' code, which may change what the process writes. So the parent does
not unpickle anything. A report is a mark, two lengths, JSON, and the bytes of an environment. Every
field must have its type in the dataclass. Otherwise BadReport is raised, and the worker is killed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from spmdrl.environments.fit_values import fit_problem
from spmdrl.rewards.samples import SCOPES
from spmdrl.workers.messages import Done, ListResult, RewardResult, SolveResult, TurnResult

_MARK = b"spmd"
_HEADER = struct.Struct("<4sII")  # mark, bytes of JSON, bytes after it
_MAX_BYTES = 64 * 2**20
_NOT_IN_JSON = {"key", "environment"}
"""The parent knows the key, and the bytes of the environment follow the JSON."""
_TOO_LARGE = (RecursionError, OverflowError)  # too deep a list, too large an integer for a float


class BadReport(Exception):
    """A worker wrote something that is not a report."""


@dataclass(frozen=True)
class Ready:
    """The worker has loaded its setup."""

    at: float
    """time.monotonic()."""
    facts: dict[str, Any]
    """See `Server.facts`."""


@dataclass(frozen=True)
class Refused:
    """The worker cannot load its setup."""

    text: str


@dataclass(frozen=True)
class Began:
    """A job has begun."""

    id: int
    at: float
    """time.monotonic()."""


@dataclass(frozen=True)
class Returned:
    """Jobs that have not begun, which the worker returns."""

    ids: tuple[int, ...]


Report = Ready | Refused | Began | Returned | Done
_KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (*get_args(Report), RewardResult, ListResult, TurnResult, SolveResult)
}

# --------------------------------------------------------------------------- in the worker


def pack_report(report: Report) -> bytes:
    """Return the bytes of a report. If a result cannot be packed, report a failure of its job.

    Raises: ValueError or TypeError for any other report that cannot be packed.
    """
    try:
        return _pack(report)
    except Exception as error:  # a user's value may raise anything
        if not isinstance(report, Done):
            raise
        why = f"the result cannot be sent: {type(error).__name__}: {error!s:.200}"
        return _pack(replace(report, failure="bad_value", message=why, result=None))


def _pack(report: Report) -> bytes:
    text = _encode(report).encode()
    data = getattr(getattr(report, "result", None), "environment", b"")
    if len(text) + len(data) > _MAX_BYTES:
        raise ValueError(f"{len(text) + len(data)} bytes, above {_MAX_BYTES}")
    return _HEADER.pack(_MARK, len(text), len(data)) + text + data


def _to_json(value: Any) -> list[Any]:
    """Return the name and the fields of a report, or of a result in it."""
    name = type(value).__name__
    if _KINDS.get(name) is not type(value):
        raise TypeError(f"{name} is not plain data")
    return [name, {field: getattr(value, field) for field in _types(_KINDS[name])}]


@cache
def _types(kind: type) -> dict[str, Any]:
    """Return the fields of a kind that are in the JSON, and their types."""
    return {name: own for name, own in get_type_hints(kind).items() if name not in _NOT_IN_JSON}


# Keep a reference to this method, because user code may replace json.dumps.
_encode = json.JSONEncoder(allow_nan=False, default=_to_json).encode

# --------------------------------------------------------------------------- in the parent


def take_reports(buffer: bytearray) -> Iterator[Report]:
    """Remove whole reports from the front of `buffer` and yield them, one by one.

    Raises: BadReport if there is something else.
    """
    while len(buffer) >= _HEADER.size:
        mark, size, more = _HEADER.unpack_from(buffer)
        if mark != _MARK or size + more > _MAX_BYTES:
            raise BadReport(f"{bytes(buffer[:40])!r}")
        end = _HEADER.size + size + more
        if len(buffer) < end:
            return
        text = bytes(buffer[_HEADER.size : end - more])
        data = bytes(buffer[end - more : end])
        del buffer[:end]
        yield _read(text, data)


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no number")


_decode = json.JSONDecoder(parse_constant=_refuse_constant).decode


def _read(text: bytes, data: bytes) -> Report:
    try:
        report = _from_json(_decode(text.decode()), get_args(Report))
        if isinstance(report, Done) and isinstance(report.result, TurnResult):
            return replace(report, result=replace(report.result, environment=data))
        return report
    except (ValueError, LookupError, TypeError, AttributeError, *_TOO_LARGE) as error:
        raise BadReport(f"{text[:80]!r}: {type(error).__name__}: {error!s:.200}") from None


def _from_json(value: Any, kinds: tuple[type, ...]) -> Any:
    """Return the report or result of [name, fields]; it must be of one of the kinds."""
    name, given = value
    kind = _KINDS[name]
    types = _types(kind)
    if kind not in kinds or given.keys() != types.keys():
        raise ValueError(f"{name} with {', '.join(given):.80}")
    fields = {field: _of_type(given[field], own) for field, own in types.items()}
    _check_values(kind, fields)
    return kind(**fields)


def _of_type(value: Any, kind: Any) -> Any:
    """Return a value as the type of its field; raise ValueError for another type.

    `true` is not an integer.
    """
    origin = get_origin(kind)
    inner = get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        if value is None:
            return None
        kinds = tuple(one for one in inner if one is not NoneType)
        if kinds[0] in _KINDS.values():
            return _from_json(value, kinds)
        return _of_type(value, kinds[0])
    if origin is tuple:
        return tuple(_of_type(one, inner[0]) for one in _of_type(value, list))
    if origin is dict:
        return {name: _of_type(own, inner[1]) for name, own in _of_type(value, dict).items()}
    if kind in _KINDS.values():
        return _from_json(value, (kind,))
    if kind is float:
        if type(value) in (int, float) and isfinite(value):
            return float(value)
    elif value in inner if origin is Literal else type(value) is kind:
        return value
    raise ValueError(f"expected {inner or kind.__name__}, got {value!r:.80}")


def _check_values(kind: type, fields: dict[str, Any]) -> None:
    """Raise ValueError for wrong values of the right type."""
    if kind is Done and fields["failure"] is None and fields["result"] is None:
        raise ValueError("neither a result nor a failure")
    for name in ("seconds", "retries"):
        if fields.get(name, 0) < 0:
            raise ValueError(f"{fields[name]} {name}")
    for message in fields["messages"] if kind is TurnResult else ():
        if not isinstance(message["role"], str) or not isinstance(message["content"], str):
            raise ValueError(f"a message of {message!r:.80}")
        if problem := fit_problem(message):  # a tokenizer of the parent would raise
            raise ValueError(problem)
    if kind is Ready:
        facts = fields["facts"]
        if not 1 <= _of_type(facts["concurrency"], int) <= 1_000_000:
            raise ValueError(f"concurrency {facts['concurrency']}")
        if not set(_of_type(facts["scopes"], list)) <= set(SCOPES):
            raise ValueError(f"scopes {facts['scopes']!r:.80}")
        _of_type(facts["called"], dict[str, str])
        for own in _of_type(facts["environments"], dict[str, dict]).values():
            _of_type(own["tools"], list)
            _of_type(own["tool_parser"], str)
            _of_type(own["not_plain"], str)
