"""Functions of layers that keep a state over the tokens, on packed rows.

Gated delta nets, Kimi delta attention, Mamba 2 and short convolutions compute with functions of
their modeling file, such as `causal_conv1d_fn`. Here are forms of these that know where sequences
begin (state_layers.py puts them in place).

Where the packages of the fast kernels are installed (causal-conv1d, flash-linear-attention,
mamba-ssm), transformers' functions call them, and get the boundaries as the kernels want them. Else
the forms in plain torch are computed (state_chunks.py). Both go on from the state after a prefix
that sequences share (state_branches.py).

Under context or tensor parallelism a rank has a part of the tokens, and computes some of the heads
or channels for the whole row (parallel/state_exchange.py).

Shape letters: T packed tokens, t of this rank, H heads, h of this rank, K size of keys (Mamba's
state), V size of values (Mamba's head), D channels, W tokens of a convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from spmdrl.imports import attempt
from spmdrl.model.attention.packing import Packing
from spmdrl.model.attention.state_branches import by_levels, with_earlier
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

    def of_row(packing: Packing, x: Tensor) -> Tensor:
        """From [d, T] to [d, T]."""
        if has_kernel("causal_conv1d", x):
            numbers = sequence_numbers(packing, x.shape[-1]).to(torch.int32)[None]
            channels_last = x.T.contiguous().T[None]  # which the kernel needs for seq_idx
            return original(channels_last, weight, bias, activation=activation, seq_idx=numbers)[0]
        out = convolve(x, weight, bias, places=packing.places(x.shape[-1]))
        return out if activation is None else ACT2FN[activation](out)

    whole = row.to_heads(x[0, :, :, None])[..., 0]
    out = with_earlier(of_row, row.packing, whole, count=weight.shape[-1] - 1)
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
        has_channels = g.dim() == 4

        def of_sequences(
            *inputs: Tensor, bounds: Tensor, before: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            """From inputs [n, h, ...] and states [S, h, K, V] to outputs [n, h, V] and states."""
            q, k, v, decay, beta = (x[None] for x in inputs)
            out, after = original(
                *(q, k, v),
                g=decay if has_channels else decay[..., 0],
                beta=beta[..., 0],
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                cu_seqlens=bounds,
                initial_state=before,
                output_final_state=row.packing.parents is not None,
            )
            return out[0], after

        out = by_levels(of_sequences, row.packing, *(x.transpose(0, 1) for x in parts))
        out = out.transpose(0, 1)
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
        kernel = partial(original, A=A, chunk_size=chunk_size, D=D)
        parts = (each.transpose(0, 1) for each in (inputs, steps, B[groups], C[groups]))
        out = _mamba2_by_kernel(kernel, row.packing, *parts).transpose(0, 1)
    else:
        out = scan_of_chunks(inputs, steps, A, B[groups], C[groups], packing=row.packing)[0]
        out = out + D[:, None, None] * inputs.float()
    return by_token(row.to_tokens(out, heads=heads))


def _mamba2_by_kernel(
    kernel: Callable[..., Any], packing: Packing, x: Tensor, dt: Tensor, B: Tensor, C: Tensor
) -> Tensor:
    """Return [T, h, V] from x [T, h, V], dt [T, h, 1] and B, C [T, h, K].

    The kernel takes a state to begin with for one sequence alone.
    """
    if packing.parents is None:
        numbers = sequence_numbers(packing, len(x)).to(torch.int32)[None]
        return kernel(x[None], dt[None, ..., 0], B=B[None], C=C[None], seq_idx=numbers)[0]

    def of_sequence(
        x: Tensor, dt: Tensor, B: Tensor, C: Tensor, *, bounds: Tensor, before: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """From inputs [n, h, ...] and a state [1, h, V, K] to the output [n, h, V] and a state."""
        states = dict(initial_states=before, return_final_states=True)
        out, after = kernel(x[None], dt[None, ..., 0], B=B[None], C=C[None], **states)
        return out[0], after

    return by_levels(of_sequence, packing, x, dt, B, C, one_by_one=True)


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
