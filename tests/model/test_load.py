"""Loading: what is refused, and that every rank's shards are slices of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM

from spmdrl.check.fit import check_fit, fit_problems
from spmdrl.config import Config
from spmdrl.model.files.file_tensors import file_tensors
from spmdrl.model.files.reader import CheckpointReader
from spmdrl.model.load import check_weights, load_hf_config
from spmdrl.model.tensor_parts import held_boxes
from spmdrl.types import Advantages, Batch
from tests.helpers.built import refused
from tests.helpers.comparing import plain_scores
from tests.helpers.policy_runs import changed, config, meta_model, small_model
from tests.helpers.ranks import run_ranks
from tests.helpers.worlds import another_trainer, refusal, with_trainer


def _check(folder: Path) -> None:
    hf_model = meta_model(folder)
    check_weights(CheckpointReader(folder), hf_model, file_tensors(hf_model))


def test_missing_and_unreadable_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load_hf_config(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no config.json"):
        load_hf_config(str(tmp_path / "empty"))
    (tmp_path / "empty" / "config.json").write_text("{ not json")
    with pytest.raises(ValueError, match="unreadable"):
        load_hf_config(str(tmp_path / "empty"))


def test_a_folder_without_safetensors_is_refused(tmp_path):
    folder = small_model(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin"):
        CheckpointReader(folder)


def test_a_file_cut_short_is_named(tmp_path):
    folder = small_model(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ValueError, match="model.safetensors.*cut short"):
        CheckpointReader(folder)


def test_missing_extra_and_misshapen_tensors_are_all_named(tmp_path):
    folder = small_model(tmp_path)
    _check(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.mlp.oops.weight"] = torch.zeros(2)
    tensors["model.norm.weight"] = torch.zeros(31)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError) as caught:
        _check(folder)
    text = str(caught.value)
    assert "missing: model.layers.1.mlp.up_proj.weight" in text
    assert "not part of the model: model.layers.0.mlp.oops.weight" in text
    assert "model.norm.weight has shape [31] in the file, [32] by config.json" in text


def test_weights_that_do_not_fit_are_refused_before_anything_is_started(tmp_path):
    folder = small_model(tmp_path)
    cfg = config(folder, tmp_path)
    scalar = changed(cfg, algorithm={"objective": "reward_model"})
    for fine in (cfg, scalar):
        check_fit(fine)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.oops.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    for wrong in (cfg, scalar):
        with pytest.raises(
            ValueError,
            match="missing: model.layers.1.mlp.up_proj.weight; not part "
            "of the model: model.oops.weight",
        ):
            check_fit(wrong)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="neither model.safetensors"):
        check_fit(cfg)
    assert fit_problems(cfg) == []  # which needs no weights


def test_tied_weights_appear_once(tmp_path):
    tied, untied = (
        file_tensors(meta_model(small_model(tmp_path, name, tied=is_tied)))
        for name, is_tied in (("a", True), ("b", False))
    )
    assert untied.keys() - tied.keys() == {"lm_head.weight"}


@pytest.mark.parametrize(
    ("family", "fields", "says"),
    [
        (
            "mistral4",
            {},
            "cannot build mistral4 .* has no such class; mend its config.json, or take",
        ),
        (
            "mixtral",
            {"vocab_size": 2, "pad_token_id": 5},
            "Padding_idx must be .*; mend its config",
        ),
        (
            "granitemoehybrid",
            {"shared_intermediate_size": 0, "num_hidden_layers": 1},
            r"shared_mlp.input_linear.weight is a parameter without elements, \[0, 4096\]; take",
        ),
    ],
)
def test_a_config_of_which_no_model_is_made_is_refused_by_name(family, fields, says, tmp_path):
    AutoConfig.for_model(family, **fields).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=says) as caught:
        check_fit(config(tmp_path, tmp_path / "run"))
    assert len(str(caught.value)) < 300


def test_a_tower_of_an_unknown_family_is_refused(tmp_path):
    folder = small_model(tmp_path)
    plain = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "mistral3",
                "text_config": {"hidden_size": 32},
                "vision_config": plain | {"model_type": "siglip_vision_model"},
            }
        )
    )
    with pytest.raises(
        ValueError, match="a mistral3 with a tower.*qwen3_vl_moe; set model.part to text"
    ):
        meta_model(folder)


ROWS = ([5, 6, 7, 8], [9, 10])


def _shards(trainer: Any, folder: Path) -> dict:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    shards = trainer.weights.shards()
    assert list(shards) == list(trainer.weights.names)
    held = 0
    for name, parameter in shards.items():
        local = parameter.detach().to_local()
        expected = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        boxes = held_boxes(name, parameter)
        assert len(boxes) == (1 if local.numel() else 0), name
        for box, view in boxes:
            assert (tuple(expected[0]), tuple(expected[1])) == (box.shape, box.start), name
            part = tuple(slice(s, s + n) for s, n in zip(box.start, box.shape))
            assert view.shape == local.shape and torch.equal(view, local), name
            assert torch.equal(local, tensors[name][part]), f"{trainer.world.rank}: {name} differs"
        held += local.numel()
    return {"held": held, "scores": trainer.weights.score(ROWS)}


@pytest.mark.parametrize(
    "architecture,tied,world_size,tp", [("qwen3", False, 4, 2), ("gemma2", None, 3, 1)]
)
def test_each_rank_holds_its_slices_of_the_files(architecture, tied, world_size, tp, tmp_path):
    folder = small_model(tmp_path, architecture=architecture, tied=tied, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1, "the test wants several files"
    cfg = config(folder, tmp_path, world_size=world_size, tp=tp)
    results = with_trainer(cfg, _shards, folder)
    count = sum(part.box.numel for part in file_tensors(meta_model(folder)).values())
    assert all(r["held"] < 0.75 * count for r in results), "a rank holds (nearly) everything"
    expected = plain_scores(AutoModelForCausalLM.from_pretrained(folder), ROWS)
    for rank, result in enumerate(results):
        for ours, theirs in zip(result["scores"], expected):
            torch.testing.assert_close(
                ours, theirs, rtol=1e-5, atol=1e-5, msg=lambda m, r=rank: f"rank {r}: {m}"
            )


def test_heads_that_do_not_divide_by_tp_are_refused_on_all_ranks(tmp_path):
    folder = small_model(tmp_path, heads=2, kv_heads=1)
    texts = run_ranks(2, refusal, config(folder, tmp_path, world_size=2, tp=2))
    assert all("layout.tp: 2 does not divide num_key_value_heads 1; values" in t for t in texts), (
        texts
    )


def _beside_an_engine(trainer: Any, broken: Config) -> dict:
    result = {
        "names": trainer.weights.names,
        "shards": len(trainer.weights.shards()),
        "score": trainer.weights.score([[5, 6]]),
    }
    if not trainer.world.is_trainer:
        nothing = Batch(scalars=None, updates=(), update_ids=torch.empty(0))
        assert trainer.annotate(nothing, step=0) is nothing
        result["update"] = trainer.update(nothing, Advantages(()), step=0)
        result["state"] = trainer.state_dict()
    with pytest.raises(ValueError) as refused:
        another_trainer(trainer, broken)
    return result | {"refused": str(refused.value)}


def test_a_rank_that_only_generates_knows_names_and_holds_nothing(tmp_path):
    folder, broken = small_model(tmp_path), small_model(tmp_path, "broken")
    (broken / "model.safetensors").unlink()
    cfg, bad = (config(path, tmp_path, world_size=2) for path in (folder, broken))
    cfg, bad = (changed(c, layout={"placement": "split"}) for c in (cfg, bad))
    trainer, generator = with_trainer(cfg, _beside_an_engine, bad)
    assert trainer["names"] == generator["names"] and trainer["shards"] == len(trainer["names"])
    assert generator["shards"] == 0 and generator["score"] == []
    assert generator["update"] == {} and generator["state"] == {}
    # Only the trainer opens the weights, and still both ranks end with the same reason.
    assert "neither model.safetensors" in trainer["refused"]
    assert trainer["refused"] == generator["refused"]


@pytest.mark.parametrize(
    "text, says",
    [
        ("[1, 2]", "no mapping `weight_map`"),
        ("{", "Expecting property name"),
        ('{"weight_map": ["a"]}', "no mapping `weight_map`"),
        ('{"weight_map": {"a": 1}}', "a is said to be in 1"),
        ('{"weight_map": {"a": "../other/model.safetensors"}}', "no file beside it"),
    ],
)
def test_an_index_that_is_none_is_refused_by_name(text, says, tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with refused(f"model.path: {path} is not a weight index", says):
        CheckpointReader(tmp_path)
