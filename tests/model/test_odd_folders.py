"""Model folders whose files hold anything: each reader says what is wrong with which."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from safetensors.torch import save_file

from spmdrl.data.tokenizer import end_token_ids, load_tokenizer
from spmdrl.errors import Refusal
from spmdrl.imports import attempt
from spmdrl.model.files.reader import CheckpointReader
from spmdrl.model.lora.files import AdapterFolder
from spmdrl.report.recorded_groups import _decoder
from spmdrl.rollout.recorder import FORMAT, HEADER, SCHEMA, digest_line
from spmdrl.tools.commands.ask import ask
from spmdrl.tools.commands.view import main as view
from spmdrl.tools.export.hf_folder import _make_classifier, _set_dtype
from tests.helpers.built import made, refused

ODD = (b"[]", b"null", b"1", b'"x"', b"{", b"\xff\xfe\x00", b"[" * 3000, b"")


@pytest.fixture
def changed_folder(tiny_model, tmp_path) -> Callable[..., Path]:
    """A function that copies a model's folder, with one file of other content or fields."""

    def make(name: str, content: bytes | dict[str, Any]) -> Path:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(tiny_model, folder)
        file = folder / name
        if isinstance(content, dict):
            fields = json.loads(file.read_text()) if file.exists() else {}
            content = json.dumps(fields | content).encode()
        file.write_bytes(content)
        return folder

    return make


def is_refused(work: Callable[[], object]) -> bool:
    """Return whether it is refused; whatever else is raised is not caught."""
    _, error = attempt(work)
    return bool(error and str(error))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json"])
def test_files_that_make_no_tokenizer_are_refused(name, changed_folder) -> None:
    wrong: tuple[bytes | dict[str, Any], ...] = ODD
    if name == "tokenizer_config.json":
        wrong += ({"eos_token": 5}, {"auto_map": [1]}, {"tokenizer_class": 1})
    for content in wrong:
        folder = changed_folder(name, content)
        cfg = made(model=dict(path=str(folder)))
        with refused(f"model.path: no tokenizer can be loaded from {str(folder)!r}"):
            load_tokenizer(cfg)
        with refused(f"no tokenizer can be loaded from {str(folder)!r}", "--tokenizer"):
            _decoder(None, str(folder), trusts=False)


def test_a_generation_config_that_cannot_be_read_is_refused_and_not_passed_over(
    changed_folder,
) -> None:
    ids: tuple[Any, ...] = ("a", -5, 1.5, True, [[1]], {"a": 1})
    for content in (*ODD, *({"eos_token_id": value} for value in ids)):
        folder = changed_folder("generation_config.json", content)
        cfg = made(model=dict(path=str(folder)))
        tokenizer = load_tokenizer(cfg)
        with refused("model.path: ", str(folder), "generation_config.json"):
            end_token_ids(cfg, tokenizer)


def test_odd_configs_are_refused_by_the_export_and_by_the_reader_of_weights(changed_folder) -> None:
    for content in (*ODD, {"quantization_config": 5}):
        folder = changed_folder("config.json", content)
        with refused(f"model.path: {folder}/config.json cannot be used"):
            CheckpointReader(folder)
    for dtype in (["float32"], 5, "save"):
        path = changed_folder("config.json", {"dtype": dtype}) / "config.json"
        assert is_refused(lambda: _set_dtype(path, "auto"))
    for fields in ({"architectures": 5}, {"architectures": [1]}, {"eos_token_id": [[1]]}):
        folder = changed_folder("config.json", fields)
        assert is_refused(lambda: _make_classifier(folder))


def test_tensors_of_less_than_a_byte_are_refused(changed_folder) -> None:
    head = json.dumps({"a": {"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}}).encode()
    folder = changed_folder(
        "model.safetensors", len(head).to_bytes(8, "little") + head + b"\x01" * 8
    )
    with refused(f"model.path: a in {folder}/model.safetensors cannot be read"):
        CheckpointReader(folder).read("a", start=(0,), shape=(16,))


@pytest.mark.parametrize(
    "fields",
    [
        {"r": 0},
        {"r": -1},
        {"lora_alpha": float("nan")},
        {"lora_alpha": True},
        {"target_parameters": 5},
        {"target_parameters": [5]},
        b"[" * 3000,
    ],
    ids=lambda fields: "deep" if isinstance(fields, bytes) else str(fields),
)
def test_an_odd_config_of_an_adapter_is_refused(fields, tmp_path) -> None:
    good: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 1}
    text = fields if isinstance(fields, bytes) else json.dumps(good | fields).encode()
    (tmp_path / "adapter_config.json").write_bytes(text)
    name = "base_model.model.q.lora_A.weight"
    save_file({name: torch.zeros(2, 4)}, tmp_path / "adapter_model.safetensors")
    with refused("model.lora.path: ", "adapter_config.json", by=Refusal):
        AdapterFolder(tmp_path)


def test_ask_refuses_what_it_cannot_ask(changed_folder, tiny_model) -> None:
    options: tuple[dict[str, Any], ...] = (
        dict(temperature=float("nan")),
        dict(seed=10**30),
        dict(max_response_tokens=0),
        dict(task="addition"),
        dict(task_option=("digits=[",)),
        dict(prompt=("\ud800",)),
        dict(prompt=("",)),
    )
    for given in options:
        assert is_refused(lambda: ask(tiny_model, **given)), given
    for name in ("tokenizer.json", "config.json", "model.safetensors", "generation_config.json"):
        folder = changed_folder(name, b"[]")
        assert is_refused(lambda: ask(folder, max_response_tokens=1, num_problems=1)), name


def test_odd_recordings_are_refused_by_the_viewer(tmp_path, capsys) -> None:
    path = tmp_path / "rollouts" / "step_000000_replica_0_of_1.parquet"
    path.parent.mkdir()
    empty = {field.name: None for field in SCHEMA}
    for header, table in (
        ({"format": FORMAT}, pa.Table.from_pylist([empty | {"group": 0}], schema=SCHEMA)),
        ({"format": FORMAT}, pa.table({"group": [0], "sample": [0]})),
        ({"format": FORMAT}, pa.table({name: ["x"] for name in SCHEMA.names})),
        ({"format": FORMAT}, SCHEMA.empty_table()),
        (["format"], SCHEMA.empty_table()),
    ):
        head = {HEADER: json.dumps(header).encode()}
        parquet.write_table(table.replace_schema_metadata(head), path, write_statistics=False)
        path.with_suffix(".sha256").write_text(digest_line(path, path.name))
        assert view([str(tmp_path), "--step", "0", "--group", "0"]) == 2
        assert f"{path.parent}" in capsys.readouterr().err
