"""A small model of the same code as a large one: a smaller config, and random weights for it.

What decides which lines of a model run is kept: each kind of layer, the ratio of heads to key/value
heads, ties, norms, biases, caps, kinds of rotary embedding. Widths, counts and windows become
small: a CPU computes it in milliseconds, and a hundred tokens reach beyond every window and chunk.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from spmdrl.errors import Refusal
from spmdrl.model.shrink_fields import MAX_LAYERS, cut_layers, small_fields

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NOISE = 0.1
"""Standard deviation of what is added to norms, biases and sinks."""
_SKIPPED = re.compile(r"(^|_)(idx|index|id|number)$|^layer$|training|^_")
"""Attributes of modules that tell a layer's place, not its kind."""


def shrunk(config: Any, *, kv_heads: int = 2) -> Any:
    """Return the config of a small text model of the same code.

    Args:
        config: a transformers config; of one with a vision tower, the text part's is taken.
        kv_heads: key/value heads to keep where the real count is a multiple of it, for tensor
            parallelism of that many ranks; twice as many where each query head has its own.
    Returns: another config of the same class, float32, without quantisation.
    Raises: Refusal when the small model is not of the same kinds of layers.
    """
    config = config.get_text_config()
    fields = small_fields(config, kv_heads=kv_heads)
    whole = _made(config, fields)
    kinds = _layer_kinds(whole)
    for chosen in (_chosen(kinds), _prefix(kinds)):
        small = _made(config, cut_layers(whole.to_dict(), layers=len(kinds), chosen=chosen))
        if _layer_kinds(small) == [kinds[i] for i in chosen]:
            return small
    raise Refusal(
        f"{config.model_type}: a small model of layers {_prefix(kinds)} has layers of other kinds "
        "than these; say in model/shrink_fields.py how its config names them"
    )


def first_layers(config: Any) -> Any:
    """Return the config of a model's first layers, one at least of each kind that it has.

    Raises: Refusal when these would be of other kinds.
    """
    kinds = _layer_kinds(config)
    chosen = range(1 + max(_place(kinds, kind, 1) for kind in {*kinds}))
    small = _made(config, cut_layers(config.to_dict(), layers=len(kinds), chosen=chosen))
    if _layer_kinds(small) != [kinds[i] for i in chosen]:
        raise Refusal(f"{config.model_type}: its first {len(chosen)} layers are of other kinds")
    return small


def tiny_model(config: Any, folder: Path, *, seed: int = 0) -> PreTrainedModel:
    """Write random weights of a config and a tokenizer of characters into a folder.

    Linear weights have the standard deviation hidden_size ** -0.5, so that attention and experts
    tell tokens apart; norms, biases, sinks and routers' biases differ from element to element;
    decays and time steps of layers with state are the model's own.

    Args:
        config: of `shrunk`, or any other with at least 104 tokens.
        seed: the same seed gives the same bytes.
    Returns: the model as transformers holds it: float32, in evaluation mode.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from spmdrl.data.characters import character_tokenizer

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
    """Add noise to what starts at one number for all elements."""
    import torch

    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    saved = model.state_dict().keys()
    for name, tensor in tensors.items():
        is_vector = tensor.dim() == 1 or "bias" in name
        if name in saved and is_vector and tensor.is_floating_point() and not _is_state(name):
            tensor.data += NOISE * torch.randn_like(tensor)


def _is_state(name: str) -> bool:
    """Return whether a tensor is a decay or time step, whose values mean something."""
    return name.rpartition(".")[2] in ("A_log", "dt_bias", "D")


def _made(config: Any, fields: Mapping[str, Any]) -> Any:
    made = type(config).from_dict(dict(fields))
    # What a saved config.json is read as, which is what everybody else sees.
    return type(config).from_dict(made.to_dict())


def _layer_kinds(config: Any) -> list[Hashable]:
    """Return what each layer of a model is: its modules, shapes and switches, not its place."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    count = config.num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists:
        raise Refusal(f"{config.model_type}: no list of its {count} layers is found in it")
    return [_kind(layer) for layer in lists[0]]


def _kind(layer: nn.Module) -> Hashable:
    modules = {re.sub(r"\d+", "*", name): module for name, module in layer.named_modules()}
    return (
        tuple((n, tuple(p.shape)) for n, p in layer.named_parameters()),
        tuple((name, type(module).__name__, _switches(module)) for name, module in modules.items()),
    )


def _switches(module: nn.Module) -> Hashable:
    """Return a module's own settings: words as they are, of numbers whether they are 0."""
    own = {n: v for n, v in sorted(vars(module).items()) if not _SKIPPED.search(n)}
    words = tuple((n, v) for n, v in own.items() if isinstance(v, (str, type(None))))
    return words, tuple((n, bool(v)) for n, v in own.items() if isinstance(v, (int, float)))


def _chosen(kinds: Sequence[Hashable]) -> list[int]:
    """Return the first two layers of each kind; one of each where there are many kinds."""
    each = 2 if 2 * len(set(kinds)) <= MAX_LAYERS else 1
    places = [i for i, kind in enumerate(kinds) if kinds[:i].count(kind) < each]
    return places


def _prefix(kinds: Sequence[Hashable]) -> list[int]:
    """Return the first layers, up to the second of each kind; to the first if that is long."""
    ends = {each: 1 + max(_place(kinds, kind, each) for kind in set(kinds)) for each in (1, 2)}
    return [*range(ends[2] if ends[2] <= MAX_LAYERS else max(ends[1], math.gcd(2, len(kinds))))]


def _place(kinds: Sequence[Hashable], kind: Hashable, each: int) -> int:
    places = [i for i, other in enumerate(kinds) if other == kind]
    return places[min(each, len(places)) - 1]
