"""Checks of a checkpoint's index of tensors and of its archives, before torch reads them.

A manifest proves that files are as its writer left them, but anybody can write a manifest. So an
index is refused that could make torch fail in the middle of a load, read outside of the
folder, or take more memory than the file has bytes.
"""

from __future__ import annotations

import itertools
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from spmdrl import run_files
from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.world.torch_internals import is_storage_info

_LARGEST = 2**62
_MOST_DIMS = 8
"""Of a tensor: the check takes 2**dimensions corners of each part."""


def check_index(metadata: Metadata, path: Path) -> None:
    """Refuse an index with other types than DCP writes, with files that are missing or too short,
    or with chunks that do not make up a tensor.

    Args:
        path: of the index, which is in the folder of its files.
    Raises: Refusal naming the tensor or file; OSError.
    """
    # A pickle may leave out any field of DCP's classes, or give it another type.
    kinds = (Refusal, AttributeError, TypeError)
    with refusing(f"{path} is not an index of tensors", *kinds):
        _check_types(metadata)
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        end = place.offset + place.length
        ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
    for name, end in sorted(ends.items()):
        with run_files.opened(path.parent / name, run_files.TENSORS) as file:
            size = file.seek(0, 2)
        if size < end:
            raise Refusal(
                f"{path.parent / name} has {size} bytes, and {path.name} names {end}: it was cut"
            )


def _check_types(metadata: Metadata) -> None:
    tensors = metadata.state_dict_metadata
    places = metadata.storage_data
    planned = metadata.planner_data
    if not isinstance(tensors, dict) or not isinstance(places, dict):
        raise Refusal("it holds no tensors, or not where they are")
    for index, place in places.items():
        _check_place(index, place)
    for name, entry in tensors.items():
        _check_tensor(name, entry)
        for chunk in entry.chunks:
            if MetadataIndex(name, chunk.offsets) not in places:
                at = tuple(chunk.offsets)
                raise Refusal(f"it does not say where the part of {name} at {at} is")
    if not isinstance(planned, dict) or not all(isinstance(v, tuple) for v in planned.values()):
        raise Refusal(f"its names are {planned!r:.60}")
    if not isinstance(metadata.version, (str, type(None))):
        raise Refusal(f"its version is {metadata.version!r:.60}")


def _check_place(index: Any, place: Any) -> None:
    """Refuse the place of a chunk that is not within a file of the folder."""
    if not isinstance(index, MetadataIndex) or not isinstance(index.fqn, str):
        raise Refusal(f"a part of a tensor is called {index!r:.60}")
    if not is_storage_info(place) or not isinstance(place.relative_path, str):
        raise Refusal(f"the place of {index.fqn} is {place!r:.60}")
    name = PurePath(place.relative_path)
    if name.is_absolute() or ".." in name.parts or not name.parts:
        raise Refusal(f"the place of {index.fqn} is outside of the folder: {str(name)!r:.60}")
    if not _are_sizes((place.offset, place.length)):
        raise Refusal(f"the place of {index.fqn} in {name} is {place!r:.100}")
    if place.transform_descriptors:
        raise Refusal(
            f"{index.fqn} is stored by {place.transform_descriptors!r:.60}, which no run does"
        )


def _check_tensor(name: Any, entry: Any) -> None:
    """Refuse a tensor of other types than DCP writes, or whose chunks are not the whole of it."""
    if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
        raise Refusal(f"{name!r:.60} is a {type(entry).__name__}, no tensor")
    kind = entry.properties
    size = entry.size
    if not isinstance(kind, TensorProperties) or not isinstance(kind.dtype, torch.dtype):
        raise Refusal(f"{name} is of no dtype")
    if not isinstance(size, torch.Size) or not _are_sizes(size) or math.prod(size) > _LARGEST:
        raise Refusal(f"{name} has the shape {size!r:.60}")
    if not isinstance(entry.chunks, list):
        raise Refusal(f"the parts of {name} are {entry.chunks!r:.60}")
    if len(size) > _MOST_DIMS:
        raise Refusal(f"{name} has {len(size)} dimensions, more than {_MOST_DIMS}")
    count = 0
    corners: set[tuple[int, ...]] = set()
    for chunk in entry.chunks:
        if not _is_within(chunk, size):
            raise Refusal(f"a part of {name}, {chunk!r:.100}, is not within {tuple(size)}")
        count += math.prod(chunk.sizes)
        corners ^= _odd_corners(chunk.offsets, chunk.sizes)
    # Equal corners: each element is in an odd number of parts. Equal counts: then it is in one.
    whole = _odd_corners([0] * len(size), size)
    if count != math.prod(size) or corners != whole:
        raise Refusal(f"the parts of {name} are not the whole of it, each element once")


def _odd_corners(begins: Sequence[int], sizes: Sequence[int]) -> set[tuple[int, ...]]:
    """Return the corners of a box; none if it is empty, since its corners coincide in pairs."""
    if 0 in sizes:
        return set()
    return set(itertools.product(*((begin, begin + n) for begin, n in zip(begins, sizes))))


def _is_within(chunk: Any, size: torch.Size) -> bool:
    if not isinstance(chunk, ChunkStorageMetadata):
        return False
    begins = chunk.offsets
    sizes = chunk.sizes
    if not isinstance(begins, torch.Size) or not isinstance(sizes, torch.Size):
        return False
    if not len(begins) == len(sizes) == len(size) or not _are_sizes((*begins, *sizes)):
        return False
    return all(begin + own <= whole for begin, own, whole in zip(begins, sizes, size))


def _are_sizes(values: Any) -> bool:
    return all(type(value) is int and 0 <= value <= _LARGEST for value in values)


def check_archive(file: IO[bytes], *, place: Path) -> None:
    """Refuse an archive that torch.save did not write: its parts are not compressed, and take no
    more bytes than the file has.

    Args:
        file: is read from its start, and left there.
        place: of the file, for messages.
    Raises: Refusal; zipfile.BadZipFile.
    """
    size = file.seek(0, 2)
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
    packed = [part.filename for part in parts if part.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise Refusal(f"{place}: {packed[0]!r:.60} in it is compressed, which no run writes")
    if sum(part.file_size for part in parts) > size:
        raise Refusal(f"{place}: its parts have more bytes than the file, {size}")
    file.seek(0)
