"""What proves that engines hold the trainers' weights: the layout before a push, checksums after.

Checksums do not depend on how ranks cut a tensor, so both ends of a push can compare them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmdrl.algorithms.splitmix import mix, to_int64
from spmdrl.model.files.file_tensors import live_tensors
from spmdrl.model.files.reader import CheckpointReader
from spmdrl.model.tensor_parts import Box
from spmdrl.sync.buckets import StreamPlan, pieces_of
from spmdrl.sync.tables import LiveShards
from spmdrl.sync.trace import Copy
from spmdrl.world.comm import gather_objects
from spmdrl.world.torch_internals import storage_id
from spmdrl.world.world import World

_MOST_PROBLEMS = 8  # spelled out in a message
_ELEMENTS_AT_ONCE = {"cpu": 2**20, "cuda": 2**24}
"""Bounds the int64 temporaries of a checksum: 8 MB each, and 128 MB on GPUs, where a smaller strip
takes as long as the launches of its kernels."""
_TEMPORARIES = 5
"""Int64 tensors as large as a strip that exist at once in `checksum`."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""{bytes of an element: the integer dtype that shows its bits}."""


def bullet_list(lines: Sequence[str]) -> str:
    """Return problems as lines of a message, the first few of them."""
    bullets = [f"  - {line}" for line in lines[:_MOST_PROBLEMS]]
    if len(lines) > _MOST_PROBLEMS:
        bullets.append(f"  and {len(lines) - _MOST_PROBLEMS} more")
    return "\n".join(bullets)


# --------------------------------------------------------------------------- the layout


def layout_problems(copies: Sequence[Copy], reader: CheckpointReader) -> list[str]:
    """Compare what an engine holds, freshly loaded, with what the trace says it loaded.

    A write in place is right only if the loader's own writes still lie where it put them:
    weights that are re-packed, transposed or quantised after loading differ here.

    Args:
        copies: traced; the engine still holds the files' weights.
        reader: of the files that the engine was loaded from.
    Returns: one line per engine parameter that differs; empty when every element is bit-equal.
    """
    problems: dict[str, str] = {}
    names = reader.names()
    for copy in copies:
        if copy.parameter in problems:
            continue
        if copy.name not in names:
            problems[copy.parameter] = f"the model's files have no tensor {copy.name}"
            continue
        part = reader.read(copy.name, start=copy.box.start, shape=copy.box.shape)
        if not _same_bits(part.to(copy.view.device).to(copy.view.dtype), copy.view):
            problems[copy.parameter] = (
                f"does not hold {copy.name} the way it was loaded: vLLM changes it after loading "
                "(re-packed or quantised), so a write in place would be wrong"
            )
    return [f"{parameter}: {why}" for parameter, why in problems.items()]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    integer = INTEGERS[b.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


# --------------------------------------------------------------------------- both ends of a push


def differences(
    copies: Sequence[Copy], plan: StreamPlan, live: LiveShards, world: World
) -> list[str]:
    """Compare checksums of what trainers hold with what engines hold, slice by slice.

    Args:
        copies: the places in this rank's engine, the wants of the plan; empty where there is none.
    Returns: on every rank, what differs: engine, tensor and both sums. Every rank calls.
    """
    counts = gather_objects(len(copies), group=world.control)
    sent = sent_checksums(plan, live, most=max(counts), world=world)
    sums = [checksum(c.view, c.box, shape=live.parts[c.name].shape) for c in copies]
    problems = []
    for copy, of_engine, of_trainers in zip(copies, on_host(sums), sent):
        if of_engine != of_trainers:
            problems.append(
                f"engine of rank {world.rank}: {copy.name} has checksum {of_engine:016x}, "
                f"the trainers sent {of_trainers:016x}"
            )
    return gather_lines(problems, world)


def gather_lines(own: Sequence[str], world: World) -> list[str]:
    """Return the lines of all ranks, in rank order, on every rank."""
    lines = []
    for of_rank in gather_objects(list(own), group=world.control):
        lines += of_rank
    return lines


def sent_checksums(plan: StreamPlan, live: LiveShards, *, most: int, world: World) -> list[int]:
    """Return the checksum of what all trainers hold of each want of this rank, mod 2^64.

    Args:
        most: the number of wants of the rank that has most. Every rank calls.
    """
    receiver_of = {}
    for index, ranks in enumerate(plan.traffic.receivers):
        for rank in ranks:
            receiver_of[rank] = index
    places = []
    parts = []
    for piece in pieces_of(plan.from_this_rank, live.table):
        value = live.held.value(piece.name, piece.box).read().to(piece.dtype)
        shape = live.parts[piece.name].shape
        places.append((receiver_of[piece.target], piece.want))
        parts.append(checksum(value, piece.box, shape=shape))
    totals = [[0] * most for _ in plan.traffic.receivers]
    for (receiver, want), part in zip(places, on_host(parts)):
        totals[receiver][want] += part
    sums = torch.tensor([[to_int64(total) for total in wants] for wants in totals])
    dist.all_reduce(sums, group=world.control)
    own = sums[receiver_of.get(world.rank, 0)]  # read only where this rank wants something
    return [int(total) % 2**64 for total in own]


# --------------------------------------------------------------------------- checksums


def checksum(view: Tensor, box: Box, *, shape: Sequence[int]) -> Tensor:
    """Return a hash of the bits in `view`, additive over disjoint boxes mod 2^64: [] int64 on the
    device of the view, for `on_host`.

    Each element is mixed with its position in the whole tensor before it is added, so the sum
    does not depend on how the tensor is cut or where its parts lie, but does on their order.

    Args:
        view: box.shape, any dtype and strides.
        box: the part of the checkpoint tensor that it shows.
        shape: of the whole checkpoint tensor.
    """
    total = torch.zeros((), dtype=torch.int64, device=view.device)
    strides = torch.empty(tuple(shape), device="meta").stride()
    for part, values in _strips(view, box):
        integer = INTEGERS[values.element_size()]
        bits = values.contiguous().view(integer).to(torch.int64)
        position = torch.zeros((), dtype=torch.int64, device=view.device)
        for dim, stride in enumerate(strides):
            index = torch.arange(part.shape[dim], device=view.device) + part.start[dim]
            later_dims = [1] * (len(shape) - dim - 1)
            position = position + (index * stride).view([-1, *later_dims])
        total += mix(mix(position) + bits).sum()
    return total


def checksum_bytes(numel: int, *, device_type: str) -> int:
    """Return about the most bytes that `checksum` of so many elements allocates at once."""
    return 8 * _TEMPORARIES * min(numel, _ELEMENTS_AT_ONCE[device_type])


def on_host(sums: Sequence[Tensor]) -> list[int]:
    """Return checksums as numbers in [0, 2^64), by one copy to the host for all of them."""
    if not sums:
        return []
    # Shards may be on the host, and buffers beside them on the device.
    devices = [one.device for one in sums if one.device.type != "cpu"]
    device = devices[0] if devices else torch.device("cpu")
    return [total % 2**64 for total in torch.stack([one.to(device) for one in sums]).tolist()]


def parameter_checksums(model: nn.Module) -> dict[str, int]:
    """Return a checksum of each parameter and persistent buffer of an engine's model."""
    tensors = live_tensors(model)
    sums = [checksum(t.detach(), Box.whole(t.shape), shape=t.shape) for t in tensors.values()]
    return dict(zip(tensors, on_host(sums)))


def flip_bits(model: nn.Module, names: Collection[str]) -> None:
    """Invert every bit of some parameters and persistent buffers; a second time undoes it."""
    views_of: dict[int, list[Tensor]] = {}
    for name, tensor in live_tensors(model).items():
        if name in names and tensor.numel():
            views_of.setdefault(storage_id(tensor), []).append(_bits(tensor))
    for views in views_of.values():
        if len(views) == 1:
            torch.bitwise_not(views[0], out=views[0])
            continue
        # Tied tensors, or a part that has a name too: what they share must be inverted once.
        inverted = [torch.bitwise_not(view) for view in views]
        for view, bits in zip(views, inverted):
            view.copy_(bits)


def _bits(tensor: Tensor) -> Tensor:
    """Return a view of a tensor that `bitwise_not` takes."""
    bits = tensor.detach()
    return bits if bits.dtype == torch.bool else bits.view(INTEGERS[bits.itemsize])


def _strips(view: Tensor, box: Box) -> Iterator[tuple[Box, Tensor]]:
    """Yield a view in strips of rows, and the box of each."""
    if not box.shape or not box.numel:
        yield box, view
        return
    rows = max(1, _ELEMENTS_AT_ONCE[view.device.type] * box.shape[0] // box.numel)
    for first in range(0, box.shape[0], rows):
        values = view[first : first + rows]
        start = (box.start[0] + first, *box.start[1:])
        yield Box(start, tuple(values.shape)), values
