"""Files of quantised weights: read by slice as transformers dequantises them whole, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from spmdrl.config import LayoutSettings, ModelSettings
from spmdrl.model.files.quantised import Packed, Scaled
from spmdrl.model.files.reader import CheckpointReader
from spmdrl.model.load import load_hf_config, load_whole_model
from spmdrl.tools.commands.export import export
from tests.helpers.checkpoint_runs import save
from tests.helpers.comparing import differing, full_parameters, plain_scores
from tests.helpers.policy_runs import config, small_model
from tests.helpers.quantised_files import fp8, mxfp4, quantise
from tests.helpers.worlds import with_stream, with_trainer
from tests.model.test_families_load import GROUPED, ROWS
from tests.sync.test_engine import PROMPTS, change, make_config, make_folder

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}


def _folder(where: Path, kind: str) -> Path:
    if kind == "mxfp4":
        sizes = GROUPED | EXPERTS | {"hidden_size": 64, "intermediate_size": 32}
        torch.manual_seed(0)
        own = AutoConfig.for_model("gpt_oss", **sizes)
        AutoModelForCausalLM.from_config(own, dtype=torch.float32).save_pretrained(where / kind)
        return quantise(where / kind, kind=kind)
    architecture = "qwen3" if kind == "compressed" else "deepseek_v3"
    folder = small_model(where, kind, architecture=architecture)
    block = {"blocks": (4, 16), "tensors": None, "compressed": None}[kind]
    return quantise(folder, kind="compressed" if kind == "compressed" else "fp8", block=block)


def _by_transformers(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    own = None
    if said["quant_method"] == "fp8":
        own = FineGrainedFP8Config(weight_block_size=said["weight_block_size"], dequantize=True)
    elif said["quant_method"] == "mxfp4":
        own = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=own)
    return dict(model.state_dict())


@pytest.mark.parametrize("kind", ["blocks", "tensors", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_bit_equal_to_what_transformers_makes_of_them(kind, dtype, tmp_path):
    folder = _folder(tmp_path, kind)
    settings = ModelSettings(path=str(folder))
    own = load_whole_model(settings, attention="eager", dtype=dtype, device=torch.device("cpu"))
    theirs = _by_transformers(folder, dtype)
    tensors = own.state_dict()
    assert tensors.keys() == theirs.keys()
    wrong = [n for n, t in tensors.items() if not torch.equal(t, theirs[n].to(t.dtype))]
    assert not wrong, wrong


def test_channel_scales_of_compressed_tensors_are_multiplied_in(tmp_path):
    folder = _folder(tmp_path, "compressed")
    raw, reader = load_file(folder / "model.safetensors"), CheckpointReader(folder)
    name = "model.layers.1.mlp.down_proj.weight"
    whole = raw[name].float() * raw[f"{name}_scale"]
    assert f"{name}_scale" not in reader.names() and reader.shape(name) == tuple(whole.shape)
    part = reader.read(name, start=(3, 7), shape=(9, 20))
    assert torch.equal(part, whole[3:12, 7:27])


class _Raw:
    """Tensors in memory, and how much of each was read at once."""

    def __init__(self, tensors: dict[str, Tensor]):
        self.tensors, self.most = tensors, 0

    def raw_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def raw(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        found = self.tensors[name][tuple(slice(s, s + n) for s, n in zip(start, shape))]
        self.most = max(self.most, found.numel())
        return found


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_any_box_is_that_of_the_whole(kind):
    """Of blocks that the shape does not divide too: DeepSeek-V3 has 4.5 of them in 576 rows."""
    generator = torch.Generator().manual_seed(0)
    if kind == "fp8":
        weight = torch.randn(36, 50, generator=generator)
        values, scales = fp8(weight, (8, 16))
        files, tensor = (
            _Raw({"w": values, "w_scale_inv": scales}),
            Scaled("w", "w_scale_inv", (8, 16)),
        )
        rows = scales.repeat_interleave(8, 0)[:36].repeat_interleave(16, 1)[:, :50]
        whole = values.float() * rows
        torch.testing.assert_close(whole, weight, rtol=0.07, atol=0.01)
    else:
        weight = torch.randn(3, 96, 10, generator=generator)
        blocks, scales = mxfp4(weight)
        files, tensor = _Raw({"b": blocks, "s": scales}), Packed("b", "s")
        whole = tensor.read(files, (0, 0, 0), (3, 96, 10))
        torch.testing.assert_close(whole, weight, rtol=0.35, atol=0.4)
    assert tensor.shape(files) == tuple(whole.shape)
    for seed in range(60):
        drawn = torch.Generator().manual_seed(seed)
        start = [int(torch.randint(n, (), generator=drawn)) for n in whole.shape]
        shape = [
            1 + int(torch.randint(n - s, (), generator=drawn)) for n, s in zip(whole.shape, start)
        ]
        files.most = 0
        expected = whole[tuple(slice(s, s + n) for s, n in zip(start, shape))]
        assert torch.equal(tensor.read(files, start, shape), expected), (start, shape)
        assert files.most <= max(expected.numel(), 1) * 32, "more was read than the box needs"


def _trained(trainer: Any) -> dict[str, Any]:
    found = {"scores": trainer.weights.score(ROWS)}
    save(trainer, 1)
    return found | {"tensors": full_parameters(trainer)}


def test_shards_of_quantised_files_score_as_transformers_and_export_plain(tmp_path):
    folder = _folder(tmp_path, "blocks")
    own = AutoConfig.from_pretrained(folder)
    plain = AutoModelForCausalLM.from_config(own, dtype=torch.float32)
    plain.load_state_dict(_by_transformers(folder, torch.float32))
    expected = plain_scores(plain.eval(), ROWS)
    cfg = config(folder, tmp_path / "run", world_size=2)
    results = with_trainer(cfg, _trained)
    for found in results:
        for ours, theirs in zip(found["scores"], expected):
            assert (ours - theirs).abs().mean() < 2e-6
    out = export(tmp_path / "run", out=tmp_path / "out", dtype="float32")
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    exported, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    assert not differing(dict(exported.named_parameters()), dict(plain.named_parameters()))


def _pushed(stream: Any, engine: Any, trainer: Any) -> dict[str, Any]:
    found = {"mode": stream.mode, "probes": [stream.probe(PROMPTS)["sync/probe_gap"]]}
    change(trainer, 0.02)
    stream.push(1)
    return found | {"probes": [*found["probes"], stream.probe(PROMPTS)["sync/probe_gap"]]}


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_an_engine_holds_the_plain_weights_of_quantised_files(kind, tmp_path):
    """From the start: the proof of layout compares it with them, and so does the first probe."""
    folder = quantise(make_folder(tmp_path, "qwen3"), kind="fp8", block=(16, 16))
    layout = LayoutSettings(world_size=1, placement="colocated")
    cfg = make_config(folder, layout=layout, dtype="float32", kind=kind)
    (found,) = with_stream(cfg, _pushed)
    assert found["mode"] == "traced"
    for gap, count in found["probes"]:
        assert count > 10 and gap / count < 1e-4, found


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors"])
def test_other_quantisations_are_refused_by_name(method, tmp_path):
    folder = small_model(tmp_path)
    groups = {"group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group"}}}
    own = {"quant_method": method, "bits": 4, "config_groups": groups}
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": own}))
    with pytest.raises(ValueError, match=f"quantised by .*{method}"):
        load_hf_config(str(folder))
    with pytest.raises(ValueError, match=f"quantised by .*{method}"):
        CheckpointReader(folder)


def test_scales_that_do_not_fit_and_floats_without_scales_are_named(tmp_path):
    folder = _folder(tmp_path, "blocks")
    file, name = folder / "model.safetensors", "model.layers.0.self_attn.o_proj.weight"
    tensors = load_file(file)
    whole = dict(start=(0, 0), shape=tuple(tensors[name].shape))
    save_file(tensors | {f"{name}_scale_inv": torch.ones(3, 3)}, file)
    with pytest.raises(ValueError, match=f"{name}_scale_inv has shape .3, 3., which does not fit"):
        CheckpointReader(folder).read(name, **whole)
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, file)
    misfit = CheckpointReader(folder).misfit(name, torch.float32)
    assert f"{name} in {file} is F8_E4M3" in misfit
