"""Small models of every family's own code: of the same kinds of layers, and fit to be compared."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from spmdrl.model.first_layers import cut_layers, first_layers
from spmdrl.tools.small_models.families import FAMILIES, family_config
from spmdrl.tools.small_models.shrink import shrunk, tiny_model

TOKENS = torch.arange(3, 63).view(2, 30)


def heads(config) -> tuple[int, int] | None:
    count = getattr(config, "num_attention_heads", None)
    return count and (count, getattr(config, "num_key_value_heads", None) or count)


# One of each kind of attention, mixture and state; that the others' gradients are those of plain
# transformers is in tests/model/test_families.py.
SAMPLE = {
    "qwen3", "gemma2", "gemma3_text", "cohere2", "deepseek_v3", "gpt_oss", "llama4_text",
    "mamba2", "falcon_h1", "qwen3_5_text", "lfm2", "jamba", "gpt2", "phi3+longrope",
}  # fmt: skip


@pytest.mark.parametrize(
    "family", [f if f in SAMPLE else pytest.param(f, marks=pytest.mark.grid) for f in FAMILIES]
)
def test_a_small_model_has_the_kinds_of_layers_and_finite_gradients(family, tmp_path):
    real = family_config(family)
    small = shrunk(real)
    assert type(small) is type(real) and small.tie_word_embeddings == real.tie_word_embeddings
    kinds = getattr(real, "layer_types", None) or []
    assert {*(getattr(small, "layer_types", None) or [])} == {*kinds}
    model = tiny_model(small, tmp_path)
    assert sum(p.numel() for p in model.parameters()) < 20e6
    logits = model(input_ids=TOKENS).logits
    torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()
    ).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert all(g is not None and g.isfinite().all() for g in grads.values())
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(again(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)
        # Tokens before matter: what mixes up sequences shows in the logits.
        changed = torch.cat([TOKENS[:, :-3].flip(1), TOKENS[:, -3:]], dim=1)
        assert (model(input_ids=changed).logits - logits)[:, -1].abs().mean() > 0.02


def test_the_sample_is_of_families():
    assert {*FAMILIES} >= SAMPLE


@pytest.mark.parametrize("family", ["qwen3", "llama", "mixtral", "deepseek_v3", "granite"])
def test_the_ratio_of_heads_is_kept(family):
    real, small = heads(family_config(family)), heads(shrunk(family_config(family)))
    assert real and small and real[0] * small[1] == real[1] * small[0] and small[1] >= 2


def test_odd_counts_of_heads_stay_odd():
    """So that what tensor parallelism refuses of the real model it refuses of the small one."""
    assert shrunk(family_config("falcon")).num_attention_heads % 2 == 1


def test_heads_for_more_ranks_are_kept_on_demand():
    assert shrunk(family_config("llama"), kv_heads=4).num_key_value_heads == 4


def test_blocks_that_count_as_two_layers_are_found():
    real = family_config("longcat_flash")
    assert (shrunk(real).num_layers, first_layers(real).num_layers) == (2, 1)


def test_each_layer_may_have_its_own_number_of_experts():
    kinds = dict(num_hidden_layers=4, num_experts=64, moe_topk=[8, 8, 1, 8])
    real = AutoConfig.for_model("hunyuan_v1_moe", num_key_value_heads=8, head_dim=128, **kinds)
    assert shrunk(real).moe_topk == [2, 2]


def test_a_rare_kind_of_layer_is_kept():
    layers = ["sliding_attention"] * 30 + ["full_attention"]
    real = family_config("gemma3_text").to_dict() | dict(num_hidden_layers=31, layer_types=layers)
    small = shrunk(type(family_config("gemma3_text")).from_dict(real))
    assert small.layer_types == ["sliding_attention"] * 2 + ["full_attention"]
    assert small.sliding_window == 8
    assert (
        shrunk(family_config("deepseek_v3")).num_hidden_layers == 5
    )  # three dense, two of experts


def test_pretrained_lengths_shrink_by_one_factor():
    rope = shrunk(family_config("deepseek_v3")).rope_parameters
    assert shrunk(family_config("deepseek_v3")).max_position_embeddings == 40 * 16
    assert rope["original_max_position_embeddings"] == 16 and rope["factor"] == 40


@pytest.mark.parametrize(
    ("family", "layers", "names"),
    [
        ("mamba2", 2, ["time_step_limit"]),
        ("falcon_h1", 2, ["time_step_limit", "mlp_multipliers"]),
        ("falcon_h1", 5, ["ssm_multipliers"]),
    ],
)
def test_a_list_that_is_as_long_as_there_are_layers_by_chance_is_not_cut(family, layers, names):
    config = shrunk(family_config(family))
    config.num_hidden_layers = layers
    small = first_layers(config)
    assert small.num_hidden_layers == 1
    for name in names:
        assert list(getattr(small, name)) == list(getattr(config, name))
    model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval()
    assert model(input_ids=TOKENS).logits.isfinite().all()


def test_lists_of_layers_and_of_their_numbers_are_cut():
    config = family_config("qwen2_moe")
    fields = config.to_dict() | dict(num_hidden_layers=4, mlp_only_layers=[1, 3])
    config = type(config).from_dict(fields | dict(layer_types=["full_attention"] * 4))
    cut = cut_layers(config, layers=4, chosen=[0, 1, 2])
    assert cut["mlp_only_layers"] == [1] and cut["layer_types"] == ["full_attention"] * 3
    assert cut["num_hidden_layers"] == 3
