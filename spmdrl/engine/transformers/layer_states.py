"""The states of running sequences, and layers that go on from them by one token.

Gated delta nets, Kimi delta attention, Mamba 2 and short convolutions compute prompts as the
trainer does (model/attention/state_chunks.py), and keep the state after each prompt. A sequence
that continues takes one step of the recurrence from its state. The fast kernels are not used.

Shape letters: T packed tokens, P of them of prompts, S prompts, B sequences that continue, N slots,
H heads, K size of keys (Mamba's state), V size of values (Mamba's head), D channels, W tokens of a
convolution.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from spmdrl.engine.transformers.kv_cache import Work
from spmdrl.model.attention.packed_states import (
    by_head,
    convolution,
    gated_delta_rule,
    mamba2_scan,
    time_steps,
)
from spmdrl.model.attention.packing import Packing
from spmdrl.model.attention.state_chunks import (
    convolve,
    delta_rule_of_chunks,
    normalized,
    scan_of_chunks,
)
from spmdrl.model.attention.state_layers import PACKED, no_fused_scan, with_functions


def keeps_known_states(mixer: nn.Module) -> bool:
    """Return whether the states of a layer that computes packed rows can be cached."""
    names = inspect.unwrap(type(mixer).forward).__code__.co_names
    packed = [PACKED[name] for name in names if name in PACKED]
    return convolution in packed and all(form in _CACHED for form in packed)


def cache_states(hf_model: nn.Module, mixers: Iterable[str]) -> None:
    """Have layers continue from the states in the cache of their `work`.

    Args:
        mixers: names of layers that compute packed rows, see `PackingSupport.states`.
    """
    for name in mixers:
        mixer: Any = hf_model.get_submodule(name)
        mixer.forward = partial(_forward, mixer, name, mixer.forward)


def _forward(
    mixer: Any, name: str, packed: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    work: Work = mixer.packing_arguments["work"]
    if work.cache is None:
        return packed(*args, **kwargs)
    known = inspect.unwrap(type(mixer).forward).__globals__
    functions = {
        function: partial(_CACHED[form], work, f"{name}.{function}")
        for function, form in PACKED.items()
        if function in known and form in _CACHED
    }
    kwargs = {key: value for key, value in kwargs.items() if key not in ("packing", "work")}
    return with_functions(mixer, functions)(*args, **kwargs)


def _in_row(
    work: Work,
    name: str,
    inputs: Sequence[Tensor],
    *,
    of_prompts: Callable[..., tuple[Tensor, Tensor]],
    of_step: Callable[..., tuple[Tensor, Tensor]],
) -> Tensor:
    """Compute prompts, then one token of each sequence that continues; write their states.

    Args:
        name: of the state.
        inputs: [T, ...] each.
        of_prompts: from a packing and inputs [P, ...] to outputs [P, ...] and states [S, ...].
        of_step: from states [B, ...] and inputs [B, ...] to outputs [B, ...] and states after them.
    Returns: [T, ...].
    """
    assert work.cache is not None
    num = work.num_prompt_tokens
    count = len(work.lengths)
    outputs = []
    if work.packing is not None:
        output, states = of_prompts(work.packing, *(x[:num] for x in inputs))
        work.cache.write_states(name, states[work.prompts], first=count)
        outputs.append(output)
    if count:
        own = work.cache.states[name][:count]
        output, states = of_step(own, *(x[num:] for x in inputs))
        own.copy_(states)
        outputs.append(output)
    return torch.cat(outputs)


# --------------------------------------------------------------------------- convolution


def _convolution(
    work: Work,
    name: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Convolve as in packed_states.py, [1, D, T] to [1, D, T]. The state is a sequence's last W - 1
    inputs, [D, W - 1], zeros before its beginning."""
    width = weight.shape[-1]

    def of_prompts(packing: Packing, x: Tensor) -> tuple[Tensor, Tensor]:
        """From inputs [P, D] to outputs [P, D] and the last inputs [S, D, W - 1]."""
        places = packing.places(len(x))
        ends = packing.cu_seqlens[1:].long() - 1
        back = torch.arange(width - 2, -1, -1, device=x.device)
        at = (ends[:, None] - back).clamp(min=0)  # [S, W - 1]
        is_own = places[ends][:, None] >= back
        last = x[at].where(is_own[..., None], 0.0).mT
        return convolve(x.T, weight, bias, places=places).T, last

    def of_step(last: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """From the last inputs [B, D, W - 1] and x [B, D] to outputs [B, D] and the last inputs."""
        whole = torch.cat([last, x[..., None]], -1)
        inputs = whole.to(weight.dtype)
        # Added up in the order of `convolve`.
        total = inputs[..., -1] * weight[:, -1]
        for place in range(width - 2, -1, -1):
            total = total + inputs[..., place] * weight[:, place]
        return total if bias is None else total + bias, whole[..., 1:]

    out = _in_row(work, name, [x[0].T], of_prompts=of_prompts, of_step=of_step)
    out = out if activation is None else ACT2FN[activation](out)
    return out.T[None].to(x.dtype)


# --------------------------------------------------------------------------- matrices as states


def _read(state: Tensor, query: Tensor) -> Tensor:
    """Return [B, H, V] of states [B, H, K, V] and queries [B, H, K]."""
    return (query[..., None, :] @ state)[..., 0, :]


def _gated_delta_rule(
    work: Work,
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute the gated delta rule or Kimi delta attention, [1, T, H, V], with arguments as in
    packed_states.py. The state is [H, K, V] float32."""

    def of_prompts(packing: Packing, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """From the five inputs [P, H, ...] to outputs [P, H, V] and states [S, H, K, V]."""
        out, states = delta_rule_of_chunks(
            *(by_head(x[None]) for x in inputs),
            packing=packing,
            normalizes=use_qk_l2norm_in_kernel,
            wants_states=True,
        )
        assert states is not None
        return out.transpose(0, 1), states.transpose(0, 1)

    def of_step(state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """From states [B, H, K, V] and inputs [B, H, ...] to outputs [B, H, V] and new states."""
        query, key, value, g, beta = (x.float() for x in inputs)
        if use_qk_l2norm_in_kernel:
            query = normalized(query)
            key = normalized(key)
        state = state * g.exp().view(*state.shape[:2], -1, 1)
        new = beta[..., None] * (value - _read(state, key))
        state = state + key[..., None] * new[..., None, :]
        return _read(state, query * query.shape[-1] ** -0.5), state

    inputs = [x[0] for x in (query, key, value, g, beta)]
    out = _in_row(work, name, inputs, of_prompts=of_prompts, of_step=of_step)
    return out[None].to(query.dtype).contiguous(), None


def _mamba2_scan(
    work: Work,
    name: str,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor,
    dt_bias: Tensor,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    **_: Any,
) -> Tensor:
    """Compute Mamba 2's state-space layer, [1, T, H, V], with arguments as in packed_states.py. The
    state is [H, K, V] float32."""
    steps = time_steps(dt, dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit)[0]
    copies = x.shape[2] // B.shape[2]  # heads of a group
    keys, queries = (each[0].repeat_interleave(copies, dim=1) for each in (B, C))

    def of_prompts(packing: Packing, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """From the four inputs [P, H, ...] to outputs [P, H, V] and states [S, H, K, V]."""
        x, dt, keys, queries = (by_head(each[None]) for each in inputs)
        out, states = scan_of_chunks(x, dt, A, keys, queries, packing=packing, wants_states=True)
        assert states is not None
        return out.transpose(0, 1), states.transpose(0, 1)

    def of_step(state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """From states [B, H, K, V] and inputs [B, H, ...] to outputs [B, H, V] and new states."""
        x, dt, keys, queries = (each.float() for each in inputs)
        state = state * (A.float() * dt).exp()[..., None, None]
        state = state + keys[..., None] * (x * dt[..., None])[..., None, :]
        return _read(state, queries), state

    inputs = [x[0], steps, keys, queries]
    out = _in_row(work, name, inputs, of_prompts=of_prompts, of_step=of_step)
    return (out + D[:, None] * x[0].float())[None].contiguous()


_CACHED: Mapping[Callable[..., Any], Callable[..., Any]] = {
    convolution: _convolution,
    gated_delta_rule: _gated_delta_rule,
    mamba2_scan: _mamba2_scan,
    no_fused_scan: no_fused_scan,
}
"""{form on packed rows: that which continues from cached states}."""
