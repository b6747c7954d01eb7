"""Plain data as bytes: what comes back, what is refused, what others' bytes cannot do."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from spmdrl import plain
from spmdrl.plain import pack, record, unpack


@record
@dataclass(frozen=True)
class Known:
    name: str
    parts: dict[int, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Unknown:
    name: str = ""


VALUES = [
    None,
    True,
    -(2**70),
    0.1 + 0.2,
    -0.0,
    math.inf,
    "text \ud800 \x00 é",
    b"\x00\xff",
    [],
    (),
    {},
    [1, "a", None, 2.5],
    (1, (2, [3, (4,)])),
    {"a": {"tuple": [1]}, 3: "int", (1, 2): "tuple", None: 0},
    [{"dict": 1}, {"array": ["|O", [1]]}],
    Path("/a/b"),
    torch.bfloat16,
    Known("x", {3: (1.5,)}),
    [Known("x")] * 2,
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_equal_and_of_the_same_kind(value: Any) -> None:
    found = unpack(pack(value))
    assert found == value and type(found) is type(value)
    assert repr(found) == repr(value)  # signs of zeros, tuples within


def test_arrays_and_tensors_come_back_bit_by_bit_and_can_be_written() -> None:
    arrays = [
        numpy.arange(6, dtype=dtype).reshape(2, 3) for dtype in ("i1", "u8", ">i4", "f2", "c16")
    ]
    arrays += [numpy.array([True, False]), numpy.empty((0, 4)), numpy.array(3.5)]
    arrays += [numpy.arange(12).reshape(3, 4).T[::2], numpy.array([math.nan, -0.0])]
    for array, found in zip(arrays, unpack(pack(arrays))):
        assert found.dtype == array.dtype and found.shape == array.shape
        assert found.tobytes() == array.tobytes() and found.flags.writeable
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool):
        ones = torch.ones(3, 2).to(dtype)
        one_of_a_column = ones[:1, 0]  # its stride is 2
        for tensor in (ones.t(), one_of_a_column, ones[0, 0], torch.empty(0, 2)):
            found = unpack(pack({"a": tensor}))["a"]
            assert found.dtype == tensor.dtype and torch.equal(found, tensor)
    assert unpack(pack(numpy.float64(0.1))) == 0.1 and unpack(pack(numpy.int16(7))) == 7


@pytest.mark.parametrize(
    "value", [Unknown(), {1, 2}, print, object(), numpy.array([object()]), ValueError("x"), [len]]
)
def test_what_is_no_plain_data_is_refused_where_it_is_packed(value: Any) -> None:
    with pytest.raises(TypeError, match="not plain data"):
        pack(value)


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("bomb went off"),))


def _with(text: bytes, behind: bytes = b"") -> bytes:
    return plain._HEADER.pack(len(text)) + text + behind


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"abc",
        pickle.dumps(Bomb()),
        _with(pickle.dumps(Bomb())),
        _with(b'{"record": ["Unknown", {}]}'),
        _with(b'{"record": ["Known", {"other": 1}]}'),
        _with(b'{"record": ["Path", {}]}'),
        _with(b'{"__class__": 1}'),
        _with(b'{"a": 1, "b": 2}'),
        _with(b'{"array": ["|O", [1]]}', bytes(8)),
        _with(b'{"array": ["<f8", [2]]}', bytes(8)),
        _with(b'{"array": ["<f8", [-1]]}', bytes(8)),
        _with(b'{"array": ["<f8", [99999999999999]]}', bytes(8)),
        _with(b'{"tensor": ["save", [1]]}', bytes(8)),
        _with(b'{"bytes": -4}', bytes(8)),
        _with(b"1", b"more"),
        _with(b"[" * 100_000),
        pack([1, 2])[:-1],
    ],
)
def test_other_bytes_are_refused_and_run_nothing(data: bytes, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError):
        unpack(data)
    assert not list(tmp_path.iterdir())
