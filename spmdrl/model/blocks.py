"""Find the parts of a transformers model: blocks, base model, mixtures of experts, experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from spmdrl.errors import Refusal
from spmdrl.model.transformers_internals import block_kinds, has_towers, is_experts


def blocks(hf_model: nn.Module) -> dict[str, nn.Module]:
    """Return {name: module} of the transformer blocks, first to last.

    For a multimodal model these are the blocks of its language model. If a model does not name its
    blocks, they are the items of the module list with most parameters.

    Raises: Refusal when there is none.
    """
    found = _blocks(hf_model)
    if not found:
        raise Refusal(
            f"model: {type(hf_model).__name__} names no blocks "
            f"(_no_split_modules = {sorted(block_kinds(hf_model))}) and has no list of layers; "
            "it cannot be sharded"
        )
    return found


def _language_model(hf_model: nn.Module) -> str:
    """Return the name of the language model in a multimodal model; empty for other models."""
    base = str(getattr(hf_model, "base_model_prefix", ""))
    whole = getattr(hf_model, base, None) if base else None
    is_part = has_towers(getattr(hf_model, "config", None)) and hasattr(whole, "language_model")
    return f"{base}.language_model" if is_part else ""


def _blocks(hf_model: nn.Module) -> dict[str, nn.Module]:
    kinds = block_kinds(hf_model)
    within = _language_model(hf_model)
    found = {
        name: module
        for name, module in hf_model.named_modules()
        if type(module).__name__ in kinds and (not within or name.startswith(f"{within}."))
    }
    if not found:
        return _layers(hf_model)
    # Some models also name parts of their blocks.
    inside = {id(m) for block in found.values() for m in block.modules() if m is not block}
    return {name: module for name, module in found.items() if id(module) not in inside}


def _layers(hf_model: nn.Module) -> dict[str, nn.Module]:
    """Return the items of the module list with most parameters."""
    lists = {n: m for n, m in hf_model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    if not lists:
        return {}
    name = max(lists, key=lambda name: sum(p.numel() for p in lists[name].parameters()))
    return {f"{name}.{index}": module for index, module in lists[name].named_children()}


def layers_of(
    hf_model: nn.Module, names: Iterable[str], *, towers: Iterable[str]
) -> dict[str, str]:
    """Return {parameter name: its layer}: the number of a block (`00` is the first), `tower`,
    `embedding`, or `head` for all others, such as the last norm.

    Args:
        hf_model: before its blocks are wrapped.
        names: of parameters and adapters.
        towers: names of modules.
    """
    modules = dict.fromkeys(towers, "tower")
    modules |= {place: f"{number:02}" for number, place in enumerate(blocks(hf_model))}
    for place, module in hf_model.named_modules():
        if isinstance(module, nn.Embedding):
            modules[place] = "embedding"
    found = {}
    for name in names:
        # Towers and blocks come first, so that embeddings in them belong to them.
        around = (layer for place, layer in modules.items() if name.startswith(f"{place}."))
        found[name] = next(around, "head")
    return found


def unshardable(hf_model: nn.Module) -> str:
    """Return why a model's parameters cannot be sharded block by block; empty if they can."""
    seen: dict[int, str] = {}
    for place, block in blocks(hf_model).items():
        for name, parameter in block.named_parameters():
            where = f"{place}.{name}"
            if (other := seen.setdefault(id(parameter), where)) != where:
                return f"{where} is also {other}, and blocks are gathered one by one"
    for name, parameter in hf_model.named_parameters():
        if not parameter.dim():
            return f"{name} is a parameter without dims, which FSDP2 cannot shard"
        if not parameter.numel():
            return f"{name} is a parameter without elements, {list(parameter.shape)}"
    return ""


def base_of(hf_model: nn.Module) -> tuple[str, nn.Module]:
    """Return (name, module) of the base model: the part that computes states for the head.

    For a multimodal model this is the language model. If `base_model_prefix` names a part that this
    class does not have, it is the part that holds the blocks.
    """
    if language := _language_model(hf_model):
        return language, hf_model.get_submodule(language)
    prefix = str(getattr(hf_model, "base_model_prefix", ""))
    base = getattr(hf_model, prefix, None) if prefix else None
    if isinstance(base, nn.Module):
        return prefix, base
    name = next(iter(blocks(hf_model))).partition(".")[0]
    return name, hf_model.get_submodule(name)


def name_of(hf_model: nn.Module, part: nn.Module) -> str:
    """Return the name of a module in a model."""
    return next(name for name, module in hf_model.named_modules() if module is part)


def mixtures(hf_model: nn.Module) -> dict[str, nn.Module]:
    """Return {name: module} of the mixtures of experts in blocks, with routers and shared experts;
    {} for a dense model."""
    return {
        f"{name}.{own}": child
        for name, block in _blocks(hf_model).items()
        for own, child in block.named_children()
        if any(is_experts(module) for module in child.modules())
    }


def experts_modules(hf_model: nn.Module) -> dict[str, nn.Module]:
    """Return {name: module} of the fused experts, one module per layer, first to last; {} for a
    dense model."""
    return {name: module for name, module in hf_model.named_modules() if is_experts(module)}


def experts_parameters(hf_model: nn.Module) -> set[str]:
    """Return the names of the experts' parameters, which are sharded separately."""
    return {
        f"{name}.{key}"
        for name, experts in experts_modules(hf_model).items()
        for key, _ in experts.named_parameters()
    }


def uneven_experts(hf_model: nn.Module, *, dtype: torch.dtype) -> str:
    """Return the first experts' weight with a dim that is no multiple of 16 bytes in a dtype; empty
    for none. Grouped matrix products need this of both dims, of one in the backward pass."""
    for name, experts in experts_modules(hf_model).items():
        for key, own in experts.named_parameters(recurse=False):
            if own.dim() == 3 and any(size * dtype.itemsize % 16 for size in own.shape[1:]):
                return f"{name}.{key} {list(own.shape)}"
    return ""


def is_latent(module: nn.Module) -> bool:
    """Return whether a module is latent attention."""
    return hasattr(module, "kv_b_proj") and hasattr(module, "kv_a_proj_with_mqa")


def of_layers(config: Any, name: str) -> list[Any]:
    """Return the values of a field of a transformers config: one, or one per layer where layers
    differ; [None] for a field that it does not have."""
    try:
        return [getattr(config, name, None)]
    except RuntimeError:  # layers have different values
        return [getattr(config.per_layer_config[i], name) for i in range(config.num_hidden_layers)]


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of a module inside a `with` block."""
    # Only an instance's own forward is put back; without one, deletion uncovers the class's.
    before = vars(module).get("forward")
    module.forward = forward  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
