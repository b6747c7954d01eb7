"""Checks of a checkpoint's index of tensors and of its archives, before torch reads them.

A manifest proves that files are as its writer left them, and anybody can write one. So an index is
refused that could make torch fail in the middle of a load, read outside of the folder, or take more
memory than the file has bytes.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
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
from spmdrl.world.torch_internals import is_storage_info

_LARGEST = 2**62


def check_index(metadata: Metadata, path: Path) -> None:
    """Refuse an index with other types than DCP writes, with files that are not there or too short,
    or with chunks that do not make up a tensor.

    Args:
        path: of the index, which is in the folder of its files.
    Raises: Refusal naming the tensor or file; OSError.
    """
    for problem in _problems(metadata):
        raise Refusal(f"{path} is not an index of tensors: {problem}")
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


def _problems(metadata: Metadata) -> Iterator[str]:
    tensors = metadata.state_dict_metadata
    places = metadata.storage_data
    if not isinstance(tensors, dict) or not isinstance(places, dict):
        yield "it holds no tensors, or not where they are"
        return
    for index, place in places.items():
        yield from _place_problems(index, place)
    for name, entry in tensors.items():
        yield from _tensor_problems(name, entry)
        for chunk in entry.chunks:
            if MetadataIndex(name, chunk.offsets) not in places:
                yield f"it does not say where the part of {name} at {tuple(chunk.offsets)} is"
    planned = metadata.planner_data
    if not isinstance(planned, dict) or not all(isinstance(v, tuple) for v in planned.values()):
        yield f"its names are {planned!r:.60}"
    if not isinstance(metadata.version, (str, type(None))):
        yield f"its version is {metadata.version!r:.60}"


def _place_problems(index: Any, place: Any) -> Iterator[str]:
    if not isinstance(index, MetadataIndex) or not isinstance(index.fqn, str):
        yield f"a part of a tensor is called {index!r:.60}"
        return
    if not is_storage_info(place) or not isinstance(getattr(place, "relative_path", None), str):
        yield f"the place of {index.fqn} is {place!r:.60}"
        return
    name = PurePath(place.relative_path)
    if name.is_absolute() or ".." in name.parts or not name.parts:
        yield f"the place of {index.fqn} is outside of the folder: {place.relative_path!r:.60}"
    if not _are_sizes((getattr(place, "offset", None), getattr(place, "length", None))):
        yield f"the place of {index.fqn} in {name} is {place!r:.100}"
    if place.transform_descriptors:
        yield f"{index.fqn} is stored by {place.transform_descriptors!r:.60}, which no run does"


def _tensor_problems(name: Any, entry: Any) -> Iterator[str]:
    if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
        yield f"{name!r:.60} is a {type(entry).__name__}, no tensor"
        return
    kind = getattr(entry, "properties", None)
    if not isinstance(kind, TensorProperties) or not isinstance(kind.dtype, torch.dtype):
        yield f"{name} is of no dtype"
    size = getattr(entry, "size", None)
    chunks = getattr(entry, "chunks", None)
    if not isinstance(size, torch.Size) or not _are_sizes(size) or math.prod(size) > _LARGEST:
        yield f"{name} has the shape {size!r:.60}"
    if not isinstance(chunks, list):
        yield f"the parts of {name} are {chunks!r:.60}"
    count = 0
    begins = set()
    for chunk in chunks or ():
        if not _is_within(chunk, size):
            yield f"a part of {name}, {chunk!r:.100}, is not within {tuple(size or ())}"
        count += math.prod(chunk.sizes)
        begins.add(tuple(chunk.offsets))
    if count != math.prod(size or ()) or len(begins) != len(chunks or ()):
        yield f"the parts of {name} are not the whole of it"


def _is_within(chunk: Any, size: Any) -> bool:
    if not isinstance(chunk, ChunkStorageMetadata):
        return False
    offsets = getattr(chunk, "offsets", None)
    sizes = getattr(chunk, "sizes", None)
    if not isinstance(offsets, torch.Size) or not isinstance(sizes, torch.Size):
        return False
    is_alike = len(offsets) == len(sizes) == len(size) and _are_sizes((*offsets, *sizes))
    return is_alike and all(a + b <= c for a, b, c in zip(offsets, sizes, size))


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
