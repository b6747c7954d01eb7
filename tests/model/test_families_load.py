"""Families built otherwise than most: loaded, sharded, scored and gathered as their files say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from spmdrl.check.fit import check_fit
from spmdrl.config import Config, ModelSettings
from spmdrl.model.blocks import uneven_experts
from spmdrl.model.files.file_tensors import file_tensors
from spmdrl.model.load import build_meta_model, load_hf_config, load_whole_model, max_positions
from spmdrl.model.scorer import HeadForm, head_form
from spmdrl.model.transformers_internals import as_saved
from spmdrl.tools.commands.export import export
from spmdrl.tools.small_models.families import family_config
from spmdrl.tools.small_models.shrink import shrunk, tiny_model
from tests.helpers.checkpoint_runs import save
from tests.helpers.comparing import (
    assert_near,
    assert_same_sums,
    differing,
    full_parameters,
    plain_scores,
)
from tests.helpers.policy_runs import config, updated
from tests.helpers.worlds import another_trainer, with_trainer
from tests.model.test_forward import assert_scored_as_by_transformers, plain_scorer

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "pad_token_id": 0}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "phi": GROUPED,  # the head has a bias
    "apertus": GROUPED | {"head_dim": 8},  # buffers without dims
    "llama4_text": GROUPED  # base_model_prefix is no attribute
    | {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4}
    | {"layer_types": ["full_attention"] * 2},
    "gpt2": GPT2 | {"bos_token_id": 1, "eos_token_id": 2},
    "gpt_neox": SIZES | {"tie_word_embeddings": True},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 128}
    | {name: size for name, size in GROUPED.items() if "inter" not in name and "key" not in name},
    "biogpt": SIZES | {"max_position_embeddings": 128, "pad_token_id": 0},  # names no blocks
    "phi tied": GROUPED | {"tie_word_embeddings": True},  # a bias beside the embedding's rows
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16}
    | {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")},
}
BLOOM = {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4}
ROWS = ([5, 6, 7, 8, 40, 41], [9, 10, 11])


def family_folder(where: Path, family: str, **fields: Any) -> Path:
    """Write a family's own model of random weights, none of them zero."""
    own = AutoConfig.for_model(family.split()[0], **FAMILIES[family] | fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(own, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(where / family)
    return where / family


def _found(trainer: Any, cfgs: list) -> list[dict[str, Any]]:
    found = []
    for cfg in cfgs:
        own = another_trainer(trainer, cfg)
        scores = own.weights.score(ROWS)
        save(own, 1, cfg)
        found.append({"scores": scores, "tensors": full_parameters(own)})
    return found


def _assert_as_in_files(folder: Path, tensors: dict[str, Tensor]) -> None:
    hf_model = build_meta_model(config(folder, folder).model)
    files = load_file(folder / "model.safetensors")
    parts, saved = file_tensors(hf_model), as_saved(hf_model, tensors)
    assert parts.keys() == saved.keys() <= files.keys()
    wrong = [name for name, tensor in saved.items() if not torch.equal(tensor, files[name])]
    assert not wrong, f"{folder.name}: {wrong}"


@pytest.mark.parametrize("world_size", [1, 2])
def test_families_are_loaded_sharded_scored_and_exported(world_size, tmp_path):
    folders = [family_folder(tmp_path, family) for family in FAMILIES]
    cfgs = [
        config(folder, tmp_path / "runs" / folder.name, world_size=world_size) for folder in folders
    ]
    results = with_trainer(cfgs[0], _found, cfgs)
    for index, folder in enumerate(folders):
        plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        expected = plain_scores(plain, ROWS)
        for found in (result[index] for result in results):
            _assert_as_in_files(folder, found["tensors"])
            for ours, theirs in zip(found["scores"], expected):
                gap = (ours - theirs).abs().mean().item()
                assert gap < 2e-6, f"{folder.name}: {gap}"
        out = export(tmp_path / "runs" / folder.name, out=tmp_path / "out" / folder.name)
        written, read = (load_file(path / "model.safetensors") for path in (out, folder))
        assert not differing(written, {name: read[name] for name in written}), folder.name
        _, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"], (folder, report)


def _updated(trainer: Any, cfgs: list[Config]) -> list[dict[str, Any]]:
    return [updated(another_trainer(trainer, cfg), 1) for cfg in cfgs]


def test_a_head_with_a_bias_trains_alike_over_tensor_parallel_ranks(tmp_path):
    """In RL with entropy, distillation (a bias in the teacher's too) and under adapters; dropout
    that the model's config names is not applied, or no two runs would agree."""
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attention_dropout"), 0.5)
    folder = family_folder(tmp_path, "phi", **dropout)
    teacher = family_folder(tmp_path / "teacher", "phi", **dropout)
    found = []
    for tp in (1, 2):
        options = {"world_size": tp, "tp": tp}
        cfgs = [
            config(folder, tmp_path, entropy_coef=0.01, **options),
            config(
                folder,
                tmp_path,
                objective="distill",
                loss="divergence",
                model={"teacher": str(teacher)},
                **options,
            ),
            config(folder, tmp_path, model={"lora": {"rank": 4}}, **options),
        ]
        found.append(with_trainer(cfgs[0], _updated, cfgs))
    (single,), ranks = found
    before = load_file(folder / "model.safetensors")["lm_head.bias"]
    for index, reference in enumerate(single):
        bias = reference["parameters"]["lm_head.bias"]
        assert torch.equal(bias, before) == (index == 2), "all but adapters train it"
        for own in (rank[index] for rank in ranks):
            assert_same_sums(own["sums"], reference["sums"], rel=1e-4, abs_=1e-5)
            assert_near(own["parameters"], reference["parameters"], rtol=1e-4, atol=1e-5)


def test_gradients_of_a_head_with_a_bias_are_those_of_transformers(tmp_path):
    folder = family_folder(tmp_path, "phi")
    hf_model, scorer = plain_scorer(folder)
    assert_scored_as_by_transformers(folder, scorer, dict(hf_model.named_parameters()))


FORMS: dict[str, tuple[dict[str, Any], HeadForm]] = {
    "phi": (GROUPED, HeadForm()),
    "gemma2": ({"final_logit_softcapping": 12.0}, HeadForm(softcap=12.0)),
    "recurrent_gemma": ({}, HeadForm(softcap=30.0)),
    "cohere": ({"logit_scale": 0.3}, HeadForm(scale=0.3)),
    "granite": ({"logits_scaling": 4.0}, HeadForm(scale=0.25)),
    "hyperclovax": ({"logits_scaling": 4.0}, HeadForm(scale=4.0)),
    "falcon_h1": ({"lm_head_multiplier": 0.5}, HeadForm(scale=0.5)),
    "minicpm3": ({"dim_model_base": 640}, HeadForm(scale=0.25)),
}


@pytest.mark.parametrize("family", FORMS)
def test_what_becomes_of_logits_is_read_off_the_forward_pass(family):
    fields, form = FORMS[family]
    hf_model = _on_meta(family, **fields)
    before = dict(vars(hf_model.model))
    assert head_form(hf_model) == form
    assert dict(vars(hf_model.model)) == before


def test_a_head_of_another_form_is_refused():
    hf_model = _on_meta("modernbert-decoder", is_decoder=True)  # a layer before the head
    with pytest.raises(ValueError, match="ModernBertDecoderForCausalLM does between"):
        head_form(hf_model)
    hf_model = _on_meta("llama")
    forward = hf_model.forward

    def shifted(**inputs: Any) -> Any:
        found = forward(**inputs)
        found.logits = found.logits + 1
        return found

    hf_model.forward = shifted
    with pytest.raises(ValueError, match="is neither a factor nor a softcap"):
        head_form(hf_model)


def _on_meta(family: str, **fields: Any) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))


def test_what_cannot_be_sharded_block_by_block_is_refused(tmp_path):
    own = AutoConfig.for_model("zamba2", num_hidden_layers=12, layers_block_type=["hybrid"] * 12)
    own.save_pretrained(tmp_path / "zamba2")
    with pytest.raises(ValueError, match="is also .*, and blocks are gathered one by one"):
        check_fit(config(tmp_path / "zamba2", tmp_path))


def test_experts_of_a_models_own_code_are_not_cut_by_ep(tmp_path):
    folder = family_folder(tmp_path, "llama4_text")
    with pytest.raises(ValueError, match="layout.ep: 2 with a llama4_text, whose experts are comp"):
        check_fit(config(folder, tmp_path, world_size=2, ep=2))


def test_experts_that_no_grouped_product_takes_are_refused(tmp_path):
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    own = AutoConfig.for_model("qwen3_moe", **GROUPED | {"head_dim": 8} | fields)
    own.save_pretrained(tmp_path)
    cfg = config(tmp_path, tmp_path, model={"compute_dtype": "bfloat16"})
    with pytest.raises(ValueError, match=r"experts.gate_up_proj \[4, 24, 32\] has|down_proj"):
        check_fit(cfg)
    assert not uneven_experts(build_meta_model(cfg.model), dtype=torch.float32)


def test_a_model_without_a_limit_of_positions_has_none(tmp_path):
    AutoConfig.for_model("bloom", **BLOOM).save_pretrained(tmp_path)
    assert max_positions(load_hf_config(str(tmp_path))) is None
    assert max_positions(load_hf_config(str(family_folder(tmp_path, "gpt2")))) == 128


@pytest.mark.parametrize("family", ["gemma3n_text", "falcon_h1"])
def test_buffers_that_a_model_computes_for_its_parts_are_those_of_transformers(family, tmp_path):
    """One by numbers of the model inside the causal one, the other for all layers at once."""
    theirs = tiny_model(shrunk(family_config(family)), tmp_path)
    ours = load_whole_model(
        ModelSettings(path=str(tmp_path)),
        attention="eager",
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    buffers = dict(ours.named_buffers())
    assert not differing(dict(theirs.named_buffers()), buffers) and len(buffers) >= 4
