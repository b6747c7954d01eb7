"""Prove that a traced path is right: layout before the first push, checksums after one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from spmdrl.config import Config
from spmdrl.model.files.file_tensors import live_tensors
from spmdrl.model.files.reader import CheckpointReader
from spmdrl.model.shards import Box
from spmdrl.sync.trace import Copy
from spmdrl.types import Sums
from spmdrl.world import World
from spmdrl.world.comm import gather_objects

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd constants of splitmix64, as signed 64-bit numbers; int64 arithmetic wraps mod 2^64.
_A, _B, _C = -7046029254386353131, -4658895280553007687, -7723592293110705685
_ELEMENTS_AT_ONCE = 2**20  # bounds the int64 temporaries of a checksum: 8 MB each
_SHOWN = 8  # problems spelled out in a message


def shown(lines: Sequence[str]) -> str:
    """Return problems as lines of a message, the first few of them."""
    more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join([f"  - {line}" for line in lines[:_SHOWN]] + more)


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
        bits = values.contiguous().view(_INTEGERS[values.element_size()]).to(torch.int64)
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
            bits = bits if bits.dtype == torch.bool else bits.view(_INTEGERS[bits.itemsize])
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
    integer = _INTEGERS[b.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


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
