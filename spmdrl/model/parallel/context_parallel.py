"""Context parallelism: each rank of a group computes a slice of every packed row.

A row of T tokens is padded by an own sequence, in no loss, to 2 * size chunks of C tokens; rank r
has chunks r and 2 * size - 1 - r, so that under a causal mask all ranks have about the same work.
Everything but attention acts on tokens one by one. Attention exchanges, in one of three ways:

- ulysses: all tokens of some heads for some tokens of all heads, and back (arXiv 2309.14509). Each
  rank then has whole sequences, and any kernel serves. Query heads must divide by the ranks.
- gather: own queries meet the keys and values of the whole row, which are gathered for a few heads
  at a time and again in the backward pass, so that at no time more of them are there than the own
  slice has of all heads (arXiv 2407.21783, section 3.3.2). Any number of heads.
- ring: keys and values go round the ranks, while each attends to those that it has (arXiv
  2310.01889; ring_attention.py). Any number of heads, and no more than two slices of keys.

Shape letters: T tokens of the padded row, t of a slice, C of a chunk, R ranks, H heads, D head
dim, N scored tokens of the row, n of those whose state before is in the slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from spmdrl.model.attention import KERNELS, Packing, check_supported, make_packing, padded_attention
from spmdrl.model.parallel import ring_attention as ring
from spmdrl.model.parallel.collectives import added, gathered, scattered_sum, swapped, with_gradient

Kernel = Callable[..., tuple[Tensor, None]]


# --------------------------------------------------------------------------- slices of a row


@dataclass(frozen=True)
class Slicing:
    """How packed rows are cut: among which ranks, and to a multiple of what."""

    group: dist.ProcessGroup | None = None
    """Of the context-parallel ranks; None: one rank computes all of a row."""
    rank: int = 0
    size: int = 1
    multiple: int = 1
    """Ranks among which a slice is cut once more, in equal parts."""
    part: int = 0
    """Which of these parts is this rank's."""

    @property
    def unit(self) -> int:
        """Tokens that a row's length must be a multiple of."""
        return self.multiple * (2 * self.size if self.size > 1 else 1)


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of a row, and the keys that they see: those of [first_key, end)."""

    begin: int
    end: int
    first_key: int
    packing: Packing


@dataclass(frozen=True)
class SlicedPacking:
    """What attention has to know of a row of which each rank of a group has two chunks."""

    group: dist.ProcessGroup
    whole: Packing
    chunks: tuple[Chunk, Chunk]
    rounds: ring.Rounds
    """What ring attention does in which round."""


@dataclass(frozen=True)
class RowSlice:
    """What one rank computes of a packed row: its slice, or all of it."""

    tokens: Tensor  # [t] int64
    position_ids: Tensor  # [t] int64
    packing: Packing | SlicedPacking
    rows: Tensor  # [t] int64, where in the row they are
    kept: Tensor  # [t / R] int64, the part of `rows` that a tp rank keeps between layers
    before: Tensor  # [n] int64, places in the slice whose next token is scored
    scored: Tensor  # [n] int64, which of the N scored tokens those are
    targets: Tensor  # [n] int64, these tokens
    row_length: int  # T
    group: dist.ProcessGroup | None
    """Ranks that have the other slices; None where there are none."""
    routes: Tensor | None = None
    """[t / R, L, K], experts of `kept` to replay, -1 where the routers choose; None: they choose
    everywhere."""

    def join(self, values: Tensor, at: Tensor, *, count: int) -> Tensor:
        """Return all ranks' values, the same on each: [count, ...] from the own ones [n, ...].

        The gradient of the own values is that of their places: every rank computes the same from
        what it gets, and is to have its share of the parameters' gradient.
        """
        return values if self.group is None else _join(values, at, count=count, group=self.group)

    def join_scored(self, found: Any, *, count: int) -> Any:
        """Join what a head made of the n states: tensors [n, ...] become [count, ...], in any
        nesting of tuples and dicts; scalars, which are sums over them, are added up."""

        def whole(value: Tensor) -> Tensor:
            if value.dim():
                return self.join(value, self.scored, count=count)
            return value if self.group is None else added(value.detach(), self.group)

        return tree_map(whole, found)


def make_slice(
    tokens: Tensor,
    lengths: Sequence[int],
    *,
    position_ids: Tensor,
    scored: Tensor,
    device: torch.device,
    padded: bool,
    slicing: Slicing,
    routes: Tensor | None = None,
) -> RowSlice:
    """Return a rank's slice of a packed row.

    Args:
        tokens, position_ids: [row] int64 on the CPU.
        lengths: tokens per sequence.
        scored: [N] int64 on the CPU, positions of the scored tokens, none a sequence's first.
        device: of the tensors.
        padded: attention pads.
        slicing: which slice.
        routes: [row, L, K] on the CPU, to be replayed; None for none.
    """
    missing = -len(tokens) % slicing.unit
    if missing:
        lengths = [*lengths, missing]
        position_ids = torch.cat([position_ids, torch.arange(missing)])
    row = F.pad(tokens, (0, missing))
    whole = make_packing(lengths, device, padded=padded)
    rows, packing = torch.arange(len(row)), whole
    if slicing.group is not None:
        spans = chunk_spans(len(row), rank=slicing.rank, size=slicing.size)
        rows = torch.cat([torch.arange(begin, end) for begin, end in spans])
        chunks = tuple(_chunk(span, lengths, device=device, padded=padded) for span in spans)
        packing = SlicedPacking(
            slicing.group,
            whole,
            chunks,
            ring.plan_rounds(
                lengths,
                lambda rank: chunk_spans(len(row), rank=rank, size=slicing.size),
                rank=slicing.rank,
                size=slicing.size,
                device=device,
            ),
        )
    place = torch.full((len(row),), -1).index_copy(0, rows, torch.arange(len(rows)))[scored - 1]
    own = (place >= 0).nonzero()[:, 0]
    kept = rows.chunk(slicing.multiple)[slicing.part]
    if routes is not None:
        # By the rows whose tokens this rank's routers see.
        routes = F.pad(routes, (0, 0, 0, 0, 0, missing), value=-1)[kept].to(device)
    return RowSlice(
        tokens=row[rows].to(device),
        position_ids=position_ids[rows].to(device),
        packing=packing,
        rows=rows.to(device),
        kept=kept.to(device),
        before=place[own].to(device),
        scored=own.to(device),
        targets=row[scored[own]].to(device),
        row_length=len(row),
        group=slicing.group,
        routes=routes,
    )


def chunk_spans(length: int, *, rank: int, size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return [begin, end) of the two chunks that a rank has of a row."""
    chunk = length // (2 * size)
    first, second = (((at * chunk), (at + 1) * chunk) for at in (rank, 2 * size - 1 - rank))
    return first, second


def _chunk(
    span: tuple[int, int], lengths: Sequence[int], *, device: torch.device, padded: bool
) -> Chunk:
    begin, end = span
    queries, keys, first_key, at = [], [], begin, 0
    for length in lengths:
        inside = min(end, at + length) - max(begin, at)
        if inside > 0:
            queries.append(inside)
            keys.append(min(end, at + length) - at)  # back to where the sequence begins
            first_key = min(first_key, at)
        at += length
    return Chunk(
        begin, end, first_key, make_packing(queries, device, padded=padded, key_lengths=keys)
    )


# --------------------------------------------------------------------------- collectives


def _join(values: Tensor, at: Tensor, *, count: int, group: dist.ProcessGroup) -> Tensor:
    """Every rank's values at their places of one tensor; see RowSlice.join."""

    def place(own: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = own.new_zeros(count, *own.shape[1:]).index_copy_(0, at, own)
        dist.all_reduce(whole, group=group)
        return whole

    return with_gradient(place, lambda grad, _: grad.index_select(0, at))(values, group)


_swap = with_gradient(swapped, swapped)
"""[R, ...]: block r goes to rank r, and the block of rank r comes to place r. The gradient goes
the same way back."""
_gather = with_gradient(gathered, scattered_sum)
"""A rank's [...] to all ranks' [R, ...]; the ranks' gradients are added up."""


def in_row_order(slices: Tensor) -> Tensor:
    """Return [H, T, D] in the row's order from the ranks' slices [R, H, t, D]."""
    first, second = slices.unflatten(2, (2, -1)).unbind(2)
    return torch.cat([first, second.flip(0)]).transpose(0, 1).flatten(1, 2)


def by_rank(row: Tensor, *, size: int) -> Tensor:
    """Return the slices of `size` ranks, [R, H, t, D], of a row [H, T, D]."""
    chunks = row.unflatten(1, (2 * size, -1)).transpose(0, 1)
    return torch.stack([chunks[:size], chunks[size:].flip(0)], dim=2).flatten(2, 3)


# --------------------------------------------------------------------------- attention


def ulysses_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: SlicedPacking,
    kernel: Kernel,
    **options: object,
) -> tuple[Tensor, None]:
    """Attend over whole sequences with a part of the heads.

    Args:
        query: [1, Hq, t, D]; key, value: [1, Hkv, t, D]. Hq divides by the ranks. Key and value
            heads are repeated to a number that does.
        kernel: of KERNELS. options: its own.
    Returns: [1, t, Hq, D] and None.
    Source: arXiv 2309.14509, section 3.
    """
    group, size = packing.group, dist.get_world_size(packing.group)
    copies = math.lcm(key.shape[1], size) // key.shape[1]
    key, value = (x.repeat_interleave(copies, dim=1) if copies > 1 else x for x in (key, value))
    heads = (
        in_row_order(_swap(x[0].unflatten(0, (size, -1)), group))[None] for x in (query, key, value)
    )
    out, _ = kernel(module, *heads, attention_mask, packing=packing.whole, **options)
    slices = by_rank(out[0].transpose(0, 1), size=size)
    return _swap(slices, group).flatten(0, 1).transpose(0, 1)[None], None


def gathered_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: SlicedPacking,
    kernel: Kernel,
    **options: object,
) -> tuple[Tensor, None]:
    """Attend with own queries over the keys of the row, for a few heads at a time.

    Args:
        query: [1, Hq, t, D]; key, value: [1, Hkv, t, D].
        kernel: of KERNELS. options: its own.
    Returns: [1, t, Hq, D] and None.
    Source: arXiv 2407.21783, section 3.3.2.
    """
    kv_heads, size = key.shape[1], dist.get_world_size(packing.group)
    shared, step = query.shape[1] // kv_heads, -(-kv_heads // size)
    attend = partial(
        _attend_gathered,
        module,
        attention_mask=attention_mask,
        packing=packing,
        kernel=kernel,
        options=options,
    )
    outputs = [
        checkpoint(
            attend,
            query[:, start * shared : (start + step) * shared],
            *(x[:, start : start + step] for x in (key, value)),
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for start in range(0, kv_heads, step)
    ]
    return torch.cat(outputs, dim=2), None


def _attend_gathered(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attention_mask: Tensor | None,
    packing: SlicedPacking,
    kernel: Kernel,
    options: dict[str, object],
) -> Tensor:
    keys, values = (in_row_order(_gather(x[0], packing.group))[None] for x in (key, value))
    outputs = []
    for own, chunk in zip(query.chunk(2, dim=2), packing.chunks):
        seen = slice(chunk.first_key, chunk.end)
        out, _ = kernel(
            module,
            own,
            keys[:, :, seen],
            values[:, :, seen],
            attention_mask,
            packing=chunk.packing,
            **options,
        )
        outputs.append(out)
    return torch.cat(outputs, dim=1)


def ring_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: SlicedPacking,
    kernel: Kernel,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **model_kwargs: object,
) -> tuple[Tensor, None]:
    """Attend with own queries to keys that go round the ranks.

    Layers with a sliding window or a softcap gather instead, which their kernels can.

    Args:
        query: [1, Hq, t, D]; key: [1, Hkv, t, D]; value: [1, Hkv, t, Dv].
        kernel: of KERNELS; `padded` stands for matrix products in float32, the others for torch's
            flash attention.
        scaling: factor on the scores; None is D ** -0.5.
        model_kwargs: whatever else the model hands to attention.
    Returns: [1, t, Hq, Dv] and None.
    """
    if sliding_window is not None or softcap is not None:
        return gathered_attention(
            module,
            query,
            key,
            value,
            attention_mask,
            packing=packing,
            kernel=kernel,
            scaling=scaling,
            dropout=dropout,
            sliding_window=sliding_window,
            softcap=softcap,
            s_aux=s_aux,
        )
    check_supported(module, attention_mask, dropout, s_aux)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = ring.Ring.apply(
        *(x[0].transpose(0, 1).contiguous() for x in (query, key, value)),
        packing.rounds,
        packing.group,
        ring.DENSE if kernel is padded_attention else ring.FLASH,
        scale,
    )
    return out[None], None


METHODS = {"ulysses": ulysses_attention, "gather": gathered_attention, "ring": ring_attention}


def register_context_attention() -> None:
    """Make kernels with each method known to transformers, as spmdrl_padded_ulysses and so on."""
    from transformers import AttentionInterface

    for kernel, function in KERNELS.items():
        for method, attend in METHODS.items():
            AttentionInterface.register(
                f"spmdrl_{kernel}_{method}", partial(attend, kernel=function)
            )


def pick_method(wanted: str, *, heads: int, size: int) -> str:
    """Return the method for `model.kernels.context`: ulysses, gather or ring.

    Args:
        heads: query heads of one tensor-parallel rank. size: of the context-parallel group.
    Raises: ValueError when ulysses is asked for and the heads do not divide.
    """
    if wanted == "ulysses" and heads % size:
        raise ValueError(
            f"model.kernels.context: ulysses deals out query heads, and layout.cp {size} does not "
            f"divide the {heads} of a tensor-parallel rank; take a cp that does, or auto"
        )
    if wanted == "auto":
        return "gather" if heads % size else "ulysses"
    return wanted
