"""The search for the first module whose bits depend on the batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmdrl.config import ModelSettings
from spmdrl.engine.transformers import kv_cache
from spmdrl.engine.vllm import paged
from spmdrl.model.blocks import replaced_forward
from spmdrl.tools.commands.check import check
from spmdrl.tools.proof import exact_search
from tests.helpers.tiny import tiny_folder

SIZES = dict(num_key_value_heads=2, head_dim=32, num_local_experts=4, num_experts_per_tok=2)


def test_it_names_the_first_module_or_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    folder = tiny_folder(tmp_path / "model", "qwen3", num_key_value_heads=2, head_dim=32)
    assert check(str(folder), exact=True) == 0
    printed = capsys.readouterr().out
    for dtype in ("float32", "bfloat16"):
        for kind in ("transformers", "vllm"):
            assert f"{dtype}, engine.kind {kind}: exact: 60 tokens" in printed
    runner = exact_search.make_runner(ModelSettings(path=str(folder)), dtype="float32")
    act = runner.hf_model.model.layers[1].mlp.act_fn
    with replaced_forward(act, lambda x: x * (1 + 1e-6 * x.shape[-2])):
        found = exact_search.first_difference(runner, runner)
    assert found.startswith("model.layers.1.mlp.act_fn (SiLUActivation): of equal inputs")
    attend = kv_cache._attend_exactly
    monkeypatch.setattr(kv_cache, "_attend_exactly", lambda *args: attend(*args) * (1 + 2.0**-22))
    found = exact_search.first_difference(runner, runner)
    assert found.startswith("what model.layers.0.self_attn (Qwen3Attention) computes between")
    assert "input of model.layers.0.self_attn.o_proj" in found
    assert check(str(folder), exact=True) == 1
    assert (
        "float32, engine.kind transformers: WRONG: what model.layers.0.self_attn"
        in capsys.readouterr().out
    )


def test_it_names_the_first_module_over_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tiny_folder(tmp_path / "model", "gpt_oss", **SIZES)
    settings = ModelSettings(path=str(folder))
    runner = exact_search.make_runner(settings, dtype="bfloat16")
    decoder = exact_search.PagedDecoder(settings, dtype="bfloat16")
    assert exact_search.first_difference(runner, decoder) == ""
    weighed = paged.PagedKeys.weighed
    monkeypatch.setattr(paged.PagedKeys, "weighed", lambda *args: weighed(*args) * (1 + 2.0**-8))
    found = exact_search.first_difference(runner, decoder)
    assert found.startswith("what model.layers.0.self_attn (GptOssAttention) computes between")


def test_it_reads_the_part_of_a_model_that_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    seen = []

    def lines(model: ModelSettings) -> list[str]:
        seen.append(model)
        return []

    monkeypatch.setattr(exact_search, "exact_lines", lines)
    assert check("m", exact=True, part="text", trust_remote_code=True) == 0
    assert seen == [ModelSettings(path="m", part="text", trust_remote_code=True)]
