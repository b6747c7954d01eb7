"""Attention whose bits do not depend on what else is in the batch.

Keys are taken in blocks of KEYS from the first of a sequence on, and the blocks are added up in
their order. Within a block all is a batched product whose number of queries is a multiple of a
unit (`units.py`), and functions of single elements or rows. Keys that a query does not see add
zeros. So the order of a query's sums depends on its position alone, whether it is one of a prompt,
of a packed row or decoded alone.

Shape letters: B sequences, Hkv key/value heads, G query heads of each, L queries, K keys, D head
dim, Dv head dim of values, n = B * Hkv, R rows: the queries of all heads that share keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.model.exact.units import ALIGNED, KEYS, attention_unit, padded

NEVER = -1e30
"""Score of a key that is not seen: finite, so that its product with 0 is 0."""


class Keys(Protocol):
    """The keys and values of B sequences, from the first token of each on.

    Keys after the last that a query sees change nothing, if they are finite.
    """

    heads: int
    """Hkv."""
    dims: tuple[int, int]
    """D and Dv."""

    def scores(self, rows: Tensor, begin: int, end: int) -> Tensor:
        """Multiply rows [n, R, D] by the keys from `begin` to `end`: [n, R, width]; the width is a
        multiple of ALIGNED, at least end - begin."""
        ...

    def weighed(self, weights: Tensor, begin: int, end: int) -> Tensor:
        """Multiply weights [n, R, width] by the values from `begin` to `end`: [n, R, Dv]."""
        ...


class DenseKeys:
    """Keys and values in tensors.

    Args:
        key, value: [B, Hkv, K, D] and [B, Hkv, K, Dv]. Views of a cache are not copied if K is a
            multiple of ALIGNED.
    """

    def __init__(self, key: Tensor, value: Tensor):
        self.heads = key.shape[1]
        self.dims = (key.shape[-1], value.shape[-1])
        self._key = key.flatten(0, 1)
        self._value = value.flatten(0, 1)

    def scores(self, rows: Tensor, begin: int, end: int) -> Tensor:
        """See Keys."""
        return torch.bmm(rows, _aligned(self._key, begin, end).transpose(1, 2))

    def weighed(self, weights: Tensor, begin: int, end: int) -> Tensor:
        """See Keys."""
        return torch.bmm(weights, _aligned(self._value, begin, end))


def _aligned(x: Tensor, begin: int, end: int) -> Tensor:
    """Return [n, begin to end, D], with rows of zeros up to a multiple of ALIGNED."""
    last = begin + padded(end - begin, ALIGNED)
    if last <= x.shape[1]:
        return x[:, begin:last]
    return F.pad(x[:, begin:end], (0, 0, 0, last - end))


@dataclass(frozen=True)
class _KeyBlock:
    """The keys from `begin` to `end`, and which of the queries from `first` to `last` see them.

    No other query sees any, but in the first block, which has all queries.
    """

    begin: int
    end: int
    first: int
    last: int
    hidden: Tensor | None
    """Bool [B or 1, 1, last - first, 1, width]; None: every one of these queries sees all."""


class Seen:
    """Which keys queries see. Layers that see the same share it.

    Args:
        mask: bool, broadcasts to [B, L, K]; each query sees a key.
    """

    def __init__(self, mask: Tensor):
        self._mask = mask.view(-1, *mask.shape[-2:])
        self._blocks: dict[int, Sequence[_KeyBlock]] = {}

    def blocks(self, step: int) -> Sequence[_KeyBlock]:
        """Return the blocks of which a key is seen, with a multiple of `step` queries if there are
        as many."""
        if step not in self._blocks:
            self._blocks[step] = [*self._found(step)]
        return self._blocks[step]

    def _found(self, step: int) -> list[_KeyBlock]:
        _, length, count = self._mask.shape
        found: list[_KeyBlock] = []
        for begin in range(0, count, KEYS):
            end = min(begin + KEYS, count)
            own = self._mask[:, :, begin:end]
            seeing = own.any(-1).any(0).nonzero()
            if not len(seeing):
                continue
            first = 0
            last = length
            if found:
                first = int(seeing[0]) // step * step
                last = min(length, (int(seeing[-1]) // step + 1) * step)
            own = own[:, first:last]
            missing = padded(end - begin, ALIGNED) - (end - begin)
            hidden = None
            if missing or not own.all():
                hidden = ~F.pad(own, (0, missing))[:, None, :, None]
            found.append(_KeyBlock(begin, end, first, last, hidden))
        return found


@dataclass
class _Sums:
    """Of the blocks so far, for each query: the largest score, sum exp(score - top), and the sum
    of values weighed by this; float32."""

    top: Tensor  # [n, R, 1]
    total: Tensor  # [n, R, 1]
    values: Tensor  # [n, R, Dv]

    def add(self, other: _Sums, rows: slice) -> None:
        """Add another block to these rows."""
        top = torch.maximum(self.top[:, rows], other.top)
        own = torch.exp(self.top[:, rows] - top)
        others = torch.exp(other.top - top)
        self.total[:, rows].mul_(own).add_(other.total * others)
        self.values[:, rows].mul_(own).add_(other.values * others)
        self.top[:, rows] = top


@torch.no_grad()
def attend(
    query: Tensor,
    keys: Keys,
    *,
    seen: Seen,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from queries to the keys that they see. Without gradients.

    Args:
        query: [B, Hkv, G, L, D]. A query's bits do not depend on L, B and Hkv.
        keys: of the B sequences.
        seen: which of them each query sees.
        scale: factor of the scores.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: [Hkv * G], for each query head the score of a key whose value is zero.
    Returns: [B, Hkv, G, L, Dv], in the dtype of the query.
    """
    batch, kv_heads, shared, length, _ = query.shape
    unit = attention_unit(*keys.dims, query.dtype, torch.get_num_threads(), query.device)
    num_rows = padded(shared * length, unit)
    # The rows of a query, one for each head that shares keys, lie next to each other.
    rows = query.transpose(2, 3).reshape(batch * kv_heads, shared * length, -1)
    if num_rows > shared * length:
        rows = F.pad(rows, (0, 0, 0, num_rows - shared * length))
    sums: _Sums | None = None
    for block in seen.blocks(unit // math.gcd(shared, unit)):
        chosen = slice(block.first * shared, padded(block.last * shared, unit))
        scores = keys.scores(rows[:, chosen], block.begin, block.end).float().mul_(scale)
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        if block.hidden is not None:
            count = block.last - block.first
            of_queries = scores[:, : count * shared].view(batch, kv_heads, count, shared, -1)
            of_queries.masked_fill_(block.hidden, NEVER)
        top = scores.amax(-1, keepdim=True)
        weights = scores.sub_(top).exp_()
        values = keys.weighed(weights.to(query.dtype), block.begin, block.end).float()
        found = _Sums(top, _row_sums(weights), values)
        if sums is None:
            sums = found
        else:
            sums.add(found, chosen)
    assert sums is not None, "each query sees a key"
    if sinks is not None:
        _add_sinks(sums, sinks.view(kv_heads, shared), length=length)
    out = sums.values.div_(sums.total).to(query.dtype)
    return out[:, : shared * length].view(batch, kv_heads, length, shared, -1).transpose(2, 3)


def _row_sums(weights: Tensor) -> Tensor:
    """Return [n, R, 1] of [n, R, width], where the last may be zeros; overwrites weights.

    The order of a sum does not depend on the width, as that of torch.sum would.
    """
    half = KEYS // 2
    while half >= ALIGNED:
        if weights.shape[-1] > half:
            upper = weights[..., half:]
            weights[..., : upper.shape[-1]] += upper
            weights = weights[..., :half]
        half //= 2
    return weights.sum(-1, keepdim=True)


def _add_sinks(sums: _Sums, sinks: Tensor, *, length: int) -> None:
    """Add a key of value zero with the score of a row's head, `sinks` [Hkv, G]."""
    kv_heads, shared = sinks.shape
    rows = sinks.float().repeat(1, length)
    rows = F.pad(rows, (0, sums.top.shape[1] - shared * length))
    top = rows.repeat(len(sums.top) // kv_heads, 1)[..., None]
    sums.add(_Sums(top, torch.ones_like(top), torch.zeros_like(sums.values)), slice(None))
