"""How packed sequences are kept apart is read off config.json alone, or the model is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from spmdrl.check.fit import check_fit
from spmdrl.model.attention.mask_patterns import MaskPattern, Other, visible
from spmdrl.model.attention.packing import make_packing
from spmdrl.model.attention.packing_support import _by_rows, enable_packing, packing_support
from spmdrl.model.blocks import blocks
from tests.helpers.built import changed, good

CPU = torch.device("cpu")
HYBRID = ["linear_attention", "full_attention"]
SLIDING = ["sliding_attention", "full_attention"]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "falcon": ({"alibi": True}, "computes with the causal mask (.ndim) before its layers get it"),
    "xlm": ({"n_layers": 2}, "transformer.ffns.0 (Linear, Linear, GELUActivation) has no part"),
    "doge": ({}, "self_attn attends by a mask of its own, attn_mask"),
    "bert": ({}, "it asks for a mask that is neither causal, a window nor chunks"),
    "cpmant": ({}, "its code does not run without its weights (modeling_cpmant.py:"),
}
SEEN: dict[str, tuple[dict[str, Any], list[MaskPattern]]] = {
    "llama": ({}, [MaskPattern(), MaskPattern()]),
    "gpt_oss": (
        {"layer_types": SLIDING, "sliding_window": 8},
        [MaskPattern(window=8), MaskPattern()],
    ),
    "qwen3_moe": ({}, [MaskPattern(), MaskPattern()]),
    "deepseek_v3": ({}, [MaskPattern(), MaskPattern()]),
    "mistral": ({"sliding_window": 8}, [MaskPattern(window=8), MaskPattern(window=8)]),
    "phimoe": ({"sliding_window": 8}, [MaskPattern(window=8), MaskPattern(window=8)]),
    "gemma2": (
        {"layer_types": SLIDING, "sliding_window": 8},
        [MaskPattern(window=8), MaskPattern()],
    ),
    "cohere2": (
        {"layer_types": SLIDING, "sliding_window": 8},
        [MaskPattern(window=8), MaskPattern()],
    ),
    "llama4_text": (
        {
            "layer_types": ["chunked_attention", "full_attention"],
            "attention_chunk_size": 8,
            "no_rope_layers": [1, 0],
        },
        [MaskPattern(chunk=8), MaskPattern()],
    ),
}
STATES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "mamba2": ({}, ["Mamba2Mixer", "Mamba2Mixer"]),
    "qwen3_next": ({"layer_types": HYBRID}, ["Qwen3NextGatedDeltaNet"]),
    "qwen3_5_text": ({"layer_types": HYBRID}, ["Qwen3_5GatedDeltaNet"]),
    "falcon_h1": ({}, ["FalconH1Mixer", "FalconH1Mixer"]),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, ["Lfm2ShortConv"]),
    "bamba": ({"attn_layer_indices": [1]}, ["BambaMixer"]),  # its blocks give pairs
    "minimax": ({"layer_types": HYBRID}, ["MiniMaxLightningAttention"]),
    "mamba": ({}, ["MambaMixer", "MambaMixer"]),
    "kimi_linear": ({"layer_types": HYBRID}, ["KimiLinearDeltaAttention"]),
    "recurrent_gemma": (
        {"block_types": ["recurrent", "attention"]},
        ["RecurrentGemmaRecurrentBlock"],
    ),
}
MIXERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "falcon": ({}, ["FalconAttention", "FalconAttention"]),
    "gptj": ({}, ["GPTJAttention", "GPTJAttention"]),
    "mpt": ({}, ["MptAttention", "MptAttention"]),
    "glm_moe_dsa": ({}, ["GlmMoeDsaAttention", "GlmMoeDsaAttention"]),
}


def config_of(family: str, **fields: Any) -> Any:
    """Return a family's own configuration with two layers."""
    config = AutoConfig.for_model(family)
    for name, value in {"num_hidden_layers": 2, **fields}.items():
        setattr(config, name, value)
    return config


def meta_model(family: str, **fields: Any) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(family, **fields))


@pytest.mark.parametrize("family", REFUSED)
def test_what_would_mix_packed_sequences_is_named(family):
    fields, why = REFUSED[family]
    model = meta_model(family, **fields)
    assert why in packing_support(model).reasons[0]
    with pytest.raises(ValueError, match=f"{type(model).__name__} is not served"):
        enable_packing(model)


@pytest.mark.parametrize("family", SEEN)
def test_windows_and_chunks_are_those_that_the_model_asks_for(family):
    fields, spans = SEEN[family]
    model = meta_model(family, **fields)
    attention = model.config._attn_implementation
    forwards = [vars(module).get("forward") for module in model.modules()]
    found = packing_support(model)
    assert not found.reasons and not found.mixers
    assert list(found.mask_patterns.values()) == spans
    scaled = ["model.layers.1.self_attn"] if family == "llama4_text" else []
    assert list(found.temperatures) == scaled
    assert bool(found.unshared) == any(own.chunk for own in spans)
    # The model is as it was.
    assert [vars(module).get("forward") for module in model.modules()] == forwards
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("family", MIXERS)
def test_layers_that_are_no_attention_compute_one_sequence_per_row(family):
    fields, kinds = MIXERS[family]
    model = meta_model(family, **fields)
    found = packing_support(model)
    assert not found.reasons
    names = [name for own in found.mixers.values() for name in own]
    assert [type(model.get_submodule(name)).__name__ for name in names] == kinds
    assert found.unshared == f"{names[0]} computes one sequence per row"
    assert not found.states


@pytest.mark.parametrize("family", STATES)
def test_layers_with_a_state_clear_it_where_a_sequence_begins(family):
    fields, kinds = STATES[family]
    model = meta_model(family, **fields)
    found = packing_support(model)
    assert not found.reasons and not found.mixers
    names = [name for own in found.states.values() for name in own]
    assert [type(model.get_submodule(name)).__name__ for name in names] == kinds
    assert not found.unshared


def test_attention_by_code_of_its_own_is_given_the_mask_and_biases_that_its_model_makes():
    falcon, bloom, mpt = (
        next(iter(packing_support(meta_model(family)).own_attention.values()))
        for family in ("falcon", "bloom", "mpt")
    )
    assert (falcon.biases, bloom.biases, mpt.biases) == ((), ("alibi",), ())  # MPT's cuts its own
    like = torch.zeros(1, dtype=torch.bfloat16)
    least = torch.finfo(torch.bfloat16).min
    assert falcon.mask(2, like=like).tolist() == [[[[0.0, least], [0.0, 0.0]]]]
    assert mpt.mask(2, like=like).tolist() == [[[[False, True], [False, False]]]]


@pytest.mark.parametrize(
    "given", [{"attention_mask": {"full": MaskPattern()}}, {"mask": MaskPattern()}]
)
def test_masks_that_come_otherwise_are_refused(given, monkeypatch):
    model = meta_model("llama")
    inputs = {name: {"packing": 0, **given} for name in blocks(model)}
    monkeypatch.setattr(f"{packing_support.__module__}.block_inputs", lambda _: inputs)
    (reason, *_) = packing_support(model).reasons
    assert reason == "model.layers.0 is given masks otherwise than as attention_mask"


def test_blocks_that_hand_on_more_than_hidden_states_are_refused(monkeypatch):
    model = meta_model("llama")
    inputs = {name: {"packing": 0, "states": (Other(),)} for name in blocks(model)}
    monkeypatch.setattr(f"{packing_support.__module__}.block_inputs", lambda _: inputs)
    (reason, *_) = packing_support(model).reasons
    assert "is given more by the block before it than hidden states: states" in reason


class _WithState(torch.nn.Module):
    """A layer that returns running sums of tokens, and the state after the last of them."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        summed = hidden_states.cumsum(1)
        return summed, summed[:, -1]


def test_only_the_first_output_of_a_layer_comes_back_from_padded_rows():
    layer = _WithState()
    layer.packing_arguments = {"packing": make_packing([3, 100, 5], CPU, padded=True)}
    states = torch.randn(1, 108, 4, dtype=torch.float64)
    out, state = _by_rows(layer, layer.forward, states, attention=None)
    parts = [part.cumsum(1) for part in states.split([3, 100, 5], dim=1)]
    torch.testing.assert_close(out, torch.cat(parts, dim=1))
    assert state is None


class _Choosing(torch.nn.Module):
    """A layer that chooses the first key of each token, or takes the choice of another layer."""

    def forward(
        self, hidden_states: torch.Tensor, indices: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if indices is None:
            indices = torch.zeros(*hidden_states.shape[:2], 1, dtype=torch.int32)
        chosen = indices.long().expand(-1, -1, hidden_states.shape[-1])
        return hidden_states.gather(1, chosen), indices + 1


def test_a_later_layer_gets_the_keys_that_an_indexer_chose_in_each_sequence():
    layer = _Choosing()
    layer.packing_arguments = {"packing": make_packing([3, 100, 5], CPU, padded=True)}
    states = torch.randn(1, 108, 4, dtype=torch.float64)
    firsts, choices = _by_rows(layer, layer.forward, states, attention=None)
    seconds, _ = _by_rows(layer, layer.forward, states, attention=None, indices=choices)
    for place, found in enumerate((firsts, seconds)):
        parts = [part[:, place, None].expand_as(part) for part in states.split([3, 100, 5], 1)]
        assert torch.equal(found, torch.cat(parts, dim=1))


def test_what_a_token_sees_is_counted_from_the_sequences_first():
    at = torch.arange(7)
    assert visible(at[5:6], at, MaskPattern()).tolist() == [[True] * 6 + [False]]
    assert visible(at[5:6], at, MaskPattern(window=2)).tolist() == [
        [False] * 4 + [True] * 2 + [False]
    ]
    assert visible(at[5:6], at, MaskPattern(chunk=4)).tolist() == [
        [False] * 4 + [True] * 2 + [False]
    ]
    assert visible(at[3:4], at, MaskPattern(chunk=4)).tolist() == [[True] * 4 + [False] * 3]


@pytest.mark.parametrize("field", ["model", "teacher"])
def test_a_run_refuses_such_a_model_before_anything_is_loaded(field, tiny_model, tmp_path):
    sizes = dict(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=32)
    AutoConfig.for_model("doge", vocab_size=64, **sizes).save_pretrained(tmp_path)
    own = {"path": str(tmp_path)}
    if field == "teacher":
        own = {"path": str(tiny_model), "teacher": str(tmp_path)}
    with pytest.raises(ValueError, match="DogeForCausalLM is not served: model.layers.0"):
        check_fit(changed(good(), model=own))


def test_rotary_frequencies_that_change_with_the_longest_sequence_of_a_row_are_refused(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    rope |= {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}  # one of each pair
    sizes = dict(original_max_position_embeddings=64)
    sizes |= dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1)
    AutoConfig.for_model(
        "phi3", **sizes, intermediate_size=32, vocab_size=64, rope_parameters=rope, pad_token_id=0
    ).save_pretrained(tmp_path)
    cfg = changed(good(), model={"path": str(tmp_path)}, sampling={"max_response_tokens": 32})
    with pytest.raises(ValueError, match="longrope.*change for a whole row.*take at most 64"):
        check_fit(changed(cfg, data={"max_prompt_tokens": 33}))
    with pytest.raises(ValueError, match="has neither model.safetensors"):  # nothing else is wrong
        check_fit(changed(cfg, data={"max_prompt_tokens": 32}))
