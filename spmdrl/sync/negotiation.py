"""How ranks agree on the plans of pushes. Each rank computes only its own part.

A rank describes to the others how its tensors are cut and what its engine wants; of ranks with
equal descriptions one sends it. From all descriptions a rank computes its own routes. Then ranks
gather the bytes and a hash of each route: its source and its receiver must have computed the same.
"""

from __future__ import annotations

import hashlib
import logging
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
import torch

from spmdrl.errors import Refusal
from spmdrl.model.cuts import CutAxis, TensorCut
from spmdrl.plain import pack, record, unpack
from spmdrl.sync.buckets import StreamPlan, Traffic, choose_buckets, count_buckets, cut_routes
from spmdrl.sync.routes import (
    Cells,
    Cuts,
    Holders,
    RankRoutes,
    missing_elements,
    route_sums,
    routes_to,
)
from spmdrl.sync.tables import Array, FileTable, LiveShards, Want, Wants
from spmdrl.world.comm import agree, bytes_from, gather_objects, gather_problems
from spmdrl.world.machine.hardware import CPU_LINK, GPUS, LinkCost, gpu_link, known_gpu
from spmdrl.world.world import World

log = logging.getLogger(__name__)

Descriptions = Sequence[tuple[Sequence[int], bytes]]
"""(ranks, the description that all of these ranks give), of all ranks."""


def make_plans(
    groups: Sequence[Sequence[Want]], live: LiveShards, *, world: World, kind: str
) -> list[StreamPlan]:
    """Plan pushes, each of some tensors; every rank calls.

    Args:
        groups: what this rank wants in each push; equally many pushes on every rank.
        live: what this rank has of the tensors.
        kind: name of the tensors, for the log.
    Returns: this rank's part of each push.
    Raises: Refusal on every rank, naming what an engine needs and no rank holds, or what ranks cut
        differently; RuntimeError where ranks do not agree on what is sent.
    """
    began = time.perf_counter()
    table = live.table
    with agree(group=world.control):
        held = describe_held(live.cuts())
        wanted = describe_wanted(groups, table)
    digests = _gather_digests(table, held, wanted, world)
    holders = _ranks_alike([digest.held for digest in digests])
    receivers = _ranks_alike([digest.wanted for digest in digests])
    all_held = _gather_descriptions(holders, held, world)
    all_wanted = _gather_descriptions(receivers, wanted, world)
    with agree(group=world.control):
        routes = list(Negotiation(all_held, all_wanted, table=table).routes(world.rank))
    bucket_bytes = world.cfg.stream.bucket_bytes
    plans = []
    for own, traffic in zip(routes, _gather_traffic(routes, receivers, world)):
        if bucket_bytes:
            number = count_buckets(traffic, bucket_bytes)
        else:
            number = choose_buckets(traffic, digests[0].link)
        plans.append(cut_routes(world.rank, traffic, num_buckets=number, routes=own))
    log.info(
        "weight stream: %s planned in %.1f s: %d bytes in %d buckets of up to %d bytes (%s)",
        kind,
        time.perf_counter() - began,
        sum(plan.nbytes for plan in plans),
        sum(plan.num_buckets for plan in plans),
        max(plan.traffic.largest_bucket(plan.num_buckets) for plan in plans),
        "stream.bucket_bytes" if bucket_bytes else "chosen for these links and ranks",
    )
    return plans


# --------------------------------------------------------------------------- descriptions


def describe_held(cuts: Cuts) -> bytes:
    """Return the description of what a rank holds; b"" for nothing."""
    if not cuts:
        return b""
    # Most tensors are cut alike, over a few meshes: each distinct cut and mesh is written once.
    mesh_index: dict[tuple[int, ...], int] = {}
    cut_index: dict[TensorCut, int] = {}
    cut_of_name = {}
    for name, cut in cuts.items():
        mesh_index.setdefault(cut.ranks, len(mesh_index))
        cut_of_name[name] = cut_index.setdefault(cut, len(cut_index))
    packed_cuts = []
    for cut in cut_index:
        axes = [[axis.size, axis.dim, axis.factor] for axis in cut.axes]
        packed_cuts.append((cut.shape, mesh_index[cut.ranks], axes))
    return zlib.compress(pack((list(mesh_index), packed_cuts, cut_of_name)))


def _read_held(description: bytes) -> Cuts:
    """Return the cuts of which `describe_held` made a description."""
    meshes, packed_cuts, cut_of_name = unpack(zlib.decompress(description))
    cuts = []
    for shape, mesh, axes in packed_cuts:
        cut_axes = tuple(CutAxis(*axis) for axis in axes)
        cuts.append(TensorCut(shape, meshes[mesh], cut_axes))
    return {name: cuts[index] for name, index in cut_of_name.items()}


def describe_wanted(groups: Sequence[Sequence[Want]], table: FileTable) -> bytes:
    """Return the description of what a rank wants in each of several pushes; b"" for nothing.

    Raises: Refusal for a name that no file tensor has.
    """
    if not any(groups):
        return b""
    return pack([table.wants(wants).pack() for wants in groups])


# --------------------------------------------------------------------------- a rank's own routes


class Negotiation:
    """Computes a rank's own routes from the descriptions of all ranks.

    Args:
        held, wanted: descriptions made by describe_held and describe_wanted.
        table: of the file tensors.
    Raises: Refusal naming a tensor that some ranks cut differently from others.
    """

    def __init__(self, held: Descriptions, wanted: Descriptions, *, table: FileTable):
        self._table = table
        cuts = [(ranks, _read_held(description)) for ranks, description in held if description]
        self._holders = Holders(cuts, table)
        receivers = []
        self._wanted: list[bytes] = []
        for ranks, description in wanted:
            if description:
                receivers.append(tuple(ranks))
                self._wanted.append(description)
        self.receivers = tuple(receivers)
        """Sets of ranks with the same wants, ascending."""

    def routes(self, rank: int) -> Iterator[RankRoutes]:
        """Yield a rank's routes in each push.

        Raises: Refusal naming what this rank wants and no rank holds.
        """
        if not self.receivers:
            return
        sent = []
        received = None
        for index, ranks in enumerate(self.receivers):
            sent.append(self._routes_to(index, source=rank))
            if rank in ranks:
                received = self._routes_to(index)
        for push, to_receivers in enumerate(zip(*sent)):
            yield RankRoutes(list(to_receivers), received[push] if received else None)

    def _routes_to(self, receiver: int, *, source: int | None = None) -> list[Cells]:
        """Return the routes to a receiver in each push: those of one source, or all, checked."""
        found = []
        for packed in unpack(self._wanted[receiver]):
            wants = Wants.unpack(packed)
            cells = routes_to(
                wants,
                self.receivers[receiver],
                holders=self._holders,
                receiver=receiver,
                source=source,
            )
            if source is None:
                self._check_whole(cells, wants)
            found.append(cells)
        return found

    def _check_whole(self, cells: Cells, wants: Wants) -> None:
        incomplete = numpy.flatnonzero(missing_elements(cells, wants))
        if not len(incomplete):
            return
        want = incomplete[0]
        file = wants.file[want]
        box = self._table.box(file, wants.start[want].tolist(), wants.shape[want].tolist())
        raise Refusal(
            f"no trainer rank holds {self._table.names[file]} from {list(box.start)}, shape "
            f"{list(box.shape)}, which an engine needs; the policy's named_shards() must "
            "cover every tensor of names()"
        )


def sent_sums(routes: RankRoutes) -> Array:
    """Return [receivers, 2] int64 of the routes that a rank sends; see route_sums."""
    sums = [route_sums(cells, numpy.zeros_like(cells.source), 1) for cells in routes.sent]
    return numpy.concatenate(sums)


def received_sums(routes: RankRoutes, world_size: int) -> Array:
    """Return [world, 2] int64 of the routes that come to a rank's receiver; zeros without one."""
    if routes.received is None:
        return numpy.zeros((world_size, 2), numpy.int64)
    return route_sums(routes.received, routes.received.source, world_size)


# --------------------------------------------------------------------------- between ranks


@record
@dataclass(frozen=True)
class _Digests:
    """Hashes of a rank's descriptions, b"" for an empty one, and what its links cost."""

    table: bytes
    held: bytes
    wanted: bytes
    link: LinkCost


def _gather_digests(table: FileTable, held: bytes, wanted: bytes, world: World) -> list[_Digests]:
    """Return the digests of every rank.

    Raises: Refusal on every rank when they have different file tensors.
    """
    own = _Digests(table.digest(), _digest(held), _digest(wanted), link_of(world))
    digests = gather_objects(own, group=world.control)
    for rank, other in enumerate(digests):
        if other.table != digests[0].table:
            raise Refusal(
                f"model.path: rank {rank} finds other tensors there than rank 0; the folder must "
                "be the same on every rank"
            )
    return digests


def _digest(description: bytes) -> bytes:
    return hashlib.sha256(description).digest() if description else b""


def _ranks_alike(digests: Sequence[bytes]) -> list[tuple[int, ...]]:
    """Return the ranks, ascending, of each distinct digest but the empty one."""
    ranks: dict[bytes, list[int]] = {}
    for rank, digest in enumerate(digests):
        if digest:
            ranks.setdefault(digest, []).append(rank)
    return [tuple(alike) for alike in ranks.values()]


def _gather_descriptions(
    groups: Sequence[tuple[int, ...]], own: bytes, world: World
) -> Descriptions:
    """Return the description of each group of ranks, sent once by its first rank."""
    return [(ranks, bytes_from(ranks[0], own, group=world.control)) for ranks in groups]


def link_of(world: World) -> LinkCost:
    """Return what messages over this rank's links cost.

    A GPU that is not in the table of hardware counts as an A100, a careful guess.
    """
    if world.wire.type == "cpu":
        link = CPU_LINK
    else:
        gpu = known_gpu(torch.cuda.get_device_name(world.device)) or GPUS["A100"]
        link = gpu_link(gpu, is_one_node=world.world_size <= torch.cuda.device_count())
    return link.at(world.cfg.stream.gbit_per_s)


def _gather_traffic(
    routes: Sequence[RankRoutes], receivers: Sequence[tuple[int, ...]], world: World
) -> list[Traffic]:
    """Return the traffic of each push.

    Raises: RuntimeError on every rank, naming a route that its source and its receiver have not
        computed equal.
    """
    gathered = gather_objects([sent_sums(own) for own in routes], group=world.control)
    pushes = [numpy.stack(sums) for sums in zip(*gathered)]  # [world, receivers, 2] each
    problems = []
    for index, ranks in enumerate(receivers):
        if world.rank not in ranks:
            continue
        for sent, own in zip(pushes, routes):
            expected = received_sums(own, world.world_size)
            for source in numpy.flatnonzero((sent[:, index] != expected).any(axis=1)):
                problems.append(
                    f"rank {source} is to send other pieces than rank {world.rank} awaits"
                )
    problems = gather_problems(problems[:1], group=world.control)
    if problems:
        raise RuntimeError(
            f"weight stream: {problems[0]}; start ranks of one version of the program"
        )
    return [Traffic(tuple(receivers), sent[..., 0]) for sent in pushes]
