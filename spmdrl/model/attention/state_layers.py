"""Which layers keep a state, and how they compute packed rows.

Most layers compute with functions of their modeling file: a layer's forward runs with forms of
these that know where sequences begin (packed_states.py, recurrences.py). Lightning attention and
the recurrent block of RecurrentGemma compute in their forward itself, which is replaced.

Shape letters: T packed tokens, t of this rank, H heads, h of this rank, V size of a head, W tokens
of a convolution.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.model.attention.packed_states import (
    by_head,
    by_token,
    convolution,
    gated_delta_rule,
    mamba2_scan,
)
from spmdrl.model.attention.packing import Packing
from spmdrl.model.attention.recurrences import linear_recurrence, selective_scan
from spmdrl.model.attention.state_branches import by_levels, with_earlier
from spmdrl.model.attention.state_chunks import convolve, scan_of_chunks
from spmdrl.model.parallel.state_exchange import StateRow


def supports_packed_states(mixer: nn.Module) -> bool:
    """Return whether a layer mixes tokens by the functions of this file alone."""
    return _whole(mixer) is not None or _is_supported(type(mixer).forward)


@cache
def _is_supported(forward: Any) -> bool:
    forward = inspect.unwrap(forward)
    if not isinstance(forward, FunctionType) or forward.__closure__:
        return False
    own = {
        name
        for name in forward.__code__.co_names
        if _module_of(forward.__globals__.get(name)) == forward.__module__
    }
    return "causal_conv1d_fn" in own and own <= {*PACKED, *_UNUSED}


def _module_of(value: Any) -> str:
    return value.__module__ if isinstance(value, FunctionType) else ""


def _whole(mixer: nn.Module) -> Callable[..., Any] | None:
    """Return the form of a layer's whole forward; None if it has none."""
    own = type(mixer)
    is_of_transformers = own.__module__.startswith("transformers.models.")
    return _WHOLE.get(own.__name__) if is_of_transformers else None


def with_packed_states(mixer: nn.Module, row_of: Callable[[], StateRow]) -> Callable[..., Any]:
    """Return a layer's forward that computes packed rows, [1, t, hidden].

    Args:
        row_of: returns the row that is computed.
    """
    whole = _whole(mixer)
    if whole is not None:
        return partial(whole, row_of, mixer)
    known = inspect.unwrap(type(mixer).forward).__globals__
    functions = {
        name: partial(function, row_of, known[name])
        for name, function in PACKED.items()
        if name in known
    }
    return with_functions(mixer, functions)


def with_functions(mixer: nn.Module, functions: Mapping[str, Any]) -> Callable[..., Tensor]:
    """Return a layer's forward that calls other functions in place of those of its file."""
    forward = inspect.unwrap(type(mixer).forward)
    names = {**forward.__globals__, **functions}
    own = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__)
    own.__kwdefaults__ = forward.__kwdefaults__
    return partial(own, mixer)


def _lightning_attention(
    row_of: Callable[[], StateRow], layer: Any, hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Compute lightning attention (arXiv 2501.08313, section 2.2.1).

    A state S [K, V] becomes exp(-slope) S + k v', and a token reads q' S.

    Args:
        hidden_states: [1, t, hidden].
    Returns: [1, t, hidden], and no state.
    """
    row = row_of()
    heads = layer.num_attention_heads
    qkv = layer.act_fn(layer.qkv_proj(hidden_states)).unflatten(-1, (heads, -1))
    query, key, value = row.to_heads(by_head(qkv)).chunk(3, dim=-1)
    log_decay = -layer.slope_rate[row.own(heads, query.device), 0, 0]
    steps = query.new_ones(*query.shape[:2], 1)
    out = scan_of_chunks(value, steps, log_decay, key, query, packing=row.packing)[0]
    out = by_token(row.to_tokens(out.to(query.dtype), heads=heads)).flatten(2)
    return layer.out_proj(layer.output_gate(hidden_states).sigmoid() * layer.norm(out)), None


def _recurrent_block(
    row_of: Callable[[], StateRow], layer: Any, input_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Compute Griffin's recurrent block (arXiv 2402.19427, sections 2.3 and 2.4).

    Args:
        input_states: [1, t, hidden].
    Returns: [1, t, hidden], and no attention weights.
    """
    row = row_of()
    unit = layer.rg_lru
    heads = unit.num_attention_heads
    x = row.to_heads(by_head(layer.linear_x(input_states).unflatten(-1, (heads, -1))))
    own = row.own(heads, x.device)
    weight = layer.conv_1d.weight.squeeze(1).unflatten(0, (heads, -1))[own]
    bias = layer.conv_1d.bias.unflatten(0, (heads, -1))[own]

    def convolved(packing: Packing, x: Tensor) -> Tensor:
        """From [h V, T] to [h V, T]."""
        places = packing.places(x.shape[1])
        return convolve(x, weight.flatten(0, 1), bias.flatten(), places=places)

    x = with_earlier(convolved, row.packing, x.mT.flatten(0, 1), count=weight.shape[-1] - 1)
    x = x.unflatten(0, (len(own), -1)).mT
    gates = _gates(unit, x, own, row.packing.places(x.shape[1]) == 0)
    states = by_levels(linear_recurrence, row.packing, *gates).transpose(0, 1)
    states = by_token(row.to_tokens(states.to(x.dtype), heads=heads)).flatten(2)
    return layer.linear_out(states * layer.act_fn(layer.linear_y(input_states))), None


def _gates(unit: Any, x: Tensor, own: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Return log decays and inputs of RG-LRU's states, [T, h, V] float32.

    Args:
        unit: the RG-LRU.
        x: [h, T, V].
        own: [h] int64, the heads.
        first: [T] bool, the tokens at which a sequence begins.
    """

    def gate(weight: Tensor, bias: Tensor) -> Tensor:
        return torch.baddbmm(bias[own, None], x, weight[own]).sigmoid()

    strength = nn.functional.softplus(
        unit.recurrent_param.unflatten(0, (len(unit.input_gate_bias), -1))
    )
    recurrent = gate(unit.recurrent_gate_weight, unit.recurrent_gate_bias)
    log_decay = -8.0 * recurrent * strength[own, None]
    root = inspect.unwrap(type(unit).forward).__globals__["SqrtBoundDerivative"]
    scale = root.apply(1 - (2 * log_decay).exp()).masked_fill(first[:, None], 1.0)
    inputs = x * gate(unit.input_gate_weight, unit.input_gate_bias) * scale.to(x.dtype)
    return log_decay.transpose(0, 1).float(), inputs.transpose(0, 1).float()


def no_fused_scan(*_: Any, **__: Any) -> None:
    """Take the place of a kernel that scans, normalises and projects: layers go on without it."""


PACKED: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolution,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "mamba_selective_scan": selective_scan,
    "mamba_inner_fn": no_fused_scan,
    "mamba2_chunk_scan": mamba2_scan,
    "mamba2_split_conv1d_scan_combined": no_fused_scan,
}
_UNUSED = (
    "apply_mask_to_padding_states",  # there is no padding
    # With a cache alone.
    "causal_conv1d_update",
    "torch_recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
    "mamba_selective_state_update",
    "mamba2_selective_state_update",
)
_WHOLE: Mapping[str, Callable[..., Any]] = {
    "MiniMaxLightningAttention": _lightning_attention,
    "RecurrentGemmaRecurrentBlock": _recurrent_block,
}
