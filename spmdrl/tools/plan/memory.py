"""Bytes that one rank holds, by cause, and its share of a model's weights.

Weights, gradients and optimizer state are exact, and so are an engine's weights, and its KV cache
if its size is given in bytes. Other causes are formulas, in trainer_memory.py and engine_memory.py.
The buckets of a push are those of the weight stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from spmdrl.model.block_shape import Block, Weight
from spmdrl.model.cuts import CutAxis, TensorCut
from spmdrl.model.model_shape import ModelShape
from spmdrl.model.parallel.expert_parallel import expert_dim
from spmdrl.sync.buckets import best_count, bound_of, overhead_s, slice_room
from spmdrl.sync.verify import checksum_bytes
from spmdrl.tools.plan.run import Run
from spmdrl.world.axes import Axes
from spmdrl.world.machine.hardware import CPU_LINK, GPUS, LinkCost, gpu_link

CUDA_CONTEXT = int(1.5 * 2**30)
"""Bytes of CUDA's context and NCCL's buffers, assumed."""
USABLE_FRAC = 0.95
"""Usable share of a GPU's memory, assumed; the allocator loses the rest between its blocks."""


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds at its peak, by cause."""

    causes: Mapping[str, int]
    moment: str = ""  # when the peak is
    sequences: int = 0  # that fit into the KV cache, if all have the longest length
    width: int = 0  # sequences of mean length that are decoded at the same time
    resting: int = 0  # bytes that stay while the other role of a colocated rank works

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.causes.values())


def shard_numel(weight: Weight, axes: Axes, *, index: int = 0) -> int:
    """Return the elements of a weight that rank `index` of its replica holds."""
    shape, group = local_shape(weight, axes)
    is_apart = weight.is_expert and axes.ep * axes.tp > 1
    # tp, for experts ep, is the innermost axis. What is left is the place among the ranks that
    # shard this weight.
    index //= axes.ep if is_apart else axes.tp
    dim = expert_dim(shape, count=shape[0], shards=group) if is_apart else 0
    own = TensorCut(tuple(shape), axes=(CutAxis(group, dim),)).runs(dim)[index]
    return sum(length for _, length in own) * math.prod(shape) // shape[dim]


def local_shape(weight: Weight, axes: Axes) -> tuple[list[int], int]:
    """Return a weight's shape after tp and ep, and the number of ranks over which it is sharded."""
    shape = list(weight.shape) or [1]
    if weight.is_expert:
        shape[0] //= axes.ep
        return shape, axes.replica // axes.ep
    if axes.tp > 1 and weight.tp_dim is not None:
        shape[weight.tp_dim] //= axes.tp
    return shape, axes.fsdp


def gathered_numel(weights: Iterable[Weight], axes: Axes) -> int:
    """Return the elements of weights on a rank after their shards are gathered."""
    return sum(math.prod(local_shape(weight, axes)[0]) for weight in weights)


@lru_cache(maxsize=4096)
def _sharded(weights: tuple[Weight, ...], axes: Axes, *, index: int = 0) -> int:
    return sum(shard_numel(weight, axes, index=index) for weight in weights)


def shards_numel(shape: ModelShape, axes: Axes, *, index: int = 0) -> int:
    """Return the elements of the whole model that rank `index` of its replica holds."""
    return _sharded(shape.root, axes, index=index) + sum(
        count * _sharded(block.weights, axes, index=index) for block, count in shape.kinds
    )


def policy_bytes(run: Run, axes: Axes) -> int:
    """Return the bytes of the policy's weights that a rank holds, if adapters train."""
    number = sum(
        count * block_bytes(run, block, lambda weight: shard_numel(weight, axes))
        for block, count in run.shape.kinds
    )
    return number + run.kernels.compute_bytes * _sharded(run.shape.root, axes)


def block_bytes(run: Run, block: Block, numel: Callable[[Weight], int]) -> int:
    """Return the bytes of a block's weights in the compute dtype, or quantised.

    Args:
        numel: returns how many elements of a weight to count: whole rows.
    """
    total = 0
    for weight in block.weights:
        if run.base and _is_quantisable(weight, block):
            columns = weight.shape[-1]
            total += numel(weight) // columns * run.base.row_bytes(columns)
        else:
            total += numel(weight) * run.kernels.compute_bytes
    return total


def _is_quantisable(weight: Weight, block: Block) -> bool:
    """Return whether model.lora.base stores a weight: of linear layers and experts, not routers."""
    return len(weight.shape) == 3 if weight.is_expert else _is_matrix(weight, block)


def dequantised_bytes(run: Run, axes: Axes) -> int:
    """Return the bytes of the largest weight while a rank dequantises it; 0 if none is."""
    if not run.base:
        return 0
    most = max(
        math.prod(local_shape(weight, axes)[0])
        for block, _ in run.shape.kinds
        for weight in block.weights
        if _is_quantisable(weight, block)
    )
    # The product of codes and scales is float32. Before it codes are int32, one for two of nf4,
    # and after it comes the compute dtype.
    half = 2 if run.base.kind == "nf4" or run.kernels.compute_bytes == 2 else 0
    return most * (4 + half)


def expert_shards_numel(shape: ModelShape, axes: Axes) -> int:
    """Return how many of these elements are of experts that are sharded over other ranks."""
    if axes.ep * axes.tp == 1:
        return 0
    return _blocks_numel(shape, axes, lambda weight, _: weight.is_expert)


def muon_numel(shape: ModelShape, axes: Axes) -> int:
    """Return how many of these elements Muon trains: linear layers without routers."""

    return _blocks_numel(shape, axes, _is_matrix)


def _is_matrix(weight: Weight, block: Block) -> bool:
    is_router = block.experts and weight.shape[0] == block.experts.count
    return len(weight.shape) == 2 and not is_router


def _blocks_numel(shape: ModelShape, axes: Axes, is_chosen: Callable[[Weight, Block], bool]) -> int:
    return sum(
        count * _sharded(tuple(w for w in block.weights if is_chosen(w, block)), axes)
        for block, count in shape.kinds
    )


def lora_numel(run: Run, axes: Axes) -> int:
    """Return the elements of the adapters that a rank holds."""
    return -(-run.lora_numel // axes.fsdp)


def bucket_count(run: Run, axes: Axes, *, nbytes: float) -> int:
    """Return the number of buckets in which an engine rank receives `nbytes`."""
    total = math.ceil(nbytes)
    bound = run.cfg.stream.bucket_bytes
    if not bound:
        own = _messages(axes)
        is_gathered = axes.replicas > 1
        best = best_count(total, link_of(run, axes), messages=own, is_gathered=is_gathered)
        bound = bound_of(total, best)
    number = max(1, math.ceil(total / bound))
    # With room for cuts at other places, so many may be too few; see count_buckets.
    while slice_room(total, number) > bound and number < total:
        number += max(1, number // 16)
    return number


def bucket_bytes(run: Run, axes: Axes, *, own: int, busiest: int) -> int:
    """Return the bytes of the two buckets of a rank that sends or receives `own` bytes.

    Args:
        busiest: what an engine rank receives.
    """
    count = bucket_count(run, axes, nbytes=busiest)
    return min(2, count) * int(slice_room(own, count))


def largest_file_tensor(shape: ModelShape) -> int:
    """Return the elements of the largest tensor of the model's files, which have one per expert."""
    blocks = [weight for block, _ in shape.kinds for weight in block.weights]
    sizes = [w.numel // (w.shape[0] if w.is_expert else 1) for w in (*shape.root, *blocks)]
    return max(sizes)


def proof_bytes(run: Run, numel: int) -> int:
    """Return what a rank allocates to check a push: the checksum of `numel` elements."""
    return checksum_bytes(numel, device_type="cuda" if run.on_gpu else "cpu")


def rounds_s(run: Run, axes: Axes, *, nbytes: float) -> float:
    """Return the overhead of a push in seconds, without the transfer of bytes."""
    own = _messages(axes)
    is_gathered = axes.replicas > 1
    count = bucket_count(run, axes, nbytes=nbytes)
    return overhead_s(nbytes, count, link_of(run, axes), messages=own, is_gathered=is_gathered)


def link_of(run: Run, axes: Axes) -> LinkCost:
    """Return the links of an H100, since the overhead hardly depends on the kind of GPU, at the
    rate that the config gives."""
    found = gpu_link(GPUS["H100"], is_one_node=axes.world_size <= 8) if run.on_gpu else CPU_LINK
    return found.at(run.cfg.stream.gbit_per_s)


def _messages(axes: Axes) -> int:
    """Return about how many messages a rank sends and receives per bucket."""
    sent = axes.inference_tp
    received = math.ceil(axes.trainers / max(1, axes.replicas))
    return sent + received if axes.roles.shares_devices else max(sent, received)
