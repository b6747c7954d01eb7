"""Bytes that a forward pass saves for its backward pass, by formula.

Shape letters: T packed tokens, R padded rows, H hidden, I width of an MLP, E experts. c is
the size of an element of the compute dtype; norms and softmax compute in float32.

There are two sets of kernels. Plain torch with padded attention runs on the CPU, and where no other
kernel can be used; tests compare its figures with measurements. Varlen attention with liger's
kernels runs on CUDA; its figures follow from the definitions of the kernels and are not measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from spmdrl.model.attention.kernels import LARGEST_HEAD, is_by_matmul
from spmdrl.model.attention.packing import PaddedGroup, make_packing
from spmdrl.model.attention.state_chunks import CHUNK
from spmdrl.model.block_shape import Attention, Block, StateLayer
from spmdrl.model.model_shape import ModelShape

_MULTIPROCESSORS = 148
"""Multiprocessors of a B200. Other GPUs have fewer, and need less memory."""
_ROWS_BETWEEN = 128  # padding between two sequences in FlashAttention's gradients of queries


@dataclass(frozen=True)
class Kernels:
    """How blocks are computed."""

    compute_bytes: int  # of one element
    is_padded: bool  # attention pads inside
    has_liger: bool  # fused norms, rotary embedding and gated MLP
    recomputes: bool  # activation checkpointing `full`: a block keeps only its input
    is_selective: bool = False  # `selective`: also its matrix products and attention
    on_host: bool = False  # saved activations are moved to host memory
    on_gpu: bool = False
    is_deterministic: bool = False


@dataclass(frozen=True)
class SavedBytes:
    """Bytes that are saved on one rank."""

    blocks: int  # all blocks, or their inputs
    recomputed: int  # of one block, recomputed in the backward pass; 0 without recomputation
    rest: int  # rotary tables, final norm, scored states

    @property
    def total(self) -> int:
        """The peak, when the backward pass begins."""
        return self.blocks + self.recomputed + self.rest


@lru_cache(maxsize=4096)
def shared_groups(prompt: int, response: int, *, count: int) -> tuple[PaddedGroup, ...]:
    """Return how padded attention groups a prompt and `count` responses to it, which share it."""
    own = torch.arange(prompt, prompt + count * response).split(response)
    keys = [torch.arange(prompt), *(torch.cat([torch.arange(prompt), part]) for part in own)]
    return make_packing(
        [prompt] + [response] * count,
        torch.device("cpu"),
        padded=True,
        key_lengths=[len(part) for part in keys],
        key_index=torch.cat(keys),
    ).groups


@dataclass(frozen=True)
class Cut:
    """How ranks divide the work on a row."""

    tp: int = 1  # divides heads and the MLP; outside of these, the tokens
    ep: int = 1  # divides experts; routing is assumed to be balanced
    cp: int = 1  # divides the row's tokens
    method: str = ""  # of attention under cp: ulysses, gather or ring


@dataclass(frozen=True)
class RowPart:
    """A rank's part of a row."""

    kernels: Kernels
    tokens: int  # of this rank
    cut: Cut = Cut()
    groups: tuple[PaddedGroup, ...] = ()  # of the whole row; needed if the kernels pad
    sequences: int = 1  # the whole row has at least so many
    copied_keys: int = 0  # of the whole row, see shared_prompts.py
    branches: int = 0  # prompts and responses of the whole row that are computed apart

    def heads(self, own: Attention) -> tuple[int, int]:
        """Return the numbers of query heads and of key/value heads of the rank under tp."""
        return max(1, own.heads // self.cut.tp), max(1, own.kv_heads // self.cut.tp)


def saved_bytes(shape: ModelShape, work: RowPart, *, num_scored: int) -> SavedBytes:
    """Return the bytes that one micro-batch saves on a rank.

    Args:
        num_scored: the number of tokens for which a logprob is computed.
    """
    kernels = work.kernels
    tokens = work.tokens
    tp = work.cut.tp
    c = kernels.compute_bytes
    each = [(_block_bytes(block, shape, work), count) for block, count in shape.kinds]
    tables = 2 * shape.rotary * tokens * shape.rotary_dims * c
    norm = tokens * _norm_bytes(shape.hidden, kernels, is_float32=shape.has_float32_norms) // tp
    rest = tables + norm + num_scored * (c * shape.hidden + 24)  # 24: indices, log total, entropy
    largest = max(size for size, _ in each)
    if kernels.on_host:  # while a block computes, what another block saved is being copied
        keeps_input = kernels.recomputes or kernels.is_selective
        way = tokens * shape.hidden * c // tp if keeps_input else largest
        return SavedBytes(way, largest, rest)
    if not kernels.recomputes and not kernels.is_selective:
        return SavedBytes(sum(size * count for size, count in each), 0, rest)
    inputs = len(shape.blocks) * tokens * shape.hidden * c // tp
    if kernels.is_selective:
        kept = [
            (tokens * c * _product_width(block, hidden=shape.hidden, tp=tp), count)
            for block, count in shape.kinds
        ]
        inputs += sum(size * count for size, count in kept)
        largest = max(0, largest - max(size for size, _ in kept))
    return SavedBytes(inputs, largest, rest)


def _product_width(block: Block, *, hidden: int, tp: int) -> int:
    """Return the elements per token that selective checkpointing saves of a block.

    These are the results of its matrix products, and the output of its attention.
    """
    own = block.attention
    experts = block.experts
    width = (own.heads + own.kv_heads) * (own.qk_dim + own.v_dim) // tp
    width += sum(own.latent) if own.latent else 0
    factors = 2 if block.is_gated else 1
    width += block.layers * hidden + factors * block.intermediate // tp
    if experts is not None:
        of_expert = factors * experts.intermediate + experts.width
        width += (experts.count + experts.top_k * of_expert) // tp
    return width


def _norm_bytes(width: int, kernels: Kernels, *, is_float32: bool) -> int:
    """Return the bytes per row of an RMSNorm.

    These are its input in float32, the reciprocal of the root, and its normalised input.
    """
    c = kernels.compute_bytes
    if kernels.has_liger:
        return c * width + 4  # the input in the compute dtype, and the reciprocal
    return 4 * width + 4 + (4 if is_float32 else c) * width


@lru_cache(maxsize=4096)
def _block_bytes(block: Block, shape: ModelShape, work: RowPart) -> int:
    kernels = work.kernels
    tokens = work.tokens
    tp = work.cut.tp
    c = kernels.compute_bytes
    hidden = shape.hidden
    is_float32 = shape.has_float32_norms
    # Under tp, norms, states and experts work on this rank's tokens; the inputs of attention and
    # MLP are gathered.
    total = block.norms * tokens * _norm_bytes(hidden, kernels, is_float32=is_float32) // tp
    gathered = block.dense_layers
    total += tokens * hidden * c * gathered + tokens * hidden * c * (block.layers - gathered) // tp
    if block.attention.heads:
        total += _attention_bytes(block.attention, work, is_float32=is_float32)
    total += _state_bytes(block.state, work) if block.state else 0
    return total + mlp_bytes(block, work)


def mlp_bytes(block: Block, work: RowPart) -> int:
    """Return the bytes saved of a block's MLP or experts, without their input."""
    kernels = work.kernels
    tokens = work.tokens
    cut = work.cut
    c = kernels.compute_bytes
    # Gate, its activation (liger computes it again), up, their product; or the ReLU, its square.
    factors = 4 if block.is_gated else 2
    per_width = (3 if kernels.has_liger else factors) * c
    total = tokens * block.intermediate * per_width // cut.tp
    if block.experts is not None:
        experts = block.experts
        rows = tokens * block.experts.top_k // cut.tp
        total += tokens * 4 * experts.count // cut.tp  # the router's probabilities
        # Each token has a row for each of its experts: input, the factors of the product, output;
        # its weight and its index. With ep, also the output after it is sent back.
        states = 3 if cut.ep > 1 else 2
        total += rows * (c * (states * experts.width + factors * experts.intermediate) + 24)
    return total


def _attention_bytes(own: Attention, work: RowPart, *, is_float32: bool) -> int:
    kernels = work.kernels
    tokens = work.tokens
    cut = work.cut
    c = kernels.compute_bytes
    heads, kv_heads = work.heads(own)
    total = 0
    if own.has_qk_norm:
        total += (
            tokens * (heads + kv_heads) * _norm_bytes(own.qk_dim, kernels, is_float32=is_float32)
        )
    if own.latent is not None:
        for rank in own.latent[:2]:  # norm of the latent, and its projection
            total += tokens * (_norm_bytes(rank, kernels, is_float32=is_float32) + c * rank)
    if cut.method in ("gather", "ring"):  # query, key, value; output; the ring's log-sum-exp
        sums = 4 * tokens * heads if cut.method == "ring" else 0
        return total + sums + tokens * c * (heads + kv_heads) * (own.qk_dim + own.v_dim)
    if kernels.is_padded or cut.method:  # a copy of the output without padding, or sent back
        total += tokens * heads * own.v_dim * c
    if cut.method:  # ulysses: some heads of the whole row; keys and values may be repeated
        tokens = tokens * cut.cp
        heads = heads // cut.cp
        # Fewer key/value heads than ranks, or a number that cp does not divide, are repeated.
        kv_heads = math.lcm(kv_heads, cut.cp) // cut.cp
    if kernels.is_padded:
        each = (_group_bytes(own, g, kernels, heads, kv_heads) for g in work.groups)
        return total + sum(each) + _viewed_bytes(own, work.groups, kernels, kv_heads)
    # Query, key, value, output (the input of the next projection), log-sum-exp.
    width = heads * (own.qk_dim + own.v_dim)
    of_keys = kv_heads * (own.qk_dim + own.v_dim)
    total += work.copied_keys * of_keys * c
    return total + tokens * ((width + of_keys) * c + 4 * heads)


def _state_bytes(own: StateLayer, work: RowPart) -> int:
    """Return the bytes saved of a layer with a state, without its input.

    Plain torch saves, per token: of each head in float32, rows of keys and values (raw, scaled,
    decayed, solved, normed), rows of a chunk, and its share of a chunk's state. The convolution
    saves its input once for each of its taps. How many rows these are was measured. Kernels save
    their inputs, a row of a chunk and the output. Ranks of tp and cp share the heads.
    """
    c = work.kernels.compute_bytes
    tokens = work.tokens / work.cut.tp
    values = own.heads * own.values
    if work.kernels.on_gpu:
        saved = c * (2 * own.keys + 2 * own.values + CHUNK) + 8
        return int(tokens * (own.heads * saved + c * (2 * own.channels + 2 * values)))
    keys, rows, chunks = (11, 9, 5) if own.corrects else (6, 7, 3)
    share = own.keys * own.values / CHUNK
    per_head = 4 * (keys * own.keys + rows * own.values + chunks * CHUNK + share)
    per_head = 4 * own.saved if own.saved else per_head
    # Each branch begins and ends a chunk.
    unused = work.branches * CHUNK / 2 / (work.cut.tp * work.cut.cp)
    padded = math.ceil((tokens + unused) / CHUNK) * CHUNK
    rest = c * (own.kernel + 1) * own.channels + 2 * c * values
    return int(padded * own.heads * per_head + tokens * rest)


def exchange_bytes(own: Attention, work: RowPart) -> int:
    """Return the peak bytes of attention's exchange over cp, which is in the backward pass.

    ulysses: the gradient of the output, both the sent and the received tensor. The output is
    already freed.
    gather: for the key and value heads of one turn, the row's keys and values, both as received and
    in order, and their gradients. Queries and output of these heads are recomputed.
    ring: two slices of keys and values and of their gradients, and the gradients of queries and
    output.
    """
    c = work.kernels.compute_bytes
    tokens = work.tokens
    cut = work.cut
    heads, kv_heads = work.heads(own)
    if cut.method == "ulysses":
        return 2 * tokens * c * heads * own.v_dim
    if cut.method == "gather":
        turn = -(-kv_heads // cut.cp)
        widths = 4 * cut.cp * turn + heads // kv_heads * turn
        # Own responses copy the keys and values of their prompts, which have gradients too.
        copied = 2 * work.copied_keys // cut.cp * turn
        return (tokens * widths + copied) * c * (own.qk_dim + own.v_dim)
    if cut.method == "ring":
        return tokens * c * (4 * kv_heads + heads) * (own.qk_dim + own.v_dim)
    return 0


def flash_backward_bytes(own: Attention, work: RowPart) -> int:
    """Return the work memory of FlashAttention's backward pass.

    Gradients of queries are added up in float32, by deterministic kernels in as many parts as it
    takes to occupy the GPU. Where query heads share keys and values, each has gradients of its own.
    Source: flash-attn 2, mha_varlen_bwd in csrc/flash_attn/flash_api.cpp.
    """
    kernels = work.kernels
    if kernels.is_padded or not kernels.on_gpu:
        return 0
    heads, kv_heads = work.heads(own)
    tokens = work.tokens
    if work.cut.method == "ulysses":
        tokens = tokens * work.cut.cp
        heads = max(1, heads // work.cut.cp)
        kv_heads = max(1, kv_heads // work.cut.cp)
    busy = work.sequences * heads
    parts = -(-_MULTIPROCESSORS // busy) if kernels.is_deterministic else 1
    rows = tokens + _ROWS_BETWEEN * work.sequences
    of_queries = 4 * parts * rows * heads * own.qk_dim
    of_others = 2 * kernels.compute_bytes * (tokens + work.copied_keys) * heads * own.qk_dim
    return of_queries + (of_others if heads > kv_heads else 0)


def ulysses_extra_bytes(own: Attention, work: RowPart) -> int:
    """Return the bytes that ulysses holds right after its kernel, in addition to saved tensors.

    These are queries, keys and values before the exchange, and repeated keys and values. If the
    kernel pads, all of these and the output also exist without padding. The output is not sent back
    yet.
    """
    heads, kv_heads = work.heads(own)
    repeated = math.lcm(kv_heads, work.cut.cp)
    both = own.qk_dim + own.v_dim
    # Minus the output, which is among the saved tensors but is not sent back yet.
    width = heads * (own.qk_dim - own.v_dim) + kv_heads * both
    width += repeated * both if repeated > kv_heads else 0
    width += (heads + repeated) * both if work.kernels.is_padded else 0
    return work.tokens * work.kernels.compute_bytes * width


def _viewed_bytes(
    own: Attention, groups: Sequence[PaddedGroup], kernels: Kernels, kv_heads: int
) -> int:
    """Return the bytes of keys and values that stay in memory in addition to copies by matmuls.

    A matmul of several sequences saves copies. A group of one sequence saves views, which keep the
    keys and values of all groups.
    """
    copied = 0
    for group in groups:
        by_matmul = is_by_matmul(
            group.key_length, has_softcap=own.has_softcap, on_gpu=kernels.on_gpu
        )
        if by_matmul and group.count > 1 and kv_heads > 1:
            copied += group.count * group.key_length
    has_views = any(group.count == 1 for group in groups)
    width = kv_heads * (own.qk_dim + own.v_dim)
    return copied * width * kernels.compute_bytes if has_views else 0


def _group_bytes(
    own: Attention, group: PaddedGroup, kernels: Kernels, heads: int, kv_heads: int
) -> int:
    c = kernels.compute_bytes
    rows = group.count * group.length
    keys = group.key_length
    has_window = own.window is not None and own.window < keys
    has_mask = has_window or group.length != keys
    # Plain matmuls save the scores; SDPA's kernel does not.
    has_scores = is_by_matmul(keys, has_softcap=own.has_softcap, on_gpu=kernels.on_gpu)
    fits_flash = c == 2 and not has_mask and own.qk_dim <= LARGEST_HEAD
    if kernels.on_gpu and not has_scores and not fits_flash:
        kv_heads = heads  # the only other kernel has no grouped heads: they are repeated
    operands = rows * c * heads * own.qk_dim
    operands += group.count * keys * c * kv_heads * (own.qk_dim + own.v_dim)
    if has_scores:
        scores = group.count * heads * group.length * keys
        softmax = scores * (4 if c == 4 else 4 + c)  # in float32, and in the compute dtype
        cap = scores * c + heads // kv_heads * group.length * keys if own.has_softcap else 0
        return operands + softmax + cap
    mask = group.length * keys * c if has_mask else 0
    return operands + rows * heads * (own.v_dim * c + 4) + mask  # output, log-sum-exp
