"""Fingerprints of tensors, gathered over ranks: exact digests, norms and sketches.

Each fingerprint has the exact digest (digests.py). It can also have the norm and a few sums with
random signs (sketches), float64. Two layouts give the same norms and sketches up to rounding, and
those of two tensors show how far the tensors are apart. They take several times as long to compute
as the digest.
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
from spmdrl.certificate.digests import Digester, Sequences, factor_of, of_places, whole
from spmdrl.model.cuts import cut_of
from spmdrl.model.tensor_parts import BlockValues, Box, held_boxes, local_part
from spmdrl.world.world import World

SKETCHES = 4
"""Number of sums with random signs. If two tensors differ in one element, each sum differs by the
size of the difference. If they differ in many, the mean square of the sums' differences estimates
the squared norm of the difference, with an error of about half of it."""
_CHUNK = {"cpu": 2**16, "cuda": 2**22}
"""Elements that are converted to float64 at a time."""
_COUNT = to_int64(0xD1B54A32D192ED03)
"""Weight of the number of elements, so that tensors of zeros of different sizes differ."""

Row = str | list[str | float | None]
"""A fingerprint in a line: the hexadecimal digest; or a list of digest, norm and sketches, with
None for a number that is not finite."""


@dataclass(frozen=True)
class Layout:
    """The boxes of a tensor that this rank holds, and how many ranks hold the same boxes."""

    boxes: tuple[Box, ...]
    strides: tuple[tuple[tuple[int, ...], int], ...]
    """(strides, offset in elements) of each box within this rank's local tensor; () for one box
    that is the whole local tensor."""
    copies: int
    """Number of trainer ranks that hold the same boxes."""
    is_counted: bool
    """Whether sums use this rank's values. This is true on exactly one of these ranks."""

    @classmethod
    def of(cls, name: str, tensor: Tensor, world: World) -> Layout:
        """Return the layout of a DTensor of any mesh, or of a plain tensor, equal on all ranks.

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
        boxes = held_boxes(name, tensor)
        assert here is not None
        copied = [at for axis, at in zip(cut.axes, here) if axis.dim is None]
        # A mesh may have only some axes of the trainers, so there are several such meshes. Count
        # the one with the first rank.
        is_counted = first in cut.ranks and not any(copied)
        # A view's offset is relative to the storage, which the local tensor may share with others.
        begin = local.storage_offset()
        strides: tuple[tuple[tuple[int, ...], int], ...] = ()
        if len(boxes) != 1 or boxes[0][1].shape != local.shape:
            strides = tuple((view.stride(), view.storage_offset() - begin) for _, view in boxes)
        return cls(tuple(box for box, _ in boxes), strides, trainers // parts, is_counted)

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
    """Tensors whose elements have the same size, and their layout on this rank.

    Args:
        tensors: DTensors of any mesh, or plain tensors, by name.
        with_norms: compute norms and sketches too, in steps that have norms.
    """

    def __init__(self, tensors: Mapping[str, Tensor], world: World, *, with_norms: bool = True):
        self.names = list(tensors)
        self.with_norms = with_norms
        self._layouts = [Layout.of(name, tensor, world) for name, tensor in tensors.items()]
        self.copies_and_counts = [(layout.copies, layout.is_counted) for layout in self._layouts]
        """(copies, is_counted) of each tensor, see Layout."""
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
        """[n] int64, added to each digest, for the number of elements."""

    def views(self, locals_: Sequence[Tensor]) -> list[tuple[str, bool, Box, Tensor]]:
        """Return for each box: its tensor's name, whether this rank is counted, box, and view.

        Args:
            locals_: this rank's local tensors, in the order of `names`.
        """
        return [
            (name, layout.is_counted, box, view)
            for name, layout, local in zip(self.names, self._layouts, locals_)
            for box, view in zip(layout.boxes, layout.views(local))
        ]


def by_size(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return tensors in groups of equal element size."""
    groups: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(tensor.element_size(), {})[name] = tensor
    return list(groups.values())


class Tally:
    """This trainer rank's share of the fingerprints of one step.

    All trainer ranks must add the same names in the same order.

    Args:
        with_norms: compute norms and sketches too.
    """

    def __init__(self, world: World, *, with_norms: bool):
        self._world = world
        self._with_norms = with_norms
        self._shares: list[tuple[Sequence[str], Tensor]] = []
        self._copies: dict[str, tuple[int, bool]] = {}  # copies, and whether this rank is counted
        self._sketches: dict[str, Tensor] = {}
        self._none = torch.zeros(1 + SKETCHES, dtype=torch.float64, device=world.device)
        self._sequences: dict[str, Tensor] = {}

    def add(self, group: TensorGroup, locals_: Sequence[Tensor], *, number: int = 0) -> None:
        """Add this rank's parts of a group's tensors.

        Args:
            number: index among the tensors with the same name. Each index has another factor, so
                the order of these tensors changes the digest.
        """
        views = group.views(locals_)
        own = [view for *_, view in views]
        digests = group.digester.digests(own, count=len(group.names))
        self._shares.append((group.names, (digests + group.counts) * factor_of(number)))
        self._copies |= zip(group.names, group.copies_and_counts)
        if not (self._with_norms and group.with_norms):
            return
        # All ranks need the same names in the all-reduce, so ranks that are not counted add zeros.
        self._sketches |= {name: self._none for name in group.names if name not in self._sketches}
        for name, is_counted, box, view in views:
            if is_counted:
                sketch = _sketch(view, box, device=self._world.device)
                self._sketches[name] = self._sketches[name] + sketch

    def add_blocks(self, name: str, blocks: BlockValues, *, with_norms: bool = True) -> None:
        """Add the values of blocks: each once, by the place of the block's first element.

        Two layouts give the same if their blocks begin at the same elements.
        """
        with_norms = with_norms and self._with_norms
        layout = Layout.of(name, blocks.parameter, self._world)
        count = len(blocks.values)
        digest = torch.tensor([to_int64(count * _COUNT)], device=self._world.device)
        sketch = self._none.clone()
        size = _CHUNK[self._world.device.type]
        for begin in range(0, count, size):
            values = blocks.values[begin : begin + size].to(self._world.device)
            places = blocks.places(begin, begin + len(values)).to(self._world.device)
            digest += of_places(values, places)
            if with_norms and layout.is_counted:
                sketch += _sketch_tokens(values, _signs_of(places, 3))
        self._shares.append(((name,), digest))
        self._copies[name] = layout.copies, layout.is_counted
        if with_norms:
            self._sketches[name] = sketch

    def add_tokens(
        self,
        columns: Mapping[str, Tensor],
        *,
        sequences: Tensor,
        starts: Tensor,
        per_sequence: Iterable[str] = (),
        count: int = 0,
    ) -> None:
        """Add columns [T, ...] of a micro-batch, {name: column}; equal on ranks of a dp index.

        Args:
            sequences: [S] int64, row of each sequence in the whole batch; -1: a dummy, left out.
            starts: [S+1] integers, the index of each sequence's first token; the last is their
                number.
            per_sequence: names of columns for which the total has the digest of each sequence too.
            count: number of sequences in the batch.
        """
        world = self._world
        names = list(columns)
        own = Sequences(sequences, starts)
        found = own.digests(list(columns.values()))
        self._shares.append((names, whole(found, own.rows)))
        self._copies |= dict.fromkeys(names, (world.ranks_per_dp, world.is_dp_leader))
        for name, row in zip(names, found):
            if name in per_sequence:
                filled = self._sequences.setdefault(name, torch.zeros(count).long())
                filled[own.rows] += row.cpu()
        if self._with_norms:
            rows, inside = own.places
            most = [int(of.max()) + 1 if len(of) else 0 for of in (rows, inside)]
            signs = _signs(0, most[0], 2, rows.device)[rows]
            signs = signs * _signs(0, most[1], 1, rows.device)[inside]
            for name, column in columns.items():
                sketch = _sketch_tokens(column[own.counts], signs)
                sketch = sketch if world.is_dp_leader else self._none
                self._sketches[name] = self._sketches.get(name, self._none) + sketch

    def total(self) -> TallyTotals:
        """Return the sums over all trainers. All trainers must call it."""
        names = sorted(self._copies)  # ranks with different shards may add in another order
        at = {name: i for i, name in enumerate(names)}
        exact = torch.zeros(len(names)).long()
        # One copy to the CPU per device.
        for device in {values.device for _, values in self._shares}:
            own = [share for share in self._shares if share[1].device == device]
            rows = torch.tensor([at[name] for some, _ in own for name in some])
            exact.index_add_(0, rows, torch.cat([values for _, values in own]).cpu())
        copies, is_counted = torch.tensor([self._copies[name] for name in names]).T
        per_sequence = sorted(self._sequences)
        sequences = [self._sequences[name] * self._world.is_dp_leader for name in per_sequence]
        flat = torch.cat([exact, exact * is_counted, *sequences])
        # Sums of int64 wrap: they are exact modulo 2**64, in any order.
        dist.all_reduce(flat, group=self._world.trainer_control)
        # Copies are equal if the sum over all ranks is `copies` times the sum over counted ranks.
        every, counted, rest = flat.tensor_split([len(names), 2 * len(names)])
        sketch = self._sketch_total()
        digests = counted.tolist()
        found = {name: _row(digests[at[name]], sketch.get(name)) for name in self._copies}
        differ = (every != counted * copies).tolist()
        differing = [name for name, is_other in zip(names, differ) if is_other]
        each = dict(zip(per_sequence, rest.chunk(len(per_sequence)))) if per_sequence else {}
        return TallyTotals(found, differing, each)

    def _sketch_total(self) -> dict[str, list[float]]:
        if not self._sketches:
            return {}
        names = sorted(self._sketches)
        sums = torch.stack([self._sketches[name] for name in names]).cpu()
        dist.all_reduce(sums, group=self._world.trainer_control)
        return dict(zip(names, sums.tolist()))


@dataclass(frozen=True)
class TallyTotals:
    """Fingerprints of a step."""

    rows: dict[str, Row]
    """{name: fingerprint}, in the order in which this rank added the names."""
    differing: list[str]
    """Names of tensors whose copies on several ranks differ."""
    sequences: dict[str, Tensor]
    """{name of a column: [S] int64, digest of each sequence's tokens}."""


@lru_cache(maxsize=128)
def _signs(first: int, count: int, dim: int, device: torch.device) -> Tensor:
    """Return [count, SKETCHES] float64, 1 or -1, for indices `first`, `first` + 1, ... of a dim."""
    return _signs_of(torch.arange(first, first + count, device=device), dim)


def _signs_of(indices: Tensor, dim: int) -> Tensor:
    """Return the same for any indices [n] int64."""
    # Add 2**8 to the dim, so that signs and the weights of digests are unrelated.
    drawn = mix(indices + ((dim + 2**8) << 48))
    # One bit of the drawn number for each sketch.
    bits = torch.arange(SKETCHES, device=indices.device) + 40
    return (drawn[:, None] >> bits).bitwise_and_(1).double().mul_(2).sub_(1)


def _sketch(view: Tensor, box: Box, *, device: torch.device) -> Tensor:
    """Return [1 + SKETCHES] float64 for a box: the sum of squares, and the signed sums."""
    sums = torch.zeros(1 + SKETCHES, dtype=torch.float64, device=device)
    if not box.numel:
        return sums
    # The sign of an element is the product of one sign per dim, so the columns of all rows have the
    # same signs.
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
        sums[0] += values.square().sum()
        sums[1:] += (values @ of_columns).mul_(signs).sum(0)
    return sums


def _sketch_tokens(column: Tensor, signs: Tensor) -> Tensor:
    """Return the same as `_sketch` for a column [T, ...] whose tokens have signs [T, SKETCHES]."""
    values = column.double()
    values = values.flatten(1) if values.dim() > 1 else values[:, None]
    across = _signs(0, values.shape[1], 0, values.device)
    signed_sums = ((values @ across) * signs).sum(0)
    return torch.cat([values.square().sum()[None], signed_sums])


def _row(digest: int, sketch: Sequence[float] | None) -> Row:
    text = f"{digest % 2**64:016x}"
    if sketch is None:
        return text
    square, *sketches = sketch
    return [text, *(_short(value) for value in (square**0.5, *sketches))]


def _short(value: float) -> float | None:
    return float(f"{value:.10g}") if math.isfinite(value) else None


def digest_of(row: Row) -> str:
    """Return the digest of a row."""
    return row if isinstance(row, str) else str(row[0])


def deviation(a: Row, b: Row) -> float | None:
    """Estimate the norm of the difference of two tensors, as a share of the larger norm.

    Returns: 0 for equal rows; inf if a norm is not finite; None if the digests differ and a row has
        no norm.
    """
    if isinstance(a, str) or isinstance(b, str):
        return 0.0 if digest_of(a) == digest_of(b) else None
    if a == b:
        return 0.0
    numbers = [[math.nan if x is None else float(x) for x in row[1:]] for row in (a, b)]
    (norm_a, *sketches_a), (norm_b, *sketches_b) = numbers
    differences = [x - y for x, y in zip(sketches_a, sketches_b)]
    difference = math.hypot(*differences) / math.sqrt(SKETCHES)
    if difference == 0:
        return 0.0
    norm = max(norm_a, norm_b)
    return difference / norm if math.isfinite(difference) and norm > 0 else math.inf
