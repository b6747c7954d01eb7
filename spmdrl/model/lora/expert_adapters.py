"""Adapters of fused experts: scale * B A x for each expert, by grouped matrix products.

transformers computes a layer's experts by grouped matrix products over tokens sorted by expert. The
low-rank term is computed in the same way, with the same sorting: r (in + out) multiplications per
token, and no tensor of the weights' size. Merged weights W + scale * B A would need a copy of all
experts of a layer, and a gradient of that copy, for any rank.

Shape letters: T tokens, K experts per token, S = T K, E experts of this rank, r rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmdrl.model.transformers_internals import (
    HAS_EMPTY_ROWS,
    activated,
    grouped_experts,
    grouped_linear,
)

EXPERT_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
"""Weights of fused experts, in the order of the modules, in which PEFT nests adapters too."""

_ALIGN = 8
"""Grouped products on CUDA need rows of 16 bytes: the rank is padded with zeros to a multiple."""


def adaptable(experts: nn.Module) -> list[str]:
    """Return the names of the parameters, [E, out, in], that can have adapters; [] for experts with
    another layout, such as [E, in, out]."""
    own = [name for name, p in experts.named_parameters(recurse=False) if p.dim() == 3]
    is_known = own == [name for name in EXPERT_PARAMETERS if name in own]
    return own if is_known and not getattr(experts, "is_transposed", True) else []


def add_to_experts(experts: nn.Module, key: str, *, rank: int) -> None:
    """Add A [E, r, in] and B [E, out, r] for the parameter `key`, float32 on the meta device, and
    have the module compute with them."""
    number, out_features, in_features = getattr(experts, key).shape
    for part, shape in (("A", (number, rank, in_features)), ("B", (number, out_features, rank))):
        matrix = nn.Parameter(torch.empty(shape, dtype=torch.float32, device="meta"))
        experts.register_parameter(f"{key}_lora_{part}", matrix)
    # Once per module: `Adapters` sets the attribute after the module's first parameter.
    if not hasattr(experts, "adapters"):
        experts.forward = functools.partial(compute_experts, experts, plain=experts.forward)


def counts(chosen: Tensor, number: int) -> Tensor:
    """Return how often each of `number` experts is chosen, [number].

    Deterministic, without waiting for the device, as in transformers. Values out of range are not
    counted.
    """
    # histc takes only floats on the CPU, and only integers on CUDA when deterministic.
    countable = chosen.float() if chosen.device.type == "cpu" else chosen.int()
    return torch.histc(countable.flatten(), bins=number, min=0, max=number - 1)


def compute_experts(
    experts: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    plain: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Compute a layer's experts as transformers does, with their adapters if there are some.

    Args:
        experts: a module of experts, or an object with its attributes. Its `product`, if it has
            one, is `grouped_linear` for weights that are stored in another form.
        hidden_states: [T, H]. top_k_index, top_k_weights: [T, K].
        plain: computes them without adapters; None for transformers' grouped products.
    Returns: [T, H].
    """
    inputs = (hidden_states, top_k_index, top_k_weights)
    if _is_adapted(experts) or hasattr(experts, "product"):
        return _own_experts(experts, *inputs)
    return plain(*inputs) if plain else grouped_experts(experts, *inputs)


def _is_adapted(experts: Any) -> bool:
    adapters = getattr(experts, "adapters", None)
    return adapters is not None and adapters.is_on


def _own_experts(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute as `grouped_experts` does: if B is zero, the results are bit-identical."""
    shape = (*top_k_index.shape, hidden_states.shape[1])
    ids, order = torch.sort(top_k_index.reshape(-1))
    offsets = torch.cumsum(counts(ids, experts.num_experts), dim=0, dtype=torch.int32)
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    # Products leave rows of no expert undefined, and the gradients of these rows too.
    is_empty = None
    if getattr(experts, HAS_EMPTY_ROWS, False):
        is_empty = (ids >= experts.num_experts)[:, None]
        ids = ids.clamp(max=experts.num_experts - 1)
    rows = _without(is_empty, hidden_states[order // shape[1]])
    rows = _without(is_empty, _linear(experts, first, rows, ids=ids, offsets=offsets))
    rows = activated(experts, rows)
    rows = _without(is_empty, _linear(experts, "down_proj", rows, ids=ids, offsets=offsets))
    rows = rows * top_k_weights.reshape(-1)[order][:, None]
    rows = rows[torch.sort(order).indices]
    return rows.view(shape).sum(dim=1).to(hidden_states.dtype)


def _without(is_empty: Tensor | None, rows: Tensor) -> Tensor:
    """Return rows with zeros where `is_empty` [S, 1]."""
    return rows if is_empty is None else rows.masked_fill(is_empty, 0.0)


def _linear(experts: Any, key: str, x: Tensor, *, ids: Tensor, offsets: Tensor) -> Tensor:
    """Return W x plus the adapter's output, [S, out], for x [S, in] sorted by expert `ids`."""
    bias = getattr(experts, f"{key}_bias")[ids] if experts.has_bias else None
    product = getattr(experts, "product", grouped_linear)
    out = product(x, getattr(experts, key), offsets, bias=bias)
    a = getattr(experts, f"{key}_lora_A", None)
    if a is None or not _is_adapted(experts):
        return out
    b = getattr(experts, f"{key}_lora_B")
    filling = -a.shape[1] % _ALIGN
    a = F.pad(a, (0, 0, 0, filling))
    b = F.pad(b, (0, filling))
    low = grouped_linear(grouped_linear(x, a, offsets), b, offsets)
    return out + low * experts.adapters.form.scale
