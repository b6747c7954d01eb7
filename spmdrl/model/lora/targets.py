"""Rank and scale of adapters, which layers get them, of which shapes, and what engines receive.

Source: arXiv 2106.09685, section 4.1; rank-stabilised scale: 2312.03732.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from spmdrl.errors import Refusal
from spmdrl.imports import attempt
from spmdrl.model.blocks import blocks, experts_modules
from spmdrl.model.lora.expert_adapters import adaptable

log = logging.getLogger(__name__)

Targets = dict[str, tuple[nn.Module, str]]
"""{name: (module, its parameter)}: a linear layer or the embedding by its own name, with `weight`;
a parameter of fused experts by the parameter's name."""


@dataclass(frozen=True)
class LoraForm:
    """The settings of a model's adapters."""

    rank: int
    alpha: float
    targets: str | tuple[str, ...]
    use_rslora: bool = False
    init: str = "kaiming"
    path: str = ""
    """Folder with their first values; empty: random numbers."""

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


@dataclass(frozen=True)
class SentAdapter:
    """Adapters that engines apply themselves: A and scale * B are sent, in the engine's dtype."""

    shapes: Mapping[str, tuple[int, ...]]  # by name, of all matrices
    factors: Mapping[str, float]  # by name of each B: the scale


def pair_names(weight: str) -> tuple[str, str]:
    """Return the names of the matrices A and B of a live tensor `weight`."""
    layer = weight.removesuffix(".weight")
    if layer == weight:  # fused experts
        return f"{weight}_lora_A", f"{weight}_lora_B"
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def weight_name(target: str, key: str) -> str:
    """Return the name of a target's live tensor."""
    return f"{target}.weight" if key == "weight" else target


def targeted(hf_model: nn.Module, targets: str | tuple[str, ...]) -> Targets:
    """Return the linear layers, experts and embedding that `targets` match; never the output head.

    Args:
        targets: `all-linear` for the layers and experts of the blocks; a regular expression for
            whole names; or names and ends of names, like PEFT's target_modules and
            target_parameters. The name of an experts module matches all its parameters.
    Raises: Refusal for an entry that matches nothing, and for an embedding that cannot have an
        adapter.
    """
    heads = (hf_model.get_output_embeddings(), getattr(hf_model, "score", None))
    known: Targets = {
        name: (module, "weight")
        for name, module in hf_model.named_modules()
        if is_linear(module) and all(module is not h for h in heads)
    }
    experts = {
        f"{name}.{key}": (module, key)
        for name, module in experts_modules(hf_model).items()
        for key in adaptable(module)
    }
    embedding = hf_model.get_input_embeddings()
    known |= experts | {
        name: (module, "weight") for name, module in hf_model.named_modules() if module is embedding
    }
    if targets == "all-linear":
        inside = {id(m) for block in blocks(hf_model).values() for m in block.modules()}
        found = {name: place for name, place in known.items() if id(place[0]) in inside}
        if not found:
            raise _no_match("all-linear", known, hf_model)
        if rest := [*_others(hf_model, known), *_more_than_linear(hf_model)]:
            log.warning(
                "model.lora.targets: all-linear leaves out what is neither a linear layer "
                "nor experts that transformers computes fused: %s",
                ", ".join(rest),
            )
        return found
    matches = _matches(targets, known, experts)
    for target, hits in matches.items():
        if not hits:
            raise _no_match(target, known, hf_model)
    wanted = set().union(*matches.values())
    found = {name: place for name, place in known.items() if name in wanted}
    for name, (module, _) in found.items():
        if module is embedding and (problem := _why_no_rows(hf_model)):
            raise Refusal(
                f"model.lora.targets: {name} of {type(hf_model).__name__} {problem}; leave it out"
            )
    return found


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes x W + b and no more. Some routers are linear layers that
    also choose experts; Falcon's layers are linear, but by code of their own."""
    if not isinstance(module, nn.Linear):
        return False
    return type(module).forward is nn.Linear.forward or _computes_as_linear(module)


def _computes_as_linear(module: nn.Linear) -> bool:
    """Return whether a layer's own forward equals a linear layer, tried on small weights and on
    small and large inputs."""
    draws = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 2, generator=draws, dtype=torch.float64)
    bias = None if module.bias is None else torch.randn(3, generator=draws, dtype=torch.float64)
    # Without its __init__, whose arguments are not known.
    small: nn.Linear = object.__new__(type(module))
    nn.Module.__init__(small)
    for name, value in vars(module).items():
        if name not in vars(small):  # the layer's own settings, not its parameters
            setattr(small, name, value)
    small.weight = nn.Parameter(weight)
    small.bias = None if bias is None else nn.Parameter(bias)
    x = torch.randn(1, 4, 2, generator=draws, dtype=torch.float64)
    for scale in (1e-4, 1.0, 1e4):
        found, _ = attempt(partial(type(module).forward, small, scale * x), Exception)
        expected = F.linear(scale * x, weight, bias)
        is_same = isinstance(found, torch.Tensor) and found.shape == expected.shape
        if not is_same or not torch.allclose(found, expected):
            return False
    return True


def _matches(
    targets: str | tuple[str, ...], known: Targets, experts: Targets
) -> dict[str, set[str]]:
    """Return {target: names that it matches}; an experts module matches by all its parameters."""
    is_match: Callable[[str, str], object] = _is_end
    if isinstance(targets, str):
        targets = (targets,)
        is_match = re.fullmatch
    return {
        target: {
            name
            for name in known
            if is_match(target, name)
            or (name in experts and is_match(target, name.rpartition(".")[0]))
        }
        for target in targets
    }


def _is_end(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _why_no_rows(hf_model: nn.Module) -> str:
    """Return why the embedding can have no adapter; empty if it can."""
    if hf_model.config.tie_word_embeddings:
        return "is the output head too, which an adapter of the embedding alone would part from it"
    kind = type(hf_model.get_input_embeddings())
    return "" if kind is nn.Embedding else f"is a {kind.__name__}, which does more than look up"


def _no_match(target: str, known: Targets, hf_model: nn.Module) -> Refusal:
    names = _patterns(known)
    rest = ", ".join(_others(hf_model, known))
    more = ", ".join(_more_than_linear(hf_model))
    return Refusal(
        f"model.lora.targets: {target!r} matches no linear layer of {type(hf_model).__name__}, and "
        f"no parameter of its experts; it has {', '.join(names) or 'none'}"
        + (f"; what is no matrix gets none: {rest}" if rest else "")
        + (f"; what computes more than x W + b gets none: {more}" if more else "")
    )


def _more_than_linear(hf_model: nn.Module) -> list[str]:
    """Return the subclasses of linear layers that compute something else, for messages."""
    return _patterns(
        f"{name} ({type(module).__name__})"
        for name, module in hf_model.named_modules()
        if isinstance(module, nn.Linear) and not is_linear(module)
    )


def _others(hf_model: nn.Module, known: Targets) -> list[str]:
    """Return the parameters with more than two dims that can have no adapter, for messages."""
    parameters = hf_model.named_parameters()
    return _patterns(name for name, p in parameters if p.dim() > 2 and name not in known)


def _patterns(names: Iterable[str]) -> list[str]:
    """Return names without the numbers of layers, each once."""
    return list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))


def has_embedding(hf_model: nn.Module, form: LoraForm) -> bool:
    """Return whether the embedding is to have an adapter. Raises: as `targeted`."""
    return any(
        isinstance(module, nn.Embedding) for module, _ in targeted(hf_model, form.targets).values()
    )


def adapter_shapes(hf_model: nn.Module, form: LoraForm) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the matrices A and B that a model would get; it stays as it is.

    Raises: Refusal as `targeted` does.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (module, key) in targeted(hf_model, form.targets).items():
        *experts, rows, columns = getattr(module, key).shape
        a, b = pair_names(weight_name(name, key))
        shapes |= {a: (*experts, form.rank, columns), b: (*experts, rows, form.rank)}
    return shapes


def largest_rank(hf_model: nn.Module, form: LoraForm) -> int:
    """Return the largest rank that one of the targeted matrices can have. Raises: as `targeted`."""
    modules = targeted(hf_model, form.targets).values()
    return max(min(getattr(module, key).shape[-2:]) for module, key in modules)


def adapter_numel(hf_model: nn.Module, form: LoraForm) -> int:
    """Return the elements of all adapters that a model would get. Raises: as `targeted`."""
    return sum(math.prod(shape) for shape in adapter_shapes(hf_model, form).values())
