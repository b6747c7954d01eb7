"""Functions of layers that keep a state over the tokens, on packed rows.

Gated delta nets, Kimi delta attention, Mamba 2 and short convolutions compute with functions of
their modeling file, such as `causal_conv1d_fn`. Here are forms of these that know where sequences
begin (state_layers.py puts them in place).

Where the packages of the fast kernels are installed (causal-conv1d, flash-linear-attention,
mamba-ssm), transformers' functions call them, and get the boundaries as the kernels want them. Else
the state runs over chunks of the packed row, and is cleared where a sequence begins.

Under context or tensor parallelism a rank has a part of the tokens, and computes some of the heads
or channels for the whole row (parallel/state_exchange.py).

Shape letters: T packed tokens, t of this rank, C chunks, L tokens of a chunk, H heads, h of this
rank, K size of keys (Mamba's state), V size of values (Mamba's head), D channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from spmdrl.imports import attempt
from spmdrl.model.attention.packing import Packing
from spmdrl.model.parallel.state_exchange import StateRow

CHUNK = 64
"""Tokens that are computed by matmuls; the state goes from chunk to chunk."""
CHANNEL_CHUNK = 16
"""The same where each channel of a key has its own decay: pairs of tokens take K numbers each."""


# --------------------------------------------------------------------------- convolution


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
        numbers = _numbers(row.packing, whole.shape[-1]).to(torch.int32)[None]
        channels_last = whole.T.contiguous().T[None]  # which the kernel needs for seq_idx
        out = original(channels_last, weight, bias, activation=activation, seq_idx=numbers)[0]
    else:
        out = convolve(whole, weight, bias, places=row.packing.places(whole.shape[-1]))
        out = out if activation is None else ACT2FN[activation](out)
    return row.to_tokens(out[..., None], heads=x.shape[1])[None, ..., 0].to(x.dtype)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, *, places: Tensor) -> Tensor:
    """Return [D, T] of [D, T].

    Args:
        places: [T] int64, of the tokens in their sequences.
    """
    x = x.to(weight.dtype)
    last = weight.shape[-1] - 1
    total = x * weight[:, last, None]
    for back in range(1, last + 1):
        before = F.pad(x, (back, 0))[..., : x.shape[-1]]
        total = total + before.where(places >= back, 0.0) * weight[:, last - back, None]
    return total if bias is None else total + bias[:, None]


def _numbers(packing: Packing, tokens: int) -> Tensor:
    """Return the number of each token's sequence, [T] int64."""
    lengths = packing.cu_seqlens.diff()
    at = torch.arange(len(lengths), device=lengths.device)
    return at.repeat_interleave(lengths, output_size=tokens)


def has_kernel(package: str, x: Tensor) -> bool:
    """Return whether transformers' function calls the kernel of a package."""
    return x.is_cuda and _imports(package)


@cache
def _imports(package: str) -> bool:
    """Return whether a package can be imported. If not, transformers goes on without it, and would
    take the packed row for one sequence."""
    return attempt(lambda: import_module(package), Exception)[1] is None


# --------------------------------------------------------------------------- states over chunks


def by_head(x: Tensor) -> Tensor:
    """Return [1, t, H, ...] as [H, t, ...], with at least one more dim."""
    x = x[0].transpose(0, 1)
    return x if x.dim() == 3 else x[..., None]


def by_token(x: Tensor) -> Tensor:
    """Return [H, t, V] as [1, t, H, V]."""
    return x.transpose(0, 1)[None].contiguous()  # some models view it in another shape


@dataclass(frozen=True)
class _Chunks:
    """Which tokens of a packed row, in chunks of L, belong together."""

    tokens: int  # T
    size: int  # L
    together: Tensor  # [C, L, L] bool, of a token and a token not after it
    continued: Tensor  # [C, L] bool, whether the token's sequence began in an earlier chunk

    @classmethod
    def of(cls, packing: Packing, tokens: int, *, size: int = CHUNK) -> _Chunks:
        """Return the chunks of a row, which are the same for all of its layers."""
        key = f"chunks of {size}"
        if key not in packing.computed:
            packing.computed[key] = cls._of(packing, tokens, size)
        return packing.computed[key]

    @classmethod
    def _of(cls, packing: Packing, tokens: int, size: int) -> _Chunks:
        numbers = F.pad(_numbers(packing, tokens), (0, -tokens % size), value=-1)
        numbers = numbers.view(-1, size)
        before = F.pad(numbers[:-1, -1], (1, 0), value=-2)
        causal = torch.ones(size, size, dtype=torch.bool, device=numbers.device).tril()
        together = (numbers[:, :, None] == numbers[:, None, :]) & causal
        return cls(tokens, size, together, numbers == before[:, None])

    def cut(self, x: Tensor) -> Tensor:
        """Return [h, T, D] as float32 [h, C, L, D], with zeros in the place of padding."""
        return F.pad(x.float(), (0, 0, 0, -self.tokens % self.size)).unflatten(1, (-1, self.size))

    def joined(self, x: Tensor) -> Tensor:
        """Return [h, C, L, D] as [h, T, D]."""
        return x.flatten(1, 2)[:, : self.tokens]

    def decays(self, log_decay: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is left of a state, where each token leaves exp(log_decay) of it.

        Args:
            log_decay: [h, C, L, G]; G is 1, or K where each channel of a key has its own.
        Returns:
            from each token to each later one of its sequence in the chunk [h, C, L, L, G], else 0;
            from the chunk before to each token [h, C, L, G], else 0.
        """
        # Sums of the steps between two tokens, and not differences of sums from the beginning of
        # the chunk, which lose digits.
        steps = log_decay[..., None, :].expand(*log_decay.shape[:-1], self.size, -1)
        later = torch.ones(self.size, self.size, dtype=torch.bool, device=steps.device).tril(-1)
        between = steps.where(later[..., None], 0.0).cumsum(-3)
        between = between.masked_fill(~self.together[..., None], -torch.inf).exp()
        from_start = log_decay.cumsum(-2).exp().where(self.continued[..., None], 0.0)
        return between, from_start

    def ends(
        self,
        packing: Packing,
        before: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        between: Tensor,
        from_start: Tensor,
    ) -> Tensor:
        """Return the states [h, sequences, K, V] after the last token of each sequence.

        Args:
            before: [h, C, K, V], the states before each chunk.
            keys, values: [h, C, L, K] and [h, C, L, V], whose outer products tokens add.
            between, from_start: see `decays`.
        """
        last = packing.cu_seqlens[1:].long() - 1
        at = (slice(None), last // self.size, last % self.size)
        added = (keys[:, at[1]] * between[at]).mT @ values[:, at[1]]
        return before[:, at[1]] * from_start[at][..., None] + added


def _products(left: Tensor, right: Tensor, between: Tensor) -> Tensor:
    """Return the decayed product of each token with each earlier one, [h, C, L, L].

    Args:
        left, right: [h, C, L, K].
        between: [h, C, L, L, G], see `_Chunks.decays`.
    """
    if between.shape[-1] == 1:
        return left @ right.mT * between[..., 0]
    return ((between * right[..., None, :, :]) @ left[..., None])[..., 0]


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

    A state S [K, V] becomes exp(g) (S - beta k (k' S)) + beta k v', and a token reads q' S.

    Args:
        query, key: [1, t, H, K].
        value: [1, t, H, V].
        g: [1, t, H], in nats.
        beta: [1, t, H].
        use_qk_l2norm_in_kernel: scale queries and keys to length 1.
    Returns: [1, t, H, V], and no state.
    """
    row = row_of()
    parts = [row.to_heads(by_head(x)) for x in (query, key, value, g, beta)]
    if has_kernel("fla", query):
        q, k, v, g, beta = (x.transpose(0, 1)[None] for x in parts)
        out, _ = original(
            *(q, k, v),
            g=g[..., 0],
            beta=beta[..., 0],
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=row.packing.cu_seqlens.long(),
        )
        out = out[0].transpose(0, 1)
    else:
        out = delta_rule_of_chunks(*parts, packing=row.packing, normalizes=use_qk_l2norm_in_kernel)[
            0
        ]
    return by_token(row.to_tokens(out.to(query.dtype), heads=query.shape[2])), None


def kimi_delta_rule(
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
    """Compute Kimi delta attention (arXiv 2510.26692, equation 1).

    It is the gated delta rule with a decay for each channel of the key.

    Args:
        g: [1, t, H, K], in nats; for the others see `gated_delta_rule`.
    Returns: [1, t, H, V], and no state.
    """
    row = row_of()
    parts = [row.to_heads(by_head(x)) for x in (query, key, value, g, beta)]
    if has_kernel("fla", query):
        q, k, v, g, beta = (x.transpose(0, 1)[None] for x in parts)
        bounds = row.packing.cu_seqlens.long()
        options = dict(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=bounds)
        out = original(q, k, v, g=g, beta=beta[..., 0], **options)[0][0].transpose(0, 1)
    else:
        out = delta_rule_of_chunks(*parts, packing=row.packing, normalizes=use_qk_l2norm_in_kernel)[
            0
        ]
    return by_token(row.to_tokens(out.to(query.dtype), heads=query.shape[2])), None


def delta_rule_of_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    packing: Packing,
    normalizes: bool,
    wants_states: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the output [h, T, V] float32, from inputs [h, T, K], [h, T, V], g [h, T, G] with G 1
    or K, and beta [h, T, 1]; and the state [h, sequences, K, V] float32 after each sequence, if
    wanted."""
    size = CHUNK if g.shape[-1] == 1 else CHANNEL_CHUNK
    chunks = _Chunks.of(packing, query.shape[1], size=size)
    query, key, value, g, beta = (chunks.cut(x) for x in (query, key, value, g, beta))
    if normalizes:
        query = normalized(query)
        key = normalized(key)
    query = query * query.shape[-1] ** -0.5
    between, from_start = chunks.decays(g)
    # Each token corrects what the state answers to its key. Within a chunk these corrections are a
    # triangular system: of the tokens' own values, and of what the state before answers.
    system = _products(beta * key, key, between)
    own = torch.cat([beta * value, beta * key * from_start], dim=-1)
    solved = torch.linalg.solve_triangular(system, own, upper=False, unitriangular=True)
    written, answered = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    attended = _products(query, key, between)
    # Unbound, and not chunk by chunk: the gradient of each slice would be as large as the whole.
    read = query * from_start
    kept = (key * between[..., -1, :, :]).mT
    whole = from_start[..., -1, :, None]
    state = query.new_zeros(query.shape[0], query.shape[-1], value.shape[-1])
    outputs = []
    states = []
    news = []
    for own_written, own_answered, own_read, own_attended, own_whole, own_kept in zip(
        *(x.unbind(1) for x in (written, answered, read, attended, whole, kept))
    ):
        new = own_written - own_answered @ state
        outputs.append(own_read @ state + own_attended @ new)
        states.append(state)
        news.append(new)
        state = state * own_whole + own_kept @ new
    ends = None
    if wants_states:
        before = torch.stack(states, dim=1)
        new = torch.stack(news, dim=1)
        ends = chunks.ends(packing, before, key, new, between=between, from_start=from_start)
    return chunks.joined(torch.stack(outputs, dim=1)), ends


def normalized(x: Tensor) -> Tensor:
    """Return queries or keys of length 1, as the gated delta rule's kernels compute them."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


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
    A, D, dt_bias = (each[own] for each in (A, D, dt_bias))
    steps = row.to_heads(by_head(dt)) + dt_bias[:, None, None].to(dt.dtype)
    inputs = row.to_heads(by_head(x))
    B, C = (row.to_all(by_head(each)) for each in (B, C))
    if has_kernel("mamba_ssm", x):
        tokens_first = (each.transpose(0, 1)[None] for each in (inputs, B[groups], C[groups]))
        out = _mamba2_kernel(
            original,
            *tokens_first,
            A=A,
            D=D,
            dt=steps[..., 0].T[None],
            numbers=_numbers(row.packing, inputs.shape[1]),
            chunk_size=chunk_size,
            dt_softplus=dt_softplus,
            dt_limit=dt_limit,
        )
    else:
        steps = F.softplus(steps) if dt_softplus else steps
        steps = steps.clamp(*dt_limit).float()
        out = scan_of_chunks(inputs, steps, A, B[groups], C[groups], packing=row.packing)[0]
        out = out + D[:, None, None] * inputs.float()
    return by_token(row.to_tokens(out, heads=heads))


def _mamba2_kernel(
    original: Callable[..., Any],
    x: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    dt: Tensor,
    A: Tensor,
    numbers: Tensor,
    **options: Any,
) -> Tensor:
    """Return [h, T, V], by the kernel of mamba-ssm."""
    numbers = numbers.to(torch.int32)[None]
    out = original(x, dt, A, B, C, seq_idx=numbers, **options)
    return out[0].transpose(0, 1)


def scan_of_chunks(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    packing: Packing,
    wants_states: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the output [h, T, V] float32, from x [h, T, V], dt [h, T, 1], A [h] and B, C
    [h, T, K]; and the state [h, sequences, K, V] float32 after each sequence, if wanted."""
    chunks = _Chunks.of(packing, x.shape[1])
    between, from_start = chunks.decays(chunks.cut(A.float()[:, None, None] * dt))
    steps = chunks.cut(x * dt)
    B, C = (chunks.cut(each) for each in (B, C))
    inside = _products(C, B, between) @ steps
    written = (B * between[..., -1, :, :]).mT @ steps
    whole = from_start[..., -1, :, None]
    state = torch.zeros_like(written[:, 0])
    states = []
    for own_written, own_whole in zip(written.unbind(1), whole.unbind(1)):
        states.append(state)
        state = state * own_whole + own_written
    before = torch.stack(states, dim=1)
    ends = None
    if wants_states:
        ends = chunks.ends(packing, before, B, steps, between=between, from_start=from_start)
    return chunks.joined(inside + (C * from_start) @ before), ends
