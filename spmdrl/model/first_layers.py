"""The config of a model's first layers, and the kind of each layer."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from spmdrl.errors import Refusal
from spmdrl.imports import attempt
from spmdrl.model.blocks import blocks

_SKIPPED = re.compile(r"(^|_)(idx|index|id|number)$|^layer$|training|^_")
"""Attributes of modules that depend on a layer's index, not on its kind."""
_NUMBERS = re.compile(r"layer|idx|index|indices")
"""Names of lists of layers' numbers, such as mlp_only_layers and full_attn_idxs."""
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def first_layers(config: Any) -> Any:
    """Return the config of a model's first layers, with at least one layer of each kind.

    Raises: Refusal if these would be layers of other kinds.
    """
    kinds = layer_kinds(config)
    chosen = range(1 + max(place_of(kinds, kind, 1) for kind in {*kinds}))
    small = config_of(config, cut_layers(config, layers=len(kinds), chosen=chosen))
    if layer_kinds(small) != [kinds[i] for i in chosen]:
        raise Refusal(f"{config.model_type}: its first {len(chosen)} layers are of other kinds")
    return small


def config_of(config: Any, fields: Mapping[str, Any]) -> Any:
    """Return a config of the same class with other fields."""
    made = type(config).from_dict(dict(fields))
    return type(config).from_dict(made.to_dict())  # as if read from a saved config.json


def layer_kinds(config: Any) -> list[Hashable]:
    """Return the kind of each layer of a model: its modules, shapes and switches."""
    import transformers as hf

    kind = type(config)  # some text models have no class with a head
    is_bare = kind in hf.MODEL_MAPPING and kind not in hf.MODEL_FOR_CAUSAL_LM_MAPPING
    maker: Any = hf.AutoModel if is_bare else hf.AutoModelForCausalLM
    with torch.device("meta"):
        model = maker.from_config(config, dtype=torch.float32)
    return [_kind(layer) for layer in blocks(model).values()]


def _kind(layer: nn.Module) -> Hashable:
    modules = {re.sub(r"\d+", "*", name): module for name, module in layer.named_modules()}
    return (
        tuple((n, tuple(p.shape)) for n, p in layer.named_parameters()),
        tuple((name, type(module).__name__, _switches(module)) for name, module in modules.items()),
    )


def _switches(module: nn.Module) -> Hashable:
    """Return a module's own settings: strings, and whether numbers are 0."""
    own = {n: v for n, v in sorted(vars(module).items()) if not _SKIPPED.search(n)}
    words = tuple((n, v) for n, v in own.items() if isinstance(v, (str, type(None))))
    return words, tuple((n, bool(v)) for n, v in own.items() if isinstance(v, (int, float)))


def cut_layers(config: Any, *, layers: int, chosen: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a model of some of the layers.

    Lists with an entry per layer, or of layers' numbers, are cut. Periods, counts of first layers,
    and other lists that happen to have the same length are not changed.

    Args:
        config: of transformers.
        layers: of the config.
        chosen: numbers of those to keep, ascending.
    """
    fields = config.to_dict()
    others = _of_other_lengths(type(config))
    cut = {
        name: value if name in others else _cut(name, value, layers=layers, chosen=chosen)
        for name, value in fields.items()
    }
    for name in _LAYERS:
        if name in cut:
            cut[name] = len(chosen)
    if shared := cut.get("num_kv_shared_layers"):  # the last so many
        cut["num_kv_shared_layers"] = sum(i >= layers - shared for i in chosen)
    return cut


def _of_other_lengths(kind: type) -> set[str]:
    """Return the fields with lists that have no entry per layer.

    In the class's defaults their length is not the number of layers, and they hold no layers'
    numbers. Mamba 2, for example, has two limits of time steps for any number of layers.
    """
    default, _ = attempt(kind, Exception)  # of any class: some have none
    count = getattr(default, "num_hidden_layers", None)
    if default is None or count is None:
        return set()
    return {
        name
        for name, value in default.to_dict().items()
        if isinstance(value, (list, tuple)) and len(value) != count and not _NUMBERS.search(name)
    }


def _cut(name: str, value: Any, *, layers: int, chosen: Sequence[int]) -> Any:
    if name == "per_layer_config" and value:
        by_layer = {int(layer): own for layer, own in value.items()}
        return {str(new): by_layer[old] for new, old in enumerate(chosen) if old in by_layer}
    # Lists of token ids may have as many entries as there are layers.
    if not isinstance(value, (list, tuple)) or not value or "token" in name:
        return value
    if _NUMBERS.search(name) and _are_numbers(value, layers=layers):
        return [new for new, old in enumerate(chosen) if old in value]
    return [value[i] for i in chosen] if len(value) == layers else value


def _are_numbers(value: Sequence[Any], *, layers: int) -> bool:
    """Return whether values can be numbers of layers: ascending integers without repetition."""
    is_whole = all(isinstance(v, int) for v in value)
    return is_whole and max(value) < layers and list(value) == sorted({*value})


def place_of(kinds: Sequence[Hashable], kind: Hashable, each: int) -> int:
    """Return the number of the `each`-th layer of a kind, or of the last one if there are fewer."""
    places = [i for i, other in enumerate(kinds) if other == kind]
    return places[min(each, len(places)) - 1]
