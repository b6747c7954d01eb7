"""What a worker tells its parent: plain data, read as if a stranger had written it.

The worker's process runs what users wrote, and what that code does to the process it may do to
what the process writes. So nothing that comes from there is unpickled: a report is JSON behind a
mark and two lengths, with the bytes of an environment after it. Every field is checked by the type
that its dataclass gives it, and what is no report raises BadReport: the worker is then as good as
dead.
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

from spmdrl.environments.fit_values import unfit
from spmdrl.rewards.samples import SCOPES
from spmdrl.workers.messages import Done, ListResult, RewardResult, TurnResult

_MARK = b"spmd"
_HEADER = struct.Struct("<4sII")  # mark, bytes of JSON, bytes after it
_MAX_BYTES = 64 * 2**20
_APART = {"key", "environment"}
"""Fields that do not stand in the JSON: the parent knows the key."""


_TOO_LARGE = (RecursionError, OverflowError)  # lists too deep, integers too large for a float


class BadReport(Exception):
    """A worker wrote something that is no report."""


@dataclass(frozen=True)
class Ready:
    """The worker has loaded what it serves."""

    at: float
    """time.monotonic()."""
    facts: dict[str, Any]


@dataclass(frozen=True)
class Refused:
    """The worker cannot load what it is to serve."""

    text: str


@dataclass(frozen=True)
class Began:
    """A job is under way."""

    id: int
    at: float
    """time.monotonic()."""


@dataclass(frozen=True)
class Returned:
    """Jobs that were not begun, given back."""

    ids: tuple[int, ...]


Report = Ready | Refused | Began | Returned | Done
_KINDS: dict[str, type] = {
    kind.__name__: kind for kind in (*get_args(Report), RewardResult, ListResult, TurnResult)
}

# --------------------------------------------------------------------------- in the worker


def pack_report(report: Report) -> bytes:
    """Return a report as it travels; one that cannot is the failure of its job.

    Raises: ValueError or TypeError for what is no plain data and no job's.
    """
    try:
        return _packed(report)
    except Exception as error:  # whatever a user's value does
        if not isinstance(report, Done):
            raise
        why = f"the result cannot be sent: {type(error).__name__}: {error!s:.200}"
        return _packed(replace(report, failure="bad_value", message=why, result=None))


def _packed(report: Report) -> bytes:
    text = _encode(report).encode()
    data = getattr(getattr(report, "result", None), "environment", b"")
    if len(text) + len(data) > _MAX_BYTES:
        raise ValueError(f"{len(text) + len(data)} bytes, above {_MAX_BYTES}")
    return _HEADER.pack(_MARK, len(text), len(data)) + text + data


def _said(value: Any) -> list[Any]:
    """Return the kind and the fields of a report, or of a result in it."""
    name = type(value).__name__
    if _KINDS.get(name) is not type(value):
        raise TypeError(f"{name} is no plain data")
    return [name, {field: getattr(value, field) for field in _types(_KINDS[name])}]


@cache
def _types(kind: type) -> dict[str, Any]:
    """Return the fields of a kind that stand in the JSON, with the types that they must have."""
    return {name: own for name, own in get_type_hints(kind).items() if name not in _APART}


# Bound here: what a user's code puts in the place of json.dumps is not called.
_encode = json.JSONEncoder(allow_nan=False, default=_said).encode

# --------------------------------------------------------------------------- in the parent


def take_reports(buffer: bytearray) -> Iterator[Report]:
    """Take whole reports out of the front of `buffer`, one by one.

    Raises: BadReport where something else stands there.
    """
    while len(buffer) >= _HEADER.size:
        mark, size, more = _HEADER.unpack_from(buffer)
        if mark != _MARK or size + more > _MAX_BYTES:
            raise BadReport(f"{bytes(buffer[:40])!r}")
        begin = _HEADER.size
        end = _HEADER.size + size + more
        if len(buffer) < end:
            return
        text = bytes(buffer[begin : begin + size])
        data = bytes(buffer[begin + size : end])
        del buffer[:end]
        yield _read(text, data)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no number")


_decode = json.JSONDecoder(parse_constant=_refuse).decode


def _read(text: bytes, data: bytes) -> Report:
    try:
        report = _made(_decode(text.decode()), get_args(Report))
        if isinstance(report, Done) and isinstance(report.result, TurnResult):
            return replace(report, result=replace(report.result, environment=data))
        return report
    except (ValueError, LookupError, TypeError, AttributeError, *_TOO_LARGE) as error:
        raise BadReport(f"{text[:80]!r}: {type(error).__name__}: {error!s:.200}") from None


def _made(value: Any, kinds: tuple[type, ...]) -> Any:
    """Return what [kind, fields] stands for, which must be of one of the kinds."""
    name, given = value
    kind = _KINDS[name]
    types = _types(kind)
    if kind not in kinds or given.keys() != types.keys():
        raise ValueError(f"{name} with {', '.join(given):.80}")
    found = {field: _checked(given[field], own) for field, own in types.items()}
    _check_values(kind, found)
    return kind(**found)


def _checked(value: Any, kind: Any) -> Any:
    """Return a value of this very type, of which a report may have fields; true is no integer."""
    origin = get_origin(kind)
    inner = get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        own = [one for one in inner if one is not NoneType]
        if value is None:
            return None
        return _made(value, tuple(own)) if own[0] in _KINDS.values() else _checked(value, own[0])
    if origin is tuple:
        return tuple(_checked(one, inner[0]) for one in _checked(value, list))
    if origin is dict:
        return {name: _checked(own, inner[1]) for name, own in _checked(value, dict).items()}
    if kind in _KINDS.values():
        return _made(value, (kind,))
    if kind is float and type(value) in (int, float) and isfinite(value):
        return float(value)
    is_right = value in inner if origin is Literal else kind is not float and type(value) is kind
    if not is_right:
        raise ValueError(f"expected {inner or kind.__name__}, got {value!r:.80}")
    return value


def _check_values(kind: type, found: dict[str, Any]) -> None:
    """Raise ValueError for what the types of the fields do not say."""
    if kind is Done and found["failure"] is None and found["result"] is None:
        raise ValueError("neither a result nor a failure")
    for name in ("seconds", "retries"):
        if found.get(name, 0) < 0:
            raise ValueError(f"{found[name]} {name}")
    for message in found["messages"] if kind is TurnResult else ():
        if not isinstance(message["role"], str) or not isinstance(message["content"], str):
            raise ValueError(f"a message of {message!r:.80}")
        if problem := unfit(message):  # a tokenizer would raise in the engine
            raise ValueError(problem)
    if kind is Ready:
        facts = found["facts"]
        if not 1 <= _checked(facts["concurrency"], int) <= 1_000_000:
            raise ValueError(f"concurrency {facts['concurrency']}")
        if not set(_checked(facts["scopes"], list)) <= set(SCOPES):
            raise ValueError(f"scopes {facts['scopes']!r:.80}")
        _checked(facts["called"], dict[str, str])
        for own in _checked(facts["environments"], dict[str, dict]).values():
            _checked(own["tools"], list)
            _checked(own["tool_parser"], str)
            _checked(own["not_plain"], str)
