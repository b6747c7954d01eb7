"""Bytes that a trainer rank holds at its peak, by formula."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from spmdrl.config.fields import least_tokens, useful_tokens
from spmdrl.model.attention.packing import PaddedGroup, padded_groups
from spmdrl.model.block_shape import Block, Weight
from spmdrl.model.divisibility import context_method
from spmdrl.model.head import logit_bytes
from spmdrl.model.model_shape import ModelShape
from spmdrl.tools.plan.activations import (
    Cut,
    RowPart,
    SavedBytes,
    exchange_bytes,
    flash_backward_bytes,
    mlp_bytes,
    saved_bytes,
    ulysses_extra_bytes,
)
from spmdrl.tools.plan.memory import (
    CUDA_CONTEXT,
    Memory,
    block_bytes,
    bucket_bytes,
    dequantised_bytes,
    gathered_numel,
    largest_file_tensor,
    local_shape,
    lora_numel,
    muon_numel,
    policy_bytes,
    proof_bytes,
    shards_numel,
)
from spmdrl.tools.plan.run import Run
from spmdrl.tools.plan.shared_prompts import group_of
from spmdrl.world.axes import Axes

_ADAPTER_BYTES = 4  # of an element of an adapter, always float32
_MUON_BYTES = 4  # of an element of Muon's only moment, always float32


@lru_cache(maxsize=4096)
def trainer_memory(run: Run, axes: Axes, *, tokens: int = 0) -> Memory:
    """Return the memory of a trainer rank in the backward pass of a full micro-batch.

    It may be full of whole sequences, or of groups that share prompts. The larger memory counts.

    Args:
        tokens: budget of a micro-batch; 0: that of the run.
    """
    budget = tokens or run.cfg.batch.tokens_per_microbatch
    own_tokens = -(-budget // axes.cp)
    work = _row_part(run, axes, tokens=own_tokens)
    share = run.response_tokens / (run.prompt_tokens + run.response_tokens)
    whole = _memory_of(run, axes, work, num_scored=int(own_tokens * share))
    group = group_of(run, axes, tokens=budget)
    if not group.copied_keys:
        return whole
    groups = own_tokens / group.planned_tokens
    of_row = groups * axes.cp
    shared = replace(
        work,
        tokens=int(groups * group.computed_tokens),
        groups=group.padded(of_row) if run.kernels.is_padded else (),
        copied_keys=int(of_row * group.copied_keys),
        branches=int(of_row * (group.size + group.pieces)),
    )
    num_scored = int(groups * group.size * run.response_tokens)
    found = _memory_of(run, axes, shared, num_scored=num_scored)
    return max(whole, found, key=lambda memory: memory.total)


def _memory_of(run: Run, axes: Axes, work: RowPart, *, num_scored: int) -> Memory:
    """Return the memory in the backward pass of a rank's part of a row."""
    shape = run.shape
    c = run.kernels.compute_bytes
    saved = saved_bytes(shape, work, num_scored=num_scored)
    state = shards_numel(shape, axes)
    trained = lora_numel(run, axes) if run.lora_numel else state
    master = _ADAPTER_BYTES if run.lora_numel else run.master_bytes
    has_muon = run.cfg.optimizer.kind == "muon"
    spared = muon_numel(shape, axes) * (run.moment_bytes - _MUON_BYTES) if has_muon else 0
    critic = int(run.trained_models * (state * (2 * run.master_bytes + run.moment_bytes) - spared))
    causes = {
        "weights": policy_bytes(run, axes) + master * trained if run.lora_numel else master * state,
        "gradients": master * trained,
        "optimizer": int(run.moment_bytes * trained - spared),
        "other models": critic + run.frozen_models * c * state * (run.master_bytes > 0),
        "gradients to be reduced": _unreduced_bytes(run, axes),
        "images": _image_bytes(run, axes, tokens=work.tokens * axes.cp),
    }
    moments = {
        "where the head's backward pass begins": _at_head(run, axes, saved=saved),
        "in the backward pass of the last block": _at_last_block(run, axes, saved, work),
        "where the embedding's gradient is reduced": _at_end(run, axes),
    }
    if work.cut.method == "ulysses":
        moments["in the attention of the last block"] = _in_attention(run, axes, saved, work)
    if axes.roles.has_engines:
        # The gradients are freed before.
        checked = max(0, sent_proof_bytes(run, axes) - causes["gradients"])
        moments["where a push is checked"] = {"checksums of a push": checked}
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    causes |= moments[moment]
    if axes.roles.has_engines:
        sent = state * run.engine_bytes
        whole = shape.numel * run.engine_bytes
        causes["stream buckets"] = bucket_bytes(run, axes, own=sent, busiest=whole)
        if run.cfg.stream.delta == "always":
            causes["copy of the last push"] = sent
    if run.on_gpu:
        causes["CUDA context"] = CUDA_CONTEXT
    resting = sum(causes[name] for name in ("weights", "optimizer", "other models"))
    return Memory({name: size for name, size in causes.items() if size}, moment, resting=resting)


def _image_bytes(run: Run, axes: Axes, *, tokens: int) -> int:
    """Return the most bytes that images can take: all tokens of prompts are placeholders.

    Each rank of tp and cp holds the features of a row, and the activations of a tower that trains.
    On a CPU, the features of all rows of a step are in memory as well.

    Args:
        tokens: of a row, on all ranks of cp together.
    """
    tower = run.shape.tower
    kernels = run.kernels
    if tower is None:
        return 0
    own_placeholders = tokens * run.prompt_tokens / (run.prompt_tokens + run.response_tokens)
    width = tower.hidden if kernels.recomputes or kernels.is_selective else tower.kept
    saved = 0 if kernels.on_host else tower.layers * width * kernels.compute_bytes
    waiting = 0 if run.on_gpu else -(-run.sequences // axes.dp_size) * run.prompt_tokens
    return int(
        tower.patches
        * (waiting * tower.patch_bytes + own_placeholders * (tower.patch_bytes + saved))
    )


def _unreduced_bytes(run: Run, axes: Axes) -> int:
    """Return the bytes of gradients that are added up over micro-batches and reduced later."""
    if run.cfg.model.memory.reduce == "each":
        return 0
    if run.lora_numel:
        return _ADAPTER_BYTES * lora_numel(run, axes) * axes.fsdp
    shape = run.shape
    numel = sum(count * gathered_numel(block.weights, axes) for block, count in shape.kinds)
    return 4 * (gathered_numel(shape.root, axes) + numel)


def _row_part(run: Run, axes: Axes, *, tokens: int) -> RowPart:
    groups: tuple[PaddedGroup, ...] = ()
    row = tokens * axes.cp
    longest = min(run.cfg.longest_sequence, row)
    if run.kernels.is_padded:
        lengths = [longest] * (row // longest) + [row % longest] * (row % longest > 0)
        groups = padded_groups(lengths)
    return RowPart(run.kernels, tokens, cut_of(run, axes), groups, sequences=row // longest)


def cut_of(run: Run, axes: Axes) -> Cut:
    """Return how a layout divides the work on a row."""
    if axes.cp == 1:
        return Cut(axes.tp, axes.ep)
    each = (block.attention.heads for block, _ in run.shape.kinds)
    heads = min(filter(None, each), default=0) // axes.tp
    method = context_method(run.cfg.model.kernels.context, heads=heads, cp=axes.cp)
    return Cut(axes.tp, axes.ep, axes.cp, method)


def _largest(shape: ModelShape, axes: Axes) -> int:
    """Return the number of elements of the largest block when it is gathered."""
    return max(gathered_numel(block.weights, axes) for block, _ in shape.kinds)


def _whole_bytes(run: Run, block: Block, axes: Axes) -> int:
    """Return the bytes of a block's weights when they are gathered."""
    return block_bytes(run, block, lambda weight: gathered_numel([weight], axes))


def _sharded_bytes(run: Run, block: Block, axes: Axes) -> int:
    """Return the bytes of a block's sharded tensors when they are gathered."""

    def numel(weight: Weight) -> int:
        return gathered_numel([weight], axes) if local_shape(weight, axes)[1] > 1 else 0

    return block_bytes(run, block, numel)


def _gathered_bytes(run: Run, axes: Axes) -> int:
    """Return the bytes of weights that are gathered during the whole micro-batch.

    These are the weights of the root, and the weights of blocks that are not sharded or that are
    not resharded.
    """
    shape = run.shape
    total = gathered_numel(shape.root, axes) * run.kernels.compute_bytes
    for block, count in shape.kinds:
        total += count * _whole_bytes(run, block, axes)
        if run.cfg.model.memory.reshard != "never":
            total -= count * _sharded_bytes(run, block, axes)
    return total


def _head_rows(shape: ModelShape, axes: Axes) -> int:
    head = next((w for w in shape.root if w.name.startswith("lm_head")), None)
    is_split = axes.tp > 1 and (head or shape.root[0]).tp_dim is not None
    return shape.vocab // axes.tp if is_split else shape.vocab


def _at_head(run: Run, axes: Axes, *, saved: SavedBytes) -> dict[str, int]:
    shape = run.shape
    c = run.kernels.compute_bytes
    rows = _head_rows(shape, axes)
    logits = run.chunk_tokens * rows * logit_bytes(run.cfg)
    # The weight's gradient in float32; in bfloat16 also that of one chunk, or the sum.
    gradient = rows * shape.hidden * (4 + (c if c < 4 else 0))
    gradient = 0 if run.lora_numel else gradient
    is_kept = run.cfg.model.memory.reshard == "auto"
    last = _sharded_bytes(run, shape.blocks[-1], axes) if is_kept else 0
    return {
        "activations": saved.blocks + saved.rest,
        "head": logits + gradient,
        "gathered by FSDP": _gathered_bytes(run, axes) + last,
    }


def _in_attention(run: Run, axes: Axes, saved: SavedBytes, work: RowPart) -> dict[str, int]:
    """Return the memory right after ulysses attention, before the MLP saves anything."""
    shape = run.shape
    kernels = run.kernels
    c = run.kernels.compute_bytes
    if kernels.recomputes or kernels.is_selective:  # attention is recomputed in the backward pass
        at_once = _at_last_block(run, axes, saved, work)
        stream = work.tokens * (4 + c) * shape.hidden
    else:  # this block's weights, and the buffer in which they were gathered
        is_kept = run.cfg.model.memory.reshard == "never"
        shared = 0 if is_kept else max(_sharded_bytes(run, b, axes) for b, _ in shape.kinds)
        at_once = {"gathered by FSDP": _gathered_bytes(run, axes) + 2 * shared}
        stream = 0
    extra = max(ulysses_extra_bytes(b.attention, work) - mlp_bytes(b, work) for b, _ in shape.kinds)
    return at_once | {"activations": saved.total + stream + extra}


def _at_last_block(run: Run, axes: Axes, saved: SavedBytes, work: RowPart) -> dict[str, int]:
    shape = run.shape
    c = run.kernels.compute_bytes
    numel = _largest(shape, axes)
    # The weights of this block, and the buffer that gathers the next block. The gradients of the
    # previous block and their float32 copy are still being reduced. The head's gradient is reduced
    # at the end.
    gathered = _gathered_bytes(run, axes)
    if run.cfg.model.memory.reshard != "never":
        most = max(_sharded_bytes(run, block, axes) for block, _ in shape.kinds)
        ahead = run.cfg.model.memory.prefetch
        gathered += (3 + (0 if ahead == "auto" else max(0, ahead - 1))) * most
    reduced = 0 if run.lora_numel or c == 4 else (c + 4) * numel
    head = 0 if run.lora_numel else c * _head_rows(shape, axes) * shape.hidden
    return {
        "activations": saved.total + _working(run.shape, work),
        "head": head,
        "gathered by FSDP": gathered,
        "gradients in reduction": reduced,
        "dequantised": dequantised_bytes(run, axes),
    }


def _working(shape: ModelShape, work: RowPart) -> int:
    """Return the work memory of a block's backward pass.

    At first these are the gradients of the MLP's product, of its factors and of the residual
    stream. Later, when the MLP's activations are freed, it is that of attention's kernel, and what
    attention exchanges over cp.
    """
    c = work.kernels.compute_bytes
    tokens = work.tokens
    tp = work.cut.tp
    widths = [
        b.intermediate // tp + (b.experts.top_k * b.experts.intermediate // tp if b.experts else 0)
        for b, _ in shape.kinds
    ]
    stream = tokens * (4 + c) * shape.hidden
    attention = max(
        exchange_bytes(b.attention, work)
        + flash_backward_bytes(b.attention, work)
        - mlp_bytes(b, work)
        for b, _ in shape.kinds
    )
    return stream + max(tokens * 2 * c * max(widths), attention)


def _at_end(run: Run, axes: Axes) -> dict[str, int]:
    shape = run.shape
    c = run.kernels.compute_bytes
    numel = gathered_numel(shape.root, axes)
    reduced = 0 if run.lora_numel else numel * (c + 4)
    return {"gathered by FSDP": _gathered_bytes(run, axes), "gradients in reduction": reduced}


def sent_proof_bytes(run: Run, axes: Axes) -> int:
    """Return what a rank allocates to check what it sent: the checksum of its largest shard, and
    the shard in the engine's dtype."""
    numel = largest_file_tensor(run.shape) // axes.fsdp
    is_cast = run.engine_bytes != run.master_bytes
    return proof_bytes(run, numel) + (numel * run.engine_bytes if is_cast else 0)


@lru_cache(maxsize=4096)
def most_tokens(run: Run, axes: Axes, *, room: int) -> int:
    """Return the largest tokens_per_microbatch whose peak fits into `room` bytes.

    The largest candidate is the number of tokens in one update, or the number in the config: a
    larger micro-batch would have the same sequences. Smaller candidates are multiples of 256, and
    the longest sequence (or pair). Return 0 if not even that fits.
    """

    def fits(tokens: int) -> bool:
        return trainer_memory(run, axes, tokens=tokens).total <= room

    step = 256
    least = max(least_tokens(run.cfg), axes.cp)
    filled = useful_tokens(run.cfg, dp_size=axes.dp_size)
    most = max(least, filled, run.cfg.batch.tokens_per_microbatch)
    if not fits(least):
        return 0
    if fits(most):
        return most
    low = -(-least // step)
    if not fits(low * step):
        return least
    high = -(-most // step)
    # `low` steps fit and `high` steps do not.
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle * step):
            low = middle
        else:
            high = middle
    return low * step
