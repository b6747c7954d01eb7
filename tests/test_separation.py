"""Models whose layers would mix packed sequences are refused by name, from config.json alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from built import changed, good
from transformers import AutoConfig, AutoModelForCausalLM

from spmdrl.check.fit import check_fit
from spmdrl.model.separation import leaks

HYBRID = ["linear_attention", "full_attention"]
LEAKING: dict[str, tuple[dict[str, Any], str]] = {
    "mamba2": ({}, "convolution"),
    "qwen3_next": ({"layer_types": HYBRID}, "convolution"),
    "qwen3_5_text": ({"layer_types": HYBRID}, "convolution"),
    "falcon_h1": ({}, "convolution"),
    "nemotron_h": ({}, "convolution"),
    "minimax": ({"layer_types": HYBRID}, "does not attend by"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "convolution"),
    "falcon": ({}, "does not attend by transformers' attention interface"),
    "bloom": ({}, "does not attend by"),
    "gptj": ({}, "does not attend by"),
    "llama4_text": ({"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
    "phimoe": ({"sliding_window": 8}, "sliding_window of 8 stands in the mask argument alone"),
}
APART = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "mistral",
    "mixtral",
    "deepseek_v3",
    "phi3",
    "olmo2",
    "olmoe",
    "glm4",
    "starcoder2",
    "granite",
    "cohere2",
    "exaone4",
    "gpt_oss",
)


def config_of(family: str, **fields: Any) -> Any:
    """Return a family's own configuration with two layers."""
    config = AutoConfig.for_model(family)
    is_given = "layer_types" in fields
    if getattr(config, "layer_types", None) and not is_given and "layer_types" in vars(config):
        fields["layer_types"] = config.layer_types[-2:]
    for name, value in {"num_hidden_layers": 2, **fields}.items():
        if family not in ("falcon_h1", "nemotron_h", "mamba2") or name != "num_hidden_layers":
            setattr(config, name, value)
    return config


def meta_model(family: str, **fields: Any) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(family, **fields))


@pytest.mark.parametrize("family", LEAKING)
def test_what_would_mix_packed_sequences_is_named(family):
    fields, why = LEAKING[family]
    assert why in leaks(meta_model(family, **fields))


@pytest.mark.parametrize("family", APART)
def test_families_that_attend_by_the_interface_alone_are_served(family):
    assert leaks(meta_model(family)) == ""


@pytest.mark.parametrize("field", ["model", "teacher"])
def test_a_run_refuses_such_a_model_before_anything_is_loaded(field, tiny_model, tmp_path):
    AutoConfig.for_model("gptj", n_layer=2, n_embd=32, n_head=2, vocab_size=64).save_pretrained(
        tmp_path
    )
    own = {"path": str(tmp_path)}
    if field == "teacher":
        own = {"path": str(tiny_model), "teacher": str(tmp_path)}
    with pytest.raises(ValueError, match="GPTJForCausalLM is not served: transformer.h.0"):
        check_fit(changed(good(), model=own))
