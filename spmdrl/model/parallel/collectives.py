"""Collectives of the R ranks of a group, and collectives whose backward is another collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.world.torch_internals import all_gather_single

Exchange = Callable[[Tensor, Any], Tensor]
"""Maps a tensor to another, usually by a collective of a group."""


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Any, forward: Exchange, backward: Exchange) -> Tensor:
        ctx.group = group
        ctx.exchange = backward
        return forward(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.exchange(grad, ctx.group), None, None, None


def with_gradient(forward: Exchange, backward: Exchange) -> Exchange:
    """Return `forward` as an autograd function whose backward pass is `backward` of the gradient.

    Neither may change its tensor in place.
    """

    def exchange(x: Tensor, group: Any) -> Tensor:
        return _WithGradient.apply(x, group, forward, backward)

    return exchange


def same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensor itself."""
    return x.view_as(x)


def added(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks, on every rank."""
    # A copy: autograd may pass the same tensor to another consumer.
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def gathered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return every rank's tensor of one shape [n, ...], in order of rank: [R, n, ...]."""
    size = dist.get_world_size(group)
    parts = own.new_empty(size * own.shape[0], *own.shape[1:])
    all_gather_single(parts, own.contiguous(), group=group)
    return parts.unflatten(0, (size, -1))


def swapped(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send block r of [R, ...] to rank r; return the blocks that the ranks sent here, by rank."""
    blocks = blocks.contiguous()
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=group)
    return received


def scattered_sum(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks of their block for this rank: [...] of [R, ...].

    Blocks are sent in their dtype and added in float32 in order of rank, so that the result does
    not depend on the algorithm of a collective.
    """
    return swapped(blocks, group).sum(dim=0, dtype=torch.float32).to(blocks.dtype)


swap = with_gradient(swapped, swapped)
"""[R, ...]: block r is sent to rank r, and the block of rank r is received at index r. The backward
pass sends gradients back."""
gather = with_gradient(gathered, scattered_sum)
"""A rank's [...] to all ranks' [R, ...]; the backward pass adds up the gradients."""
