"""The search for the first module whose bits depend on the batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmdrl.config import ModelSettings
from spmdrl.engine.transformers import kv_cache
from spmdrl.model.blocks import replaced_forward
from spmdrl.tools.commands.check import check
from spmdrl.tools.proof import exact
from tests.helpers.tiny import tiny_folder


def test_it_names_the_first_module_or_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    folder = tiny_folder(tmp_path / "model", "qwen3", num_key_value_heads=2, head_dim=32)
    assert check(str(folder), exact=True) == 0
    printed = capsys.readouterr().out
    assert "float32: exact: 60 tokens" in printed and "bfloat16: exact: 60 tokens" in printed
    runner = exact.make_runner(ModelSettings(path=str(folder)), dtype="float32")
    act = runner.hf_model.model.layers[1].mlp.act_fn
    with replaced_forward(act, lambda x: x * (1 + 1e-6 * x.shape[-2])):
        found = exact.first_difference(runner)
    assert found.startswith("model.layers.1.mlp.act_fn (SiLUActivation): of equal inputs")
    attend = kv_cache._attend_exactly
    monkeypatch.setattr(kv_cache, "_attend_exactly", lambda *args: attend(*args) * (1 + 2.0**-22))
    found = exact.first_difference(runner)
    assert found.startswith("what model.layers.0.self_attn (Qwen3Attention) computes between")
    assert "input of model.layers.0.self_attn.o_proj" in found
    assert check(str(folder), exact=True) == 1
    assert "float32: WRONG: what model.layers.0.self_attn" in capsys.readouterr().out


def test_it_reads_the_part_of_a_model_that_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    seen = []

    def lines(model: ModelSettings) -> list[str]:
        seen.append(model)
        return []

    monkeypatch.setattr(exact, "exact_lines", lines)
    assert check("m", exact=True, part="text", trust_remote_code=True) == 0
    assert seen == [ModelSettings(path="m", part="text", trust_remote_code=True)]
