"""Columns of a plan as boxes of named tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from spmdrl.model.shards import Box
from spmdrl.sync.plan import Slices
from spmdrl.sync.tables import DTYPES, ITEMSIZES, FileTable


class Piece(NamedTuple):
    """A box of a file tensor that one rank sends to another."""

    source: int
    target: int
    at: int  # byte of the bucket at which its block begins
    want: int  # index in the wants of the target
    name: str
    box: Box
    dtype: torch.dtype  # on the wire, and of the engine
    nbytes: int  # on the wire


def pieces_of(slices: Slices, table: FileTable) -> Iterator[Piece]:
    """Yield the boxes that rows are, in their order; a span of a box may be several."""
    itemsizes = ITEMSIZES.tolist()
    columns = (slices.source, slices.target, slices.at, slices.want, slices.file, slices.dtype)
    for row, (source, target, at, want, file, dtype) in enumerate(
        zip(*(column.tolist() for column in columns))
    ):
        cell = table.box(file, slices.start[row], slices.shape[row])
        for box in cell.span(int(slices.first[row]), int(slices.last[row])):
            nbytes = box.numel * itemsizes[dtype]  # torch.dtype.itemsize takes 50 us
            yield Piece(source, target, at, want, table.names[file], box, DTYPES[dtype], nbytes)
