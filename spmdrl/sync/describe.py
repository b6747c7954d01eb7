"""What ranks tell each other of what they hold and want, and what each makes of it by itself."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy

from spmdrl.errors import Refusal
from spmdrl.model.cuts import CutAxis, TensorCut
from spmdrl.plain import pack, unpack
from spmdrl.sync.holders import Description, Holders
from spmdrl.sync.routes import Cells, OwnRoutes, route_sums, routes_to, uncovered
from spmdrl.sync.tables import Array, FileTable, Want, Wants

Said = Sequence[tuple[Sequence[int], bytes]]
"""(ranks, what each of them says), of ranks that say the same."""


def describe_held(cuts: Description) -> bytes:
    """Return what a rank says of what it holds; b"" for nothing."""
    meshes: dict[tuple[int, ...], int] = {}  # each cut, and each mesh, is said once
    known: dict[TensorCut, int] = {}
    same = {}
    for name, cut in cuts.items():
        meshes.setdefault(cut.ranks, len(meshes))
        same[name] = known.setdefault(cut, len(known))
    forms = [
        (c.shape, meshes[c.ranks], [list(vars(axis).values()) for axis in c.axes]) for c in known
    ]
    return zlib.compress(pack((list(meshes), forms, same))) if same else b""


def _held(said: bytes) -> Description:
    meshes, forms, same = unpack(zlib.decompress(said))
    cuts = [
        TensorCut(shape, meshes[mesh], tuple(CutAxis(*axis) for axis in axes))
        for shape, mesh, axes in forms
    ]
    return {name: cuts[form] for name, form in same.items()}


def describe_wanted(groups: Sequence[Sequence[Want]], table: FileTable) -> bytes:
    """Return what a rank says of what it wants, in each of several pushes; b"" for nothing.

    Raises: Refusal for a name that is no file tensor's.
    """
    packed = [table.wants(wants).pack() for wants in groups]
    return pack(packed) if any(groups) else b""


class Described:
    """What all ranks have said; a rank computes its own routes from it.

    Args:
        held, wanted: what describe_held and describe_wanted made.
        table: of the file tensors.
    Raises: Refusal naming a tensor that ranks do not hold alike.
    """

    def __init__(self, held: Said, wanted: Said, *, table: FileTable):
        self._table = table
        own: list[tuple[Sequence[int], Mapping[str, TensorCut]]] = [
            (ranks, _held(said)) for ranks, said in held if said
        ]
        self._holders = Holders(own, table)
        wanting = [(tuple(ranks), said) for ranks, said in wanted if said]
        self.receivers = tuple(ranks for ranks, _ in wanting)
        """Ranks that want the same, ascending."""
        self._wanted = [said for _, said in wanting]

    def routes(self, rank: int) -> Iterator[OwnRoutes]:
        """Yield a rank's routes in each push.

        Raises: Refusal naming what this rank wants and nobody holds.
        """
        sent = [self._routes(index, source=rank) for index in range(len(self.receivers))]
        own = next((i for i, ranks in enumerate(self.receivers) if rank in ranks), None)
        taken = None if own is None else self._routes(own, is_checked=True)
        pushes = zip(*sent) if sent else ()
        for push, routes in enumerate(pushes):
            yield OwnRoutes(list(routes), taken[push] if taken else None)

    def _routes(
        self, receiver: int, *, source: int | None = None, is_checked: bool = False
    ) -> list[Cells]:
        found = []
        for packed in unpack(self._wanted[receiver]):
            wants = Wants.unpack(packed)
            cells = routes_to(
                wants, self.receivers[receiver], holders=self._holders, turn=receiver, source=source
            )
            if is_checked:
                self._check_whole(cells, wants)
            found.append(cells)
        return found

    def _check_whole(self, cells: Cells, wants: Wants) -> None:
        missing = numpy.flatnonzero(uncovered(cells, wants))
        if len(missing):
            first = missing[0]
            file = wants.file[first]
            box = self._table.box(file, wants.start[first], wants.shape[first])
            raise Refusal(
                f"no trainer rank holds {self._table.names[file]} from {list(box.start)}, shape "
                f"{list(box.shape)}, which an engine needs; the policy's named_shards() must "
                "cover every tensor of names()"
            )


def sums_sent(routes: OwnRoutes) -> Array:
    """Return [receivers, 2] int64 of the routes that a rank sends; see route_sums."""
    return numpy.concatenate([route_sums(cells, cells.source * 0, 1) for cells in routes.sent])


def sums_taken(routes: OwnRoutes, world_size: int) -> Array:
    """Return [world, 2] int64 of the routes that come to a rank's receiver; zeros without one."""
    if routes.taken is None:
        return numpy.zeros((world_size, 2), numpy.int64)
    return route_sums(routes.taken, routes.taken.source, world_size)
