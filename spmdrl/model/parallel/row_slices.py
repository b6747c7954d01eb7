"""A rank's slice of a packed row under context parallelism, or the whole row without it.

A row is padded to 2 * size chunks by a sequence that is in no loss. Rank r gets chunks r and
2 * size - 1 - r, so that under a causal mask all ranks have about the same work. All layers but
attention work on tokens one by one; for attention see context_parallel.py.

Where sequences begin with the same tokens, the row that ranks compute has these once: its tokens
are those of a prefix tree (data/prefix_tree.py).

Shape letters: T tokens of the computed and padded row, t of a slice, R tensor-parallel ranks, N
scored tokens of the row, n of those whose state before is in the slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from spmdrl.columns import Columns, RouterRoutes, to_device
from spmdrl.data.prefix_tree import Path, prefix_tree, separate
from spmdrl.model.attention.packing import Copies, Packing, make_copies, make_packing
from spmdrl.model.parallel import ring_attention as ring
from spmdrl.model.parallel.collectives import added, with_gradient
from spmdrl.model.parallel.expert_room import Room
from spmdrl.model.sampling_rules import SamplingRules
from spmdrl.model.vision.layout import SliceImages, VisionLayout
from spmdrl.model_inputs import MultimodalItems
from spmdrl.world.torch_internals import tree_map


@dataclass(frozen=True)
class Slicing:
    """How packed rows are cut into slices, and which slice this rank computes."""

    group: dist.ProcessGroup | None = None
    """The context-parallel ranks; None: this rank computes whole rows."""
    rank: int = 0
    size: int = 1
    multiple: int = 1
    """Tensor-parallel ranks, each of which keeps an equal part of the slice between layers."""
    part: int = 0
    """Which of these parts this rank keeps."""
    is_padded: bool = True
    """Whether attention or other layers pad."""
    chunk: int | None = None
    """Length of the chunks that some layers attend within, in tokens; None: no chunks."""
    device: torch.device | str = "cpu"
    """Of the slice."""
    vision: VisionLayout | None = None
    """None for a model without a vision tower."""
    shares_prefixes: bool = False
    """Whether a prefix that sequences have in common is computed once."""

    @property
    def unit(self) -> int:
        """The length of a row must be a multiple of this."""
        return self.multiple * (2 * self.size if self.size > 1 else 1)


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of a row, and the keys that they attend to: [first_key, end)."""

    begin: int
    end: int
    first_key: int
    packing: Packing


@dataclass(frozen=True)
class SlicedPacking:
    """Where sequences begin in a row of which each rank of a group has two chunks."""

    group: dist.ProcessGroup
    whole: Packing
    chunks: tuple[Chunk, Chunk]
    rounds: ring.Rounds
    """The tiles that ring attention computes in each round."""


@dataclass(frozen=True)
class RowSlice:
    """The part of a packed row that one rank computes: its slice, or all of it."""

    tokens: Tensor  # [t] int64
    position_ids: Tensor  # [t] int64, or [3, t], see RowLayout
    packing: Packing | SlicedPacking
    rows: Tensor  # [t] int64, positions of the tokens in the row
    kept: Tensor  # [t / R] int64, the part of `rows` that a tp rank keeps between layers
    before: Copies  # the n positions in the slice whose next token is scored
    scored: Tensor  # [n] int64, which of the N scored tokens those are
    targets: Tensor  # [n] int64, these tokens
    row_length: int  # T
    uses: Tensor
    """[t / R] int64, how many tokens of the sequences each of the `kept` stands for; 0: padding."""
    computed: tuple[tuple[int, int], ...]
    """What all ranks compute of the row: the positions [begin, end) in their sequences."""
    places: Copies | None
    """For each token of the sequences, the one of the row that stands for it; None if these are
    the same."""
    group: dist.ProcessGroup | None
    """Ranks that have the other slices; None if there are none."""
    routes: Tensor | None = None
    """[t / R, L, K], experts of the `kept` tokens to replay, -1 where routers choose; None: they
    always choose."""
    room: Sequence[Room] | None = None
    """For each layer with experts, the rows that ranks send each other; None: found in the pass."""
    rules: SamplingRules | None = None
    """How the `targets` were sampled; None: by temperature alone."""
    multimodal: SliceImages | None = None
    """What the tokens show; None: nothing, on no rank."""

    def join(self, values: Tensor, at: Tensor, *, count: int) -> Tensor:
        """Return the values of all ranks, [count, ...], on each rank, from its own [n, ...].

        Every rank then computes the same loss. The gradient of the own values is that of their
        positions, so that each rank has its share of the parameters' gradient.
        """
        return values if self.group is None else _join(values, at, count=count, group=self.group)

    def join_scored(self, found: Any, *, count: int) -> Any:
        """Join the results of a head on n states, in any nesting of tuples and dicts.

        Tensors [n, ...] become [count, ...]. Scalars, which are sums over states, are added up.
        """

        def whole(value: Tensor) -> Tensor:
            if value.dim():
                return self.join(value, self.scored, count=count)
            return value if self.group is None else added(value.detach(), self.group)

        return tree_map(whole, found)


def make_slice(
    tokens: Tensor,
    lengths: Sequence[int],
    *,
    scored: Tensor,
    slicing: Slicing,
    columns: Columns = MappingProxyType({}),
    rules: Callable[[Tensor], SamplingRules | None] = lambda scored: None,
) -> RowSlice:
    """Return a rank's slice of a packed row.

    Args:
        tokens: [row] int64 on the CPU.
        lengths: tokens per sequence.
        scored: [N] int64 on the CPU, positions of the scored tokens, none a sequence's first.
        slicing: which slice.
        columns: of the tokens, on the CPU: router routes to replay, images.
        rules: returns how scored tokens were sampled, from their positions.
    """
    device = slicing.device
    multimodal = MultimodalItems.of(columns)
    routes = RouterRoutes.of(columns)
    tree = separate(lengths)
    if slicing.shares_prefixes and multimodal is None:
        tree = prefix_tree(tokens, lengths, also=() if routes is None else (routes.rows,))
    missing = -len(tree.sources) % slicing.unit
    row = F.pad(tokens[tree.sources], (0, missing))
    rows = torch.arange(len(row))
    paths = tree.paths()
    parents = [*tree.parents]
    if missing:
        paths.append([(len(row) - missing, len(row))])
        parents.append(-1)
    position_ids = torch.cat([torch.arange(*_span(path)) for path in paths])
    spans = None
    if multimodal is not None:
        assert slicing.vision is not None, "only a vision model's rows have images"
        layout = slicing.vision.row(row, [end - begin for ((begin, end),) in paths], multimodal)
        position_ids = layout.position_ids
        spans = layout.spans
    whole = _packing(paths, parents, slicing, spans=spans)
    packing: Packing | SlicedPacking = whole
    if slicing.group is not None:
        chunks = chunk_spans(len(row), rank=slicing.rank, size=slicing.size)
        rows = torch.cat([torch.arange(begin, end) for begin, end in chunks])
        packing = _sliced(whole, paths, slicing)
    # A token is scored from the state before it; -1 where another rank has that state.
    in_slice = torch.full((len(row),), -1).index_copy(0, rows, torch.arange(len(rows)))
    place = in_slice[tree.places[scored - 1]]
    own = (place >= 0).nonzero()[:, 0]
    kept = rows.chunk(slicing.multiple)[slicing.part]
    if routes is not None:
        # Only of the tokens that this rank's routers get.
        routes = routes.cat([routes[tree.sources], routes.unknown(missing)])[kept]
        routes = routes.to(device, non_blocking=True)
    return RowSlice(
        tokens=to_device(row[rows], device),
        position_ids=to_device(position_ids[..., rows], device),
        packing=packing,
        rows=to_device(rows, device),
        kept=to_device(kept, device),
        before=make_copies(place[own], device),
        scored=to_device(own, device),
        targets=to_device(tokens[scored[own]], device),
        row_length=len(row),
        uses=to_device(torch.bincount(tree.places, minlength=len(row))[kept], device),
        computed=tuple(map(_span, tree.paths())),
        places=make_copies(tree.places, device) if tree.is_shared else None,
        group=slicing.group,
        routes=None if routes is None else routes.rows,
        rules=rules(scored[own]),
        multimodal=None if multimodal is None else layout.of_slice(rows, kept),
    )


def _span(path: Path) -> tuple[int, int]:
    """Return the positions [begin, end) of a node's tokens in their sequence."""
    end = _length(path)
    return end - (path[-1][1] - path[-1][0]), end


def _length(path: Path) -> int:
    return sum(end - begin for begin, end in path)


def _packing(
    paths: Sequence[Path], parents: Sequence[int], slicing: Slicing, *, spans: Tensor | None
) -> Packing:
    """Return the packing of a whole row.

    Args:
        paths: of all nodes, in order. parents, spans: see Packing.
    """
    lengths = [path[-1][1] - path[-1][0] for path in paths]
    if all(len(path) == 1 for path in paths):
        return make_packing(
            lengths, slicing.device, padded=slicing.is_padded, chunk=slicing.chunk, spans=spans
        )
    return make_packing(
        lengths,
        slicing.device,
        padded=slicing.is_padded,
        key_lengths=[_length(path) for path in paths],
        key_index=_key_index(paths, 0),
        parents=parents,
    )


def _sliced(whole: Packing, paths: Sequence[Path], slicing: Slicing) -> SlicedPacking:
    row = paths[-1][-1][1]
    rank = slicing.rank
    size = slicing.size
    first, second = chunk_spans(row, rank=rank, size=size)
    return SlicedPacking(
        slicing.group,
        whole,
        (_chunk(first, paths, slicing), _chunk(second, paths, slicing)),
        ring.plan_rounds(
            paths,
            lambda other: chunk_spans(row, rank=other, size=size),
            rank=rank,
            size=size,
            device=slicing.device,
        ),
    )


def chunk_spans(length: int, *, rank: int, size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return [begin, end) of the two chunks that a rank has of a row."""
    chunk = length // (2 * size)
    first, second = (((at * chunk), (at + 1) * chunk) for at in (rank, 2 * size - 1 - rank))
    return first, second


def _chunk(span: tuple[int, int], paths: Sequence[Path], slicing: Slicing) -> Chunk:
    begin, end = span
    queries = []
    keys = []
    for path in paths:
        *before, (first, stop) = path
        if first < end and stop > begin:
            queries.append(min(end, stop) - max(begin, first))
            keys.append([*before, (first, min(end, stop))])  # back to where the sequence begins
    first_key = min(path[0][0] for path in keys)
    lengths = [_length(path) for path in keys]
    is_shared = any(len(path) > 1 for path in keys)
    packing = make_packing(
        queries,
        slicing.device,
        padded=slicing.is_padded,
        key_lengths=lengths,
        key_index=_key_index(keys, first_key) if is_shared else None,
    )
    return Chunk(begin, end, first_key, packing)


def _key_index(paths: Sequence[Path], first_key: int) -> Tensor:
    """Return the keys of each path, counted from the row's first key, one after another."""
    spans = (torch.arange(*span) for path in paths for span in path)
    return torch.cat([*spans]) - first_key


def _join(values: Tensor, at: Tensor, *, count: int, group: dist.ProcessGroup) -> Tensor:
    """Return one tensor with every rank's values at their positions; see RowSlice.join."""

    def place(own: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = own.new_zeros(count, *own.shape[1:]).index_copy_(0, at, own)
        dist.all_reduce(whole, group=group)
        return whole

    return with_gradient(place, lambda grad, _: grad.index_select(0, at))(values, group)
