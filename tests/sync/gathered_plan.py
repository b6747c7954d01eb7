"""Who sends what, found box by box from the boxes of all ranks: what plans are held against.

Ranks once gathered every box that each holds and wants, and each planned the whole push. It is the
definition; spmdrl/sync/routes.py computes a rank's part of it from descriptions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from spmdrl.model.tensor_parts import Box
from spmdrl.sync.tables import Want

_SPREAD_BYTES = 16 * 2**10  # pieces above this are spread over all their holders

Pieces = list[tuple[int, int, Box]]
"""(source, index of the want, box)."""


def gathered_plan(
    holders: Sequence[Mapping[str, Sequence[Box]]], wants: Sequence[Sequence[Want]]
) -> list[tuple[tuple[int, ...], Pieces]]:
    """Return (ranks, what comes to them) of each set of ranks that want the same."""
    owners: dict[str, dict[Box, list[int]]] = {}
    for rank, held in enumerate(holders):
        for name, box in ((name, box) for name, boxes in held.items() for box in boxes):
            owners.setdefault(name, {}).setdefault(box, []).append(rank)
    alike: dict[tuple[Want, ...], list[int]] = {}
    for rank, own in enumerate(wants):
        if own:
            alike.setdefault(tuple(own), []).append(rank)
    loads = [0] * len(wants)
    return [
        (
            tuple(ranks),
            [
                (source, index, box)
                for index, want in enumerate(own)
                for source, box in _sources(want, owners[want.name], loads=loads, near=ranks)
            ],
        )
        for own, ranks in alike.items()
    ]


def _sources(
    want: Want, owners: Mapping[Box, list[int]], *, loads: list[int], near: Sequence[int]
) -> Iterator[tuple[int, Box]]:
    missing = [want.box]
    for held, ranks in sorted(owners.items()):
        rest = []
        for box in missing:
            common = box.intersect(held)
            rest += box.minus(held)
            if common is not None:
                sharers = [r for r in ranks if r in near] or ranks
                yield from _shared(common, want.dtype.itemsize, loads=loads, ranks=sharers)
        missing = rest
    assert not missing


def _shared(
    box: Box, itemsize: int, *, loads: list[int], ranks: list[int]
) -> Iterator[tuple[int, Box]]:
    """Yield the box, spread over all `ranks` that hold it, or from the least busy if small."""
    if box.numel * itemsize < _SPREAD_BYTES:
        ranks = [min(ranks, key=lambda r: (loads[r], r))]
    for i, rank in enumerate(ranks):
        first, last = (box.numel * j // len(ranks) for j in (i, i + 1))
        loads[rank] += (last - first) * itemsize
        for part in box.span(first, last):
            yield rank, part
