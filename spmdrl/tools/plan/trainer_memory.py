"""Bytes that a trainer rank holds at its peak.

The weights that FSDP2 gathers and the work memory of the backward pass are formulas.
"""

from __future__ import annotations

from functools import lru_cache

from spmdrl.config.fields import least_tokens, useful_tokens
from spmdrl.model.attention.packing import PaddedGroup
from spmdrl.model.divisibility import context_method
from spmdrl.model.head import logit_bytes
from spmdrl.model.model_shape import Block, ModelShape
from spmdrl.tools.plan.activations import (
    Cut,
    RowPart,
    SavedBytes,
    exchange_bytes,
    mlp_bytes,
    padded_groups,
    saved_bytes,
    unkept_bytes,
)
from spmdrl.tools.plan.memory import (
    CUDA_CONTEXT,
    Memory,
    bucket_count,
    gathered_numel,
    local_shape,
    lora_numel,
    muon_numel,
    shards_numel,
)
from spmdrl.tools.plan.run import Run
from spmdrl.world.axes import Axes

_ADAPTER = 4  # bytes of an adapter's element, always float32
_MOMENTUM = 4  # ... of Muon's one moment, likewise


@lru_cache(maxsize=4096)
def trainer_memory(run: Run, axes: Axes, *, tokens: int = 0) -> Memory:
    """Return the memory of a trainer rank in the backward pass of a full micro-batch.

    Args:
        tokens: budget of a micro-batch; 0 takes the run's.
    """
    shape = run.shape
    c = run.kernels.compute_bytes
    own_tokens = -(-(tokens or run.cfg.batch.tokens_per_microbatch) // axes.cp)
    work = _work(run, axes, tokens=own_tokens)
    share = run.response_tokens / (run.prompt_tokens + run.response_tokens)
    saved = saved_bytes(shape, work, num_scored=int(own_tokens * share))
    state = shards_numel(shape, axes)
    trained = lora_numel(run, axes) if run.lora_numel else state
    master = _ADAPTER if run.lora_numel else run.master_bytes
    has_muon = run.cfg.optimizer.kind == "muon"
    spared = muon_numel(shape, axes) * (run.moment_bytes - _MOMENTUM) if has_muon else 0
    critic = int(run.trained_models * (state * (2 * run.master_bytes + run.moment_bytes) - spared))
    causes = {
        "weights": c * state + master * trained if run.lora_numel else master * state,
        "gradients": master * trained,
        "optimizer": int(run.moment_bytes * trained - spared),
        "other models": critic + run.frozen_models * c * state * (run.master_bytes > 0),
        "gradients to be reduced": _unreduced(run, axes),
        "shown": _shown_bytes(run, axes, tokens=own_tokens * axes.cp),
    }
    moments = {
        "where the head's backward pass begins": _at_head(run, axes, saved=saved),
        "in the backward pass of the last block": _at_last_block(run, axes, saved, work),
        "where the embedding's gradient is reduced": _at_end(run, axes),
    }
    if work.cut.method == "ulysses":
        moments["in the attention of the last block"] = _in_attention(run, axes, saved, work)
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    causes |= moments[moment]
    if axes.roles.has_engines:
        # Trainers pack into two buckets; tensors that are sent from live memory need none.
        sent = state * run.engine_bytes
        whole = run.shape.numel * run.engine_bytes
        causes["stream buckets"] = 2 * sent // bucket_count(run, axes, nbytes=whole)
    if run.on_gpu:
        causes["CUDA context"] = CUDA_CONTEXT
    resting = sum(causes[name] for name in ("weights", "optimizer", "other models"))
    return Memory({name: size for name, size in causes.items() if size}, moment, resting=resting)


def _shown_bytes(run: Run, axes: Axes, *, tokens: int) -> int:
    """Return the bytes of images at most, if all tokens of prompts are placeholders.

    On each rank of tp and cp these are the features of a row, and the activations that a trained
    tower keeps. On a CPU, the features of all rows of a step are in memory as well.

    Args:
        tokens: of a row, on all ranks of cp together.
    """
    tower = run.shape.tower
    kernels = run.kernels
    if tower is None:
        return 0
    own_placeholders = tokens * run.prompt_tokens / (run.prompt_tokens + run.response_tokens)
    width = tower.hidden if kernels.recomputes or kernels.is_selective else tower.kept
    kept = 0 if kernels.on_host else tower.layers * width * kernels.compute_bytes
    waiting = 0 if run.on_gpu else -(-run.sequences // axes.dp_size) * run.prompt_tokens
    return int(
        tower.patches
        * (waiting * tower.patch_bytes + own_placeholders * (tower.patch_bytes + kept))
    )


def _unreduced(run: Run, axes: Axes) -> int:
    """Return the bytes of gradients that micro-batches add up before they are reduced, float32."""
    if run.cfg.model.memory.reduce == "each":
        return 0
    if run.lora_numel:
        return _ADAPTER * lora_numel(run, axes) * axes.fsdp
    shape = run.shape
    numel = sum(count * gathered_numel(block.weights, axes) for block, count in shape.kinds)
    return 4 * (gathered_numel(shape.root, axes) + numel)


def _work(run: Run, axes: Axes, *, tokens: int) -> RowPart:
    groups: tuple[PaddedGroup, ...] = ()
    if run.kernels.is_padded:
        row = tokens * axes.cp
        longest = min(run.cfg.longest_sequence, row)
        lengths = [longest] * (row // longest) + [row % longest] * (row % longest > 0)
        groups = padded_groups(lengths)
    return RowPart(run.kernels, tokens, cut_of(run, axes), groups)


def cut_of(run: Run, axes: Axes) -> Cut:
    """Return how a layout divides the work on a row."""
    if axes.cp == 1:
        return Cut(axes.tp, axes.ep)
    heads = min(block.attention.heads for block, _ in run.shape.kinds) // axes.tp
    method = context_method(run.cfg.model.kernels.context, heads=heads, cp=axes.cp)
    return Cut(axes.tp, axes.ep, axes.cp, method)


def _largest(shape: ModelShape, axes: Axes) -> int:
    """Return the elements of the largest block when gathered."""
    return max(gathered_numel(block.weights, axes) for block, _ in shape.kinds)


def _shared(block: Block, axes: Axes) -> int:
    """Return how many elements of a block are gathered from other ranks."""
    return gathered_numel([w for w in block.weights if local_shape(w, axes)[1] > 1], axes)


def _kept(run: Run, axes: Axes) -> int:
    """Return the bytes that stay gathered during a micro-batch: the root's weights, and those of
    blocks that are on one rank only, or are not resharded."""
    shape = run.shape
    numel = gathered_numel(shape.root, axes)
    for block, count in shape.kinds:
        numel += count * gathered_numel(block.weights, axes)
        numel -= 0 if run.cfg.model.memory.reshard == "never" else count * _shared(block, axes)
    return numel * run.kernels.compute_bytes


def _head_rows(shape: ModelShape, axes: Axes) -> int:
    head = next((w for w in shape.root if w.name.startswith("lm_head")), None)
    is_split = axes.tp > 1 and (head or shape.root[0]).tp_dim is not None
    return shape.vocab // axes.tp if is_split else shape.vocab


def _at_head(run: Run, axes: Axes, *, saved: SavedBytes) -> dict[str, int]:
    shape = run.shape
    c = run.kernels.compute_bytes
    rows = _head_rows(shape, axes)
    logits = run.chunk_tokens * rows * logit_bytes(run.cfg)
    # The weight's gradient in float32; in bfloat16 also a chunk's share, or the sum.
    gradient = rows * shape.hidden * (4 + (c if c < 4 else 0))
    gradient = 0 if run.lora_numel else gradient
    last = c * _shared(shape.blocks[-1], axes) if run.cfg.model.memory.reshard == "auto" else 0
    return {
        "activations": saved.blocks + saved.rest,
        "head": logits + gradient,
        "gathered by FSDP": _kept(run, axes) + last,
    }


def _in_attention(run: Run, axes: Axes, saved: SavedBytes, work: RowPart) -> dict[str, int]:
    """Return the memory right after attention by ulysses, when the MLP keeps nothing yet."""
    shape = run.shape
    kernels = run.kernels
    c = run.kernels.compute_bytes
    if kernels.recomputes or kernels.is_selective:  # once more, in the block's backward pass
        at_once = _at_last_block(run, axes, saved, work)
        stream = work.tokens * (4 + c) * shape.hidden
    else:  # gathered: this block, and once more as it came, in one piece
        is_kept = run.cfg.model.memory.reshard == "never"
        shared = 0 if is_kept else max(_shared(b, axes) for b, _ in shape.kinds)
        at_once = {"gathered by FSDP": _kept(run, axes) + 2 * c * shared}
        stream = 0
    unkept = max(
        unkept_bytes(b.attention, work) - mlp_bytes(b, work, hidden=shape.hidden)
        for b, _ in shape.kinds
    )
    return at_once | {"activations": saved.total + stream + unkept}


def _at_last_block(run: Run, axes: Axes, saved: SavedBytes, work: RowPart) -> dict[str, int]:
    shape = run.shape
    c = run.kernels.compute_bytes
    numel = _largest(shape, axes)
    # Gathered: this block and the next, on its way in one piece. Of the block before, gradients
    # and their float32 copy are still being reduced; the head's gradient waits for the end.
    gathered = _kept(run, axes)
    if run.cfg.model.memory.reshard != "never":
        most = max(_shared(block, axes) for block, _ in shape.kinds)
        ahead = run.cfg.model.memory.prefetch
        gathered += (3 + (0 if ahead == "auto" else max(0, ahead - 1))) * c * most
    reduced = 0 if run.lora_numel or c == 4 else (c + 4) * numel
    head = 0 if run.lora_numel else c * _head_rows(shape, axes) * shape.hidden
    return {
        "activations": saved.total + _working(run.shape, work),
        "head": head,
        "gathered by FSDP": gathered,
        "gradients on their way": reduced,
    }


def _working(shape: ModelShape, work: RowPart) -> int:
    """Return the work memory of a block's backward pass: gradients of the MLP's product, of its
    factors and of the residual stream; or later, when the MLP's activations are freed, what
    attention exchanges over cp."""
    c = work.kernels.compute_bytes
    tokens = work.tokens
    tp = work.cut.tp
    widths = [
        b.intermediate // tp + (b.experts.top_k * b.experts.intermediate // tp if b.experts else 0)
        for b, _ in shape.kinds
    ]
    stream = tokens * (4 + c) * shape.hidden
    exchanged = max(
        exchange_bytes(b.attention, work) - mlp_bytes(b, work, hidden=shape.hidden)
        for b, _ in shape.kinds
    )
    return stream + max(tokens * 2 * c * max(widths), exchanged)


def _at_end(run: Run, axes: Axes) -> dict[str, int]:
    shape = run.shape
    c = run.kernels.compute_bytes
    numel = gathered_numel(shape.root, axes)
    reduced = 0 if run.lora_numel else numel * (c + 4)
    return {"gathered by FSDP": _kept(run, axes), "gradients on their way": reduced}


@lru_cache(maxsize=4096)
def most_tokens(run: Run, axes: Axes, *, room: int) -> int:
    """Return the largest tokens_per_microbatch whose peak fits into `room` bytes.

    The largest size that is tried is what one update fills, or what the config asks for: a larger
    micro-batch would hold the same sequences. Below that, sizes are tried in steps of 256; 0 means
    that not even the longest sequence (or pair) fits.
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
    # `low` steps fit, `high` steps do not.
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle * step):
            low = middle
        else:
            high = middle
    return low * step
