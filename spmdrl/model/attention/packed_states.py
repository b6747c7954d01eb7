"""Functions of layers that keep a state over the tokens, on packed rows.

Gated delta nets, Kimi delta attention, Mamba 2 and short convolutions compute with functions of
their modeling file, such as `causal_conv1d_fn`. Here are forms of these that know where sequences
begin (state_layers.py puts them in place).

Where the packages of the fast kernels are installed (causal-conv1d, flash-linear-attention,
mamba-ssm), transformers' functions call them, and get the boundaries as the kernels want them. Else
the forms in plain torch are computed (state_chunks.py).

Under context or tensor parallelism a rank has a part of the tokens, and computes some of the heads
or channels for the whole row (parallel/state_exchange.py).

Shape letters: T packed tokens, t of this rank, H heads, h of this rank, K size of keys (Mamba's
state), V size of values (Mamba's head), D channels, W tokens of a convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from spmdrl.imports import attempt
from spmdrl.model.attention.state_chunks import (
    convolve,
    delta_rule_of_chunks,
    scan_of_chunks,
    sequence_numbers,
)
from spmdrl.model.parallel.state_exchange import StateRow


def convolution(
    row_of: Callable[[], StateRow],
    original: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Convolve each channel over the last W tokens of its sequence: [1, D, t] to [1, D, t].

    Args:
        weight: [D, W].
        bias: [D].
    """
    row = row_of()
    own = row.own(len(weight), weight.device)
    weight = weight[own]
    bias = None if bias is None else bias[own]
    whole = row.to_heads(x[0, :, :, None])[..., 0]
    if has_kernel("causal_conv1d", x):
        numbers = sequence_numbers(row.packing, whole.shape[-1]).to(torch.int32)[None]
        channels_last = whole.T.contiguous().T[None]  # which the kernel needs for seq_idx
        out = original(channels_last, weight, bias, activation=activation, seq_idx=numbers)[0]
    else:
        out = convolve(whole, weight, bias, places=row.packing.places(whole.shape[-1]))
        out = out if activation is None else ACT2FN[activation](out)
    return row.to_tokens(out[..., None], heads=x.shape[1])[None, ..., 0].to(x.dtype)


def by_head(x: Tensor) -> Tensor:
    """Return [1, t, H, ...] as [H, t, ...], with at least one more dim."""
    x = x[0].transpose(0, 1)
    return x if x.dim() == 3 else x[..., None]


def by_token(x: Tensor) -> Tensor:
    """Return [H, t, V] as [1, t, H, V]."""
    return x.transpose(0, 1)[None].contiguous()  # some models view it in another shape


def gated_delta_rule(
    row_of: Callable[[], StateRow],
    original: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute the gated delta rule (arXiv 2412.06464, equation 10).

    A state S [K, V] first decays to exp(g) S. Then it becomes S + beta k (v' - k' S), and a token
    reads q' S. Where each channel of the key has its own decay, this is Kimi delta attention
    (arXiv 2510.26692, equation 1).

    Args:
        query, key: [1, t, H, K].
        value: [1, t, H, V].
        g: [1, t, H] or [1, t, H, K], in nats.
        beta: [1, t, H].
        use_qk_l2norm_in_kernel: scale queries and keys to length 1.
    Returns: [1, t, H, V], and no state.
    """
    row = row_of()
    parts = [row.to_heads(by_head(x)) for x in (query, key, value, g, beta)]
    if has_kernel("fla", query):
        q, k, v, decay, beta = (x.transpose(0, 1)[None] for x in parts)
        out = original(
            *(q, k, v),
            g=decay if g.dim() == 4 else decay[..., 0],
            beta=beta[..., 0],
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=row.packing.cu_seqlens.long(),
        )[0]
        out = out[0].transpose(0, 1)
    else:
        normalizes = use_qk_l2norm_in_kernel
        out = delta_rule_of_chunks(*parts, packing=row.packing, normalizes=normalizes)[0]
    return by_token(row.to_tokens(out.to(query.dtype), heads=query.shape[2])), None


def mamba2_scan(
    row_of: Callable[[], StateRow],
    original: Callable[..., Any],
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
    """Compute Mamba 2's state-space layer (arXiv 2405.21060, section 6).

    Args:
        x: [1, t, H, V].
        dt: [1, t, H], time steps before the bias.
        A: [H], negative.
        B, C: [1, t, groups, K]; a group has the same number of consecutive heads.
        chunk_size: of the kernel; without it, chunks have L tokens.
        D, dt_bias: [H].
        dt_softplus: take the softplus of time steps.
        dt_limit: bounds of time steps after it.
    Returns: [1, t, H, V].
    """
    row = row_of()
    heads = x.shape[2]
    own = row.own(heads, x.device)
    groups = own // (heads // B.shape[2])
    A, D = (each[own] for each in (A, D))
    steps = time_steps(dt, dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit)
    steps = row.to_heads(by_head(steps))
    inputs = row.to_heads(by_head(x))
    B, C = (row.to_all(by_head(each)) for each in (B, C))
    if has_kernel("mamba_ssm", x):
        x, B, C = (each.transpose(0, 1)[None] for each in (inputs, B[groups], C[groups]))
        numbers = sequence_numbers(row.packing, inputs.shape[1]).to(torch.int32)[None]
        steps = steps[..., 0].T[None]
        out = original(x, steps, A, B, C, chunk_size=chunk_size, D=D, seq_idx=numbers)
        out = out[0].transpose(0, 1)
    else:
        out = scan_of_chunks(inputs, steps, A, B[groups], C[groups], packing=row.packing)[0]
        out = out + D[:, None, None] * inputs.float()
    return by_token(row.to_tokens(out, heads=heads))


def time_steps(
    dt: Tensor, dt_bias: Tensor, *, dt_softplus: bool, dt_limit: tuple[float, float]
) -> Tensor:
    """Return Mamba 2's time steps [1, t, H] float32; see `mamba2_scan`."""
    steps = dt.float() + dt_bias.float()
    steps = F.softplus(steps) if dt_softplus else steps
    return steps.clamp(*dt_limit)


def has_kernel(package: str, x: Tensor) -> bool:
    """Return whether transformers' function calls the kernel of a package."""
    return x.is_cuda and _imports(package)


@cache
def _imports(package: str) -> bool:
    """Return whether a package can be imported. If not, transformers goes on without it, and would
    take the packed row for one sequence."""
    return attempt(lambda: import_module(package), Exception)[1] is None
