"""What a worker tells its parent: plain data, read as if a stranger had written it.

The worker's process runs what users wrote, and what that code does to the process it may do to
what the process writes. So nothing that comes from there is unpickled: a report is JSON behind a
mark and two lengths, with the bytes of an environment after it. Every field is checked, and what is
no report raises BadReport: the worker is then as good as dead.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, TypeVar, get_args

from spmdrl.environments.fit_values import unfit
from spmdrl.rewards.samples import SCOPES
from spmdrl.workers.messages import Done, Failure, ListResult, RewardResult, TurnResult

T = TypeVar("T")

_MARK = b"spmd"
_HEADER = struct.Struct("<4sII")  # mark, bytes of JSON, bytes after it
_MAX_BYTES = 64 * 2**20
_OF_CALL = ("key", "seconds", "failure", "message")
"""Fields of a result that stand in its Done."""
# Bound here: what a user's code puts in the place of json.dumps is not called.
_encode = json.JSONEncoder(allow_nan=False).encode


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

# --------------------------------------------------------------------------- in the worker


def pack_report(report: Report) -> bytes:
    """Return a report as it travels; one that cannot is the failure of its job.

    Raises: ValueError or TypeError for what is no plain data and no job's.
    """
    if not isinstance(report, Done):
        return _packed(type(report).__name__, vars(report))
    try:
        return _pack_done(report)
    except Exception as error:  # whatever a user's value does
        why = f"the result cannot be sent: {type(error).__name__}: {error!s:.200}"
        return _pack_done(replace(report, failure="bad_value", message=why, result=None))


def _pack_done(done: Done) -> bytes:
    fields, data = dict(vars(done)), b""
    if done.result is not None:
        inner = _without(done.result, *_OF_CALL)
        data = inner.pop("environment", b"")
        if isinstance(done.result, ListResult):
            inner["results"] = [_without(r, "key", "seconds") for r in done.result.results]
        fields["result"] = inner
    return _packed("Done", fields, data)


def _without(result: RewardResult | ListResult | TurnResult, *names: str) -> dict[str, Any]:
    return {name: value for name, value in vars(result).items() if name not in names}


def _packed(kind: str, fields: dict[str, Any], data: bytes = b"") -> bytes:
    text = _encode([kind, fields]).encode()
    if len(text) + len(data) > _MAX_BYTES:
        raise ValueError(f"{len(text) + len(data)} bytes, above {_MAX_BYTES}")
    return _HEADER.pack(_MARK, len(text), len(data)) + text + data


# --------------------------------------------------------------------------- in the parent


def take_reports(buffer: bytearray) -> Iterator[Report]:
    """Take whole reports out of the front of `buffer`, one by one.

    Raises: BadReport where something else stands there.
    """
    while len(buffer) >= _HEADER.size:
        mark, size, more = _HEADER.unpack_from(buffer)
        if mark != _MARK or size + more > _MAX_BYTES:
            raise BadReport(f"{bytes(buffer[:40])!r}")
        begin, end = _HEADER.size, _HEADER.size + size + more
        if len(buffer) < end:
            return
        text, data = bytes(buffer[begin : begin + size]), bytes(buffer[begin + size : end])
        del buffer[:end]
        yield _read(text, data)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no number")


_decode = json.JSONDecoder(parse_constant=_refuse).decode


def _read(text: bytes, data: bytes) -> Report:
    try:
        kind, fields = _decode(text.decode())
        return _READERS[kind](fields, data)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BadReport(f"{text[:80]!r}: {type(error).__name__}: {error!s:.200}") from None


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not isfinite(value):
        raise ValueError(f"expected a number, got {value!r:.80}")
    return float(value)


def _of(kind: type[T]) -> Callable[[Any], T]:
    def check(value: Any) -> T:
        """Return a value of this very type; true is no integer."""
        if type(value) is not kind:
            raise ValueError(f"expected {kind.__name__}, got {value!r:.80}")
        return value

    return check


_integer, _text, _flag = _of(int), _of(str), _of(bool)


def _named(value: Any, check: Callable[[Any], T]) -> dict[str, T]:
    return {name: check(inner) for name, inner in _of(dict)(value).items()}


def _read_done(fields: dict[str, Any], data: bytes) -> Done:
    failure, result = fields["failure"], fields["result"]
    if _failure(failure) is None and result is None:
        raise ValueError("neither a result nor a failure")
    seconds = _number(fields["seconds"])
    if seconds < 0:
        raise ValueError(f"{seconds} seconds")
    return Done(
        _integer(fields["id"]),
        _number(fields["finished"]),
        seconds,
        failure,
        _text(fields["message"]),
        None if result is None else _read_result(result, data),
    )


def _failure(value: Any) -> Failure | None:
    if value is not None and value not in get_args(Failure):
        raise ValueError(f"failure {value!r:.80}")
    return value


def _read_result(fields: dict[str, Any], data: bytes) -> RewardResult | ListResult | TurnResult:
    if "messages" in fields:
        return TurnResult(
            None,
            environment=data,
            messages=tuple(map(_message, _of(list)(fields["messages"]))),
            is_done=_flag(fields["is_done"]),
            reward=_number(fields["reward"]),
            info=_named(fields["info"], _number),
            state=_integer(fields["state"]),
        )
    if "results" in fields:
        return ListResult(None, results=tuple(map(_read_one, _of(list)(fields["results"]))))
    return _read_score(fields)


def _read_one(fields: Any) -> RewardResult:
    found = _read_score(_of(dict)(fields))
    return replace(found, failure=_failure(fields["failure"]), message=_text(fields["message"]))


def _read_score(fields: dict[str, Any]) -> RewardResult:
    value = fields["value"]
    return RewardResult(
        None,
        value=None if value is None else _number(value),
        parts=_named(fields["parts"], _number),
        metrics=_named(fields["metrics"], _number),
        extras=_named(fields["extras"], _text),
    )


def _message(value: Any) -> dict[str, Any]:
    message = _of(dict)(value)
    _text(message["role"])
    _text(message["content"])
    if problem := unfit(message):  # a tokenizer would raise in the engine
        raise ValueError(problem)
    return message


def _read_facts(fields: dict[str, Any]) -> dict[str, Any]:
    if not 1 <= _integer(fields["concurrency"]) <= 1_000_000:
        raise ValueError(f"concurrency {fields['concurrency']}")
    if not set(_of(list)(fields["scopes"])) <= set(SCOPES):
        raise ValueError(f"scopes {fields['scopes']!r:.80}")
    if "tools" in fields:
        _of(list)(fields["tools"])
        _text(fields["tool_parser"])
    return fields


_READERS: dict[str, Callable[[dict[str, Any], bytes], Report]] = {
    "Ready": lambda f, _: Ready(_number(f["at"]), _read_facts(_of(dict)(f["facts"]))),
    "Refused": lambda f, _: Refused(_text(f["text"])),
    "Began": lambda f, _: Began(_integer(f["id"]), _number(f["at"])),
    "Returned": lambda f, _: Returned(tuple(map(_integer, _of(list)(f["ids"])))),
    "Done": _read_done,
}
