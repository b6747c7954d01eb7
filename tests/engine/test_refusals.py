"""What vLLM cannot run is refused on every rank by name, what it runs wrongly is run otherwise."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import AutoConfig

from spmdrl.check.fit import check_fit, fit_problems
from spmdrl.config import LayoutSettings
from spmdrl.engine.vllm import families
from spmdrl.engine.vllm.families import model_arguments, refusing_models
from spmdrl.tools.small_models.families import family_config
from spmdrl.tools.small_models.shrink import shrunk
from tests.helpers.built import changed
from tests.helpers.tiny import tiny_folder
from tests.helpers.worlds import in_world, make_engine
from tests.sync.test_engine import make_config

SPLIT = LayoutSettings(world_size=2, trainer_ranks=1)
JAMBA = dict(
    num_key_value_heads=2,
    attn_layer_period=2,
    attn_layer_offset=1,
    num_experts=1,
    mamba_dt_rank=8,
    use_mamba_kernels=False,
)


def refusal(world: Any) -> str:
    """Build an engine as if nothing were known of the model."""
    try:
        with mock.patch.object(families, "_lacking", lambda *_, **__: ""):
            make_engine(world.cfg, world).close()
    except ValueError as error:
        return str(error)
    return ""


def test_a_kernel_that_the_cpu_build_lacks_is_missed_at_start_on_every_rank(tmp_path):
    folder = tiny_folder(tmp_path / "m", "jamba", **JAMBA)
    cfg = make_config(folder, layout=SPLIT, dtype="float32")
    for said in in_world(cfg, refusal):
        assert "cannot run" in said and "(jamba)" in said and "selective_scan_fwd" in said
        assert "engine.kind to transformers" in said


def _config_of(folder: Path, family: str, *, dtype: str = "bfloat16", **fields: Any) -> Any:
    AutoConfig.for_model(family, **fields).save_pretrained(folder)
    return make_config(folder, layout=SPLIT, dtype=dtype)


def test_families_that_vllm_computes_otherwise_get_what_makes_them_right(tmp_path):
    backend = {"model_impl": "transformers"}
    assert model_arguments(_config_of(tmp_path / "a", "cohere2")) == backend
    assert model_arguments(_config_of(tmp_path / "e", "ministral3")) == backend
    apertus = _config_of(tmp_path / "b", "apertus")
    assert model_arguments(apertus) == {}
    assert model_arguments(changed(apertus, engine={"dtype": "float32"})) == backend
    llama = {"override_generation_config": {"attn_temperature_tuning": True}}
    assert model_arguments(_config_of(tmp_path / "c", "llama4_text")) == llama
    assert model_arguments(_config_of(tmp_path / "d", "qwen3")) == {}
    others = {
        "olmoe": [{"clip_qkv": 8.0}, {"attention_bias": True}],
        "qwen2_moe": [{"qkv_bias": False}],
        "qwen3_moe": [{"attention_bias": True}],
    }
    for family, settings in others.items():
        assert model_arguments(_config_of(tmp_path / family, family)) == {}
        for number, fields in enumerate(settings):
            odd = _config_of(tmp_path / f"{family}{number}", family, **fields)
            assert model_arguments(odd) == backend
    for number, (has_windows, found) in enumerate({False: {}, True: backend}.items()):
        moe = _config_of(tmp_path / f"e{number}", "qwen2_moe", use_sliding_window=has_windows)
        assert model_arguments(moe) == found


def test_what_vllm_computes_otherwise_whatever_it_is_told_is_refused(tmp_path):
    grouped = _config_of(tmp_path / "eight", "mamba2", n_groups=8)
    with pytest.raises(
        ValueError, match="mamba2: its n_groups is 8, and vLLM normalises each group"
    ):
        model_arguments(grouped)
    with pytest.raises(ValueError, match="its n_groups is 8"):  # before an engine is built
        check_fit(changed(grouped, engine={"kind": "vllm"}))
    quantised = changed(
        _config_of(tmp_path / "c", "cohere2"), engine={"options": {"quantization": "fp8"}}
    )
    with pytest.raises(ValueError, match="a cohere2: vLLM's own class for it computes otherwise"):
        model_arguments(quantised)
    alone = _config_of(tmp_path / "f", "mamba2", n_groups=1)
    assert model_arguments(alone) == {}


@pytest.mark.parametrize(
    ("family", "dtype", "lacks"),
    [
        ("jamba", "bfloat16", "CPU build has no op selective_scan_fwd"),
        ("nemotron_h", "bfloat16", "experts without a gate .is_act_and_mul=False. on GPUs alone"),
        ("olmo_hybrid", "bfloat16", "gated delta nets by Triton kernels, on GPUs alone"),
        ("qwen3_next", "float32", "cpu_gdn_attention_core.* in bfloat16 alone on the CPU"),
    ],
)
def test_what_the_cpu_build_lacks_is_refused_by_the_dry_run_and_not_on_gpus(
    family, dtype, lacks, tmp_path
):
    shrunk(family_config(family)).save_pretrained(tmp_path)
    cfg = make_config(tmp_path, layout=SPLIT, dtype=dtype)
    (problem,) = fit_problems(cfg)  # which is what the dry run shows
    assert re.search(f"engine.kind: vllm with a {family}: .*{lacks}.*transformers$", problem)
    with pytest.raises(ValueError, match=lacks):
        check_fit(cfg)
    on_gpus = changed(cfg, layout={"device": "cuda"})
    assert model_arguments(on_gpus) == {} and fit_problems(on_gpus) == []
    assert fit_problems(changed(cfg, engine={"kind": "transformers"})) == []
    if family == "qwen3_next":
        assert fit_problems(changed(cfg, engine={"dtype": "bfloat16"})) == []


def test_attention_that_attends_twice_is_refused_by_vllms_backend(tmp_path):
    shrunk(family_config("diffllama")).save_pretrained(tmp_path)
    cfg = make_config(tmp_path, layout=SPLIT)
    (problem,) = fit_problems(cfg)
    assert "cannot run DiffLlamaAttention, which attends more than once" in problem
    assert fit_problems(changed(cfg, engine={"kind": "transformers"})) == []


@pytest.mark.parametrize(
    ("family", "has"),
    [
        ("qwen3_next", "layers with a state .*GatedDeltaNet"),
        ("glm_moe_dsa", "layers that compute by code of their own .GlmMoeDsaAttention"),
        ("deepseek_v3", "latent attention"),
        ("qwen3", ""),
    ],
)
def test_drafts_of_models_that_were_not_compared_are_refused(family, has, tmp_path):
    shrunk(family_config(family)).save_pretrained(tmp_path)
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    cfg = make_config(tmp_path, layout=SPLIT, dtype="bfloat16")
    assert fit_problems(cfg) == []
    problems = fit_problems(changed(cfg, engine={"options": drafts}))
    assert len(problems) == bool(has)
    assert not has or re.search(f"speculative_config: is set with a {family}.*{has}", problems[0])


def test_a_module_that_imports_what_is_not_installed_is_refused_with_what_to_install(tmp_path):
    shrunk(family_config("qwen3_5_text")).save_pretrained(tmp_path)
    cfg = make_config(tmp_path, layout=SPLIT)
    for is_there in (True, False):
        found = mock.Mock() if is_there else None
        with mock.patch.object(importlib.util, "find_spec", return_value=found):
            said = refused(cfg)
        assert is_there != ("imports torchvision, which is not installed" in said)


def refused(cfg: Any) -> str:
    try:
        model_arguments(cfg)
    except ValueError as error:
        return str(error)
    return ""


def test_layers_that_neither_of_vllms_ways_can_run_are_refused_by_the_dry_run(tmp_path):
    shrunk(family_config("minimax")).save_pretrained(tmp_path)
    cfg = make_config(tmp_path, layout=SPLIT)
    for own in (cfg, changed(cfg, layout={"device": "cuda"})):
        (problem,) = fit_problems(own)
        assert "no class MiniMaxForCausalLM of its own" in problem
        assert "MiniMaxLightningAttention" in problem


def test_the_classes_of_vllms_own_are_read_from_its_source():
    found = families.own_classes()
    assert {"LlamaForCausalLM", "Mamba2ForCausalLM", "Qwen3NextForCausalLM"} <= found
    assert not {"Olmo2ForCausalLM", "MiniMaxForCausalLM", "TransformersForCausalLM"} & found


def test_fields_that_transformers_does_not_write_are_told(tmp_path):
    lfm2 = _config_of(tmp_path / "a", "lfm2")
    assert model_arguments(lfm2)["hf_overrides"] == {"conv_dim": 2560, "block_dim": 2560}
    minimax = _config_of(tmp_path / "b", "minimax_m2", rotary_dim=64)
    assert model_arguments(minimax)["hf_overrides"]["rotary_dim"] == 64
    glm = _config_of(tmp_path / "d", "glm4_moe_lite")
    assert model_arguments(glm)["hf_overrides"] == {"first_k_dense_replace": 1}
    phimoe = _config_of(tmp_path / "c", "phimoe")
    assert model_arguments(phimoe)["hf_overrides"] == {"architectures": ["PhiMoEForCausalLM"]}


def test_rotary_factors_that_change_with_the_length_are_refused_beyond_it(tmp_path):
    family_config("phi3+longrope").save_pretrained(tmp_path)
    cfg = make_config(tmp_path, layout=SPLIT)
    assert fit_problems(cfg) == []
    (problem,) = fit_problems(changed(cfg, data={"max_prompt_tokens": 4090}))
    assert "longrope" in problem and "longer than 4096" in problem


def test_what_vllm_says_of_a_model_is_told_with_the_way_out(tmp_path):
    cfg = _config_of(tmp_path, "qwen3_next", dtype="float32")
    with pytest.raises(ValueError, match="engine.dtype to bfloat16, or engine.kind") as refused:
        with refusing_models(cfg):
            raise AssertionError("CPU GDN attention requires BF16.")
    assert "(qwen3_next) in float32" in str(refused.value)
    assert "tests/engine/test_refusals.py:" in str(refused.value)
