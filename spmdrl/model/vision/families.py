"""Which vision models are supported, and where tower, projector and language model are in them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from spmdrl.config import ModelSettings
from spmdrl.data.attachments import VISION_FAMILIES
from spmdrl.errors import Refusal
from spmdrl.imports import attempt
from spmdrl.model.blocks import base_of
from spmdrl.model.files.reader import text_part
from spmdrl.model.transformers_internals import block_kinds, class_of, has_towers


def check_vision_family(config: Any, *, path: str) -> None:
    """Refuse a model with towers that is not a supported vision model.

    Args:
        config: of transformers, of a model with towers.
        path: of the model, for messages.
    Raises: Refusal for such a model.
    """
    if config.model_type in VISION_FAMILIES:
        return
    _, error = attempt(lambda: text_part(path))
    raise Refusal(
        f"model.path: {path} is a {config.model_type} with a tower; those that can be trained as "
        f"they are: {', '.join(VISION_FAMILIES)}; "
        + (
            f"and its text part cannot be trained alone either: {error}"
            if error
            else "set model.part to text to train its text part alone"
        )
    )


_BIDIRECTIONAL = ("gemma3",)


def has_bidirectional_images(hf_model: nn.Module) -> bool:
    """Return whether the tokens of an image attend to each other in both directions."""
    return has_vision_tower(hf_model) and hf_model.config.model_type in _BIDIRECTIONAL  # type: ignore[union-attr]


def has_vision_tower(hf_model: nn.Module) -> bool:
    """Return whether a model takes images, or anything but text."""
    return has_towers(getattr(hf_model, "config", None))


def build_vision_model(config: Any, *, attention: str | None, is_scalar: bool) -> nn.Module:
    """Build a vision model, with the head of the vocabulary or a scalar one named `score`.

    Args:
        config: of transformers, of a model with towers.
        attention: of the language model; None for transformers' own choice. The tower always gets
            transformers' own choice.
    Returns: a transformers model, all parameters float32, on torch's default device.
    """
    chosen = None if attention is None else {"text_config": attention}
    hf_model = class_of(config).from_config(config, dtype=torch.float32, attn_implementation=chosen)
    if is_scalar:
        hf_model.lm_head = None
        hf_model.score = nn.Linear(config.get_text_config().hidden_size, 1, bias=False)
    return hf_model


def vision_modules(hf_model: nn.Module) -> dict[str, nn.Module]:
    """Return {name: module} of tower and projector; {} for a model without."""
    if not has_vision_tower(hf_model):
        return {}
    whole, _, language = base_of(hf_model)[0].rpartition(".")
    children = hf_model.get_submodule(whole).named_children()
    return {f"{whole}.{name}": child for name, child in children if name != language}


def vision_blocks(hf_model: nn.Module) -> dict[str, nn.Module]:
    """Return {name: module} of the blocks of the towers, first to last; {} for a model without."""
    kinds = block_kinds(hf_model)
    found = {}
    for place, tower in vision_modules(hf_model).items():
        for name, module in tower.named_modules():
            is_item = name.rpartition(".")[2].isdigit()
            if is_item and type(module).__name__ in kinds:
                found[f"{place}.{name}"] = module
    return found


def vision_parameters(hf_model: nn.Module) -> set[str]:
    """Return the names of the parameters of tower and projector."""
    return {
        f"{place}.{name}"
        for place, tower in vision_modules(hf_model).items()
        for name, _ in tower.named_parameters()
    }


def set_attention(hf_model: nn.Module, name: str) -> None:
    """Set the attention implementation of a language model; a tower keeps its own."""
    chosen: Any = {"text_config": name} if has_vision_tower(hf_model) else name
    hf_model.set_attn_implementation(chosen)  # type: ignore[operator]


def freeze_vision(hf_model: nn.Module, model: ModelSettings) -> None:
    """Freeze tower and projector if model.train is `language`."""
    if model.train == "language":
        for tower in vision_modules(hf_model).values():
            tower.requires_grad_(False)


def with_text_config(config: Any, own: Any) -> Any:
    """Return a config with another text config in it; without towers, that text config itself."""
    if not has_towers(config):
        return own
    changed = copy.deepcopy(config)
    changed.text_config = own
    return changed
