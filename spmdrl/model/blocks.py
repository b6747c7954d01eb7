"""The parts of a transformers model that are treated apart: its blocks, mixtures and experts."""

from __future__ import annotations

from torch import nn

from spmdrl.model.transformers_internals import block_kinds, is_experts


def blocks(hf_model: nn.Module) -> dict[str, nn.Module]:
    """Return {name: module} of the transformer blocks, first to last.

    Raises: ValueError when the model does not say what its blocks are.
    """
    found = _blocks(hf_model)
    if not found:
        raise ValueError(
            f"model: {type(hf_model).__name__} names no blocks "
            f"(_no_split_modules = {sorted(block_kinds(hf_model))}); it cannot be sharded"
        )
    return found


def _blocks(hf_model: nn.Module) -> dict[str, nn.Module]:
    kinds = block_kinds(hf_model)
    return {n: module for n, module in hf_model.named_modules() if type(module).__name__ in kinds}


def mixtures(hf_model: nn.Module) -> dict[str, nn.Module]:
    """Return {name: module} of the parts of blocks that hold experts, routers and shared experts
    included; {} of a dense model."""
    return {
        f"{name}.{own}": child
        for name, block in _blocks(hf_model).items()
        for own, child in block.named_children()
        if any(is_experts(module) for module in child.modules())
    }


def experts_modules(hf_model: nn.Module) -> dict[str, nn.Module]:
    """Return {name: module} of what transformers' experts functions compute: one per layer of
    experts, first to last; {} for a dense model."""
    return {name: module for name, module in hf_model.named_modules() if is_experts(module)}


def experts_parameters(hf_model: nn.Module) -> set[str]:
    """Return the names of the experts' parameters, which are sharded apart from all others."""
    return {
        f"{name}.{key}"
        for name, experts in experts_modules(hf_model).items()
        for key, _ in experts.named_parameters()
    }


def is_latent(module: nn.Module) -> bool:
    """Return whether a module is latent attention."""
    return hasattr(module, "kv_b_proj") and hasattr(module, "kv_a_proj_with_mqa")
