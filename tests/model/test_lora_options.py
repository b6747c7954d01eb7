"""What model.lora may say: first values, targets as PEFT's, what is refused and how."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from spmdrl.check.fit import fit_problems
from spmdrl.check.settings import validate
from spmdrl.config import LoraSettings
from spmdrl.model.lora.files import AdapterFolder, write_adapter
from spmdrl.model.lora.layers import Adapters, initial_a, lora_form
from spmdrl.model.lora.targets import LoraForm, targeted
from tests.helpers.built import refused
from tests.helpers.policy_runs import config, meta_model, small_model


def test_a_matrices_start_as_pefts_do_keyed_by_seed_and_name():
    a = initial_a("x.lora_A.weight", (64, 256), init="kaiming", seed=0)
    assert float(a.abs().max()) <= 1 / 16 and float(a.std()) == pytest.approx(
        1 / 16 / 3**0.5, rel=0.02
    )
    wide = initial_a("x.lora_A.weight", (64, 256), init="gaussian", seed=0)
    assert float(wide.std()) == pytest.approx(1 / 64, rel=0.02)
    again = initial_a("x.lora_A.weight", (64, 256), init="kaiming", seed=0)
    assert torch.equal(a, again)
    for name, seed in (("y.lora_A.weight", 0), ("x.lora_A.weight", 1)):
        assert not torch.equal(a, initial_a(name, (64, 256), init="kaiming", seed=seed))


@pytest.mark.parametrize(
    "targets, count",
    [
        ("all-linear", 14),
        (("q_proj",), 2),
        (("layers.0.mlp.up_proj", "o_proj"), 3),
        (r".*\.1\..*(q|v)_proj", 2),
    ],
)
def test_targets_are_read_as_peft_reads_them(targets, count, tiny_model):
    hf_model = meta_model(tiny_model)
    ours = set(targeted(hf_model, targets))
    asked = list(targets) if isinstance(targets, tuple) else targets
    theirs = get_peft_model(hf_model, LoraConfig(target_modules=asked, task_type="CAUSAL_LM"))
    names = {
        re.sub(r"^base_model\.model\.|\.lora_A\.default$", "", n)
        for n, _ in theirs.named_modules()
        if n.endswith("lora_A.default")
    }
    assert ours == names and len(ours) == count


@pytest.mark.parametrize("targets", [("q_proj", "query"), ("lm_head",), ".*lm_head.*", ("proj",)])
def test_targets_that_match_nothing_are_refused_with_the_names_that_exist(targets, tiny_model):
    hf_model = meta_model(tiny_model)
    wrong = targets if isinstance(targets, str) else targets[-1]
    with pytest.raises(ValueError, match=re.escape(repr(wrong))) as raised:
        targeted(hf_model, targets)
    assert "model.layers.*.self_attn.q_proj" in str(raised.value)


@pytest.mark.parametrize(
    "lora, says",
    [
        ({"rank": True}, "model.lora.rank: expected int, got True"),
        ({"r": 8}, "PEFT's r is rank here"),
        ({"rnk": 8}, "did you mean rank?"),
        ({"dropout": 0.1}, "there is none"),
        ({"lora_dropout": 0.0}, "there is none"),
        ({"targets": [1]}, "model.lora.targets"),
        ({"targets": {"q": 1}}, r"model.lora.targets: expected TEXT\|TEXT \.\.\., got"),
        ({"init": "pissa"}, "'pissa' is not one of kaiming, gaussian"),
        ({"use_rslora": 1}, "true or false"),
        ({"push": "own"}, "model.lora.push: 'own' is not one of merged, adapter"),
    ],
)
def test_unknown_options_and_types_are_refused(lora, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        config(tmp_path, tmp_path, model={"lora": lora})


@pytest.mark.parametrize(
    "lora, says",
    [
        ({"rank": -1}, "model.lora.rank: must be at least 0, got -1"),
        ({"rank": 4, "alpha": -1}, "model.lora.alpha: must be above 0"),
        ({"rank": 4, "targets": []}, "model.lora.targets"),
        ({"rank": 4, "targets": [""]}, "model.lora.targets"),
        ({"rank": 4, "targets": "(q"}, "model.lora.targets"),
        (
            {"targets": ["q_proj"]},
            "model.lora.targets: [q_proj] with model.lora.rank 0; it has no effect there; set",
        ),
        ({"path": "x", "rank": 4}, "model.lora.rank: 4 with model.lora.path x; it has no effect"),
    ],
)
def test_values_that_cannot_be_are_refused(lora, says, tmp_path):
    cfg = config(tmp_path, tmp_path, model={"lora": lora})
    assert any(says in problem for problem in validate(cfg)), validate(cfg)


def test_a_reference_that_follows_is_refused(tmp_path):
    model = {"lora": {"rank": 4}, "reference": {"sync_every": 2}}
    problems = validate(config(tmp_path, tmp_path, model=model, kl_coef=0.1))
    assert any("sync_every: 2 with model.lora" in problem for problem in problems)


def _write(folder: Path, layer: str, a: torch.Tensor, b: torch.Tensor) -> None:
    matrices = {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}
    write_adapter(folder, matrices, rank=2, alpha=4, use_rslora=False, base="")


@pytest.mark.parametrize(
    "change, says",
    [
        ({"use_dora": True}, "use_dora"),
        ({"r": "8"}, "no LoRA adapter"),
        ({"peft_type": "IA3"}, "no LoRA adapter"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        (None, "PEFT's save_pretrained"),
    ],
)
def test_adapters_that_compute_something_else_are_refused(change, says, tmp_path):
    _write(tmp_path, "x", torch.ones(2, 4), torch.ones(3, 2))
    file = tmp_path / "adapter_config.json"
    if change is None:
        file.unlink()
    else:
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=says):
        lora_form(LoraSettings(path=str(tmp_path)))


def test_an_adapter_of_another_model_is_refused(tiny_model, tmp_path):
    form = LoraForm(rank=2, alpha=4, targets=("q_proj",))
    hf_model = meta_model(tiny_model)
    names = Adapters(hf_model, form).names
    tensors = {n: torch.ones(hf_model.get_parameter(n).shape) for n in names}
    tensors[names[0]] = torch.ones(2, 7)
    write_adapter(tmp_path, tensors, rank=2, alpha=4, use_rslora=False, base="")
    hf_model = meta_model(tiny_model)
    adapters = Adapters(hf_model, lora_form(LoraSettings(path=str(tmp_path))))
    with pytest.raises(ValueError, match=r"lora_A.weight has shape \[2, 7\] there, \[2, 64\]"):
        adapters.fill({n: torch.empty(hf_model.get_parameter(n).shape) for n in names}, seed=0)


def test_adapters_that_cannot_be_are_refused_from_the_config_alone(tiny_model, tmp_path):
    def problems(**lora: object) -> list[str]:
        return fit_problems(config(tiny_model, tmp_path, model={"lora": lora}))

    assert problems(rank=4) == [] and problems(rank=4, targets=["q_proj"]) == []
    (text,) = problems(rank=4, targets=["q_proj", "query"])
    assert text.startswith("model.lora.targets: 'query' matches no linear layer")
    (text,) = problems(path=str(tmp_path / "nothing"))
    assert text.startswith("model.lora.path: cannot read")
    layer = "model.layers.0.self_attn.q_proj"
    _write(tmp_path, layer, torch.ones(2, 7), torch.ones(64, 2))
    (text,) = problems(path=str(tmp_path))
    assert "does not fit the model" in text and "has shape [2, 7] there" in text


def _mixture(where: Path) -> torch.nn.Module:
    return meta_model(small_model(where, architecture="qwen3_moe", intermediate=24))


_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_EXPERTS = {"gate_up_proj", "down_proj"}


@pytest.mark.parametrize(
    "targets, ends, count",
    [
        ("all-linear", _ATTENTION | _EXPERTS, 12),
        (("experts",), _EXPERTS, 4),
        (("experts.down_proj",), {"down_proj"}, 2),
        (("q_proj", "down_proj"), {"q_proj", "down_proj"}, 4),
        (r".*\.1\.mlp\.experts", _EXPERTS, 2),
        (r".*\.1\..*(q_proj|gate_up_proj)", {"q_proj", "gate_up_proj"}, 2),
    ],
)
def test_experts_are_targets_by_their_parameters_names_or_the_module_s(
    targets, ends, count, tmp_path, caplog
):
    found = targeted(_mixture(tmp_path), targets)
    assert {name.rpartition(".")[2] for name in found} == ends and len(found) == count
    assert not caplog.text


def test_experts_that_are_kept_otherwise_get_none_and_the_log_says_so(tmp_path, caplog):
    hf_model = _mixture(tmp_path)
    for module in hf_model.modules():
        if hasattr(module, "is_transposed"):
            module.is_transposed = True
    assert {n.rpartition(".")[2] for n in targeted(hf_model, "all-linear")} == _ATTENTION
    assert "model.layers.*.mlp.experts.gate_up_proj" in caplog.text
    with pytest.raises(ValueError, match="gets none: .* model.layers.*.mlp.experts.down_proj"):
        targeted(hf_model, ("experts.down_proj",))


@pytest.mark.parametrize("targets, problems", [(["q_proj"], 0), (["q_proj", "embed_tokens"], 1)])
def test_an_embedding_s_adapter_does_not_travel_by_itself(targets, problems, tiny_model, tmp_path):
    cfg = config(
        tiny_model, tmp_path, model={"lora": {"rank": 4, "targets": targets, "push": "adapter"}}
    )
    found = fit_problems(cfg)
    assert len(found) == problems and all("name the embedding" in text for text in found)


def test_an_adapter_config_that_is_a_list_is_refused_by_name(tmp_path):
    path = tmp_path / "adapter_config.json"
    path.write_text("[]")
    with refused(f"{path} holds a list", "save_pretrained"):
        AdapterFolder(tmp_path)
