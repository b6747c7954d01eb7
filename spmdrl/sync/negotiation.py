"""What ranks tell each other of what they hold and want, and what each makes of it by itself."""

from __future__ import annotations

import hashlib
import logging
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch

from spmdrl.errors import Refusal
from spmdrl.model.cuts import CutAxis, TensorCut
from spmdrl.plain import pack, record, unpack
from spmdrl.sync.buckets import StreamPlan, Traffic, choose_buckets, count_buckets, cut_routes
from spmdrl.sync.live_shards import LiveShards
from spmdrl.sync.routes import (
    Cells,
    Description,
    Holders,
    OwnRoutes,
    route_sums,
    routes_to,
    uncovered,
)
from spmdrl.sync.tables import Array, FileTable, Want, Wants
from spmdrl.world.comm import agree, bytes_from, gather_objects, gather_problems
from spmdrl.world.machine.hardware import CPU_LINK, GPUS, LinkCost, gpu_link, known_gpu
from spmdrl.world.world import World

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


log = logging.getLogger(__name__)


@record
@dataclass(frozen=True)
class _Greeting:
    """What a rank says first: hashes of what it could say, b"" for nothing."""

    table: bytes
    held: bytes
    wanted: bytes
    link: LinkCost


def make_plans(
    groups: Sequence[Sequence[Want]], live: LiveShards, *, world: World, kind: str
) -> list[StreamPlan]:
    """Plan pushes, each of some tensors; every rank calls.

    Args:
        groups: what this rank wants in each push, as many on every rank.
        live: what this rank has of the tensors.
        kind: of plans, for the log.
    Returns: this rank's part of each.
    Raises: Refusal on every rank, naming what an engine needs and nobody holds, or ranks do not
        hold alike; RuntimeError where ranks do not agree on what is sent.
    """
    began, size = time.perf_counter(), world.cfg.stream.bucket_bytes
    table = live.table
    with agree(group=world.control):
        own = describe_held(live.cuts()), describe_wanted(groups, table)
    greetings = _greet(table, own, world)
    link, receivers = greetings[0].link, _alike([greeting.wanted for greeting in greetings])
    held = _alike([greeting.held for greeting in greetings])
    heard = _hear(held, own[0], world), _hear(receivers, own[1], world)
    with agree(group=world.control):
        routes = list(Described(*heard, table=table).routes(world.rank))
    sums = [_sums(one, world.world_size) for one in routes]
    plans = []
    for one, traffic in zip(routes, _traffic(sums, receivers, world)):
        number = count_buckets(traffic, size) if size else choose_buckets(traffic, link)
        plans.append(cut_routes(world.rank, traffic, num_buckets=number, routes=one))
    log.info(
        "weight stream: %s planned in %.1f s: %d bytes in %d buckets of up to %d bytes (%s)",
        kind,
        time.perf_counter() - began,
        sum(plan.nbytes for plan in plans),
        sum(plan.num_buckets for plan in plans),
        max(int(numpy.max(plan.traffic.bucket_bytes(plan.num_buckets))) for plan in plans),
        "stream.bucket_bytes" if size else "chosen for these links and ranks",
    )
    return plans


def _hear(alike: Sequence[tuple[int, ...]], own: bytes, world: World) -> Said:
    """Return what ranks say, each thing once."""
    return [(ranks, bytes_from(ranks[0], own, group=world.control)) for ranks in alike]


def _greet(table: FileTable, own: tuple[bytes, bytes], world: World) -> list[_Greeting]:
    """Return what every rank says first.

    Raises: Refusal on every rank when they have other file tensors.
    """
    held, wanted = (hashlib.sha256(said).digest() if said else b"" for said in own)
    mine = _Greeting(table.digest(), held, wanted, _link(world))
    greetings = gather_objects(mine, group=world.control)
    others = [rank for rank, one in enumerate(greetings) if one.table != greetings[0].table]
    if others:
        raise Refusal(
            f"model.path: rank {others[0]} finds other tensors there than rank 0; the folder must "
            "be the same on every rank"
        )
    return greetings


def _alike(digests: Sequence[bytes]) -> list[tuple[int, ...]]:
    """Return the ranks, ascending, that say the same, for each thing that is said."""
    ranks: dict[bytes, list[int]] = {}
    for rank, digest in enumerate(digests):
        if digest:
            ranks.setdefault(digest, []).append(rank)
    return [tuple(own) for own in ranks.values()]


def _link(world: World) -> LinkCost:
    """Return what messages over this rank's links cost; of a GPU that is not in the table, as of
    an A100."""
    if world.wire.type == "cpu":
        return CPU_LINK
    gpu = known_gpu(torch.cuda.get_device_name(world.device)) or GPUS["A100"]
    return gpu_link(gpu, is_one_node=world.world_size <= torch.cuda.device_count())


def _sums(routes: OwnRoutes, world_size: int) -> tuple[Array, Array]:
    return sums_sent(routes), sums_taken(routes, world_size)


def _traffic(
    sums: Sequence[tuple[Array, Array]], receivers: Sequence[tuple[int, ...]], world: World
) -> Iterator[Traffic]:
    """Yield the traffic of each push, which sources and receivers have computed alike.

    Raises: RuntimeError on every rank, naming a route that they have not.
    """
    gathered = gather_objects([sent for sent, _ in sums], group=world.control)
    pushes = [numpy.stack(push) for push in zip(*gathered)]  # [world, receivers, 2] each
    problems = []
    for index in (i for i, ranks in enumerate(receivers) if world.rank in ranks):
        for sent, (_, taken) in zip(pushes, sums):
            problems += [
                f"rank {source} is to send other pieces than rank {world.rank} awaits"
                for source in numpy.flatnonzero((sent[:, index] != taken).any(axis=1))
            ]
    problems = gather_problems(problems[:1], group=world.control)
    if problems:
        raise RuntimeError(
            f"weight stream: {problems[0]}; start ranks of one version of the program"
        )
    for sent in pushes:
        yield Traffic(tuple(receivers), sent[..., 0])
