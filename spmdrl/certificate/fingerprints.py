"""Fingerprints of tensors, gathered over ranks: exact digests, and numbers that may be rounded.

With the exact digest (digests.py) a fingerprint can have the norm and a few sums with random signs
(sketches), float64. Between layouts these differ only by rounding, and those of two tensors show
how far the tensors are apart. They take several times as long as the digest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from spmdrl.algorithms.splitmix import mix, to_int64
from spmdrl.certificate.digests import Digester, Sequences, factor_of, whole
from spmdrl.model.cuts import cut_of
from spmdrl.model.tensor_parts import Box, held_boxes, local_part
from spmdrl.world.world import World

SKETCHES = 4
"""Sums with random signs. For tensors that differ in one element each sum gives the size of the
difference; if they differ in many, the mean square of the sums estimates the squared norm of the
difference, up to about half of it."""
_CHUNK = {"cpu": 2**16, "cuda": 2**22}
"""Elements that are converted to float64 at a time."""
_COUNT = to_int64(0xD1B54A32D192ED03)
"""Weight of the number of elements, by which tensors of more or fewer zeros differ."""

Row = str | list[str | float | None]
"""A fingerprint in a line: the hexadecimal digest; or a list of digest, norm and sketches, with
None for numbers that are not finite."""


@dataclass(frozen=True)
class Layout:
    """The boxes of a tensor that this rank holds, and how many ranks hold the same."""

    boxes: tuple[Box, ...]
    strides: tuple[tuple[tuple[int, ...], int], ...]
    """(strides, offset in elements) of each box within this rank's local tensor; () for one box
    that is the whole local tensor."""
    copies: int
    """Trainer ranks that hold the same."""
    speaks: bool
    """Whether this rank is the only one of these whose values are added up."""

    @classmethod
    def of(cls, name: str, tensor: Tensor, world: World) -> Layout:
        """Return the layout of a DTensor of any mesh, or of a plain tensor, which all ranks hold.

        Args:
            name: for messages.
        """
        trainers = len(world.trainer_ranks)
        first = world.trainer_ranks[0]
        if not isinstance(tensor, DTensor):
            return cls((Box.whole(tensor.shape),), (), trainers, world.rank == first)
        cut = cut_of(name, tensor)
        local = local_part(tensor)
        parts = math.prod(axis.size for axis in cut.axes if axis.dim is not None)
        here = tensor.device_mesh.get_coordinate()
        held = held_boxes(name, tensor)
        assert here is not None
        copied = [at for axis, at in zip(cut.axes, here) if axis.dim is None]
        # A mesh may have only some axes of the trainers, so there are several such meshes; the one
        # with the first rank counts.
        speaks = first in cut.ranks and not any(copied)
        # A view's offset is in the storage, which the local tensor may share with others.
        begin = local.storage_offset()
        strides: tuple[tuple[tuple[int, ...], int], ...] = ()
        if len(held) != 1 or held[0][1].shape != local.shape:
            strides = tuple((view.stride(), view.storage_offset() - begin) for _, view in held)
        return cls(tuple(box for box, _ in held), strides, trainers // parts, speaks)

    def views(self, local: Tensor) -> list[Tensor]:
        """Return a view of each box in this rank's local tensor."""
        if not self.strides:
            return [local]
        begin = local.contiguous().storage_offset()
        return [
            local.contiguous().as_strided(box.shape, strides, begin + offset)
            for box, (strides, offset) in zip(self.boxes, self.strides)
        ]


class TensorGroup:
    """Tensors whose elements have one size, and this rank's layout of them.

    Args:
        tensors: DTensors of any mesh, or plain tensors, by name.
        is_near: take norms and sketches of them in steps that have any.
    """

    def __init__(self, tensors: Mapping[str, Tensor], world: World, *, is_near: bool = True):
        self.names = list(tensors)
        self.is_near = is_near
        self._layouts = [Layout.of(name, tensor, world) for name, tensor in tensors.items()]
        self.held = [(layout.copies, layout.speaks) for layout in self._layouts]
        """(copies, speaks) of each, see Layout."""
        sizes = {tensor.element_size() for tensor in tensors.values()}
        assert len(sizes) == 1, f"elements of {sizes} bytes in one group"
        boxes = [
            (number, box, tensor.shape)
            for number, (layout, tensor) in enumerate(zip(self._layouts, tensors.values()))
            for box in layout.boxes
        ]
        self.digester = Digester(boxes, itemsize=sizes.pop(), device=world.device)
        elements = [sum(box.numel for box in layout.boxes) for layout in self._layouts]
        counts = [to_int64(count * _COUNT) for count in elements]
        self.counts = torch.tensor(counts, device=world.device)
        """[n] int64, added to each digest for the number of elements."""

    def views(self, locals_: Sequence[Tensor]) -> list[tuple[str, bool, Box, Tensor]]:
        """Return for each box the tensor's name, whether this rank counts it, the box, and its
        view.

        Args:
            locals_: this rank's local tensors, in the order of `names`.
        """
        return [
            (name, layout.speaks, box, view)
            for name, layout, local in zip(self.names, self._layouts, locals_)
            for box, view in zip(layout.boxes, layout.views(local))
        ]


def by_size(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return tensors in groups of one element size."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found.setdefault(tensor.element_size(), {})[name] = tensor
    return list(found.values())


class Tally:
    """This trainer rank's share of the fingerprints of one step.

    All trainer ranks must add the same names in the same order.

    Args:
        is_near: take norms and sketches too.
    """

    def __init__(self, world: World, *, is_near: bool):
        self._world = world
        self._is_near = is_near
        self._shares: list[tuple[Sequence[str], Tensor]] = []
        self._held: dict[str, tuple[int, bool]] = {}  # copies, and whether this rank counts
        self._near: dict[str, Tensor] = {}
        self._none = torch.zeros(1 + SKETCHES, dtype=torch.float64)
        self._sequences: dict[str, Tensor] = {}

    def add(self, group: TensorGroup, locals_: Sequence[Tensor], *, number: int = 0) -> None:
        """Add this rank's parts of a group's tensors.

        Args:
            number: index among tensors that share a name: each is added with another factor, so
                their order matters.
        """
        views = group.views(locals_)
        own = [view for *_, view in views]
        digests = group.digester.digests(own, count=len(group.names))
        self._shares.append((group.names, (digests + group.counts) * factor_of(number)))
        self._held |= zip(group.names, group.held)
        if not (self._is_near and group.is_near):
            return
        # Ranks that do not count add zeros: all need the same names in the all-reduce.
        self._near |= {name: self._none for name in group.names if name not in self._near}
        for name, speaks, box, view in views:
            if speaks:
                near = _near(view, box, device=self._world.device)
                self._near[name] = self._near[name] + near.cpu()

    def add_tokens(
        self,
        columns: Mapping[str, Tensor],
        *,
        sequences: Tensor,
        starts: Tensor,
        kept: Iterable[str] = (),
        count: int = 0,
    ) -> None:
        """Add columns [T, ...] of a micro-batch, {name: column}; equal on ranks of a dp index.

        Args:
            sequences: [S] int64, row of each sequence in the whole batch; -1: a dummy, left out.
            starts: [S+1] integers, where sequences begin among the tokens.
            kept: names of the columns whose digest of each sequence is returned too.
            count: sequences in the batch.
        """
        world = self._world
        names = list(columns)
        own = Sequences(sequences, starts)
        found = own.digests(list(columns.values()))
        self._shares.append((names, whole(found, own.rows)))
        self._held |= dict.fromkeys(names, (world.ranks_per_dp, world.is_dp_leader))
        for name, row in zip(names, found):
            if name in kept:
                filled = self._sequences.setdefault(name, torch.zeros(count).long())
                filled[own.rows] += row.cpu()
        if self._is_near:
            rows, inside = own.places
            most = [int(of.max()) + 1 if len(of) else 0 for of in (rows, inside)]
            signs = _signs(0, most[0], 2, rows.device)[rows]
            signs = signs * _signs(0, most[1], 1, rows.device)[inside]
            for name, column in columns.items():
                near = _near_tokens(column[own.counts], signs)
                near = near if world.is_dp_leader else self._none
                self._near[name] = self._near.get(name, self._none) + near

    def total(self) -> TallyTotals:
        """Return the sums over all trainers, which meet."""
        names = sorted(self._held)  # ranks whose shards differ may add in another order
        at = {name: i for i, name in enumerate(names)}
        exact = torch.zeros(len(names)).long()
        for device in {values.device for _, values in self._shares}:  # one copy to the CPU for each
            own = [share for share in self._shares if share[1].device == device]
            rows = torch.tensor([at[name] for some, _ in own for name in some])
            exact.index_add_(0, rows, torch.cat([values for _, values in own]).cpu())
        copies, speaks = torch.tensor([self._held[name] for name in names]).T
        kept = sorted(self._sequences)
        sequences = [self._sequences[name] * self._world.is_dp_leader for name in kept]
        flat = torch.cat([exact, exact * speaks, *sequences])
        # Sums of int64 wrap: they are exact modulo 2**64, in any order.
        dist.all_reduce(flat, group=self._world.trainer_control)
        # Copies are equal if the sum over all ranks is `copies` times that of one rank of each.
        every, counted, rest = flat.tensor_split([len(names), 2 * len(names)])
        near = self._near_total()
        digests = counted.tolist()
        found = {name: _row(digests[at[name]], near.get(name)) for name in self._held}
        differ = (every != counted * copies).tolist()
        differing = [name for name, is_other in zip(names, differ) if is_other]
        each = dict(zip(kept, rest.chunk(len(kept)))) if kept else {}
        return TallyTotals(found, differing, each)

    def _near_total(self) -> dict[str, list[float]]:
        if not self._near:
            return {}
        names = sorted(self._near)
        sums = torch.stack([self._near[name].cpu() for name in names])
        dist.all_reduce(sums, group=self._world.trainer_control)
        return dict(zip(names, sums.tolist()))


@dataclass(frozen=True)
class TallyTotals:
    """Fingerprints of a step."""

    rows: dict[str, Row]
    """By name, in the order in which this rank added them."""
    differing: list[str]
    """Names of tensors whose copies on several ranks differ."""
    sequences: dict[str, Tensor]
    """{name: [S] int64, digest of each sequence's tokens}."""


@lru_cache(maxsize=128)
def _signs(first: int, count: int, dim: int, device: torch.device) -> Tensor:
    """Return [count, SKETCHES] float64, 1 or -1, for the indices from `first` on of a dim."""
    # + 2**8: other numbers than those of the digests' weights.
    drawn = mix(torch.arange(first, first + count, device=device) + ((dim + 2**8) << 48))
    # One bit of the drawn number for each sketch.
    bits = torch.arange(SKETCHES, device=device) + 40
    return (drawn[:, None] >> bits).bitwise_and_(1).double().mul_(2).sub_(1)


def _near(view: Tensor, box: Box, *, device: torch.device) -> Tensor:
    """Return [1 + SKETCHES] float64 for a box: the sum of squares, and the signed sums. The sign of
    an element is a product of one sign for each dim, so all rows have the same signs inside."""
    found = torch.zeros(1 + SKETCHES, dtype=torch.float64, device=device)
    if not box.numel:
        return found
    start = box.start or (0,)
    shape = box.shape or (1,)
    of_rows = torch.ones(1, SKETCHES, dtype=torch.float64, device=device)
    for dim, (at, count) in enumerate(zip(start[:-1], shape[:-1])):
        own = _signs(at, count, len(shape) - 1 - dim, device)
        of_rows = (of_rows[:, None] * own).flatten(0, 1)
    of_columns = _signs(start[-1], shape[-1], 0, device)
    rows = view.reshape(-1, shape[-1])
    size = max(1, _CHUNK[device.type] // shape[-1])
    for part, signs in zip(rows.split(size), of_rows.split(size)):
        values = part.to(device).double()
        found[0] += values.square().sum()
        found[1:] += (values @ of_columns).mul_(signs).sum(0)
    return found


def _near_tokens(column: Tensor, signs: Tensor) -> Tensor:
    """Return [1 + SKETCHES] float64 for a column [T, ...], with signs [T, SKETCHES] of tokens."""
    values = column.double()
    values = values.flatten(1) if values.dim() > 1 else values[:, None]
    across = _signs(0, values.shape[1], 0, values.device)
    signed_sums = ((values @ across) * signs).sum(0)
    return torch.cat([values.square().sum()[None], signed_sums])


def _row(digest: int, near: Sequence[float] | None) -> Row:
    text = f"{digest % 2**64:016x}"
    if near is None:
        return text
    square, *sketches = near
    return [text, *(_short(value) for value in (square**0.5, *sketches))]


def _short(value: float) -> float | None:
    return float(f"{value:.10g}") if math.isfinite(value) else None


def digest_of(row: Row) -> str:
    """Return the digest of a row."""
    return row if isinstance(row, str) else str(row[0])


def deviation(a: Row, b: Row) -> float | None:
    """Estimate how far two tensors are apart, as a share of the larger norm.

    Returns: 0 for equal rows; inf where a norm is not finite; None where digests differ and a row
        has no norm.
    """
    if isinstance(a, str) or isinstance(b, str):
        return 0.0 if digest_of(a) == digest_of(b) else None
    if a == b:
        return 0.0
    numbers = [[math.nan if x is None else float(x) for x in row[1:]] for row in (a, b)]
    (norm, *own), (other, *its) = numbers
    apart = math.hypot(*(x - y for x, y in zip(own, its))) / math.sqrt(SKETCHES)
    if apart == 0:
        return 0.0
    largest = max(norm, other)
    return apart / largest if math.isfinite(apart) and largest > 0 else math.inf
