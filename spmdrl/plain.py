"""Values as bytes and back, for peers and files: plain data, so that reading them runs nothing.

The form is JSON, followed by the bytes of arrays. `pack` refuses what is not plain data, and
`unpack` makes no instances but those of `@record` classes.
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
    """Allow `pack` to take instances of this dataclass. Its fields must hold plain data."""
    assert is_dataclass(cls) and _RECORDS.setdefault(cls.__name__, cls) is cls, cls
    return cls


def pack(value: Any) -> bytes:
    """Return bytes from which `unpack` makes an equal value.

    Args:
        value: None, bool, int, float, str, bytes, Path, torch.dtype, numpy array or CPU tensor of
            numbers, `record`, or a list, tuple or dict of these.
    Raises: TypeError naming the class that cannot be packed.
    """
    buffers: list[bytes] = []
    text = json.dumps(_encode(value, buffers), separators=(",", ":")).encode()
    return b"".join([_HEADER.pack(len(text)), text, *buffers])


def unpack(data: bytes) -> Any:
    """Return the value that was packed. Arrays are copies.

    Raises: ValueError for bytes that `pack` did not make.
    """
    try:
        size = _HEADER.unpack_from(data)[0]
        buffer = _Buffer(data, _HEADER.size + size)
        value = _decode(json.loads(data[_HEADER.size : _HEADER.size + size]), buffer)
    except (struct.error, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"these are no packed values: {error}") from error
    if buffer.at != len(data):
        raise ValueError(f"these are no packed values: {len(data) - buffer.at} bytes are left")
    return value


class _Buffer:
    """The bytes after the JSON, read in order."""

    def __init__(self, data: bytes, at: int):
        self._data = data
        self.at = at

    def take(self, size: int) -> bytes:
        if not 0 <= size <= len(self._data) - self.at:
            raise ValueError(f"these are no packed values: {size} bytes are missing")
        self.at += size
        return self._data[self.at - size : self.at]


def _encode(value: Any, buffers: list[bytes]) -> Any:
    """Return a value as JSON has it, and append the bytes of its arrays to `buffers`.

    A JSON object has one key, the kind of the value that it encodes.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind in (list, tuple):
        items = list(value)
        if not set(map(type, items)) <= _SCALARS:  # else they stay as they are, the usual case
            items = [_encode(item, buffers) for item in items]
        return items if kind is list else {"tuple": items}
    for known, name, encode in _ENCODERS:
        if isinstance(value, known):
            return {name: encode(value, buffers)}
    if _RECORDS.get(kind.__name__) is kind:
        own = {field.name: _encode(getattr(value, field.name), buffers) for field in fields(value)}
        return {"record": [kind.__name__, own]}
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not plain data")


def _encode_dict(value: dict, buffers: list[bytes]) -> list:
    return [[_encode(key, buffers), _encode(item, buffers)] for key, item in value.items()]


def _encode_bytes(value: bytes, buffers: list[bytes]) -> int:
    buffers.append(value)
    return len(value)


def _encode_array(value: Any, buffers: list[bytes]) -> list:
    if value.dtype.kind not in _KINDS:
        raise TypeError(f"an array of {value.dtype} is not plain data")
    buffers.append(value.tobytes())
    return [value.dtype.str, list(value.shape)]


def _encode_tensor(value: torch.Tensor, buffers: list[bytes]) -> list:
    # A tensor of one element is contiguous with any stride, but views of bytes need a stride of 1.
    flat = value.detach().contiguous().as_strided((value.numel(),), (1,))
    buffers.append(flat.view(torch.uint8).numpy().tobytes())
    return [str(value.dtype).removeprefix("torch."), list(value.shape)]


# The first match counts: numpy.float64 is also a float.
_ENCODERS: tuple[tuple[Any, str, Callable[[Any, list[bytes]], Any]], ...] = (
    (dict, "dict", _encode_dict),
    (bytes, "bytes", _encode_bytes),
    (numpy.ndarray, "array", _encode_array),
    (torch.Tensor, "tensor", _encode_tensor),
    (numpy.generic, "scalar", lambda value, buffers: _encode_array(numpy.asarray(value), buffers)),
    (torch.dtype, "dtype", lambda value, buffers: str(value).removeprefix("torch.")),
    (Path, "path", lambda value, buffers: str(value)),
    # Subclasses of numbers and texts, such as enumerations, become plain numbers and texts.
    (int, "same", lambda value, buffers: int(value)),
    (float, "same", lambda value, buffers: float(value)),
    (str, "same", lambda value, buffers: str.__str__(value)),
)


def _decode(encoded: Any, buffer: _Buffer) -> Any:
    """Return the value that `_encode` turned into this JSON."""
    if type(encoded) is list:
        if set(map(type, encoded)) <= _SCALARS:
            return encoded
        return [_decode(item, buffer) for item in encoded]
    if type(encoded) is not dict:
        return encoded
    ((name, own),) = encoded.items()
    return _DECODERS[name](own, buffer)


def _decode_array(own: list, buffer: _Buffer) -> Any:
    dtype = numpy.dtype(own[0])
    shape = own[1]
    if dtype.kind not in _KINDS:
        raise ValueError(f"these are no packed values: an array of {dtype}")
    data = buffer.take(dtype.itemsize * math.prod(shape))
    return numpy.frombuffer(data, dtype).reshape(shape).copy()


def _decode_tensor(own: list, buffer: _Buffer) -> torch.Tensor:
    dtype = _decode_dtype(own[0], buffer)
    shape = own[1]
    data = bytearray(buffer.take(dtype.itemsize * math.prod(shape)))
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


def _decode_dtype(own: str, buffer: _Buffer) -> torch.dtype:
    dtype = getattr(torch, own)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"these are no packed values: {own} is no dtype")
    return dtype


def _decode_record(own: list, buffer: _Buffer) -> Any:
    return _RECORDS[own[0]](**{name: _decode(value, buffer) for name, value in own[1].items()})


_DECODERS: dict[str, Callable[[Any, _Buffer], Any]] = {
    "tuple": lambda own, buffer: tuple(_decode(own, buffer)),
    "dict": lambda own, buffer: {_decode(k, buffer): _decode(item, buffer) for k, item in own},
    "bytes": lambda own, buffer: buffer.take(own),
    "array": _decode_array,
    "tensor": _decode_tensor,
    "scalar": lambda own, buffer: _decode_array(own, buffer)[()],
    "dtype": _decode_dtype,
    "path": lambda own, buffer: Path(own),
    "same": lambda own, buffer: own,
    "record": _decode_record,
}
