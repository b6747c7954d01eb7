"""States whose channels do not mix, on packed rows: Mamba 1 and RG-LRU.

Each channel h of a state becomes a h + b. A row is cut into chunks. All chunks run side by side,
first from an empty state, which shows what each leaves of the state before it; then from the state
that they really begin with. So T tokens take 2 L + T / L steps instead of T.

Shape letters: T packed tokens, t of this rank, C chunks, L tokens of a chunk, D channels, d of this
rank, N size of a channel's state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from spmdrl.model.attention.packed_states import has_kernel
from spmdrl.model.attention.packing import Packing
from spmdrl.model.attention.state_branches import by_levels, with_earlier
from spmdrl.model.parallel.state_exchange import StateRow

CHUNK = 32
"""Tokens of a chunk: about the square root of half the tokens of a row."""


def linear_recurrence(
    log_decay: Tensor, inputs: Tensor, *, bounds: Tensor, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the states h[t] = exp(log_decay[t]) h[t-1] + inputs[t] [T, ...], and those that end
    sequences [S, ...].

    Args:
        log_decay, inputs: [T, ...], of one dtype.
        bounds: [S + 1] int64, where each sequence begins.
        before: [S, ...], the state before each sequence; None: empty.
    """
    firsts = bounds[:-1]
    decay = log_decay.index_fill(0, firsts, -torch.inf).exp()
    if before is not None:
        inputs = inputs.index_add(0, firsts, log_decay[firsts].exp() * before)
    states = _Recurrence.apply(decay, inputs)
    return states, states[bounds[1:] - 1]


class _Recurrence(torch.autograd.Function):
    """The gradient of a recurrence is the recurrence in the other direction."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, inputs: Tensor) -> Tensor:  # type: ignore[override]
        states = _run(decay, inputs)
        ctx.save_for_backward(decay, states)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        decay, states = ctx.saved_tensors
        # What a state passes on is the decay of the next token.
        following = torch.cat([decay[1:], torch.zeros_like(decay[:1])])
        of_inputs = _run(following.flip(0), grad.flip(0)).flip(0)
        of_decay = torch.zeros_like(decay)
        torch.mul(of_inputs[1:], states[:-1], out=of_decay[1:])
        return of_decay, of_inputs


def _run(decay: Tensor, inputs: Tensor) -> Tensor:
    tokens = len(inputs)
    padding = inputs.new_zeros(-tokens % CHUNK, *inputs.shape[1:])
    decay, inputs = (
        torch.cat([x, padding]).unflatten(0, (-1, CHUNK)).unbind(1) for x in (decay, inputs)
    )
    # From an empty state, and what is left of the state before.
    ends = inputs[0]
    left = decay[0]
    for own_decay, own_inputs in zip(decay[1:], inputs[1:]):
        ends = torch.addcmul(own_inputs, own_decay, ends)
        left = left * own_decay
    state = torch.zeros_like(ends[0])
    before = []
    for own_end, own_left in zip(ends, left):
        before.append(state)
        state = torch.addcmul(own_end, own_left, state)
    states = torch.stack(before)
    found = []
    for own_decay, own_inputs in zip(decay, inputs):
        states = torch.addcmul(own_inputs, own_decay, states)
        found.append(states)
    return torch.stack(found, dim=1).flatten(0, 1)[:tokens]


def selective_scan(
    row_of: Callable[[], StateRow],
    original: Callable[..., Any],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> Tensor:
    """Compute Mamba's selective state-space layer (arXiv 2312.00752, algorithm 2).

    Args:
        x: [1, D, t].
        dt: [1, D, t], time steps before the bias.
        A: [D, N], negative.
        B, C: [1, N, t].
        D: [D]; None for 0.
        z: [1, D, t], gates; None for none.
        delta_bias: [D], of time steps.
        delta_softplus: take the softplus of time steps.
    Returns: [1, D, t].
    """
    row = row_of()
    channels = x.shape[1]
    own = row.own(channels, x.device)
    inputs = row.to_heads(x[0, ..., None])[..., 0]
    steps = row.to_heads(dt[0, ..., None])[..., 0]
    B, C = (row.to_all(each.mT)[0] for each in (B, C))
    if delta_bias is not None:
        steps = steps + delta_bias[own, None].to(steps.dtype)
    steps = F.softplus(steps) if delta_softplus else steps
    if has_kernel("mamba_ssm", x):
        kernel = partial(_by_sequence, original, A[own])
        out = with_earlier(kernel, row.packing, inputs, steps, B.T, C.T, count=None)
    else:
        out = by_levels(partial(_scan, A[own]), row.packing, inputs.T, steps.T, B, C).T
    if D is not None:
        out = out + D[own, None] * inputs
    out = row.to_tokens(out[..., None], heads=channels)[None, ..., 0]
    return out if z is None else out * F.silu(z)


def _scan(
    A: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, **sequences: Any
) -> tuple[Tensor, Tensor]:
    """Return the output [n, d] and the states after sequences [S, d, N], float32.

    Args:
        A: [d, N].
        x, dt: [n, d].
        B, C: [n, N].
        sequences: `bounds` and `before` of `linear_recurrence`.
    """
    dt = dt.float()
    log_decay = dt[..., None] * A.float()
    inputs = (dt * x.float())[..., None] * B.float()[:, None]
    states, after = linear_recurrence(log_decay, inputs, **sequences)
    return (states @ C.float()[..., None])[..., 0], after


def _by_sequence(
    kernel: Callable[..., Any],
    A: Tensor,
    packing: Packing,
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
) -> Tensor:
    """Return [d, T] by the kernel of mamba-ssm, which takes a row for one sequence, and no state to
    begin with."""
    lengths = packing.cu_seqlens.diff().tolist()
    parts = zip(*(each.split(lengths, dim=1) for each in (x, dt, B, C)))
    outputs = [
        kernel(*(each.contiguous()[None] for each in (own_x, own_dt)), A, own_B[None], own_C[None])
        for own_x, own_dt, own_B, own_C in parts
    ]
    return torch.cat(outputs, dim=-1)[0]
