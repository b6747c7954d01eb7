"""Bytes that one rank holds, by cause, and what it holds of a model's weights.

Weights, gradients and optimizer state are exact; so are an engine's weights and its KV cache where
its size is a number of bytes. The rest are formulas, in trainer_memory.py and engine_memory.py.
Buckets of a push are as the weight stream will cut them, from sizes alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from spmdrl.model.model_shape import Block, ModelShape, Weight
from spmdrl.model.parallel.expert_parallel import expert_dim
from spmdrl.sync.buckets import best_count, overhead_s
from spmdrl.tools.plan.run import Run
from spmdrl.world.axes import Axes
from spmdrl.world.machine.hardware import CPU_LINK, GPUS, LinkCost, gpu_link

CUDA_CONTEXT = int(1.5 * 2**30)
"""CUDA's context and NCCL's buffers, assumed."""
USABLE_FRAC = 0.95
"""Of a GPU's memory; the rest is lost between blocks of the allocator, assumed."""


@dataclass(frozen=True)
class Memory:
    """What one rank holds at its peak, bytes by cause."""

    causes: Mapping[str, int]
    moment: str = ""  # when that is
    sequences: int = 0  # of the longest kind that the KV cache holds
    width: int = 0  # sequences of mean length that are decoded together
    resting: int = 0  # what stays while the other role of a colocated rank works

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.causes.values())


def shard_numel(weight: Weight, axes: Axes, *, index: int = 0) -> int:
    """Return the elements of a weight that rank `index` of its replica holds.

    FSDP2 cuts the first dim into equal runs of rows, the last ones shorter or empty; the second
    one of experts that are fewer than the ranks (see expert_parallel.py).
    """
    shape, group = local_shape(weight, axes)
    is_apart = weight.is_expert and axes.ep * axes.tp > 1
    index //= axes.ep if is_apart else axes.tp
    if is_apart and expert_dim(shape, count=shape[0], shards=group) == 1:
        return math.prod(shape) // group
    each = -(-shape[0] // group)
    rows = max(0, min(each, shape[0] - each * index))
    return rows * math.prod(shape[1:])


def local_shape(weight: Weight, axes: Axes) -> tuple[list[int], int]:
    """Return a weight's shape after tp and ep, and how many ranks share its shards."""
    shape = list(weight.shape) or [1]
    if weight.is_expert:
        shape[0] //= axes.ep
        return shape, axes.replica // axes.ep
    if axes.tp > 1 and weight.tp_dim is not None:
        shape[weight.tp_dim] //= axes.tp
    return shape, axes.fsdp


def gathered_numel(weights: Iterable[Weight], axes: Axes) -> int:
    """Return the elements of weights that a rank computes with, once their shards are gathered."""
    return sum(math.prod(local_shape(weight, axes)[0]) for weight in weights)


@lru_cache(maxsize=4096)
def _sharded(weights: tuple[Weight, ...], axes: Axes, *, index: int = 0) -> int:
    return sum(shard_numel(weight, axes, index=index) for weight in weights)


def shards_numel(shape: ModelShape, axes: Axes, *, index: int = 0) -> int:
    """Return the elements of the whole model that rank `index` of its replica holds."""
    return _sharded(shape.root, axes, index=index) + sum(
        count * _sharded(block.weights, axes, index=index) for block, count in shape.kinds
    )


def expert_shards_numel(shape: ModelShape, axes: Axes) -> int:
    """Return how many of these are of experts that are sharded over other ranks."""
    if axes.ep * axes.tp == 1:
        return 0
    return _blocks_numel(shape, axes, lambda weight, _: weight.is_expert)


def muon_numel(shape: ModelShape, axes: Axes) -> int:
    """Return how many of these Muon trains: those of linear layers, but no routers."""

    def is_matrix(weight: Weight, block: Block) -> bool:
        is_router = block.experts and weight.shape[0] == block.experts.count
        return len(weight.shape) == 2 and not is_router

    return _blocks_numel(shape, axes, is_matrix)


def _blocks_numel(shape: ModelShape, axes: Axes, is_chosen: Callable[[Weight, Block], bool]) -> int:
    return sum(
        count * _sharded(tuple(w for w in block.weights if is_chosen(w, block)), axes)
        for block, count in shape.kinds
    )


def lora_numel(run: Run, axes: Axes) -> int:
    """Return the elements of the adapters that a rank holds."""
    return -(-run.lora_numel // axes.fsdp)


def bucket_count(run: Run, axes: Axes, *, nbytes: float) -> int:
    """Return the number of buckets in which an engine rank takes `nbytes`."""
    if run.cfg.stream.bucket_bytes:
        return max(1, math.ceil(nbytes / run.cfg.stream.bucket_bytes))
    own = _messages(axes)
    is_gathered = axes.replicas > 1
    return best_count(nbytes, _link(run, axes), messages=own, is_gathered=is_gathered)


def rounds_s(run: Run, axes: Axes, *, nbytes: float) -> float:
    """Return the seconds of a push besides those in which bytes travel."""
    own = _messages(axes)
    is_gathered = axes.replicas > 1
    count = bucket_count(run, axes, nbytes=nbytes)
    return overhead_s(nbytes, count, _link(run, axes), messages=own, is_gathered=is_gathered)


def _link(run: Run, axes: Axes) -> LinkCost:
    """Return the links of a usual GPU: what rounds cost hardly depends on the kind."""
    return gpu_link(GPUS["H100"], is_one_node=axes.world_size <= 8) if run.on_gpu else CPU_LINK


def _messages(axes: Axes) -> int:
    """Return the messages that a rank sends and takes in a bucket, about."""
    return axes.inference_tp + math.ceil(axes.trainers / max(1, axes.replicas))
