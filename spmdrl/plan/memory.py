"""Bytes that one rank holds, by cause, at the moment when it holds most.

Weights, gradients and optimizer state are exact; so are an engine's weights and its KV cache where
its size is a number of bytes. What FSDP2 gathers and what the backward pass works with are
formulas for its peak.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from spmdrl.model.fits import context_method
from spmdrl.model.shape import Block, ModelShape, Weight
from spmdrl.plan.activations import (
    Cut,
    Saved,
    exchange_bytes,
    mlp_bytes,
    padded_groups,
    saved_bytes,
)
from spmdrl.plan.setting import Run
from spmdrl.world.axes import Axes

CUDA_CONTEXT = int(1.5 * 2**30)
"""CUDA's context and NCCL's buffers, assumed."""
CUDA_GRAPHS = 2**30
"""vLLM's CUDA graphs and what it keeps besides weights, cache and activations, assumed."""
USABLE_FRAC = 0.95
"""Of a GPU's memory; the rest is lost between blocks of the allocator, assumed."""
_ADAPTER = 4  # bytes of an adapter's element, always float32


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


# --------------------------------------------------------------------------- shards


def shard_numel(weight: Weight, axes: Axes, *, index: int = 0) -> int:
    """Return the elements of a weight that rank `index` of its replica holds.

    FSDP2 cuts the first dim into equal runs of rows, the last ones shorter or empty; the second
    one of experts that are fewer than the ranks (see moe.py).
    """
    shape, group = _local_shape(weight, axes)
    is_apart = weight.is_expert and axes.ep * axes.tp > 1
    index //= axes.ep if is_apart else axes.tp
    if is_apart and shape[0] < group and len(shape) > 1 and shape[1] % group == 0:
        return math.prod(shape) // group
    each = -(-shape[0] // group)
    rows = max(0, min(each, shape[0] - each * index))
    return rows * math.prod(shape[1:])


def _local_shape(weight: Weight, axes: Axes) -> tuple[list[int], int]:
    """Return a weight's shape after tp and ep, and how many ranks share its shards."""
    shape = list(weight.shape) or [1]
    if weight.is_expert:
        shape[0] //= axes.ep
        return shape, axes.replica // axes.ep
    if axes.tp > 1 and weight.tp_dim is not None:
        shape[weight.tp_dim] //= axes.tp
    return shape, axes.fsdp


def _gathered(weights: Iterable[Weight], axes: Axes) -> int:
    return sum(math.prod(_local_shape(weight, axes)[0]) for weight in weights)


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
    return sum(
        count * _sharded(tuple(w for w in block.weights if w.is_expert), axes)
        for block, count in shape.kinds
    )


def lora_numel(run: Run, axes: Axes) -> int:
    """Return the elements of the adapters that a rank holds."""
    return -(-run.lora_numel // axes.fsdp)


# --------------------------------------------------------------------------- trainers


@lru_cache(maxsize=4096)
def trainer_memory(run: Run, axes: Axes, *, tokens: int = 0) -> Memory:
    """Return what a trainer rank holds in the backward pass of a full micro-batch.

    Args:
        tokens: budget of a micro-batch; 0 takes the run's.
    """
    shape = run.shape
    c = run.kernels.compute_bytes
    own_tokens = -(-(tokens or run.microbatch_tokens) // axes.cp)
    saved = _saved(run, axes, tokens=own_tokens)
    state = shards_numel(shape, axes)
    trained = lora_numel(run, axes) if run.lora_rank else state
    master = _ADAPTER if run.lora_rank else run.master_bytes
    critic = int(run.trained_models * state * (2 * run.master_bytes + run.moment_bytes))
    causes = {
        "weights": c * state + master * trained if run.lora_rank else master * state,
        "gradients": master * trained,
        "optimizer": int(run.moment_bytes * trained),
        "other models": critic + run.frozen_models * c * state * run.holds_weights,
        "gradients to be reduced": _unreduced(run, axes),
    }
    moments = {
        "where the head's backward pass begins": _at_head(run, axes, saved=saved),
        "in the backward pass of the last block": _at_last_block(
            run, axes, saved=saved, tokens=own_tokens
        ),
        "where the embedding's gradient is reduced": _at_end(run, axes),
    }
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    causes |= moments[moment]
    if axes.roles.has_engines:
        # Trainers pack into two buckets; what travels from live memory needs none.
        causes["stream buckets"] = 2 * min(run.bucket_bytes, state * run.engine_bytes)
    if run.on_gpu:
        causes["CUDA context"] = CUDA_CONTEXT
    resting = sum(causes[name] for name in ("weights", "optimizer", "other models"))
    return Memory({name: size for name, size in causes.items() if size}, moment, resting=resting)


def _unreduced(run: Run, axes: Axes) -> int:
    """Return the bytes of what micro-batches add up before it is reduced, float32."""
    if not run.reduces_last:
        return 0
    if run.lora_rank:
        return _ADAPTER * lora_numel(run, axes) * axes.fsdp
    return 4 * (_gathered(run.shape.root, axes) + _blocks_numel(run.shape, axes))


def _blocks_numel(shape: ModelShape, axes: Axes) -> int:
    return sum(count * _gathered(block.weights, axes) for block, count in shape.kinds)


def _saved(run: Run, axes: Axes, *, tokens: int) -> Saved:
    shape = run.shape
    share = run.response_tokens / (run.prompt_tokens + run.response_tokens)
    groups = ()
    if run.kernels.is_padded:
        row = tokens * axes.cp
        longest = min(run.longest, row)
        lengths = [longest] * (row // longest) + [row % longest] * (row % longest > 0)
        groups = padded_groups(lengths)
    return saved_bytes(
        shape,
        run.kernels,
        tokens=tokens,
        groups=groups,
        cut=cut_of(run, axes),
        num_scored=int(tokens * share),
    )


def cut_of(run: Run, axes: Axes) -> Cut:
    """Return how a layout shares out the work on a row."""
    if axes.cp == 1:
        return Cut(axes.tp, axes.ep)
    heads = min(block.attention.heads for block, _ in run.shape.kinds) // axes.tp
    method = context_method(run.context, heads=heads, cp=axes.cp)
    return Cut(axes.tp, axes.ep, axes.cp, method)


def _largest(shape: ModelShape, axes: Axes) -> int:
    """Return the elements of the largest block when gathered."""
    return max(_gathered(block.weights, axes) for block, _ in shape.kinds)


def _shared(block: Block, axes: Axes) -> int:
    """Return how many of a block's elements are gathered from other ranks."""
    return _gathered([w for w in block.weights if _local_shape(w, axes)[1] > 1], axes)


def _kept(run: Run, axes: Axes) -> int:
    """Return the bytes that stay gathered through a micro-batch: the root's weights, and those of
    blocks that no other rank has a shard of, or that are not let go of."""
    shape = run.shape
    numel = _gathered(shape.root, axes)
    for block, count in shape.kinds:
        numel += count * _gathered(block.weights, axes)
        numel -= 0 if run.reshard == "never" else count * _shared(block, axes)
    return numel * run.kernels.compute_bytes


def _head_rows(shape: ModelShape, axes: Axes) -> int:
    head = next((w for w in shape.root if w.name.startswith("lm_head")), None)
    is_split = axes.tp > 1 and (head or shape.root[0]).tp_dim is not None
    return shape.vocab // axes.tp if is_split else shape.vocab


def _at_head(run: Run, axes: Axes, *, saved: Saved) -> dict[str, int]:
    shape = run.shape
    c, rows = run.kernels.compute_bytes, _head_rows(shape, axes)
    # Logits, their exponentials and the gradient in float32, and once more to multiply.
    logits = run.chunk_tokens * rows * (12 + (c if c < 4 else 0))
    # The weight's gradient in float32; in bfloat16 also a chunk's share, or the sum.
    gradient = rows * shape.hidden * (4 + (c if c < 4 else 0))
    gradient = 0 if run.lora_rank else gradient
    last = c * _shared(shape.blocks[-1], axes) if run.reshard == "auto" else 0
    return {
        "activations": saved.blocks + saved.rest,
        "head": logits + gradient,
        "gathered by FSDP": _kept(run, axes) + last,
    }


def _at_last_block(run: Run, axes: Axes, *, saved: Saved, tokens: int) -> dict[str, int]:
    shape = run.shape
    c, numel = run.kernels.compute_bytes, _largest(shape, axes)
    # Gathered: this block and the next, on its way in one piece. Of the block before, gradients
    # and their float32 copy are still being reduced; the head's gradient waits for the end.
    gathered = _kept(run, axes)
    if run.reshard != "never":
        most = max(_shared(block, axes) for block, _ in shape.kinds)
        gathered += (3 + max(0, run.ahead - 1)) * c * most
    reduced = 0 if run.lora_rank or c == 4 else (c + 4) * numel
    head = 0 if run.lora_rank else c * _head_rows(shape, axes) * shape.hidden
    return {
        "activations": saved.total + _working(run, axes, tokens=tokens),
        "head": head,
        "gathered by FSDP": gathered,
        "gradients on their way": reduced,
    }


def _working(run: Run, axes: Axes, *, tokens: int) -> int:
    """Return what a block's backward pass makes before it drops as much: gradients of the MLP's
    product and of its factors, and of the residual stream; or, when what the MLP kept is gone,
    what attention exchanges over cp."""
    shape, c, cut = run.shape, run.kernels.compute_bytes, cut_of(run, axes)
    widths = [
        b.intermediate // axes.tp
        + (b.experts.top_k * b.experts.intermediate // axes.tp if b.experts else 0)
        for b, _ in shape.kinds
    ]
    stream = tokens * (4 + c) * shape.hidden
    exchanged = max(
        exchange_bytes(b.attention, kernels=run.kernels, tokens=tokens, cut=cut)
        - mlp_bytes(b, kernels=run.kernels, tokens=tokens, hidden=shape.hidden, cut=cut)
        for b, _ in shape.kinds
    )
    return stream + max(tokens * 2 * c * max(widths), exchanged)


def _at_end(run: Run, axes: Axes) -> dict[str, int]:
    shape = run.shape
    c, numel = run.kernels.compute_bytes, _gathered(shape.root, axes)
    reduced = 0 if run.lora_rank else numel * (c + 4)
    return {"gathered by FSDP": _kept(run, axes), "gradients on their way": reduced}


@lru_cache(maxsize=4096)
def most_tokens(run: Run, axes: Axes, *, room: int) -> int:
    """Return the largest tokens_per_microbatch, in steps of 256, whose peak is within `room`
    bytes; the longest sequence's (or pair's) where no step above it is; 0 when that is not."""

    def fits(tokens: int) -> bool:
        return trainer_memory(run, axes, tokens=tokens).total <= room

    step, least = 256, max(run.least, axes.cp)
    if not fits(least):
        return 0
    low = high = -(-least // step)  # in steps
    if not fits(low * step):
        return least
    while high < 2**14 and fits(2 * high * step):
        high *= 2
    low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step


# --------------------------------------------------------------------------- engines


def engine_weight_bytes(run: Run, axes: Axes) -> int:
    """Return the bytes of one engine rank's weights.

    vLLM shards heads, MLPs, experts and vocabulary over its tp ranks, repeats key/value heads
    that are fewer than these, keeps norms, routers and latent projections whole, and pads the
    vocabulary to a multiple of 64.
    """
    shape = run.shape
    tp, pads = axes.inference_tp, run.engine_kind == "vllm"
    rows = -(-shape.vocab // 64) * 64 if pads else shape.vocab
    numel = 0
    for weight in shape.root:
        is_table = weight.shape[0] == shape.vocab and len(weight.shape) == 2
        numel += rows // tp * shape.hidden if is_table else weight.numel
    for block, count in shape.kinds:
        numel += count * sum(_engine_numel(w, block, tp=tp) for w in block.weights)
    return numel * run.engine_bytes


_WHOLE = (
    "norm.weight",
    "gate.weight",
    "q_a_proj.weight",
    "kv_a_proj_with_mqa.weight",
    "shared_expert_gate.weight",
    "o_proj.bias",
    "down_proj.bias",
)


def _engine_numel(weight: Weight, block: Block, *, tp: int) -> int:
    if tp == 1 or weight.name.endswith(_WHOLE):
        return weight.numel
    if weight.name.split(".")[-2] in ("k_proj", "v_proj"):
        return weight.numel // min(tp, block.attention.kv_heads)
    return weight.numel // tp


def cache_bytes_per_token(run: Run, axes: Axes) -> int:
    """Return the bytes of one token's keys and values on one engine rank, all layers."""
    shape = run.shape
    numel = 0
    for block, count in shape.kinds:
        own = block.attention
        if own.latent is not None and run.engine_kind == "vllm":
            numel += count * (own.latent[1] + own.latent[2])  # the latent, whole on every rank
        else:
            heads = max(1, own.kv_heads // axes.inference_tp)
            numel += count * heads * (own.qk_dim + own.v_dim)
    return numel * run.engine_bytes


def engine_memory(run: Run, axes: Axes, *, memory_bytes: int) -> Memory:
    """Return what an engine rank holds.

    Args:
        memory_bytes: of its GPU; on the CPU the cache has a size of its own.
    """
    shape = run.shape
    weights = engine_weight_bytes(run, axes)
    causes = {"engine weights": weights}
    if run.on_gpu:
        widest = max(
            max(b.intermediate, b.experts.intermediate * b.experts.top_k if b.experts else 0)
            for b, _ in shape.kinds
        )
        logits = 2 * run.max_num_seqs * shape.vocab * 4
        working = (
            run.max_batched_tokens
            * (4 * shape.hidden + 3 * widest // axes.inference_tp)
            * run.engine_bytes
        )
        causes["engine activations"] = logits + working + CUDA_GRAPHS
        causes["CUDA context"] = CUDA_CONTEXT
        room = int(run.gpu_memory_frac * memory_bytes) - sum(causes.values())
    else:
        room = run.cpu_cache_bytes
    per_token = cache_bytes_per_token(run, axes)
    used, sequences, width = _cache(max(0, room), run, per_token=per_token)
    causes["KV cache"] = used
    if axes.roles.has_engines:
        causes["stream buckets"] = 2 * min(run.bucket_bytes, weights)
    resting = sum(causes.values())
    if run.engine_sleeps and run.engine_kind == "vllm":
        resting = CUDA_GRAPHS  # CUDA's context is the process's own, and counted with the trainer
    elif run.engine_sleeps:
        resting -= used
    return Memory(causes, "while it generates", sequences, width, resting)


def _cache(room: int, run: Run, *, per_token: int) -> tuple[int, int, int]:
    """Return the bytes of the cache, and how many sequences of the longest and of mean length it
    holds. The transformers engine gives each of them room for the longest."""
    if run.engine_kind == "transformers":
        slots = min(run.max_num_seqs, room // (per_token * run.longest))
        return slots * run.longest * per_token, slots, slots
    block = 16 if run.on_gpu else 128  # tokens that vLLM hands out together
    blocks = room // (block * per_token)
    mean = max(1, math.ceil((run.prompt_tokens + run.response_tokens) / block))
    longest = min(run.max_num_seqs, blocks // -(-run.longest // block))
    return (
        blocks * block * per_token,
        longest,
        min(run.max_num_seqs, blocks // mean) * (longest > 0),
    )
