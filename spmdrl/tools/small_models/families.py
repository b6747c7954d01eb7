"""Families of transformers that are checked by name.

Each has what a released model's config says and its class's defaults do not, as far as its small
model (shrink.py) differs by it: sizes that are made small anyway are left out.
"""

from __future__ import annotations

from typing import Any

_LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
_YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=40,
    mscale=1.0,
    mscale_all_dim=1.0,
    beta_fast=32,
    beta_slow=1,
    original_max_position_embeddings=4096,
)
_LONGROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    short_factor=[1.0 + 0.01 * i for i in range(48)],
    long_factor=[1.0 + 0.9 * i for i in range(48)],
    original_max_position_embeddings=4096,
)
_GRANITE = dict(
    embedding_multiplier=12.0,
    logits_scaling=16.0,
    residual_multiplier=0.22,
    attention_multiplier=0.0078125,
    num_key_value_heads=8,
    tie_word_embeddings=True,
)
_LFM2 = "conv conv full conv conv full conv conv full conv full conv full conv full conv"
_SLIDING = "sliding_attention"
_FULL = "full_attention"

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": dict(
        hidden_size=1536, num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=True
    ),
    "qwen2_moe": {},
    "qwen3": dict(
        hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=True
    ),
    "qwen3_moe": dict(head_dim=128),
    "qwen3_next": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "llama": dict(
        hidden_size=2048,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        rope_parameters=_LLAMA3,
    ),
    "llama4_text": {},
    "mistral": {},
    "ministral": dict(
        num_hidden_layers=36, head_dim=128, layer_types=[_FULL, _SLIDING, _SLIDING, _SLIDING] * 9
    ),
    "ministral3": {},
    "mixtral": {},
    "gemma2": {},
    "gemma3_text": {},
    "gemma3n_text": {},
    "gemma4_text": {},
    "phi": {},
    "phi3": dict(sliding_window=2047),
    "phimoe": dict(sliding_window=2047, lm_head_bias=True, attention_bias=True),
    "olmo2": {},
    "olmo3": {},
    "olmoe": {},
    "glm4": {},
    "glm4_moe": dict(head_dim=128, attention_bias=True),
    "starcoder2": dict(sliding_window=4096),
    "granite": _GRANITE,
    "granitemoe": _GRANITE | dict(hidden_size=1536, num_attention_heads=24),
    "granitemoehybrid": _GRANITE
    | dict(
        hidden_size=1536,
        num_attention_heads=12,
        num_key_value_heads=4,
        num_hidden_layers=40,
        layer_types=["full_attention" if i % 10 == 5 else "linear_attention" for i in range(40)],
        position_embedding_type="nope",
    ),
    "cohere2": dict(num_attention_heads=32, num_key_value_heads=8),
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": dict(num_key_value_heads=8),
    "apertus": dict(num_key_value_heads=8),
    "smollm3": {},
    "seed_oss": {},
    "hunyuan_v1_dense": dict(
        hidden_size=2048,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        tie_word_embeddings=True,
    ),
    "hunyuan_v1_moe": dict(
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        num_experts=64,
        moe_topk=8,
        tie_word_embeddings=True,
    ),
    "gpt_oss": {},
    "deepseek_v2": dict(
        hidden_size=2048,
        num_attention_heads=16,
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        max_position_embeddings=163840,
        rope_parameters=_YARN | dict(mscale=0.707, mscale_all_dim=0.707),
    ),
    "deepseek_v3": dict(
        # vLLM reads both from config.json, transformers neither.
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        max_position_embeddings=163840,
        rope_parameters=_YARN,
    ),
    "deepseek_v32": dict(rope_parameters=_YARN, topk_method="noaux_tc", scoring_func="sigmoid"),
    "glm_moe_dsa": {},
    "hy_v4": {},
    "minimax_m2": dict(rotary_dim=64),
    "mamba2": {},
    "nemotron_h": {},
    "falcon_h1": dict(
        embedding_multiplier=5.656854249492381,
        lm_head_multiplier=0.0390625,
        key_multiplier=0.390625,
        mlp_multipliers=[0.8838834764831845, 0.5859375],
        ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        attention_out_multiplier=0.9375,
        ssm_in_multiplier=1.25,
        ssm_out_multiplier=0.23570226039551587,
    ),
    "jamba": {},
    "lfm2": dict(
        num_hidden_layers=16,
        layer_types=[kind.replace("full", "full_attention") for kind in _LFM2.split()],
    ),
    "gpt2": {},
    "gpt_neox": {},
    "stablelm": dict(use_qkv_bias=True),
    "nemotron": dict(num_key_value_heads=8),
    "falcon": {},
    "bloom": {},
    "gptj": {},
    "codegen": {},
    "mpt": {},
    "olmo": dict(tie_word_embeddings=True),
    "nanochat": {},
    "afmoe": {},
    "jetmoe": {},
    "youtu": {},
    "mamba": {},
    "falcon_mamba": {},
    "recurrent_gemma": {},
    "kimi_linear": {},
    "minimax": dict(head_dim=128),
    "bamba": dict(attn_layer_indices=[9, 18, 27]),
    "dots1": dict(
        hidden_size=4096,
        n_routed_experts=128,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    ),
    "glm4_moe_lite": {},
    "lfm2_moe": dict(
        num_hidden_layers=24,
        layer_types=[_FULL if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
    ),
    "olmo_hybrid": {},
    # Settings that released models have and the class's own do not.
    "falcon+new": dict(
        new_decoder_architecture=True, hidden_size=8192, num_attention_heads=128, num_kv_heads=8
    ),
    "falcon+sequential": dict(multi_query=False, parallel_attn=False, bias=True),
    "falcon+alibi": dict(alibi=True, multi_query=False, parallel_attn=False, bias=True),
    "olmo+clip": dict(clip_qkv=8.0),
    "stablelm+norms": dict(qk_layernorm=True, use_parallel_residual=True),
    "qwen2_moe+window": dict(use_sliding_window=True, max_window_layers=12),
    "phi3+longrope": dict(max_position_embeddings=131072, rope_parameters=_LONGROPE),
    "gemma4_text+moe": dict(
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        num_global_key_value_heads=2,
    ),
    "gemma4_text+shared": dict(num_kv_shared_layers=18, use_double_wide_mlp=True),
}
"""{model type: fields that differ from its class's defaults}; a name may end with `+VARIANT`."""

WITH_TOWERS: dict[str, dict[str, Any]] = {
    "gemma3": {},
    "glm4v": dict(
        text_config=dict(
            rope_parameters=dict(
                rope_type="default",
                rope_theta=10000.0,
                mrope_section=[8, 12, 12],
                partial_rotary_factor=0.5,
            )
        )
    ),
    "internvl": dict(
        text_config=dict(
            model_type="qwen2", hidden_size=3584, num_attention_heads=28, num_key_value_heads=4
        ),
        tie_word_embeddings=False,
    ),
    "qwen2_5_vl": {},
    "qwen2_vl": {},
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "qwen3_vl": dict(text_config=dict(num_key_value_heads=8)),
    "qwen3_vl_moe": dict(
        text_config=dict(
            num_attention_heads=32, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8
        )
    ),
}
"""The same of models that see."""


def family_names() -> tuple[str, ...]:
    """Return the families of the table."""
    return (*FAMILIES, *WITH_TOWERS)


def family_config(family: str) -> Any:
    """Return the transformers config of a family of the table, or of any other by its defaults.

    Raises: Refusal for a model type that transformers does not know.
    """
    from transformers import AutoConfig

    fields = {**FAMILIES, **WITH_TOWERS}.get(family, {})
    return AutoConfig.for_model(family.partition("+")[0], **fields)
