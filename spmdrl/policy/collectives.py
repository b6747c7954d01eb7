"""The two exchanges of equal parts that parallel attention is made of. R ranks of a group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def gathered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return every rank's tensor of one shape [n, ...], in order of rank: [R, n, ...]."""
    size = dist.get_world_size(group)
    parts = own.new_empty(size * own.shape[0], *own.shape[1:])
    # One name until torch 2.12, the other from then on.
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    collective(parts, own.contiguous(), group=group)
    return parts.unflatten(0, (size, -1))


def swapped(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send block r of [R, ...] to rank r; return the blocks that the ranks sent here, by rank."""
    blocks = blocks.contiguous()
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=group)
    return received


def scattered_sum(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks of their block for this rank: [...] of [R, ...].

    Sent as they are, added up in float32 in order of rank: one result for any algorithm of the
    collective.
    """
    return swapped(blocks, group).sum(dim=0, dtype=torch.float32).to(blocks.dtype)
