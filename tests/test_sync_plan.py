"""The planner and its executor, in one process: every element once, from the right place."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.model.shards import Box
from spmdrl.sync.plan import StreamPlan, Want, make_plan
from spmdrl.sync.prove import checksum

DTYPES = (torch.bfloat16, torch.float32)
BOUNDED = settings(max_examples=60, deadline=None, derandomize=True)


def cut_at_random(box: Box, rng: random.Random, *, cuts: int) -> list[Box]:
    """Return disjoint boxes covering `box`."""
    boxes = [box]
    for _ in range(cuts):
        old = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(max(1, len(old.shape)))
        if not old.shape or old.shape[dim] < 2:
            boxes.append(old)
            continue
        at = rng.randrange(1, old.shape[dim])
        low = Box(old.start, (*old.shape[:dim], at, *old.shape[dim + 1 :]))
        boxes += [low, *old.minus(low)]
    return boxes


def make_case(seed: int) -> tuple[dict, list, list]:
    """Return (tensor shapes, holders per rank, wants per rank) of a random layout."""
    rng = random.Random(seed)
    shapes = {
        f"w{i}": tuple(rng.randrange(1, 40) for _ in range(rng.randrange(0, 4)))
        for i in range(rng.randrange(1, 6))
    }
    trainers, copies = rng.randrange(1, 5), rng.randrange(1, 3)
    tp, replicas = rng.randrange(1, 4), rng.randrange(1, 4)
    is_split = rng.random() < 0.6
    world = trainers * copies + tp * replicas if is_split else max(trainers * copies, tp * replicas)
    holders = [{} for _ in range(world)]
    for name, shape in shapes.items():
        for copy in range(copies):
            # Some tensors are cut alike in both copies of the policy, some each in its own way.
            pieces = cut_at_random(
                Box((0,) * len(shape), shape),
                random.Random(f"{seed}{name}{copy * (rng.random() < 0.3)}"),
                cuts=rng.randrange(0, 6),
            )
            for i, box in enumerate(pieces):
                held = holders[copy * trainers + i % trainers]
                held[name] = (*held.get(name, ()), box)
    wants = [[] for _ in range(world)]
    per_tp = [[] for _ in range(tp)]
    for name, shape in shapes.items():
        dtype = rng.choice(DTYPES)
        for box in cut_at_random(Box((0,) * len(shape), shape), rng, cuts=rng.randrange(0, 5)):
            for at in rng.sample(range(tp), rng.randrange(1, tp + 1)):
                per_tp[at].append(Want(name, box, dtype))
    for i in range(tp * replicas):
        wants[(trainers * copies if is_split else 0) + i] = per_tp[i % tp]
    return shapes, holders, wants


def coordinates(box: Box) -> list[tuple[int, ...]]:
    """Return every element's position."""
    return list(itertools.product(*(range(a, a + n) for a, n in zip(box.start, box.shape))))


@BOUNDED
@given(seed=st.integers(0, 10**9), bucket_bytes=st.integers(1024, 20_000))
def test_every_wanted_element_comes_once_from_a_rank_that_holds_it(seed, bucket_bytes):
    _, holders, wants = make_case(seed)
    plan = make_plan(holders, wants, bucket_bytes=bucket_bytes)
    for index, receiver in enumerate(plan.receivers):
        got = [{} for _ in receiver.wants]
        for route in (r for r in plan.routes if r.receiver == index):
            for bucket, target in itertools.product(range(plan.num_buckets), route.targets):
                for piece in route.slice(bucket, target=target, num_buckets=plan.num_buckets):
                    name = receiver.wants[piece.want].name
                    assert any(
                        b.intersect(piece.box) == piece.box for b in holders[route.source][name]
                    )
                    for at in coordinates(piece.box):
                        assert at not in got[piece.want], (name, at)
                        got[piece.want][at] = route.source
        for want, elements in zip(receiver.wants, got):
            assert sorted(elements) == coordinates(want.box)


@BOUNDED
@given(seed=st.integers(0, 10**9), bucket_bytes=st.integers(1024, 20_000))
def test_no_bucket_is_larger_than_asked_and_blocks_hold_their_slices(seed, bucket_bytes):
    _, holders, wants = make_case(seed)
    plan = make_plan(holders, wants, bucket_bytes=bucket_bytes)
    for sent, got in plan.bucket_bytes():
        assert max(sent, got) <= bucket_bytes
    for route in plan.routes:
        room = route.block_bytes(plan.num_buckets)
        sizes = [w.itemsize for w in plan.receivers[route.receiver].wants]
        for bucket, target in itertools.product(range(plan.num_buckets), route.targets):
            at = 0
            for piece in route.slice(bucket, target=target, num_buckets=plan.num_buckets):
                assert at % sizes[piece.want] == 0, "a view of this dtype cannot start here"
                at += piece.box.numel * sizes[piece.want]
            assert at <= room


@BOUNDED
@given(seed=st.integers(0, 10**9))
def test_the_same_metadata_give_the_same_plan(seed):
    def listing(plan: StreamPlan) -> list:
        return [
            plan.num_buckets,
            plan.receivers,
            [(r.source, r.receiver, r.targets, r.pieces) for r in plan.routes],
        ]

    plans = [make_plan(*make_case(seed)[1:], bucket_bytes=4096) for _ in range(2)]
    assert listing(plans[0]) == listing(plans[1])


@BOUNDED
@given(seed=st.integers(0, 10**9))
def test_each_byte_leaves_the_trainers_once_however_many_replicas(seed):
    _, holders, wants = make_case(seed)
    plan = make_plan(holders, wants, bucket_bytes=4096)
    distinct = {tuple(own) for own in wants if own}
    assert plan.nbytes == sum(w.box.numel * w.itemsize for own in distinct for w in own)


@BOUNDED
@given(seed=st.integers(0, 10**9), copies=st.integers(2, 5))
def test_senders_that_hold_the_same_share_the_work(seed, copies):
    rng = random.Random(seed)
    shapes = {f"w{i}": (rng.randrange(1, 300), rng.randrange(1, 200)) for i in range(20)}
    boxes = {name: (Box((0, 0), shape),) for name, shape in shapes.items()}
    wants = [Want(name, box, torch.float32) for name, (box,) in boxes.items()]
    plan = make_plan([boxes] * copies + [{}], [[]] * copies + [wants], bucket_bytes=2**20)
    loads = [sum(r.nbytes for r in plan.routes if r.source == i) for i in range(copies)]
    assert max(loads) - min(loads) <= 16 * 2**10 + 200 * 4


def test_replicas_take_equal_parts_and_a_colocated_source_keeps_its_own():
    shape = (64, 64)
    halves = [{"w": (Box((0, 0), (32, 64)),)}, {"w": (Box((32, 0), (32, 64)),)}]
    want = [Want("w", Box((0, 0), shape), torch.bfloat16)]
    split = make_plan(halves + [{}, {}], [[], [], want, want], bucket_bytes=2**20)
    assert [split.part_bytes(r) for r in (2, 3)] == [4096 + 32] * 2
    colocated = make_plan(halves, [want, want], bucket_bytes=2**20)
    assert [(r.source, r.targets) for r in colocated.routes] == [(0, (0,)), (1, (1,))]


def test_a_tensor_that_nobody_holds_is_named():
    want = Want("model.norm.weight", Box((0,), (8,)), torch.float32)
    with pytest.raises(ValueError, match=r"holds model.norm.weight from \[4\], shape \[4\]"):
        make_plan([{"model.norm.weight": (Box((0,), (4,)),)}, {}], [[], [want]], bucket_bytes=2**20)


@BOUNDED
@given(seed=st.integers(0, 10**9))
def test_a_span_of_a_box_is_the_same_elements_in_row_major_order(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randrange(1, 6) for _ in range(rng.randrange(0, 4)))
    box = Box(tuple(rng.randrange(0, 9) for _ in shape), shape)
    first, last = sorted(rng.randrange(0, box.numel + 1) for _ in range(2))
    parts = [at for part in box.span(first, last) for at in coordinates(part)]
    assert parts == coordinates(box)[first:last]


@BOUNDED
@given(seed=st.integers(0, 10**9))
def test_checksums_add_up_over_any_cut_and_see_an_exchange_of_elements(seed):
    rng = random.Random(seed)
    shape = (rng.randrange(2, 30), rng.randrange(1, 30))
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    box = Box((0, 0), shape)
    total = checksum(whole, box, shape=shape)
    parts = cut_at_random(box, rng, cuts=4)
    views = [
        whole[p.start[0] : p.start[0] + p.shape[0], p.start[1] : p.start[1] + p.shape[1]]
        for p in parts
    ]
    assert sum(checksum(v, p, shape=shape) for v, p in zip(views, parts)) % 2**64 == total
    assert checksum(whole.t().contiguous().t(), box, shape=shape) == total
    swapped = whole.flip(0)
    assert torch.equal(swapped, whole) or checksum(swapped, box, shape=shape) != total
