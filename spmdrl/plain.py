"""Values as bytes and back, for peers and files: plain data, so that reading them runs nothing.

JSON, and behind it the bytes of arrays. What is no plain data is refused where it is packed, and
only classes that say `@record` are made anew.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch

C = TypeVar("C", bound=type)
_HEADER = struct.Struct("<Q")  # bytes of JSON
_SCALARS = {type(None), bool, int, float, str}
_KINDS = "biufc"  # of numpy's dtypes: numbers, no objects
_RECORDS: dict[str, type] = {}


def record(cls: C) -> C:
    """Let instances of a dataclass be packed, if their fields can be."""
    assert is_dataclass(cls) and _RECORDS.setdefault(cls.__name__, cls) is cls, cls
    return cls


def pack(value: Any) -> bytes:
    """Return bytes of which `unpack` makes an equal value.

    Args:
        value: None, bool, int, float, str, bytes, Path, torch.dtype, numpy array or CPU tensor of
            numbers, `record`, or list, tuple or dict of such.
    Raises: TypeError naming what it cannot pack.
    """
    buffers: list[bytes] = []
    text = json.dumps(_said(value, buffers), separators=(",", ":")).encode()
    return b"".join([_HEADER.pack(len(text)), text, *buffers])


def unpack(data: bytes) -> Any:
    """Return what `pack` made bytes of; arrays are copies.

    Raises: ValueError for anything else.
    """
    try:
        size = _HEADER.unpack_from(data)[0]
        buffer = _Buffer(data, _HEADER.size + size)
        value = _meant(json.loads(data[_HEADER.size : _HEADER.size + size]), buffer)
    except (struct.error, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"these are no packed values: {error}") from error
    if buffer.at != len(data):
        raise ValueError(f"these are no packed values: {len(data) - buffer.at} bytes are left")
    return value


class _Buffer:
    """Takes the bytes behind the JSON, in order."""

    def __init__(self, data: bytes, at: int):
        self._data = data
        self.at = at

    def take(self, size: int) -> bytes:
        if not 0 <= size <= len(self._data) - self.at:
            raise ValueError(f"these are no packed values: {size} bytes are not there")
        self.at += size
        return self._data[self.at - size : self.at]


def _said(value: Any, buffers: list[bytes]) -> Any:
    """Return the JSON of a value; an object has one key, which says what it stands for."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind in (list, tuple):
        plain = set(map(type, value)) <= _SCALARS
        items = list(value) if plain else [_said(item, buffers) for item in value]
        return items if kind is list else {"tuple": items}
    for known, name, say in _SAYERS:
        if isinstance(value, known):
            return {name: say(value, buffers)}
    if _RECORDS.get(kind.__name__) is kind:
        own = {field.name: _said(getattr(value, field.name), buffers) for field in fields(value)}
        return {"record": [kind.__name__, own]}
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} is no plain data")


def _say_dict(value: dict, buffers: list[bytes]) -> list:
    return [[_said(key, buffers), _said(item, buffers)] for key, item in value.items()]


def _say_bytes(value: bytes, buffers: list[bytes]) -> int:
    buffers.append(value)
    return len(value)


def _say_array(value: Any, buffers: list[bytes]) -> list:
    if value.dtype.kind not in _KINDS:
        raise TypeError(f"an array of {value.dtype} is no plain data")
    buffers.append(value.tobytes())
    return [value.dtype.str, list(value.shape)]


def _say_tensor(value: torch.Tensor, buffers: list[bytes]) -> list:
    flat = value.detach().contiguous().flatten().view(torch.uint8)
    buffers.append(flat.numpy().tobytes())
    return [str(value.dtype).removeprefix("torch."), list(value.shape)]


_SAYERS: tuple[tuple[Any, str, Callable[[Any, list[bytes]], Any]], ...] = (
    (dict, "dict", _say_dict),
    (bytes, "bytes", _say_bytes),
    (numpy.ndarray, "array", _say_array),
    (torch.Tensor, "tensor", _say_tensor),
    (numpy.generic, "scalar", lambda value, buffers: _say_array(numpy.asarray(value), buffers)),
    (torch.dtype, "dtype", lambda value, buffers: str(value).removeprefix("torch.")),
    (Path, "path", lambda value, buffers: str(value)),
    # Kinds of numbers and texts of others, such as enumerations, come as what they are.
    (bool, "same", lambda value, buffers: bool(value)),
    (int, "same", lambda value, buffers: int(value)),
    (float, "same", lambda value, buffers: float(value)),
    (str, "same", lambda value, buffers: str.__str__(value)),
)


def _meant(said: Any, buffer: _Buffer) -> Any:
    if type(said) is list:
        return said if set(map(type, said)) <= _SCALARS else [_meant(x, buffer) for x in said]
    if type(said) is not dict:
        return said
    ((name, own),) = said.items()
    return _MEANINGS[name](own, buffer)


def _mean_array(own: list, buffer: _Buffer) -> Any:
    dtype = numpy.dtype(own[0])
    shape = own[1]
    if dtype.kind not in _KINDS:
        raise ValueError(f"these are no packed values: an array of {dtype}")
    data = buffer.take(dtype.itemsize * math.prod(shape))
    return numpy.frombuffer(data, dtype).reshape(shape).copy()


def _mean_tensor(own: list, buffer: _Buffer) -> torch.Tensor:
    dtype = _mean_dtype(own[0], buffer)
    shape = own[1]
    data = bytearray(buffer.take(dtype.itemsize * math.prod(shape)))
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


def _mean_dtype(own: str, buffer: _Buffer) -> torch.dtype:
    dtype = getattr(torch, own)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"these are no packed values: {own} is no dtype")
    return dtype


def _mean_record(own: list, buffer: _Buffer) -> Any:
    return _RECORDS[own[0]](**{name: _meant(value, buffer) for name, value in own[1].items()})


_MEANINGS: dict[str, Callable[[Any, _Buffer], Any]] = {
    "tuple": lambda own, buffer: tuple(_meant(own, buffer)),
    "dict": lambda own, buffer: {_meant(k, buffer): _meant(item, buffer) for k, item in own},
    "bytes": lambda own, buffer: buffer.take(own),
    "array": _mean_array,
    "tensor": _mean_tensor,
    "scalar": lambda own, buffer: _mean_array(own, buffer)[()],
    "dtype": _mean_dtype,
    "path": lambda own, buffer: Path(own),
    "same": lambda own, buffer: own,
    "record": _mean_record,
}
