"""What tensor parallelism makes of each module, for dense models, latent attention, experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from spmdrl.check.fit import fit_problems
from spmdrl.model.blocks import mixtures
from spmdrl.model.divisibility import misfits
from spmdrl.model.model_shape import counts_of, model_shape, tp_problem
from spmdrl.model.parallel import sequence_parallel
from spmdrl.model.parallel.tp_plan import PARTIAL, style_problems, tp_styles
from spmdrl.world.axes import Axes
from tests.helpers.policy_runs import config


def model_of(kind: str, **options: object) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, num_hidden_layers=2, **options)
        )


def test_a_dense_model_has_the_styles_of_its_own_plan():
    styles = tp_styles(model_of("qwen3"))
    own = {
        "q_proj": "colwise",
        "k_proj": "colwise",
        "v_proj": "colwise",
        "o_proj": "rowwise",
        "q_norm": PARTIAL,
        "k_norm": PARTIAL,
    }
    mlp = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
    assert styles == {
        f"model.layers.{i}.{part}.{name}": style
        for i in range(2)
        for part, names in (("self_attn", own), ("mlp", mlp))
        for name, style in names.items()
    }


@pytest.mark.parametrize(
    "kind, norms",
    [
        ("glm4_moe", {"q_norm": PARTIAL, "k_norm": PARTIAL}),  # its plan forgets them
        ("olmo2", {}),  # over all heads, which its plan gathers first
        ("llama", {}),
    ],
)
def test_norms_of_a_ranks_own_heads_have_a_part_of_their_gradient(kind, norms):
    styles = tp_styles(model_of(kind, **({"use_qk_norm": True} if kind == "glm4_moe" else {})))
    found = {
        name.rpartition(".")[2]: style
        for name, style in styles.items()
        if name.startswith("model.layers.1.self_attn.") and "norm" in name
    }
    assert found == norms


def test_latent_attention_is_split_by_heads_and_a_mixture_is_left_alone():
    for kind in ("deepseek_v3", "deepseek_v2"):  # with no plan for it, and with one
        model = model_of(kind, first_k_dense_replace=1, num_experts_per_tok=2)
        styles = tp_styles(model)
        assert list(mixtures(model)) == ["model.layers.1.mlp"], kind
        inside = {
            name.removeprefix("model.layers.1."): style
            for name, style in styles.items()
            if name.startswith("model.layers.1.")
        }
        assert inside == {
            f"self_attn.{name}": style
            for name, style in {
                "q_a_proj": PARTIAL,
                "q_a_layernorm": PARTIAL,
                "q_b_proj": "colwise",
                "kv_a_proj_with_mqa": PARTIAL,
                "kv_a_layernorm": PARTIAL,
                "kv_b_proj": "colwise",
                "o_proj": "rowwise",
            }.items()
        }, kind
        assert styles["model.layers.0.mlp.down_proj"] == "rowwise"
        assert not list(style_problems(model, styles))
        dims = {w.name: w.tp_dim for w in model_shape(model).blocks[1].weights}
        assert dims["self_attn.kv_b_proj.weight"] == 0 and dims["self_attn.o_proj.weight"] == 1
        assert {dim for name, dim in dims.items() if name.startswith("mlp.")} == {None}


def test_attention_with_sinks_is_split_by_heads_and_they_with_it():
    model = model_of("gpt_oss")  # its own plan has the output head alone
    styles = tp_styles(model)
    own = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
    assert styles == {
        f"model.layers.{i}.self_attn.{name}": style
        for i in range(2)
        for name, style in {**own, "sinks": "colwise"}.items()
    }
    assert tp_problem(model) == ""
    dims = {w.name: w.tp_dim for w in model_shape(model).blocks[1].weights}
    assert dims["self_attn.sinks"] == 0 and dims["self_attn.o_proj.bias"] is None


def test_a_plan_that_is_missing_or_has_an_unknown_style_is_named():
    model = model_of("qwen2")
    model._tp_plan = {"model.layers.*.mlp.up_proj": "sideways"}
    first, second = style_problems(model, tp_styles(model))
    assert first.startswith(
        "the plan of Qwen2ForCausalLM gives model.layers.0.mlp.up_proj the "
        "style sideways, which is not supported; known: colwise,"
    )
    assert "layers.1" in second and model_shape(model).counts.tp_problem == first
    model = model_of("gpt_neox")
    model._tp_plan = {}
    (problem,) = style_problems(model, tp_styles(model))
    assert problem == "GPTNeoXForCausalLM has no tensor-parallel plan of its own"


def test_a_model_without_a_plan_gets_that_of_the_names_of_its_matrices():
    model = model_of("qwen2")
    own = tp_styles(model)
    model._tp_plan = {}
    assert tp_styles(model) == {name: s for name, s in own.items() if "embed" not in name}
    model.model.layers[1].mlp.mixes = nn.Linear(4, 4, device="meta")
    assert tp_styles(model) == {}  # a matrix that is not known


def test_attention_that_reshapes_by_all_heads_is_not_split():
    assert tp_styles(model_of("stablelm")) == {}
    norms = model_of("stablelm", qk_layernorm=True)  # one per head
    assert tp_styles(norms) == {}


def test_an_activation_with_parameters_has_a_part_of_their_gradient_on_each_rank():
    model = model_of("apertus")
    styles = tp_styles(model)
    assert styles["model.layers.1.mlp.act_fn"] == PARTIAL and tp_problem(model) == ""


def test_experts_and_latent_attention_are_refused_where_tokens_cannot_be_sharded():
    kinds = ["linear_attention", "full_attention"]
    model = model_of("qwen3_moe")
    model.model.layers[1].other = nn.Linear(4, 4, device="meta")
    assert tp_problem(model) == (
        "experts and latent attention need tokens sharded between layers, which cannot be done "
        "with Qwen3MoeForCausalLM: model.layers.1.other is neither attention, MLP nor norm"
    )
    assert tp_problem(model_of("granitemoehybrid", layer_types=kinds)) == ""
    assert tp_problem(model_of("qwen3_next", layer_types=kinds)) == ""
    assert tp_problem(model_of("deepseek_v3")) == ""
    whole = model_of("gpt_neox")  # dense: it has all tokens on every rank, if it has a plan
    whole._tp_plan = {"gpt_neox.layers.*.mlp.dense_h_to_4h": "colwise"}
    assert sequence_parallel.why_not(whole, tp_styles(whole)) != ""
    assert tp_problem(whole) == ""


@pytest.mark.parametrize(
    "kind, says",
    [
        ("stablelm", "StableLmForCausalLM has no tensor-parallel plan of its own"),
        ("gemma3n_text", "module model.layers.0.mlp (Gemma3nTextMLP) drops activations by"),
        ("gptj", "its GPTJAttention is not cut"),
    ],
)
def test_such_models_are_refused_from_their_config_alone(kind, says, tmp_path):
    options = {"activation_sparsity_pattern": [0.95, 0.0]} if kind == "gemma3n_text" else {}
    if kind == "gemma3n_text":
        options |= {"layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 0}
    AutoConfig.for_model(kind, num_hidden_layers=2, **options).save_pretrained(tmp_path)
    problems = fit_problems(config(tmp_path, tmp_path, world_size=2, tp=2))
    (problem,) = [p for p in problems if says in p]
    assert problem.startswith(f"layout.tp: 2 with a {kind}: {says}")
    assert problem.endswith(f"; set layout.tp to 1 (model.path {tmp_path})")


@pytest.mark.parametrize(
    "fields, tp, says",
    [
        (dict(), 4, ""),
        (dict(), 8, ""),  # 2 key/value heads: ranks hold the same ones
        (
            dict(num_attention_heads=6),
            4,
            "does not divide num_attention_heads 6; values that suit the model: 1, 2",
        ),
        (
            dict(num_attention_heads=12, num_key_value_heads=3, intermediate_size=48),
            2,
            "does not divide num_key_value_heads 3, nor is it a multiple; values that suit the "
            "model: 1",
        ),
        (dict(intermediate_size=50), 4, "does not divide intermediate_size 50; values"),
        (
            dict(num_attention_heads=6, intermediate_size=48),
            3,
            "does not divide padded vocab_size 128",
        ),
    ],
)
def test_an_engine_s_ranks_must_divide_what_vllm_cuts(fields, tp, says):
    sizes = dict(num_attention_heads=8, num_key_value_heads=2, intermediate_size=64, vocab_size=104)
    counts = counts_of(model_of("qwen3", **sizes | fields))
    found = list(misfits(counts, Axes("split", tp + 1, inference_tp=tp)))
    assert [text for text in found if says in text] if says else not found, found
    if says:
        assert found[0].startswith(f"layout.inference_tp: {tp} does not divide ")


def test_the_engine_s_ranks_count_where_there_is_an_engine_of_vllm_s(tiny_model, tmp_path):
    cfg = config(tiny_model, tmp_path, world_size=6)
    layout = replace(cfg.layout, placement="colocated", inference_tp=3)
    (problem,) = fit_problems(replace(cfg, layout=layout))
    assert problem.startswith("layout.inference_tp: 3 does not divide num_attention_heads")
    assert fit_problems(replace(cfg, layout=replace(layout, placement="offline"))) == []
