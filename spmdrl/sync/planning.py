"""Plans of pushes, made together: what ranks tell each other, and prove equal.

A rank tells the others how its tensors are cut and what its engine wants, once for all ranks that
say the same; computes its own routes alone; and gathers of each route of the others its bytes and
a hash, which must be those that the receiver has computed for itself.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
import torch

from spmdrl.errors import Refusal
from spmdrl.plain import record
from spmdrl.sync.bucket_size import choose_buckets
from spmdrl.sync.describe import (
    Described,
    Said,
    describe_held,
    describe_wanted,
    sums_sent,
    sums_taken,
)
from spmdrl.sync.live_shards import LiveShards
from spmdrl.sync.plan import StreamPlan, Traffic, count_buckets, cut_routes
from spmdrl.sync.routes import OwnRoutes
from spmdrl.sync.tables import Array, FileTable, Want
from spmdrl.world.comm import agree, bytes_from, gather_objects, gather_problems
from spmdrl.world.machine.hardware import CPU_LINK, GPUS, LinkCost, gpu_link, known_gpu
from spmdrl.world.world import World

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
