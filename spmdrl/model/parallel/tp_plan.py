"""The tensor-parallel style of each part of a model.

Most of transformers' models have a plan of their own, {name pattern: style}; a model without one
gets it where the names of all its matrices are known. Three things are added: latent attention
(DeepSeek's) and attention with sinks (GPT-OSS's), of which some plans say nothing, are split by
heads; so are norms of queries and keys by head, which some plans forget. Mixtures of experts and
layers with a state are left alone, since each rank computes them for its own tokens. A model of
these alone needs no plan.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from spmdrl.model.attention.state_layers import supports_packed_states
from spmdrl.model.blocks import blocks, is_latent, mixtures
from spmdrl.model.transformers_internals import tp_plan

PARTIAL = "replicated_with_grad_allreduce"
"""Style of a module that is whole on every rank and computes own heads only. The gradients of the
ranks are added up."""
SPLIT_DIMS: dict[str, int | None] = {
    "colwise": 0,
    "colwise_gather_output": 0,
    "embedding_rowwise": 0,
    "rowwise": 1,
    "rowwise_split_input": 1,
    PARTIAL: None,
}
"""Dim of a weight that each style shards; None: none."""
_LATENT = {"q_proj": "colwise", "q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
"""Of latent attention's parts; the others make what all heads share (arXiv 2405.04434, 2.1)."""
_WITH_SINKS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "sinks"), "colwise") | {
    "o_proj": "rowwise"
}
"""Of attention that has these parts and no others."""


def tp_styles(hf_model: nn.Module) -> dict[str, str]:
    """Return {name: style} of a transformers model's modules and parameters that have one.

    The output head has none here: whether it is split depends on whether it is the embedding.
    """
    own = tp_plan(hf_model)
    if not any("*" in pattern for pattern in own):  # at most of the head
        own |= _plan_by_names(hf_model)
    added = {**_norms_plan(hf_model, own), **_activations_plan(hf_model, own)}
    plan = {**added, **_sinks_plan(hf_model), **own, **_latent_plan(hf_model)}
    head = hf_model.get_output_embeddings()
    inside = tuple(f"{name}." for name in of_own_tokens(hf_model))
    places = [n for n, m in hf_model.named_modules() if m is not head]
    places += [n for n, _ in hf_model.named_parameters()]
    return {
        name: plan[_pattern(name)]
        for name in places
        if _pattern(name) in plan and not name.startswith(inside)
    }


def of_own_tokens(hf_model: nn.Module) -> set[str]:
    """Return the names of modules that each rank computes whole, for its own tokens: mixtures,
    layers with a state, and MLPs whose gate and up projection are one matrix (Granite 4)."""
    found = {name for name, part in hf_model.named_modules() if supports_packed_states(part)}
    for place, block in blocks(hf_model).items():
        found |= {f"{place}.{name}" for name, _ in block.named_children() if name == "shared_mlp"}
    return found | {*mixtures(hf_model)}


_BY_NAME = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3"), "colwise"),
    **dict.fromkeys(("o_proj", "down_proj", "w2"), "rowwise"),
}
"""Of attention and an MLP. LFM2 calls the parts of its MLP w1 to w3."""


def _plan_by_names(hf_model: nn.Module) -> dict[str, str]:
    """Return a plan for a model without one, such as Nemotron, StableLM and those with a state.

    It is empty if a block has a matrix of another name, parameters beside a matrix that are of all
    heads together, or attention whose code asks for the number of all heads.
    """
    inside = [part for block in blocks(hf_model).values() for part in block.modules()]
    if any(_counts_heads(part) for part in inside if hasattr(part, "q_proj")):
        return {}
    found: dict[str, str] = {}
    apart = tuple(f"{name}." for name in of_own_tokens(hf_model))
    for place, block in blocks(hf_model).items():
        for key, parameter in block.named_parameters():
            part, _, _ = key.rpartition(".")
            if not part or f"{place}.{key}".startswith(apart) or "lora_" in key:
                continue
            holder, _, name = part.rpartition(".")
            if name == "out_proj" and hasattr(block.get_submodule(holder), "q_proj"):
                name = "o_proj"
            if name in _BY_NAME:
                found[_pattern(f"{place}.{part}")] = _BY_NAME[name]
            elif parameter.dim() > 1 or (holder and not _is_of_each(parameter, name, hf_model)):
                return {}
    return found


def _counts_heads(attention: nn.Module) -> bool:
    """Return whether attention reshapes by the number of all heads, not by those that it gets."""
    code = inspect.unwrap(type(attention).forward).__code__
    return bool({"num_heads", "num_key_value_heads", "hidden_size"} & {*code.co_names})


def _is_of_each(vector: Tensor, name: str, hf_model: nn.Module) -> bool:
    """Return whether a vector in a block's part is the same for each head or feature.

    One of a list is of one head (StableLM).
    """
    if name.isdigit():
        return False
    config = hf_model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 1
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return vector.numel() == head_dim or (name == "act_fn" and vector.numel() == 1)


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _norms_plan(hf_model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return the styles of norms in attention whose queries come out by head, a rank's own."""
    return {
        _pattern(f"{name}.{own}"): PARTIAL
        for name, module in hf_model.named_modules()
        if plan.get(_pattern(f"{name}.q_proj")) == "colwise"
        for own, child in module.named_children()
        if (shapes := [p.dim() for p in child.parameters()]) and max(shapes) == 1
    }


def _activations_plan(hf_model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return the styles of activations with parameters (Apertus), whose features are a rank's."""
    return {
        _pattern(f"{name}.act_fn"): PARTIAL
        for name, module in hf_model.named_modules()
        if plan.get(_pattern(f"{name}.up_proj")) == "colwise"
        and any(True for _ in getattr(module, "act_fn", nn.Identity()).parameters())
    }


def _sinks_plan(hf_model: nn.Module) -> dict[str, str]:
    return {
        _pattern(f"{name}.{part}"): style
        for name, module in hf_model.named_modules()
        if {part.partition(".")[0] for part, _ in module.named_parameters()} == _WITH_SINKS.keys()
        for part, style in _WITH_SINKS.items()
    }


def _latent_plan(hf_model: nn.Module) -> dict[str, str]:
    return {
        _pattern(f"{name}.{own}"): _LATENT.get(own, PARTIAL)
        for name, module in hf_model.named_modules()
        if is_latent(module)
        for own, child in module.named_children()
        if any(True for _ in child.parameters())
    }


def _has_states_alone(hf_model: nn.Module) -> bool:
    """Return whether blocks consist of layers with a state and norms: then ranks shard tokens."""
    return all(
        supports_packed_states(part) or all(own.dim() == 1 for own in part.parameters())
        for block in blocks(hf_model).values()
        for part in block.children()
    )


def split_dim(name: str, styles: Mapping[str, str]) -> int | None:
    """Return the dim of a parameter that tensor parallelism shards; None keeps it whole."""
    module, _, kind = name.rpartition(".")
    style = styles.get(name, styles.get(module))
    dim = None if style is None else SPLIT_DIMS.get(style)
    # The bias of a row-wise layer is added after the sum over ranks, so it stays whole.
    return None if kind == "bias" and dim == 1 else dim


def style_problems(hf_model: nn.Module, styles: Mapping[str, str]) -> Iterator[str]:
    """Yield why a model cannot be tensor-parallel, as far as its plan tells."""
    if not styles and not _has_states_alone(hf_model):
        yield f"{type(hf_model).__name__} has no tensor-parallel plan of its own"
    if getattr(hf_model.config, "num_kv_shared_layers", 0):
        # Updates at tp 2 differ by 1.6e-3 of the largest change from those of one rank.
        yield f"layers of {type(hf_model).__name__} attend to keys and values of others"
    unknown = {name: style for name, style in styles.items() if style not in SPLIT_DIMS}
    for name, style in unknown.items():
        yield (
            f"the plan of {type(hf_model).__name__} gives {name} the style {style}, which is "
            f"not supported; known: {', '.join(SPLIT_DIMS)}"
        )
    for name, module in hf_model.named_modules():
        if f"{name}.gate_proj" in styles and getattr(module, "activation_sparsity", False):
            yield (
                f"module {name} ({type(module).__name__}) drops activations by their mean over all "
                "of them, of which a rank has a part"
            )
        kind = nn.Embedding if styles.get(name) == "embedding_rowwise" else nn.Linear
        if styles.get(name, PARTIAL) not in (PARTIAL, *unknown.values()) and not isinstance(
            module, kind
        ):
            yield (
                f"module {name} ({type(module).__name__}) has the tensor-parallel style "
                f"{styles[name]!r}, which is for {kind.__name__} modules"
            )
