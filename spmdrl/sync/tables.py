"""The tensors that travel: file tensors and the parts of them that engines want, as arrays with one
row each, and the shards that a rank has of them.

A model of 671B parameters has 45,000 file tensors, and every engine rank wants a slice of each:
too many for one Python object each. All boxes have `depth` dims here, as many as the live tensor
with the most dims; a box with fewer gets leading dims of size 1.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy
import torch
from torch import Tensor

from spmdrl.errors import Refusal
from spmdrl.model.cuts import TensorCut, cut_of
from spmdrl.model.tensor_parts import Box, Delta, Held, Part, addresses
from spmdrl.plain import pack, unpack

Array = Any
"""A numpy array."""

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
"""The dtypes in which an engine may keep a weight."""
ITEMSIZES = numpy.array([dtype.itemsize for dtype in DTYPES])
"""[dtypes] int64: bytes of an element."""


@dataclass(frozen=True)
class Want:
    """A box that an inference rank needs."""

    name: str  # of the file tensor
    box: Box
    dtype: torch.dtype


@dataclass(frozen=True)
class Columns:
    """A table: arrays that all have the same number of rows."""

    @property
    def columns(self) -> list[Array]:
        """The arrays, in the order of the fields."""
        return [getattr(self, field.name) for field in fields(self)]

    def rows(self, index: Array | slice) -> Self:
        """Return the rows at `index`, in its order, or the rows where a mask is true."""
        return type(self)(*[column[index] for column in self.columns])

    @classmethod
    def join(cls, tables: Sequence[Self]) -> Self:
        """Return the rows of all tables, in order. There must be at least one table."""
        joined = []
        for field in fields(cls):
            joined.append(numpy.concatenate([getattr(table, field.name) for table in tables]))
        return cls(*joined)

    def pack(self) -> bytes:
        """Return the table as few bytes. Equal tables give equal bytes."""
        packed = []
        for column in self.columns:
            # Neighbouring rows are alike, and their differences repeat: these compress well.
            zero = numpy.zeros_like(column[:1])
            steps = numpy.diff(column, axis=0, prepend=zero)
            packed.append((steps.dtype.str, steps.shape, steps.tobytes("F")))
        return zlib.compress(pack(packed), 1)

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """Return the table of which `pack` made these bytes."""
        columns = []
        for dtype, shape, data in unpack(zlib.decompress(packed)):
            steps = numpy.frombuffer(data, dtype).reshape(shape, order="F")
            columns.append(steps.cumsum(axis=0, dtype=dtype))
        return cls(*columns)


@dataclass(frozen=True)
class Wants(Columns):
    """What one inference rank wants."""

    file: Array  # [N] int32: index of the file tensor
    dtype: Array  # [N] int8: index in DTYPES
    start: Array  # [N, depth] int64: of the box in the file tensor
    shape: Array  # [N, depth] int64


class FileTable:
    """All file tensors, numbered, and where they lie in live tensors.

    Args:
        parts: {file name: part of a live tensor}, the same on every rank.
    """

    def __init__(self, parts: Mapping[str, Part]):
        self.names = tuple(parts)
        self.tensors = tuple(dict.fromkeys(part.tensor for part in parts.values()))
        ndims_live = [len(part.box.shape) for part in parts.values()]
        self.depth = max([1, *ndims_live])
        self._index = {name: i for i, name in enumerate(self.names)}
        number_of = {name: i for i, name in enumerate(self.tensors)}
        tensors = []
        ndims = []
        starts = []
        dims = []
        for part in parts.values():
            tensors.append(number_of[part.tensor])
            ndims.append(len(part.dims))
            pad = self.depth - len(part.box.shape)
            starts.append([0] * pad + list(part.box.start))
            dims.append(_live_dims(part, pad))
        self.tensor = numpy.array(tensors, numpy.int32)
        """[N]: index in `tensors`."""
        self.ndim = numpy.array(ndims, numpy.int32)
        """[N]: number of dims of the file tensor."""
        self.start = numpy.array(starts, numpy.int64).reshape(-1, self.depth)
        """[N, depth]: where the part starts in the live tensor."""
        self.dims = numpy.array(dims, numpy.int64).reshape(-1, self.depth)
        """[N, depth]: the live dim of each dim of the file tensor."""

    def digest(self) -> bytes:
        """Return a hash of the whole table."""
        text = "\n".join((*self.names, "", *self.tensors))
        digest = hashlib.sha256(text.encode())
        for array in (self.tensor, self.ndim, self.start, self.dims):
            digest.update(array.tobytes())
        return digest.digest()

    def wants(self, wants: Sequence[Want]) -> Wants:
        """Return the wants of one rank as a table.

        Raises: Refusal for a name that no file tensor has.
        """
        files = []
        dtypes = []
        starts = []
        shapes = []
        for want in wants:
            if want.name not in self._index:
                raise Refusal(f"an engine needs {want.name}, which no trainer rank holds")
            files.append(self._index[want.name])
            dtypes.append(DTYPES.index(want.dtype))
            pad = self.depth - len(want.box.shape)
            starts.append((0,) * pad + want.box.start)
            shapes.append((1,) * pad + want.box.shape)
        return Wants(
            file=numpy.array(files, numpy.int32),
            dtype=numpy.array(dtypes, numpy.int8),
            start=numpy.array(starts, numpy.int64).reshape(-1, self.depth),
            shape=numpy.array(shapes, numpy.int64).reshape(-1, self.depth),
        )

    def box(self, file: int, start: Sequence[int], shape: Sequence[int]) -> Box:
        """Return a row's box with as many dims as its file tensor has.

        Args:
            file: index of the file tensor.
            start, shape: `depth` numbers.
        """
        pad = self.depth - int(self.ndim[file])
        return Box(tuple(start[pad:]), tuple(shape[pad:]))


def _live_dims(part: Part, pad: int) -> list[int]:
    """Return the live dim of each padded dim of a file tensor.

    Live dims that the file tensor does not have (an expert's index, say) have size 1 in its box,
    so they go before its own dims.
    """
    missing = [dim for dim in range(len(part.box.shape)) if dim not in part.dims]
    return list(range(pad)) + [pad + dim for dim in (*missing, *part.dims)]


class LiveShards:
    """This rank's shards of the tensors that travel, which `refresh` reads again if they moved.

    Args:
        shards: returns the current {live name: shard}; {} off the trainers.
        parts: {name of a tensor that travels: part of a live tensor}.
        deltas: returns {live name: what to add on reading}, for the same names each time.
        factors: {live name: what to multiply with on reading}.
    """

    def __init__(
        self,
        shards: Callable[[], Mapping[str, Tensor]],
        parts: Mapping[str, Part],
        *,
        deltas: Callable[[], Mapping[str, Delta]] = dict,
        factors: Mapping[str, float] | None = None,
    ):
        self.parts = parts
        self.table = FileTable(parts)
        self._shards = shards
        self._deltas = deltas
        self._factors = factors
        self._addresses: tuple[int, ...] | None = None
        self.held: Held
        self.refresh()

    def cuts(self) -> dict[str, TensorCut]:
        """Return how this rank's tensors are cut, of those that travel.

        Raises: Refusal for partial sums.
        """
        travelling = {part.tensor for part in self.parts.values()}
        cuts = {}
        for name, shard in self._shards().items():
            if name in travelling:
                cuts[name] = cut_of(name, shard)
        return cuts

    def refresh(self) -> bool:
        """Read the current shards; return whether they moved, as a restored checkpoint's may."""
        shards = self._shards()
        deltas = self._deltas()
        current = addresses(shards)
        if current == self._addresses:
            self.held.deltas = dict(deltas)
            return False
        self.held = Held(shards, self.parts, deltas, self._factors)
        self._addresses = current
        return True
