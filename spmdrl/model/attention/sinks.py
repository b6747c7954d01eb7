"""Attention sinks: each query head has one more score in its softmax, of a key whose value is zero.

Sinks are parameters, one per head (GPT-OSS; in arXiv 2309.17453, section 3.2, a zero or a token).
No kernel supports them, so they are added in one of two ways:

- As a key. Queries get one more feature, the sink of their head. In all keys this feature is 0. One
  key is added in which it is 1 and all others are 0. This works with any kernel that has gradients.
- After a kernel that also returns lse, the log of the sums of the softmax. With the sink, lse2 =
  log(exp(lse) + exp(sink)) and out2 = out * exp(lse - lse2). The kernel's backward pass, given out2
  and lse2, computes the weights exp(score - lse2). The sink has value 0 and adds nothing to the
  sums of weight times gradient, so the gradients of queries, keys and values are right.

Shape letters: T packed tokens, K keys, B rows of L tokens, Hq query heads, Hkv key/value heads, D
head dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.world.torch_internals import FLASH_BACKWARD, FLASH_FORWARD

_FEATURES = 8
"""Added to the head dim: CUDA kernels need rows of a multiple of 16 bytes."""


def with_sink_keys(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values with the sinks as a key before the others.

    Args:
        q: [B, L, Hq, D]; k: [B, K, Hkv, D]; v: [B, K, Hkv, Dv].
        sinks: [Hq], as scores.
        scale: of the other scores.
    Returns: [B, L, Hq, D + 8]; [B, K + 1, Hkv, D + 8], keys and values, of which the first Dv dims
        are the values'.
    """
    # Where scale is a power of 2, as it is with head dims of 64, bfloat16 loses nothing here.
    own = F.pad((sinks / scale).to(q.dtype)[:, None], (0, _FEATURES - 1))
    q = torch.cat([q, own.expand(*q.shape[:3], -1)], dim=-1)
    key = k.new_zeros(k.shape[0], 1, k.shape[2], k.shape[3] + _FEATURES)
    key[..., k.shape[3]] = 1
    k = torch.cat([key, F.pad(k, (0, _FEATURES))], dim=1)
    return q, k, F.pad(v, (0, k.shape[3] - v.shape[3], 0, 0, 1, 0))


def with_sink_scores(scores: Tensor, sinks: Tensor, *, kv_heads: int) -> Tensor:
    """Return the weights of keys by a softmax over keys and sinks, in float32.

    Args:
        scores: [B * Hkv, n, K], where n are the rows of the query heads of one key/value head, head
            after head.
        sinks: [Hq].
    Returns: [B * Hkv, n, K] float32.
    """
    batch = scores.shape[0] // kv_heads
    rows = scores.shape[1] * kv_heads // len(sinks)
    column = sinks.view(1, kv_heads, -1).repeat_interleave(rows, dim=2).expand(batch, -1, -1)
    column = column.reshape(*scores.shape[:2], 1).to(scores.dtype)
    return torch.cat([scores, column], dim=-1).softmax(dim=-1, dtype=torch.float32)[..., :-1]


def sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks, [Hq] in their dtype.

    Args:
        grad, out: [T, Hq, D], of the attention with sinks.
        lse: [T, Hq] float32, with the sinks in the sums.
    """
    of_scores = (grad.float() * out.float()).sum(-1)
    return -((sinks.float() - lse).exp() * of_scores).sum(0).to(sinks.dtype)


class FlashWithSinks(torch.autograd.Function):
    """Causal attention within packed sequences, with sinks, by torch's flash attention (CUDA,
    bfloat16)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        ends: tuple[Tensor, Tensor],
        longest: tuple[int, int],
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Return [T, Hq, D] from q [T, Hq, D], k and v [K, Hkv, D]; see torch_internals.varlen."""
        ctx.options = {
            "scale": scale,
            "window_size_left": -1 if window is None else window - 1,
            "window_size_right": 0,
        }
        ctx.places = (*ends, *longest, 0.0, window is None)
        q, k, v = (x.contiguous() for x in (q, k, v))
        out, lse, *_ = FLASH_FORWARD(q, k, v, *ctx.places, False, **ctx.options)
        total = torch.logaddexp(lse, sinks.float()[:, None])
        out = (out * (lse - total).exp().T[..., None]).to(out.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, total)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v and sinks."""
        q, k, v, sinks, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, device=q.device)
        found = FLASH_BACKWARD(
            grad, q, k, v, out, lse, *ctx.places, no_dropout, unused, **ctx.options
        )
        return (*found, sink_gradient(grad, out, lse.T, sinks), None, None, None, None)
