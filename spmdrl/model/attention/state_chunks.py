"""Layers that keep a state over the tokens of a packed row, in plain torch.

A convolution looks at no token before its sequence. The state of a delta rule or of Mamba 2 is
computed over chunks of the row: within a chunk by matmuls, then from chunk to chunk. Where a
sequence begins, it is cleared, or it is the state after what the sequence continues.

Shape letters: T packed tokens, C chunks, L tokens of a chunk, h heads, K size of keys (Mamba's
state), V size of values (Mamba's head), D channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.model.attention.packing import Packing
from spmdrl.model.attention.state_branches import ChunkPlaces, in_chunks, place, take

CHUNK = 64
"""Tokens that are computed by matmuls; the state goes from chunk to chunk."""
CHANNEL_CHUNK = 16
"""The same where each channel of a key has its own decay: pairs of tokens take K numbers each."""


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


def sequence_numbers(packing: Packing, tokens: int) -> Tensor:
    """Return the number of each token's sequence, [T] int64."""
    lengths = packing.cu_seqlens.diff()
    at = torch.arange(len(lengths), device=lengths.device)
    return at.repeat_interleave(lengths, output_size=tokens)


@dataclass(frozen=True)
class _Chunks:
    """Which tokens of a packed row, in chunks of L, belong together."""

    tokens: int  # T
    size: int  # L
    together: Tensor  # [C, L, L] bool, of a token and a token not after it
    continued: Tensor  # [C, L] bool, whether a token's state before the chunk is not empty
    branches: ChunkPlaces | None = None
    """None: tokens are one after another, and each chunk follows the one before."""

    @classmethod
    def of(cls, packing: Packing, tokens: int, *, size: int = CHUNK) -> _Chunks:
        """Return the chunks of a row, which are the same for all of its layers."""
        return packing.once(f"chunks of {size}", lambda: cls._of(packing, tokens, size))

    @classmethod
    def _of(cls, packing: Packing, tokens: int, size: int) -> _Chunks:
        branches = None
        if packing.parents is None:
            numbers = F.pad(sequence_numbers(packing, tokens), (0, -tokens % size), value=-1)
        else:
            branches = in_chunks(packing, size)
            numbers = branches.numbers
        numbers = numbers.view(-1, size)
        before = F.pad(numbers[:-1, -1], (1, 0), value=-2)
        if branches is not None:
            firsts = [*branches.before]
            before[firsts] = numbers[firsts, 0]
        causal = torch.ones(size, size, dtype=torch.bool, device=numbers.device).tril()
        together = (numbers[:, :, None] == numbers[:, None, :]) & causal
        return cls(tokens, size, together, numbers == before[:, None], branches)

    def before(self, at: int, after: Sequence[Tensor]) -> Tensor:
        """Return the state before chunk `at`; `after`: an empty one, then those after chunks."""
        parent = self.branches.before.get(at, at - 1) if self.branches else at - 1
        return after[parent + 1]

    def cut(self, x: Tensor) -> Tensor:
        """Return [h, T, D] as float32 [h, C, L, D], with zeros in the place of padding."""
        if self.branches is not None:
            whole = place(x.float(), self.branches.at, count=len(self.branches.numbers))
        else:
            whole = F.pad(x.float(), (0, 0, 0, -self.tokens % self.size))
        return whole.unflatten(1, (-1, self.size))

    def joined(self, x: Tensor) -> Tensor:
        """Return [h, C, L, D] as [h, T, D]."""
        whole = x.flatten(1, 2)
        return take(whole, self.branches.at) if self.branches else whole[:, : self.tokens]

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
        assert self.branches is None, "engines compute whole prompts"
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
    after = [query.new_zeros(query.shape[0], query.shape[-1], value.shape[-1])]
    outputs = []
    states = []
    news = []
    parts = zip(*(x.unbind(1) for x in (written, answered, read, attended, whole, kept)))
    for at, part in enumerate(parts):
        own_written, own_answered, own_read, own_attended, own_whole, own_kept = part
        state = chunks.before(at, after)
        new = own_written - own_answered @ state
        outputs.append(own_read @ state + own_attended @ new)
        states.append(state)
        news.append(new)
        after.append(state * own_whole + own_kept @ new)
    ends = None
    if wants_states:
        before = torch.stack(states, dim=1)
        new = torch.stack(news, dim=1)
        ends = chunks.ends(packing, before, key, new, between=between, from_start=from_start)
    return chunks.joined(torch.stack(outputs, dim=1)), ends


def normalized(x: Tensor) -> Tensor:
    """Return queries or keys of length 1, as the gated delta rule's kernels compute them."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


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
    after = [torch.zeros_like(written[:, 0])]
    states = []
    for at, (own_written, own_whole) in enumerate(zip(written.unbind(1), whole.unbind(1))):
        state = chunks.before(at, after)
        states.append(state)
        after.append(state * own_whole + own_written)
    before = torch.stack(states, dim=1)
    ends = None
    if wants_states:
        ends = chunks.ends(packing, before, B, steps, between=between, from_start=from_start)
    return chunks.joined(inside + (C * from_start) @ before), ends
