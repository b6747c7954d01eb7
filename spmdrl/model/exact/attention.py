"""Attention whose bits do not depend on what else is in the batch.

Keys are taken in blocks of KEYS from the first of a sequence on, and the blocks are added up in
their order. Within a block all is a batched product of a multiple of ROWS queries, and functions
of single elements or rows. Keys that a query does not see add zeros. So the order of a query's sums
depends on its position alone, whether it is one of a prompt, of a packed row or decoded alone.

Shape letters: B sequences, Hkv key/value heads, G query heads of each, L queries, K keys, D head
dim, Dv head dim of values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.model.exact.linear import ROWS, padded_rows

KEYS = 128
"""Keys of a block."""
NEVER = -1e30
"""Score of a key that is not seen: finite, so that its product with 0 is 0."""


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
    key: Tensor,
    value: Tensor,
    *,
    seen: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from queries to the keys that they see. Without gradients.

    Args:
        query: [B, Hkv, G, L, D]. A query's bits do not depend on L, B and Hkv.
        key, value: [B, Hkv, K, D] and [B, Hkv, K, Dv], from the first token of each sequence on.
            Keys after the last that a query sees change nothing.
        seen: bool, broadcasts to [B, L, K]: which keys a query sees; at least one.
        scale: factor of the scores.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: [Hkv * G], for each query head the score of a key whose value is zero.
    Returns: [B, Hkv, G, L, Dv], in the dtype of the query.
    """
    batch, kv_heads, shared, length, _ = query.shape
    num_rows = padded_rows(shared * length)
    # The rows of a query, one for each head that shares keys, lie next to each other.
    rows = query.transpose(2, 3).reshape(batch * kv_heads, shared * length, -1)
    rows = F.pad(rows, (0, 0, 0, num_rows - shared * length))
    step = ROWS // math.gcd(shared, ROWS)
    key = key.flatten(0, 1)
    value = value.flatten(0, 1)
    # [B or 1, 1, L, 1, K]: query heads that share keys see the same.
    seen = seen.view(-1, *seen.shape[-2:])[:, None, :, None]
    sums: _Sums | None = None
    for begin in range(0, key.shape[1], KEYS):
        end = min(begin + KEYS, key.shape[1])
        own = seen[..., begin:end]
        seeing = own.any(-1).any(0).flatten().nonzero()
        if not len(seeing):
            continue
        first = 0
        last = length
        if sums is not None:
            # Only queries that see a key of the block, in steps whose rows are a multiple of ROWS.
            first = int(seeing[0]) // step * step
            last = min(length, (int(seeing[-1]) // step + 1) * step)
        chosen = slice(first * shared, padded_rows(last * shared))
        missing = padded_rows(end - begin) - (end - begin)
        keys, values = (_with_zeros(part[:, begin:end], missing) for part in (key, value))
        scores = torch.bmm(rows[:, chosen], keys.transpose(1, 2)).float().mul_(scale)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        count = last - first
        of_queries = scores[:, : count * shared].view(batch, kv_heads, count, shared, -1)
        of_queries.masked_fill_(~F.pad(own[:, :, first:last], (0, missing)), NEVER)
        found = _block(scores, values)
        if sums is None:
            sums = found
        else:
            sums.add(found, chosen)
    assert sums is not None, "each query sees a key"
    if sinks is not None:
        _add_sinks(sums, sinks.view(kv_heads, shared), length=length)
    out = (sums.values / sums.total).to(query.dtype)
    return out[:, : shared * length].view(batch, kv_heads, length, shared, -1).transpose(2, 3)


def _with_zeros(rows: Tensor, missing: int) -> Tensor:
    """Append rows of zeros to [n, k, D], contiguous. Without any, F.pad would copy."""
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows.contiguous()


def _block(scores: Tensor, values: Tensor) -> _Sums:
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    # A sum over all keys at once would depend on their number, also where the last are zeros.
    first, *others = weights.unflatten(-1, (-1, ROWS)).unbind(-2)
    total = first.clone()
    for other in others:
        total += other
    found = torch.bmm(weights.to(values.dtype), values).float()
    return _Sums(top, total.sum(-1, keepdim=True), found)


def _add_sinks(sums: _Sums, sinks: Tensor, *, length: int) -> None:
    """Add a key of value zero with the score of a row's head, `sinks` [Hkv, G]."""
    kv_heads, shared = sinks.shape
    rows = sinks.float().repeat(1, length)
    rows = F.pad(rows, (0, sums.top.shape[1] - shared * length))
    top = rows.repeat(len(sums.top) // kv_heads, 1)[..., None]
    sums.add(_Sums(top, torch.ones_like(top), torch.zeros_like(sums.values)), slice(None))
