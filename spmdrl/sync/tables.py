"""File tensors and what engines want of them as arrays: a row each, in place of an object each.

A model of 671B parameters has 45,000 file tensors, and every engine rank wants a slice of each.
Boxes have `depth` dims here, those of the live tensor with the most; others have dims of size 1
in front.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy
import torch

from spmdrl.errors import Refusal
from spmdrl.model.shards import Box, Part
from spmdrl.plain import pack, unpack

Array = Any
"""A numpy array."""


@dataclass(frozen=True)
class Want:
    """A box that an inference rank needs."""

    name: str  # of the file tensor
    box: Box
    dtype: torch.dtype


@dataclass(frozen=True)
class Columns:
    """Arrays with as many rows each."""

    @property
    def columns(self) -> list[Array]:
        """The arrays, in the order of the fields."""
        return [getattr(self, field.name) for field in fields(self)]

    def rows(self, index: Array | slice) -> Self:
        """Return some of the rows, in the order of `index`, or those where a mask is true."""
        return type(self)(*(column[index] for column in self.columns))

    @classmethod
    def join(cls, tables: Sequence[Self]) -> Self:
        """Return the rows of one or more tables, one after the other."""
        return cls(*map(numpy.concatenate, zip(*(table.columns for table in tables))))

    def pack(self) -> bytes:
        """Return it in few bytes, the same for the same rows."""
        # Neighbouring rows are alike, their differences all the more.
        steps = [numpy.diff(c, axis=0, prepend=numpy.zeros_like(c[:1])) for c in self.columns]
        packed = [(c.dtype.str, c.shape, c.tobytes("F")) for c in steps]
        return zlib.compress(pack(packed), 1)

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """Return what `pack` made bytes of."""
        columns = [
            numpy.frombuffer(data, dtype).reshape(shape, order="F").cumsum(axis=0, dtype=dtype)
            for dtype, shape, data in unpack(zlib.decompress(packed))
        ]
        return cls(*columns)


class FileTable:
    """All file tensors, numbered, and where they lie in live tensors.

    Args:
        parts: {file name: part of a live tensor}, the same on every rank.
    """

    def __init__(self, parts: Mapping[str, Part]):
        self.names = tuple(parts)
        self.tensors = tuple(dict.fromkeys(part.tensor for part in parts.values()))
        self.depth = max((len(part.box.shape) for part in parts.values()), default=1) or 1
        self._index = {name: i for i, name in enumerate(self.names)}
        numbers = {name: i for i, name in enumerate(self.tensors)}
        self.tensor = numpy.array([numbers[part.tensor] for part in parts.values()], numpy.int32)
        """[N]: index in `tensors`."""
        self.ndim = numpy.array([len(part.dims) for part in parts.values()], numpy.int32)
        """[N]: dims of the file tensor."""
        placed = [_placed(part, self.depth) for part in parts.values()]
        self.start = numpy.array([start for start, _ in placed]).reshape(-1, self.depth)
        """[N, depth] int64: of the part in the live tensor."""
        self.dims = numpy.array([dims for _, dims in placed]).reshape(-1, self.depth)
        """[N, depth] int64: the live dim of each dim of the file tensor."""

    def digest(self) -> bytes:
        """Return a hash of all of it."""
        arrays = (self.tensor, self.ndim, self.start, self.dims)
        text = "\n".join((*self.names, "", *self.tensors)).encode()
        return hashlib.sha256(b"".join([text, *(a.tobytes() for a in arrays)])).digest()

    def wants(self, wants: Sequence[Want]) -> Wants:
        """Return what one rank wants as a table.

        Raises: Refusal for a name that is no file tensor's.
        """
        for want in wants:
            if want.name not in self._index:
                raise Refusal(f"an engine needs {want.name}, which no trainer rank holds")
        index = [self._index[want.name] for want in wants]
        padded = [_padded(want.box, self.depth) for want in wants]
        boxes = numpy.array(padded, numpy.int64).reshape(-1, 2, self.depth)
        dtype = numpy.array([DTYPES.index(want.dtype) for want in wants], numpy.int8)
        return Wants(numpy.array(index, numpy.int32), dtype, boxes[:, 0], boxes[:, 1])

    def box(self, file: int, start: Array, shape: Array) -> Box:
        """Return a row's box with the dims of its file tensor."""
        first = self.depth - int(self.ndim[file])
        return Box(tuple(start[first:].tolist()), tuple(shape[first:].tolist()))


@dataclass(frozen=True)
class Wants(Columns):
    """What an inference rank wants."""

    file: Array  # [N] int32: index of the file tensor
    dtype: Array  # [N] int8: index in DTYPES
    start: Array  # [N, depth] int64: of the box in the file tensor
    shape: Array  # [N, depth] int64


DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
"""What an engine may keep a weight in."""
ITEMSIZES = numpy.array([dtype.itemsize for dtype in DTYPES])


def _placed(part: Part, depth: int) -> tuple[list[int], list[int]]:
    pad = depth - len(part.box.shape)
    others = [d for d in range(len(part.box.shape)) if d not in part.dims]
    dims = [*range(pad), *(pad + d for d in (*others, *part.dims))]
    return [0] * pad + list(part.box.start), dims


def _padded(box: Box, depth: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    pad = depth - len(box.shape)
    return (0,) * pad + box.start, (1,) * pad + box.shape
