"""Make a small model of the same code as a large one: a smaller config and random weights.

Everything that decides which code runs is kept: each kind of layer, the ratio of heads to key/value
heads, ties, norms, biases, caps, kinds of rotary embedding. Widths, counts and windows become
small, so that a CPU computes the model in milliseconds, and a hundred tokens exceed every window
and chunk.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spmdrl.errors import Refusal
from spmdrl.model.first_layers import config_of, cut_layers, layer_kinds, place_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NOISE = 0.1
"""Standard deviation of the noise that is added to norms, biases and sinks."""


def shrunk(config: Any, *, kv_heads: int = 2) -> Any:
    """Return the config of a small text model of the same code.

    Args:
        config: a transformers config; of one with a tower, the text part's is taken.
        kv_heads: key/value heads to keep where the real count is a multiple of it, for tensor
            parallelism of that many ranks; twice as many where each query head has its own.
    Returns: another config of the same class, float32, without quantisation.
    Raises: Refusal if the small model has other kinds of layers.
    """
    config = config.get_text_config()
    fields = small_fields(config, kv_heads=kv_heads)
    whole = config_of(config, fields)
    kinds = layer_kinds(whole)
    for chosen in (_chosen(kinds), _prefix(kinds)):
        small = config_of(config, cut_layers(whole, layers=len(kinds), chosen=chosen))
        if layer_kinds(small) == [kinds[i] for i in chosen]:
            return small
    raise Refusal(
        f"{config.model_type}: a small model of layers {_prefix(kinds)} has layers of other kinds "
        "than these; say in tools/small_models/shrink.py how its config names them"
    )


def tiny_model(config: Any, folder: Path, *, seed: int = 0) -> PreTrainedModel:
    """Write random weights of a config and a tokenizer of characters into a folder.

    Linear weights have the standard deviation hidden_size ** -0.5, so that attention and experts
    depend on tokens. Norms, biases, sinks and routers' biases differ from element to element.
    Decays and time steps of layers with state are the model's own.

    Args:
        config: of `shrunk`, or any other with at least 104 tokens.
        seed: the same seed gives the same bytes.
    Returns: the model as transformers holds it: float32, in evaluation mode.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    from spmdrl.tools.small_models.character_tokenizer import character_tokenizer

    words = character_tokenizer(chat_template=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _shake(model)
    model.generation_config = GenerationConfig(
        pad_token_id=words.pad_token_id, eos_token_id=words.eos_token_id
    )
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return model.eval()


def _shake(model: nn.Module) -> None:
    """Add noise to tensors that start with equal elements."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    saved = model.state_dict().keys()
    for name, tensor in tensors.items():
        is_vector = tensor.dim() == 1 or "bias" in name
        # Decays and time steps need their own values.
        is_state = name.rpartition(".")[2] in ("A_log", "dt_bias", "D")
        if name in saved and is_vector and tensor.is_floating_point() and not is_state:
            tensor.data += NOISE * torch.randn_like(tensor)


def _chosen(kinds: Sequence[Hashable]) -> list[int]:
    """Return the first two layers of each kind; one of each if there are many kinds."""
    each = 2 if 2 * len(set(kinds)) <= MAX_LAYERS else 1
    return [i for i, kind in enumerate(kinds) if kinds[:i].count(kind) < each]


def _prefix(kinds: Sequence[Hashable]) -> list[int]:
    """Return the first layers, up to the second of each kind, or to the first if that is too
    long."""
    ends = {each: 1 + max(place_of(kinds, kind, each) for kind in set(kinds)) for each in (1, 2)}
    return [*range(ends[2] if ends[2] <= MAX_LAYERS else max(ends[1], math.gcd(2, len(kinds))))]


MAX_LAYERS = 8
"""Layers of a small model, unless it needs more for one of each kind."""
VOCABULARY = 104  # tokens of tools/small_models/character_tokenizer.py
HEAD_DIM = 32  # the smallest that vLLM's attention on CPUs has
POSITIONS = 512  # tokens
WINDOW = 8  # tokens
CHUNK = 32  # tokens of a chunk of attention: vLLM's must be whole pages
EXPERTS = 8

_ORIGINAL = "original_max_position_embeddings"
_DROPPED = {"quantization_config", "torch_dtype", "dtype", "transformers_version", "_name_or_path"}
_INTERMEDIATE = re.compile(r"intermediate_size|ffn_hidden_size|^n_inner$|^ffn_dim$")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
_FIXED: dict[str, Any] = {
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "attention_chunk_size": CHUNK,
    "window_size": WINDOW,
    "floor_scale": WINDOW,  # of Llama 4's temperature, which grows by the position
    "block_size": WINDOW,  # of lightning attention
    # Layers with state
    "chunk_size": 16,
    "mamba_chunk_size": 16,
    "state_size": 16,
    "ssm_state_size": 16,
    "mamba_d_state": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_n_heads": 8,
    "time_step_rank": 8,
    "mamba_dt_rank": 8,
    "linear_num_key_heads": 2,
    "linear_num_heads": 2,
    # Latent attention; of it and of linear attention, kernels know the real sizes alone
    "q_lora_rank": 2 * HEAD_DIM,
    "qk_nope_head_dim": HEAD_DIM,
    "v_head_dim": HEAD_DIM,
    # Indexers and compressors, which choose keys
    "index_topk": WINDOW,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    # Gemma 3n and 4
    "laurel_rank": 16,
    "hidden_size_per_layer_input": HEAD_DIM,
    "vocab_size_per_layer_input": VOCABULARY,
    # What a feed-forward width is rounded to
    "block_multiple_of": 16,
    "num_nextn_predict_layers": 0,  # heads of further tokens, which are not trained
}
# Different from 1 and head_dim ** -0.5, but not so small that attention or logits vanish.
_SCALES: dict[str, float] = {
    "logit_scale": 0.5,
    "logits_scaling": 2.0,
    "lm_head_multiplier": 0.5,
    "attention_multiplier": 0.25,
}
_GROUPS = ("n_groups", "mamba_n_groups")  # of layers with state


def small_fields(config: Any, *, kv_heads: int) -> dict[str, Any]:
    """Return the fields of a config with all of its layers, each of them small.

    Args:
        kv_heads: see `shrunk`.
    """
    own = config.attribute_map
    fields = {n: v for n, v in config.to_dict().items() if n not in _DROPPED}
    common = fields | {name: fields.get(other) for name, other in own.items()}
    heads = _heads(common, kv_heads=kv_heads)
    hidden = heads["hidden_size"]
    fields |= {n: value for n, value in _FIXED.items() if fields.get(n)}
    fields |= {n: value for n, value in _SCALES.items() if fields.get(n, 1) not in (1, None)}
    fields |= {n: math.gcd(fields[n], 2) for n in _GROUPS if fields.get(n)}
    fields |= _tokens(fields) | {own.get(name, name): value for name, value in heads.items()}
    fields |= _widths(fields, hidden=hidden, scale=hidden / common["hidden_size"])
    fields |= _state_sizes(fields, config=config, hidden=hidden)
    fields |= _experts(fields) | _positions(fields, common=common)
    if fields.get("per_layer_config"):
        fields["per_layer_config"] = _layers_own(common, heads=heads)
    return fields | {"dtype": "float32", "initializer_range": hidden**-0.5}


def _tokens(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a small vocabulary, divisible by what the real one is, and ids inside of it."""
    found: dict[str, Any] = {"vocab_size": VOCABULARY + fields["vocab_size"] % 8}
    own = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for name in fields:
        if name.endswith(("_token_id", "_token_index")) and fields[name] is not None:
            found[name] = own.get(name, 3)
    return found


def _heads(common: Mapping[str, Any], *, kv_heads: int) -> dict[str, Any]:
    """Return few heads in the real ratio, and the width of the residual stream that they make.

    Args:
        common: the real fields, by the names that most classes have.
    """
    heads = common.get("num_attention_heads")
    hidden = common["hidden_size"]
    if not heads:
        return {"hidden_size": 2 * HEAD_DIM}
    kv_name = next((n for n in ("num_key_value_heads", "num_kv_heads") if common.get(n)), "")
    kept = common.get(kv_name, heads)
    ratio = max(heads // kept, 1)
    count = math.gcd(kept, kv_heads * (2 if ratio == 1 else 1))
    count = min(kept, 3) if count == 1 else count
    ratio = min(ratio, 8 if ratio % 2 == 0 else 7)
    found = {"num_attention_heads": ratio * count} | ({kv_name: count} if kv_name else {})
    head_dim = common.get("head_dim") or hidden // heads
    wide = hidden * ratio * count * HEAD_DIM / (heads * head_dim)
    if "qk_rope_head_dim" in common:  # latent attention, whose heads make no width
        wide = 4 * HEAD_DIM
        found["qk_head_dim"] = HEAD_DIM + common["qk_rope_head_dim"]
    if common.get("head_dim"):
        is_rotary = common.get("kv_lora_rank") and head_dim == common["qk_rope_head_dim"]
        found["head_dim"] = head_dim if is_rotary else HEAD_DIM
    return found | {"hidden_size": max(2 * HEAD_DIM, HEAD_DIM * round(wide / HEAD_DIM))}


def _layers_own(common: Mapping[str, Any], *, heads: Mapping[str, int]) -> dict[str, Any]:
    """Return what layers have of their own, smaller by what the whole model's is."""
    return {
        layer: own | {n: max(v * heads[n] // common[n], 1) for n, v in own.items() if n in heads}
        for layer, own in common["per_layer_config"].items()
    }


def _widths(fields: Mapping[str, Any], *, hidden: int, scale: float) -> dict[str, Any]:
    def small(width: int) -> int:
        return min(max(HEAD_DIM, HEAD_DIM * round(width * scale / HEAD_DIM)), hidden)

    found: dict[str, Any] = {}
    for name, value in fields.items():
        if _INTERMEDIATE.search(name) and value:
            found[name] = [*map(small, value)] if isinstance(value, list) else small(value)
    return found


def _state_sizes(fields: Mapping[str, Any], *, config: Any, hidden: int) -> dict[str, Any]:
    """Return the head sizes of layers with state, which follow from the width."""
    found: dict[str, Any] = {}
    if fields.get("mamba_d_ssm"):
        found |= {"mamba_d_ssm": 128, "mamba_d_head": 16}
    elif fields.get("mamba_d_head"):
        found["mamba_d_head"] = fields["mamba_expand"] * hidden // fields["mamba_n_heads"]
    elif "state_size" in fields and "num_heads" in fields:  # Mamba 2 alone
        found |= {"num_heads": 8, "head_dim": fields["expand"] * hidden // 8}
    if fields.get("linear_num_value_heads"):
        ratio = config.linear_num_value_heads // config.linear_num_key_heads
        found["linear_num_value_heads"] = 2 * ratio
    return found


def _experts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return few experts in at most two groups, two of which serve a token."""
    found: dict[str, Any] = {}
    for name in _EXPERTS:
        if (fields.get(name) or 0) > 1:
            found[name] = EXPERTS
    if fields.get("zero_expert_num"):
        found["zero_expert_num"] = EXPERTS // 2
    for name in _TOP_K:
        if isinstance(fields.get(name), list):  # one for each layer
            found[name] = [min(count, 2) for count in fields[name]]
        elif fields.get(name):
            found[name] = min(fields[name], 2)
    if (fields.get("n_group") or 1) > 1:
        found |= {"n_group": 2, "topk_group": 1}
    return found


def _positions(fields: Mapping[str, Any], *, common: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary settings of small heads, and lengths in the real ratio to those pretrained."""
    ropes = [fields[n] for n in ("rope_parameters", "rope_scaling") if fields.get(n)]
    pretrained = _found(ropes, _ORIGINAL)
    pretrained += [fields[_ORIGINAL]] if fields.get(_ORIGINAL) else []
    ratio = max((common.get("max_position_embeddings") or 1) // min(pretrained, default=1), 1)
    # Rotary frequencies of these kinds change with a row's longest sequence, where runs stay below.
    is_dynamic = {*_found(ropes, "rope_type"), *_found(ropes, "type")} & {"dynamic", "longrope"}
    original = max(POSITIONS // 4 if is_dynamic else 2 * WINDOW, POSITIONS // ratio)
    lengths = {_ORIGINAL: original, "max_position_embeddings": original * ratio}
    if not pretrained:
        lengths = {"max_position_embeddings": POSITIONS}
    lengths["n_positions"] = lengths["max_seq_len"] = lengths["max_position_embeddings"]
    found: dict[str, Any] = {n: v for n, v in lengths.items() if fields.get(n)}
    head_dim = fields.get("qk_rope_head_dim") or HEAD_DIM
    for name in ("rope_parameters", "rope_scaling"):
        if fields.get(name):
            found[name] = _small_rope(fields[name], lengths=lengths, head_dim=head_dim)
    if fields.get("rotary_dim"):
        found["rotary_dim"] = HEAD_DIM // 2
    if fields.get("query_pre_attn_scalar") and common.get("head_dim"):
        scalar = fields["query_pre_attn_scalar"] * HEAD_DIM / common["head_dim"]
        found["query_pre_attn_scalar"] = type(fields["query_pre_attn_scalar"])(scalar)
    return found


def _found(rope: Any, name: str) -> list[Any]:
    """Return what a nested field is, wherever it stands."""
    if isinstance(rope, list):
        return [found for one in rope for found in _found(one, name)]
    if not isinstance(rope, Mapping):
        return []
    own = [rope[name]] if rope.get(name) else []
    return own + [found for value in rope.values() for found in _found(value, name)]


def _small_rope(rope: Any, *, lengths: Mapping[str, int], head_dim: int) -> Any:
    if not isinstance(rope, Mapping):
        return rope
    small = {n: _small_rope(v, lengths=lengths, head_dim=head_dim) for n, v in rope.items()}
    small |= {name: length for name, length in lengths.items() if small.get(name)}
    pairs = int(head_dim * small.get("partial_rotary_factor", 1.0)) // 2
    small |= {n: small[n][:pairs] for n in ("short_factor", "long_factor") if n in small}
    if section := small.get("mrope_section"):
        others = [pairs * part // sum(section) for part in section[1:]]
        small["mrope_section"] = [pairs - sum(others), *others]
    return small
