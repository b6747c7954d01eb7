"""Checkpoints that somebody wrote to break their readers: refusals that name file and tensor."""

from __future__ import annotations

import copy
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from spmdrl.checkpoint.manifest import TensorReader, load_plain
from spmdrl.tools.export.weights import SavedWeights
from tests.helpers.built import refused

NAME = "model.a"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint's folder, with one tensor by DCP."""
    tensors = {NAME: torch.arange(6.0).view(2, 3)}
    writer = dcp.FileSystemWriter(tmp_path / "policy")
    with pytest.warns(UserWarning, match="torch.distributed"):
        dcp.save(tensors, storage_writer=writer, no_dist=True)
    return tmp_path


def _with(folder: Path, change: Any) -> None:
    """Write the index again, with one thing changed."""
    path = folder / "policy" / ".metadata"
    found = copy.deepcopy(TensorReader(path.parent).read_metadata())
    change(found)
    path.write_bytes(pickle.dumps(found))


def _set(name: str, value: Any) -> Any:
    return lambda found: setattr(found, name, value)


def _set_tensor(name: str, value: Any) -> Any:
    return lambda found: setattr(found.state_dict_metadata[NAME], name, value)


def _rows(begin: int, count: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([begin, 0]), torch.Size([count, 3]))


def _columns(begin: int, count: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([0, begin]), torch.Size([2, count]))


def _set_place(name: str, value: Any) -> Any:
    return lambda found: [setattr(one, name, value) for one in found.storage_data.values()]


@pytest.mark.parametrize(
    "change, says",
    [
        (_set("state_dict_metadata", None), "holds no tensors"),
        (_set("state_dict_metadata", {NAME: 3}), "'model.a' is a int, no tensor"),
        (_set("storage_data", {}), "does not say where the part of model.a at (0, 0) is"),
        (_set("planner_data", 5), "its names are 5"),
        (_set_tensor("size", [2, 3]), "model.a has the shape [2, 3]"),
        (_set_tensor("size", torch.Size([2, 4])), "the parts of model.a are not the whole of it"),
        (_set_tensor("size", torch.Size([1])), "is not within (1,)"),
        (_set_tensor("chunks", None), "the parts of model.a are None"),
        (_set_tensor("chunks", []), "the parts of model.a are not the whole of it"),
        (
            _set_tensor("chunks", [_rows(0, 1), _rows(0, 1)]),
            "the parts of model.a are not the whole of it, each element once",
        ),
        (
            _set_tensor("chunks", [_columns(0, 2), _columns(1, 1)]),
            "the parts of model.a are not the whole of it, each element once",
        ),
        (_set_tensor("size", torch.Size([1] * 70)), "model.a has 70 dimensions, more than 8"),
        (_set_tensor("properties", None), "model.a is of no dtype"),
        (_set_place("relative_path", "../../x"), "is outside of the folder: '../../x'"),
        (_set_place("relative_path", 5), "the place of model.a is"),
        (_set_place("offset", -1), "the place of model.a in"),
        (_set_place("length", 10**9), "names 1000000000: it was cut"),
        (_set_place("transform_descriptors", ["zstd"]), "is stored by ['zstd']"),
    ],
)
def test_an_index_of_another_form_is_refused_with_its_tensor(change, says, saved):
    assert SavedWeights(saved).read("a").sum() == 15
    _with(saved, change)
    with refused(f"{saved / 'policy'}", says):
        SavedWeights(saved)


def test_files_of_tensors_that_hold_something_else_are_refused(saved):
    (path,) = (saved / "policy").glob("*.distcp")
    data = path.read_bytes()
    for at in (0, len(data) // 2):
        path.write_bytes(data[:at] + bytes(200) + data[at + 200 :])
        with refused(f"{saved / 'policy'}: its files do not hold what its .metadata says"):
            SavedWeights(saved).read("a")


def test_archives_that_unpack_to_more_than_their_bytes_are_refused(tmp_path):
    path = tmp_path / "rng_0.pt"
    torch.save({"a": torch.zeros(1000)}, path)
    assert load_plain(path)["a"].sum() == 0
    with zipfile.ZipFile(path) as stored:
        parts = {name: stored.read(name) for name in stored.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in parts.items():
            packed.writestr(name, content)
    with refused(f"{path}: ", "is compressed, which no run writes"):
        load_plain(path)
    torch.save({"a": torch.zeros(10)}, path, _use_new_zipfile_serialization=False)
    with refused(f"{path} is no file of tensors and plain values"):
        load_plain(path)
