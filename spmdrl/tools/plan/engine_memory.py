"""Bytes that an engine rank holds: weights, KV cache, activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from spmdrl.model.block_shape import Block, Experts, StateLayer, Weight
from spmdrl.model.divisibility import engine_rows
from spmdrl.sync.buckets import LARGEST
from spmdrl.tools.plan.memory import (
    CUDA_CONTEXT,
    Memory,
    bucket_bytes,
    largest_file_tensor,
    proof_bytes,
)
from spmdrl.tools.plan.run import Run, item_bytes
from spmdrl.world.axes import Axes

CUDA_GRAPHS = 2**30
"""Bytes of vLLM's CUDA graphs and other buffers, assumed."""

_MOST_SEQUENCES = 1024  # vLLM's own max_num_seqs on an H100


def engine_weight_bytes(run: Run, axes: Axes) -> int:
    """Return the bytes of one engine rank's weights.

    vLLM shards heads, MLPs, experts and vocabulary over its tp ranks. It repeats key/value heads if
    there are fewer than tp ranks. It replicates norms, routers and latent projections, and pads the
    vocabulary to a multiple of 64.
    """
    return int(_weight_bytes(run, axes, hit=lambda experts: 1.0))


def decode_step_bytes(run: Run, axes: Axes, *, width: float) -> float:
    """Return the bytes of weights that one engine rank reads when it decodes `width` sequences: all
    but those of experts to which none of them goes, if routing is balanced."""
    return _weight_bytes(
        run, axes, hit=lambda experts: 1 - (1 - experts.top_k / experts.count) ** width
    )


def _weight_bytes(run: Run, axes: Axes, *, hit: Callable[[Experts], float]) -> float:
    """Return the bytes of one rank's weights.

    Args:
        hit: returns the share of a block's experts to count.
    """
    shape = run.shape
    tp = axes.inference_tp
    rows = engine_rows(shape.vocab) if run.engine.traits.has_own_models else shape.vocab
    total = 0.0
    for weight in shape.root:
        is_table = weight.shape[0] == shape.vocab and len(weight.shape) == 2
        numel = rows // tp * shape.hidden if is_table else weight.numel
        total += numel * run.engine_bytes
    for block, count in shape.kinds:
        for weight in block.weights:
            share = hit(block.experts) if weight.is_expert and block.experts else 1.0
            total += count * share * _engine_bytes(run, weight, block, tp=tp)
    return total


def _engine_bytes(run: Run, weight: Weight, block: Block, *, tp: int) -> int:
    """Return the bytes of a weight of a block on one rank, quantised if vLLM quantises it.

    That is, a linear layer or experts, but not a router or a convolution.
    """
    numel = _engine_numel(weight, block, tp=tp)
    is_matrix = len(weight.shape) == (3 if weight.is_expert else 2)
    if not run.engine_scales or not is_matrix or weight.name.endswith(_ROUTERS):
        return numel * run.engine_bytes
    *count, rows, columns = weight.shape
    if numel < weight.numel and not weight.name.endswith(_CUT_BY_COLUMNS):
        rows = numel // math.prod(count) // columns
    else:
        columns = numel // math.prod(count) // rows
    of_rows, of_columns = run.engine_scales
    scales = math.prod(count)
    scales *= -(-rows // (of_rows or rows))
    scales *= -(-columns // (of_columns or columns))
    # vLLM multiplies by a copy of this matrix in the engine's dtype.
    copy = run.engine_bytes if weight.name.endswith("kv_b_proj.weight") else 0
    return numel * (1 + copy) + 4 * scales


def reload_bytes(run: Run) -> int:
    """Return the bytes of all whole tensors, as a reload sends them."""
    own = 4 * sum(weight.numel for weight in run.shape.root)
    return own + sum(count * _reloaded_bytes(run, block) for block, count in run.shape.kinds)


def _reloaded_bytes(run: Run, block: Block) -> int:
    """Return the bytes of a block's whole tensors: experts in the engine's dtype, others in
    float32."""
    experts = sum(weight.numel for weight in block.weights if weight.is_expert)
    return 4 * (block.numel - experts) + run.engine_bytes * experts


def _whole_tensors(run: Run, axes: Axes) -> int:
    """Return the bytes that a reload takes: the tensors of one message; those of a block, which
    vLLM keeps until the block is complete; what it then makes of them before it copies that."""
    message = min(run.cfg.stream.bucket_bytes or LARGEST, reload_bytes(run))
    block = max((block for block, _ in run.shape.kinds), key=lambda block: block.numel)
    own = sum(_engine_numel(weight, block, tp=axes.inference_tp) for weight in block.weights)
    made = run.engine_bytes + (run.engine_scales is not None)
    return message + _reloaded_bytes(run, block) + made * own


_ROUTERS = ("gate.weight", "router.weight")
_CUT_BY_COLUMNS = ("down_proj", "down_proj.weight", "o_proj.weight", "out_proj.weight")
# Suffixes of names: norms, routers, latent projections, and biases that are added after a
# reduction.
_REPLICATED = (
    "norm.weight",
    "gate.weight",
    "q_a_proj.weight",
    "kv_a_proj_with_mqa.weight",
    "shared_expert_gate.weight",
    "latent_proj.weight",
    "o_proj.bias",
    "down_proj.bias",
)


def _engine_numel(weight: Weight, block: Block, *, tp: int) -> int:
    if tp == 1 or weight.name.endswith(_REPLICATED):
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
        if own.latent is not None and run.engine.traits.has_own_models:
            numel += count * (own.latent[1] + own.latent[2])  # the latent, whole on every rank
        else:
            heads = max(1, own.kv_heads // axes.inference_tp)
            numel += count * heads * (own.qk_dim + own.v_dim)
    option = str(run.engine.options.get("kv_cache_dtype", "auto"))
    return numel * (1 if option.startswith("fp8") else run.engine_bytes)


def state_bytes_per_sequence(run: Run, axes: Axes) -> int:
    """Return the bytes of one sequence's states on one engine rank, all layers.

    The transformers engine keeps matrices in float32.
    """
    total = 0
    for block, count in run.shape.kinds:
        if own := block.state:
            of_matrix = _matrix_bytes(run, own) if run.engine.traits.has_own_models else 4
            total += count * (own.matrix_numel * of_matrix + own.input_numel * run.engine_bytes)
    return total // axes.inference_tp


def _matrix_bytes(run: Run, own: StateLayer) -> int:
    """Return the bytes of an element of a state's matrices in a vLLM engine."""
    option = run.engine.options.get("mamba_ssm_cache_dtype", "auto")
    dtype = own.vllm_dtype if option == "auto" else option
    return item_bytes(dtype) if dtype else run.engine_bytes


def engine_memory(run: Run, axes: Axes, *, memory_bytes: int) -> Memory:
    """Return what an engine rank holds.

    Args:
        memory_bytes: of its GPU. On a CPU, engine.cpu_kv_cache_gib sets the size of the cache.
    """
    shape = run.shape
    weights = engine_weight_bytes(run, axes)
    causes = {"engine weights": weights}
    if run.on_gpu:
        widest = max(
            max(b.intermediate, b.experts.intermediate * b.experts.top_k if b.experts else 0)
            for b, _ in shape.kinds
        )
        logits = 2 * run.engine.max_num_seqs * shape.vocab * 4
        working = (
            run.engine.max_batched_tokens
            * (4 * shape.hidden + 3 * widest // axes.inference_tp)
            * run.engine_bytes
        )
        causes["engine activations"] = logits + working + CUDA_GRAPHS
        causes["CUDA context"] = CUDA_CONTEXT
        room = int(run.engine.gpu_memory_frac * memory_bytes) - sum(causes.values())
    else:
        room = int(run.engine.cpu_kv_cache_gib * 2**30)
    states = run.engine.max_num_seqs * state_bytes_per_sequence(run, axes)
    if states:
        causes["states of sequences"] = states
        room -= states
    per_token = cache_bytes_per_token(run, axes)
    used, sequences, width = _cache(max(0, room), run, per_token=per_token)
    causes["KV cache"] = used
    if axes.roles.has_engines and run.reloads:
        # An engine that sleeps has no cache yet when tensors arrive.
        free = used if run.engine_sleeps and axes.roles.shares_devices else 0
        causes["whole tensors of a reload"] = max(0, _whole_tensors(run, axes) - free)
    elif axes.roles.has_engines and axes.world_size > 1:  # one rank copies from shard to engine
        causes["stream buckets"] = bucket_bytes(run, axes, own=weights, busiest=weights)
        proof = proof_bytes(run, largest_file_tensor(shape) // axes.inference_tp)
        # Nothing is generated meanwhile, but graphs keep their buffers.
        free = causes.get("engine activations", CUDA_GRAPHS) - CUDA_GRAPHS
        if proof > free:
            causes["checksums of a push"] = proof - free
    resting = sum(causes.values())
    # An engine that sleeps frees its cache, and some kinds free their weights too.
    if run.engine_sleeps and run.engine.traits.frees_weights:
        resting = CUDA_GRAPHS  # the trainer's memory counts the CUDA context of the process
    elif run.engine_sleeps:
        resting -= used
    return Memory(causes, "while it generates", sequences, width, resting)


def best_num_seqs(run: Run, axes: Axes, *, memory_bytes: int) -> int:
    """Return the `engine.max_num_seqs` at which an engine decodes all its sequences of a step at
    once, or as many of mean length as its KV cache holds beside their logits.

    Args:
        memory_bytes: of its GPU.
    """
    each = math.ceil(run.sequences * run.cfg.rollout.schedule.over_sample / axes.replicas)
    wanted = replace(run, engine=replace(run.engine, max_num_seqs=min(each, _MOST_SEQUENCES)))
    held = engine_memory(wanted, axes, memory_bytes=memory_bytes).width
    return held if held == wanted.engine.max_num_seqs else held // 8 * 8 or held


def _cache(room: int, run: Run, *, per_token: int) -> tuple[int, int, int]:
    """Return the bytes of the cache, and how many sequences it holds: longest and mean length.

    The transformers engine reserves the longest length for each sequence.
    """
    if not run.engine.traits.pages_cache:
        slots = min(run.engine.max_num_seqs, room // (per_token * run.cfg.longest_in_engine))
        return slots * run.cfg.longest_in_engine * per_token, slots, slots
    block = 16 if run.on_gpu else 128  # tokens of a block of vLLM's cache
    blocks = room // (block * per_token)
    mean = max(1, math.ceil((run.prompt_tokens + run.response_tokens) / block))
    longest = min(run.engine.max_num_seqs, blocks // -(-run.cfg.longest_in_engine // block))
    width = min(run.engine.max_num_seqs, blocks // mean) if longest else 0
    return blocks * block * per_token, longest, width
