"""Weights that are not what config.json says: refused by name, or loaded as transformers does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmdrl.check.fit import check_fit
from spmdrl.config import ModelSettings
from spmdrl.model.files.tied import _SAMPLED
from spmdrl.model.load import load_whole_model
from tests.helpers.built import changed, refused, small_model
from tests.helpers.comparing import plain_scores
from tests.helpers.policy_runs import config
from tests.helpers.ranks import run_ranks
from tests.helpers.worlds import refusal

ROWS = ([5, 6, 7, 8], [9, 10])
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
Tensors = dict[str, Tensor]


def written(folder: Path, change: Callable[[Tensors], object], **options: Any) -> Path:
    """Write a small model whose tensors are changed in place."""
    small_model(folder, **options)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def split(folder: Path, *, places: Callable[[dict[str, str]], object] = lambda places: 0) -> Path:
    """Divide a folder's tensors between two files and write an index, whose places are changed."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in files.items():
        save_file({name: tensors[name] for name in own}, folder / file)
    found = {name: file for file, own in files.items() for name in own}
    places(found)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": found}))
    return folder


def add(folder: Path, file: str, **tensors: Tensor) -> None:
    """Add tensors to a file."""
    save_file(load_file(folder / file) | tensors, folder / file)


def loaded(folder: Path) -> torch.nn.Module:
    """Return what one rank loads of a folder."""
    return load_whole_model(
        ModelSettings(path=str(folder)),
        attention="eager",
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def assert_as_transformers(folder: Path, tmp_path: Path) -> None:
    """Assert that a folder is accepted, and that what is loaded is what transformers loads."""
    check_fit(config(folder, tmp_path))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = plain_scores(theirs, ROWS)
    for ours, plain in zip(plain_scores(loaded(folder), ROWS), expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------------------- tied tensors


def test_a_tied_head_of_other_values_is_refused_as_transformers_would_not_tie_it(tmp_path):
    def other(tensors: Tensors) -> None:
        tensors[HEAD] = torch.randn_like(tensors[EMBEDDING])

    folder = written(tmp_path / "m", other, tied=True)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert not torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight)
    for vllm in (False, True):
        cfg = config(folder, tmp_path)
        cfg = changed(cfg, engine={"kind": "vllm"}) if vllm else cfg
        with refused(f"ties {HEAD} to {EMBEDDING}", "Set tie_word_embeddings to false"):
            check_fit(cfg)
    file = folder / "config.json"
    own = json.loads(file.read_text())
    file.write_text(json.dumps(own | {"tie_word_embeddings": False}))
    assert_as_transformers(folder, tmp_path)  # as the refusal says


def test_a_tied_head_that_is_the_embedding_is_loaded_once(tmp_path):
    def copied(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()

    assert_as_transformers(written(tmp_path / "m", copied, tied=True), tmp_path)


def test_a_tied_head_of_another_shape_is_refused(tmp_path):
    def longer(tensors: Tensors) -> None:
        tensors[HEAD] = torch.cat([tensors[EMBEDDING]] * 2)

    folder = written(tmp_path / "m", longer, tied=True)
    with refused(f"ties {HEAD} to {EMBEDDING}", "of shape"):
        check_fit(config(folder, tmp_path))


def test_a_row_that_no_sample_has_is_compared_where_the_weights_are_loaded(tmp_path):
    def one_row(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()
        last = len(tensors[HEAD]) - 1
        assert last > _SAMPLED
        sampled = torch.linspace(0, last, _SAMPLED).long().tolist()
        tensors[HEAD][max({*range(last)} - {*sampled})] += 1

    folder = written(tmp_path / "m", one_row, tied=True)
    check_fit(config(folder, tmp_path))
    with refused(f"ties {HEAD} to {EMBEDDING}", "values up to"):
        loaded(folder)
    # One rank alone holds the row, and both end with the same reason.
    texts = run_ranks(2, refusal, config(folder, tmp_path, world_size=2))
    assert all(f"ties {HEAD} to {EMBEDDING}" in text for text in texts), texts


def test_a_head_in_the_files_of_a_reward_model_is_not_its_own(tmp_path):
    def other(tensors: Tensors) -> None:
        tensors[HEAD] = torch.randn_like(tensors[EMBEDDING])

    folder = written(tmp_path / "m", other, tied=True)
    check_fit(changed(config(folder, tmp_path), algorithm={"objective": "reward_model"}))


# ---------------------------------------------------------------------------- values and dtypes


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_named_with_their_file(value, tmp_path):
    def broken(tensors: Tensors) -> None:
        tensors[UP][3] = value

    folder = written(tmp_path / "m", broken)
    with refused(f"{UP} in {folder}/model.safetensors has values that are not finite", "32 of"):
        loaded(folder)


def test_a_row_that_is_not_finite_on_one_rank_ends_both(tmp_path):
    def broken(tensors: Tensors) -> None:
        tensors[UP][-1, 0] = float("nan")

    folder = written(tmp_path / "m", broken)
    texts = run_ranks(2, refusal, config(folder, tmp_path, world_size=2))
    assert all(f"{UP} in {folder}" in text and "1 of them NaN" in text for text in texts), texts


def test_large_values_whose_sum_overflows_are_finite(tmp_path):
    def large(tensors: Tensors) -> None:
        tensors[UP][:] = 3e38

    loaded(written(tmp_path / "m", large))


def in_dtype(name: str, dtype: torch.dtype) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name].to(dtype)

    return change


def as_bits(tensors: Tensors) -> None:
    tensors[UP] = tensors[UP].bfloat16().view(torch.int16)


@pytest.mark.parametrize(
    "change, spelled",
    [
        (in_dtype(UP, torch.int8), "I8"),
        (in_dtype(UP, torch.uint8), "U8"),
        (in_dtype(UP, torch.bool), "BOOL"),
        (in_dtype(UP, torch.float8_e4m3fn), "F8_E4M3"),
        (in_dtype(UP, torch.complex64), "C64"),
        (as_bits, "I16"),
    ],
)
def test_weights_that_are_no_plain_floats_are_refused_by_their_header(change, spelled, tmp_path):
    folder = written(tmp_path / "m", change)
    with refused(f"{UP} in {folder}/model.safetensors is {spelled}, and a weight is one of F64"):
        check_fit(config(folder, tmp_path))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_plain_floats_are_loaded_as_transformers_does(dtype, tmp_path):
    assert_as_transformers(written(tmp_path / "m", in_dtype(UP, dtype)), tmp_path)


# ---------------------------------------------------------------------------- names and shapes


def renamed(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.up.weight"] = tensors.pop(UP)


def transposed(tensors: Tensors) -> None:
    tensors[UP] = tensors[UP].T.contiguous()


def one_more(tensors: Tensors) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = tensors[UP].clone()


def empty(tensors: Tensors) -> None:
    tensors[UP] = torch.zeros(0, 32)


@pytest.mark.parametrize(
    "change, words",
    [
        (renamed, (f"missing: {UP}", "not part of the model: model.layers.1.mlp.up.weight")),
        (transposed, (f"{UP} has shape [32, 48] in the file, [48, 32] by config.json",)),
        (one_more, ("not part of the model: model.layers.2.mlp.up_proj.weight",)),
        (empty, (f"{UP} has shape [0, 32] in the file",)),
    ],
)
def test_other_names_and_shapes_are_refused(change, words, tmp_path):
    folder = written(tmp_path / "m", change)
    with refused(*words):
        check_fit(config(folder, tmp_path))


def test_a_vocabulary_of_another_size_is_refused(tmp_path):
    folder = small_model(tmp_path / "m", tied=True)
    file = folder / "config.json"
    own = json.loads(file.read_text())
    file.write_text(json.dumps(own | {"vocab_size": own["vocab_size"] + 8}))
    with refused(f"{EMBEDDING} has shape [{own['vocab_size']}, 32] in the file"):
        check_fit(config(folder, tmp_path))


# ---------------------------------------------------------------------------- files and their index


def test_files_with_an_index_are_loaded_as_transformers_does(tmp_path):
    assert_as_transformers(split(small_model(tmp_path / "m")), tmp_path)


def test_a_head_that_the_index_does_not_name_is_loaded_as_transformers_does(tmp_path):
    folder = split(small_model(tmp_path / "m", tied=False), places=lambda own: own.pop(HEAD))
    assert_as_transformers(folder, tmp_path)


def test_a_name_in_two_files_is_refused(tmp_path):
    folder = split(small_model(tmp_path / "m"))
    for file in ("a.safetensors", "b.safetensors"):
        add(folder, file, **{NORM: torch.ones(32)})
    with refused(f"{NORM} is in two files of {folder}, a.safetensors and b.safetensors"):
        check_fit(config(folder, tmp_path))


def test_an_index_that_disagrees_with_the_files_is_refused(tmp_path):
    def swapped(places: dict[str, str]) -> None:
        places[NORM], places[UP] = "a.safetensors", "b.safetensors"
        places[EMBEDDING] = "a.safetensors"

    folder = split(small_model(tmp_path / "m"), places=swapped)
    with refused("does not hold", "says it does; it is in", "Write the index again"):
        check_fit(config(folder, tmp_path))


def test_a_single_file_beside_an_index_of_others_is_refused(tmp_path):
    folder = split(small_model(tmp_path / "m"))
    other = small_model(tmp_path / "other", seed=1)
    (other / "model.safetensors").rename(folder / "model.safetensors")
    with refused("model.safetensors, which transformers loads", "which vLLM loads"):
        check_fit(config(folder, tmp_path))
