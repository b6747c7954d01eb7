"""Checksums of weights that do not depend on how ranks cut them: both ends of a push compare."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmdrl.algorithms.splitmix import signed
from spmdrl.config import Config
from spmdrl.model.files.file_tensors import live_tensors
from spmdrl.model.files.reader import CheckpointReader
from spmdrl.model.shards import Box
from spmdrl.sync.buckets import StreamPlan, pieces_of
from spmdrl.sync.live_shards import LiveShards
from spmdrl.sync.trace import Copy
from spmdrl.types import Sums
from spmdrl.world.comm import gather_objects
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


_SHOWN = 8  # problems spelled out in a message


def shown(lines: Sequence[str]) -> str:
    """Return problems as lines of a message, the first few of them."""
    more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join([f"  - {line}" for line in lines[:_SHOWN]] + more)


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


def differences(
    copies: Sequence[Copy], plan: StreamPlan, live: LiveShards, world: World
) -> list[str]:
    """Compare checksums of what trainers hold with what engines hold, slice by slice.

    Args:
        copies: the places in this rank's engine, the wants of the plan; empty where there is none.
    Returns: on every rank, what differs: engine, tensor and both sums. Every rank calls.
    """
    counts = gather_objects(len(copies), group=world.control)
    sums = sums_sent(plan, live, most=max(counts), world=world)
    problems = []
    for copy, total in zip(copies, sums):
        held = checksum(copy.view, copy.box, shape=live.parts[copy.name].shape)
        if held != total:
            problems.append(
                f"engine of rank {world.rank}: {copy.name} has checksum {held:016x}, "
                f"the trainers sent {total:016x}"
            )
    every = gather_objects(problems, group=world.control)
    return [line for lines in every for line in lines]


def probe_gap(
    of_engine: Sequence[Tensor],
    of_trainer: Sequence[Tensor],
    *,
    limit: float,
    version: int,
    world: World,
) -> Sums:
    """Compare engines' logprobs of some sequences with the trainers'; every rank calls.

    Args:
        of_engine, of_trainer: per sequence [len] float32, first 0, of this rank's engine and model;
            empty where there is none.
        limit: stream.max_logprob_gap, in nats.
        version: of the weights, for messages.
    Returns: sync/probe_gap: (sum of |engine - trainer| in nats, tokens), over all replicas.
    Raises: RuntimeError on every rank when the mean is above the limit or not a number.
    """
    scores = gather_objects((_flat(of_engine), _flat(of_trainer)), group=world.control)
    engines, trainers = ([own for own in column if len(own)] for column in zip(*scores))
    trainer = trainers[0]
    gaps = torch.stack([(own - trainer).abs() for own in engines]).double()
    mean = float(gaps.mean())
    if not mean <= limit:
        raise RuntimeError(
            f"probe at version {version}: engine and trainer logprobs differ by {mean:.4g} "
            f"nats on average (largest {float(gaps.max()):.4g}), more than "
            f"stream.max_logprob_gap {limit:g}; mean logprob {float(engines[0].mean()):.4f} by "
            f"the engine, {float(trainer.mean()):.4f} by the trainer, whose rows "
            f"were found right, so look at the engine: {_suspects(world.cfg)}"
        )
    return {"sync/probe_gap": (float(gaps.sum()), float(gaps.numel()))}


def _flat(scores: Sequence[Tensor]) -> Tensor:
    """Join scores without each sequence's first token, which has none."""
    return torch.cat([torch.empty(0), *(one[1:].float().cpu() for one in scores)])


def _suspects(cfg: Config) -> str:
    if quantization := cfg.engine.options.get("quantization"):
        return (
            f"engine.options quantization {quantization} may be all of it; then raise the limit, "
            "and keep an algorithm.correction"
        )
    kind, dtype, other = cfg.engine.kind, cfg.engine.dtype, cfg.model.compute_dtype
    if dtype != other or dtype != "float32":
        return (
            f"engine.dtype {dtype} beside model.compute_dtype {other} may be all of it, which "
            f"float32 for both would show; else it is {kind}'s own code or kernels for this model"
        )
    if kind == "transformers":
        return "its weights are not the trainer's, or its attention is wrong; this is a bug here"
    return f"{kind}'s own code or kernels for this model; engine.kind transformers has others"
