"""Checksums of weights that do not depend on how ranks cut them: both ends of a push compare."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmdrl.algorithms.splitmix import signed
from spmdrl.model.files.file_tensors import live_tensors
from spmdrl.model.shards import Box
from spmdrl.sync.live_shards import LiveShards
from spmdrl.sync.pieces import pieces_of
from spmdrl.sync.plan import StreamPlan
from spmdrl.world.world import World

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd constants of splitmix64, as signed 64-bit numbers; int64 arithmetic wraps mod 2^64.
_A, _B, _C = -7046029254386353131, -4658895280553007687, -7723592293110705685
_ELEMENTS_AT_ONCE = 2**20  # bounds the int64 temporaries of a checksum: 8 MB each


def checksum(view: Tensor, box: Box, *, shape: Sequence[int]) -> int:
    """Return a hash of the bits in `view`, additive over disjoint boxes mod 2^64.

    Each element is mixed with its position in the whole tensor before it is added, so the sum
    does not depend on how the tensor is cut or where its parts lie, but does on their order.

    Args:
        view: box.shape, any dtype and strides.
        box: the part of the checkpoint tensor that it shows.
        shape: of the whole checkpoint tensor.
    """
    total, strides = 0, torch.empty(tuple(shape), device="meta").stride()
    for part, values in _strips(view, box):
        bits = values.contiguous().view(INTEGERS[values.element_size()]).to(torch.int64)
        at = torch.zeros((), dtype=torch.int64, device=view.device)
        for dim, stride in enumerate(strides):
            index = torch.arange(part.shape[dim], device=view.device) + part.start[dim]
            at = at + (index * stride).view([-1] + [1] * (len(shape) - dim - 1))
        total += int((_mix(_mix(at + 1) + bits)).sum())
    return total % 2**64


def parameter_checksums(model: nn.Module) -> dict[str, int]:
    """Return a checksum of each parameter and persistent buffer of an engine's model."""
    return {
        name: checksum(p.detach(), Box.whole(p.shape), shape=p.shape)
        for name, p in live_tensors(model).items()
    }


def flip_bits(model: nn.Module, names: Collection[str]) -> None:
    """Invert every bit of some parameters and persistent buffers; a second time undoes it."""
    seen: set[int] = set()
    for name, tensor in live_tensors(model).items():
        if name in names and tensor.numel() and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())  # tied ones are flipped once
            bits = tensor.detach()
            bits = bits if bits.dtype == torch.bool else bits.view(INTEGERS[bits.itemsize])
            torch.bitwise_not(bits, out=bits)


def _strips(view: Tensor, box: Box) -> Iterator[tuple[Box, Tensor]]:
    if not box.shape or not box.numel:
        yield box, view
        return
    rows = max(1, _ELEMENTS_AT_ONCE * box.shape[0] // box.numel)
    for first in range(0, box.shape[0], rows):
        values = view[first : first + rows]
        yield Box((box.start[0] + first, *box.start[1:]), tuple(values.shape)), values


def _mix(x: Tensor) -> Tensor:
    """Scramble int64 values (splitmix64 with arithmetic shifts: only equality matters here)."""
    x = x * _A
    x = (x ^ (x >> 30)) * _B
    x = (x ^ (x >> 27)) * _C
    return x ^ (x >> 31)


def sums_sent(plan: StreamPlan, live: LiveShards, *, most: int, world: World) -> list[int]:
    """Return the checksum of what all trainers hold of each want of this rank, mod 2^64.

    Args:
        most: the wants of the rank that has most. Every rank calls.
    """
    receivers = plan.traffic.receivers
    receiver_of = {target: i for i, ranks in enumerate(receivers) for target in ranks}
    sent = [[0] * most for _ in receivers]
    for piece in pieces_of(plan.held_here, live.table):
        value = live.held.value(piece.name, piece.box).read().to(piece.dtype)
        own = sent[receiver_of[piece.target]]
        own[piece.want] += checksum(value, piece.box, shape=live.parts[piece.name].shape)
    sums = torch.tensor([[signed(total) for total in own] for own in sent])
    dist.all_reduce(sums, group=world.control)
    return [int(total) % 2**64 for total in sums[receiver_of.get(world.rank, 0)]]
