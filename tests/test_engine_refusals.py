"""What vLLM cannot run is refused on every rank by name, what it runs wrongly is run otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from built import changed
from test_sync_engine import make_config
from tiny import tiny_folder
from transformers import AutoConfig
from worlds import in_world, make_engine

from spmdrl.check.fit import check_fit
from spmdrl.config import LayoutSettings
from spmdrl.engine.vllm_arguments import model_arguments
from spmdrl.engine.vllm_trial import refusing_models
from spmdrl.model.families import family_config

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
    try:
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
    for number, (has_windows, found) in enumerate({False: {}, True: backend}.items()):
        moe = _config_of(tmp_path / f"e{number}", "qwen2_moe", use_sliding_window=has_windows)
        assert model_arguments(moe) == found


def test_what_vllm_computes_otherwise_whatever_it_is_told_is_refused(tmp_path):
    grouped = _config_of(tmp_path / "eight", "mamba2", n_groups=8)
    with pytest.raises(ValueError, match="mamba2 of n_groups 8: vLLM normalises each group"):
        model_arguments(grouped)
    with pytest.raises(ValueError, match="mamba2 of n_groups 8"):  # before an engine is built
        check_fit(changed(grouped, engine={"kind": "vllm"}))
    quantised = changed(
        _config_of(tmp_path / "c", "cohere2"), engine={"options": {"quantization": "fp8"}}
    )
    with pytest.raises(ValueError, match="a cohere2: vLLM's own class for it computes otherwise"):
        model_arguments(quantised)
    alone = _config_of(tmp_path / "f", "mamba2", n_groups=1)
    assert model_arguments(alone) == {}


def test_rotary_factors_that_change_with_the_length_are_refused_beyond_it(tmp_path):
    longrope = family_config("phi3+longrope")
    longrope.save_pretrained(tmp_path)
    cfg = make_config(tmp_path, layout=SPLIT)
    assert model_arguments(cfg) == {}
    with pytest.raises(ValueError, match="4096 tokens is where the rotary factors"):
        model_arguments(changed(cfg, data={"max_prompt_tokens": 4090}))


def test_what_vllm_says_of_a_model_is_told_with_the_way_out(tmp_path):
    cfg = _config_of(tmp_path, "qwen3_next", dtype="float32")
    with pytest.raises(ValueError, match="engine.dtype to bfloat16, or engine.kind") as refused:
        with refusing_models(cfg):
            raise AssertionError("CPU GDN attention requires BF16.")
    assert "(qwen3_next) in float32" in str(refused.value)
    assert "test_engine_refusals.py:" in str(refused.value)
