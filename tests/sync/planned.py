"""All ranks' plans of a push, computed in one process: each from what all have said."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import numpy
import torch

from spmdrl.model.cuts import CutAxis, TensorCut
from spmdrl.model.tensor_parts import Box, Part
from spmdrl.sync.buckets import Slices, StreamPlan, Traffic, count_buckets, cut_routes, pieces_of
from spmdrl.sync.negotiation import (
    Negotiation,
    describe_held,
    describe_wanted,
    received_sums,
    sent_sums,
)
from spmdrl.sync.tables import FileTable, Want


def distinct(said: Sequence[bytes]) -> list[tuple[list[int], bytes]]:
    """Return (ranks, what they say) of each distinct saying."""
    ranks: dict[bytes, list[int]] = {}
    for rank, own in enumerate(said):
        ranks.setdefault(own, []).append(rank)
    return [(own, text) for text, own in ranks.items()]


def plan_all(
    held: Sequence[Mapping[str, TensorCut]],
    wants: Sequence[Sequence[Want]],
    parts: Mapping[str, Part],
    *,
    bucket_bytes: int,
) -> list[StreamPlan]:
    """Return every rank's plan, after the sums of sources and receivers were found equal."""
    table, world_size = FileTable(parts), len(held)
    described = Negotiation(
        distinct([describe_held(own) for own in held]),
        distinct([describe_wanted([own], table) for own in wants]),
        table=table,
    )
    routes = [next(iter(described.routes(rank))) for rank in range(world_size)]
    sums = numpy.stack([sent_sums(own) for own in routes])
    for index, ranks in enumerate(described.receivers):
        for rank in ranks:
            assert numpy.array_equal(received_sums(routes[rank], world_size), sums[:, index])
    traffic = Traffic(described.receivers, sums[..., 0])
    number = count_buckets(traffic, bucket_bytes)
    return [
        cut_routes(rank, traffic, num_buckets=number, routes=own) for rank, own in enumerate(routes)
    ]


def at(box: Box, inside: Box) -> tuple[slice, ...]:
    """Return where a box lies in an array that shows `inside`."""
    return tuple(slice(a - b, a - b + n) for a, b, n in zip(box.start, inside.start, box.shape))


def sources_of(plan: StreamPlan, wants: list[Want], table: FileTable) -> list[numpy.ndarray]:
    """Return per want of a rank the source of each element, each of which comes once."""
    found = [numpy.full(want.box.shape, -1) for want in wants]
    for piece in pieces_of(plan.received, table):
        want, own = wants[piece.want], found[piece.want]
        assert (piece.name, piece.dtype) == (want.name, want.dtype)
        place = at(piece.box, want.box)
        assert (own[place] == -1).all() and own[place].size == piece.box.numel
        own[place] = piece.source
    return found


def check_both_sides(plans: Sequence[StreamPlan], table: FileTable) -> None:
    """Hold what each rank sends in each bucket against what the other awaits."""
    awaited, sent = {}, {}
    for plan in plans:
        own = _listed(plan.received, table)
        assert all(target in plan.replicas for _, _, target in own)
        for rank in plan.replicas:  # all replicas know what each of them gets
            assert own == _listed(plans[rank].received, table)
        awaited |= {key: v for key, v in own.items() if key[2] == plan.rank != key[1]}
        own = _listed(plan.sent, table)
        assert all(source == plan.rank for _, source, _ in own)
        sent |= own
    assert sent == awaited


def _listed(slices: Slices, table: FileTable) -> dict[tuple[int, int, int], list]:
    """Return {(bucket, source, target): what travels, in order}."""
    found: dict[tuple[int, int, int], list] = {}
    for bucket in numpy.unique(slices.bucket).tolist():
        for piece in pieces_of(slices.in_bucket(bucket), table):
            key = bucket, piece.source, piece.target
            found.setdefault(key, []).append((piece.name, piece.box, piece.dtype))
    return found


def random_mesh_pair(seed: int) -> tuple[list, list, dict]:
    """Return (cuts per rank, wants per rank, parts) of tensors on a random pair of meshes."""
    rng = random.Random(seed)
    copies, shards, tp = rng.randrange(1, 4), rng.randrange(1, 5), rng.randrange(1, 4)
    mesh = numpy.arange(copies * shards * tp).reshape(copies, shards, tp)
    engine_tp, replicas = rng.randrange(1, 4), rng.randrange(1, 4)
    is_split = rng.random() < 0.6
    first = mesh.size if is_split else 0
    held: list[dict] = [{} for _ in range(max(mesh.size, first + engine_tp * replicas))]
    per_tp: list[list[Want]] = [[] for _ in range(engine_tp)]
    parts: dict[str, Part] = {}
    for i in range(rng.randrange(1, 7)):
        shape = tuple(rng.randrange(1, 30) for _ in range(rng.randrange(0, 4)))
        for rank, cut in _random_cuts(rng, shape, mesh).items():
            held[rank][f"w{i}"] = cut
        own = _random_parts(rng, f"w{i}", shape)
        parts |= own
        dtype = rng.choice((torch.bfloat16, torch.float32))
        for name, part in own.items():
            for at, box in _random_wants(rng, part.shape, engine_tp):
                per_tp[at].append(Want(name, box, dtype))
    wants: list[list[Want]] = [[] for _ in held]
    for i in range(engine_tp * replicas):
        wants[first + i] = per_tp[i % engine_tp]
    return held, wants, parts


def _random_cuts(rng: random.Random, shape: tuple, mesh: numpy.ndarray) -> dict[int, TensorCut]:
    """Return a tensor's cut by rank: over the mesh, one cut for each tp rank, or on each whole."""
    copies, shards, tp = mesh.shape
    kind = rng.choice(("mesh", "columns", "plain")) if shape else "plain"
    if kind == "plain":
        return {int(rank): TensorCut(shape) for rank in mesh.flat}
    dims = [None, *range(len(shape))]
    shard = rng.randrange(len(shape))
    if kind == "mesh":
        of_tp = rng.choice(dims)
        factor = tp if of_tp == shard else 1
        axes = (CutAxis(copies), CutAxis(shards, shard, factor), CutAxis(tp, of_tp))
        return {int(r): TensorCut(shape, tuple(mesh.flatten().tolist()), axes) for r in mesh.flat}
    axes = (CutAxis(copies), CutAxis(shards, shard))
    columns = [tuple(mesh[:, :, i].flatten().tolist()) for i in range(tp)]
    return {rank: TensorCut(shape, column, axes) for column in columns for rank in column}


def _random_parts(rng: random.Random, name: str, shape: tuple) -> dict[str, Part]:
    """Return a live tensor's file tensors: one, or one for each index of dim 0, transposed."""
    if len(shape) != 3 or rng.random() < 0.4:
        return {name: Part.whole(name, shape)}
    boxes = [Box((i, 0, 0), (1, *shape[1:])) for i in range(shape[0])]
    return {f"{name}.{i}": Part(name, box, (2, 1)) for i, box in enumerate(boxes)}


def _random_wants(rng: random.Random, shape: tuple, tp: int) -> list[tuple[int, Box]]:
    """Return (tp rank, box): cut along one dim, or whole on each."""
    fitting = [d for d, n in enumerate(shape) if n >= tp]
    if not fitting or rng.random() < 0.3:
        return [(at, Box.whole(shape)) for at in range(tp)]
    dim, found = rng.choice(fitting), []
    edges = [shape[dim] * i // tp for i in range(tp + 1)]
    for at in range(tp):
        start, size = [0] * len(shape), list(shape)
        start[dim], size[dim] = edges[at], edges[at + 1] - edges[at]
        found.append((at, Box(tuple(start), tuple(size))))
    return found


def owned_boxes(name: str, cut: TensorCut, rank: int) -> list[Box]:
    """Return a rank's boxes of a tensor that is cut so."""
    if not cut.ranks:
        return [Box.whole(cut.shape)]
    coordinate = numpy.unravel_index(cut.ranks.index(rank), [axis.size for axis in cut.axes])
    own = [cut.runs(d)[cut.position(d, coordinate)] for d in range(len(cut.shape))]
    return [
        Box(tuple(start for start, _ in runs), tuple(length for _, length in runs))
        for runs in itertools.product(*own)
    ]


def boxes_in_files(held: Mapping[str, TensorCut], parts: Mapping[str, Part], rank: int) -> dict:
    """Return a rank's boxes of each file tensor, as ranks once told each other."""
    return {
        name: [
            box
            for own in owned_boxes(part.tensor, held[part.tensor], rank)
            if (box := part.in_file(own)) is not None and box.numel
        ]
        for name, part in parts.items()
        if part.tensor in held
    }
