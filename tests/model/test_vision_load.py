"""Models that see are built without storage: what they are made of, by the names of their files."""

from __future__ import annotations

import gc
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForImageTextToText

from spmdrl.config import ModelSettings
from spmdrl.engine.vllm.arguments import with_plain_weights
from spmdrl.model.attention.kernels import register_attention
from spmdrl.model.attention.packing_support import enable_packing
from spmdrl.model.blocks import base_of, blocks, layers_of
from spmdrl.model.files.file_tensors import file_tensors
from spmdrl.model.head import HeadOptions
from spmdrl.model.load import build_meta_model, checkpoint_shapes, load_whole_model
from spmdrl.model.parallel.row_slices import Slicing
from spmdrl.model.scorer import Scorer, make_row
from spmdrl.model.vision import tower
from spmdrl.model.vision.families import vision_blocks, vision_modules, vision_parameters
from spmdrl.model.vision.layout import vision_layout_of
from spmdrl.model.vision.tower import tower_inputs
from tests.helpers.policy_runs import VALID
from tests.helpers.vision_runs import microbatch, sequences
from tests.helpers.vlm import FAMILIES, seeing_model


@pytest.fixture(params=FAMILIES)
def folder(request, tmp_path):
    return seeing_model(request.param, tmp_path)


def test_a_model_that_sees_is_built_by_the_names_of_its_files(folder):
    settings = ModelSettings(path=str(folder))
    hf_model = build_meta_model(settings)
    saved = load_file(folder / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    found = checkpoint_shapes(replace(VALID, model=settings))
    assert {name: tuple(shape) for name, shape in found.items()} == shapes
    assert base_of(hf_model)[0] == "model.language_model"
    assert all(name.startswith("model.language_model.layers.") for name in blocks(hf_model))
    towers = vision_parameters(hf_model)
    assert len(blocks(hf_model)) == len(vision_blocks(hf_model)) == 2
    names = {n for n, _ in hf_model.named_parameters()}
    rest = names - towers
    assert towers and all(n.startswith(("model.language_model.", "lm_head.")) for n in rest)
    adapter = "model.language_model.layers.1.mlp.up_proj.lora_A.weight"
    layers = layers_of(hf_model, {*names, adapter}, towers=vision_modules(hf_model))
    assert {n for n, layer in layers.items() if layer == "tower"} == towers
    assert layers[adapter] == "01" and layers["model.language_model.norm.weight"] == "head"
    assert layers["model.language_model.embed_tokens.weight"] == "embedding"
    assert set(layers.values()) == {"00", "01", "tower", "embedding", "head"}


def test_its_weights_are_those_that_transformers_loads(folder):
    settings = ModelSettings(path=str(folder))
    own = load_whole_model(
        settings, attention=None, dtype=torch.float32, device=torch.device("cpu")
    )
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    parts = [{**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (own, theirs)]
    assert parts[0].keys() == parts[1].keys()
    assert not [
        name for name, tensor in parts[0].items() if not torch.equal(tensor, parts[1][name])
    ]


def test_a_siglip_tower_is_named_as_in_released_files(tmp_path):
    saved = load_file(seeing_model("gemma3", tmp_path) / "model.safetensors")
    own = [name for name in saved if name.startswith("vision_tower.")]
    assert own and all(name.startswith("vision_tower.vision_model.") for name in own)


@pytest.mark.parametrize("part", ["all", "text"])
def test_files_that_name_a_siglip_tower_as_transformers_does_are_read_as_released_ones(
    tmp_path, part
):
    released = seeing_model("gemma3", tmp_path / "released")
    other = shutil.copytree(released, tmp_path / "other")
    saved = load_file(released / "model.safetensors")
    short = {
        name.replace("vision_tower.vision_model.", "vision_tower."): t for name, t in saved.items()
    }
    assert short.keys() != saved.keys()
    save_file(short, other / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForImageTextToText.from_pretrained(other, dtype=torch.float32)
    fresh = type(theirs)(theirs.config)
    fresh.save_pretrained(tmp_path / "fresh")  # which is how such files come about
    assert load_file(tmp_path / "fresh/model.safetensors").keys() == short.keys()
    options = dict(attention=None, dtype=torch.float32, device=torch.device("cpu"))
    own, right = (
        dict(load_whole_model(ModelSettings(path=str(of), part=part), **options).named_parameters())
        for of in (other, released)
    )
    assert own.keys() == right.keys()
    assert all(torch.equal(own[name], right[name]) for name in own)
    if part == "all":  # whose own loader knows the released names alone
        told = [
            with_plain_weights(replace(VALID, model=ModelSettings(path=str(of))), {})
            for of in (released, other)
        ]
        assert told[0] == {} and told[1]["load_format"] == "spmdrl_plain"


def test_a_scalar_head_stands_where_the_vocabulary_s_was(folder):
    settings = ModelSettings(path=str(folder))
    whole, scalar = (
        file_tensors(build_meta_model(settings, is_scalar=kind)).keys() for kind in (False, True)
    )
    assert scalar - whole == {"score.weight"}
    assert not [name for name in scalar if "lm_head" in name]


def test_pixels_are_copied_for_a_forward_pass_and_go_with_its_graph(tmp_path, monkeypatch):
    folder, copies = seeing_model("qwen3_vl", tmp_path), []

    def watched(items, device):
        made = tower_inputs(items, device)
        copies.append(StorageWeakRef(made["pixel_values"].untyped_storage()))
        return made

    def alive():
        gc.collect()
        return [not copy.expired() for copy in copies]

    monkeypatch.setattr(tower, "tower_inputs", watched)
    register_attention()
    hf_model = load_whole_model(
        ModelSettings(path=str(folder)),
        attention="spmdrl_padded",
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    enable_packing(hf_model.requires_grad_(True))
    scorer = Scorer(hf_model, HeadOptions(64))
    slicing, ids = Slicing(vision=vision_layout_of(hf_model, device="cpu")), sequences(folder)[0]
    moved = microbatch(folder, [0]).to(torch.device("meta"))
    assert moved.tokens.is_meta and moved.extra_columns["multimodal"].places.is_meta
    assert (
        moved.extra_columns["multimodal"].items[0].features["pixel_values"]
        is ids.items[0].features["pixel_values"]
    )
    rows = []
    for number in (0, 3):
        own = microbatch(folder, [number])
        mask, lengths = own.response_mask, own.cu_seqlens.diff().tolist()
        rows.append(
            make_row(own.tokens, lengths, mask=mask, slicing=slicing, columns=own.extra_columns)
        )
    assert not copies  # what is prepared holds none
    with torch.no_grad():
        for row in rows:
            scorer(row)
    assert alive() == [False, False]
    for row in rows:
        logprobs, _ = scorer(row)
        assert alive()[-1]  # the gradient of the first convolution needs them
        logprobs.sum().backward()
        del logprobs
        assert not any(alive())
    assert len(copies) == 4
