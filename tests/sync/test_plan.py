"""Plans of the weight stream: every element once, from the right place, at the right byte."""

from __future__ import annotations

import itertools
import random

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.model.cuts import CutAxis, TensorCut
from spmdrl.model.tensor_parts import Box, Part
from spmdrl.sync import verify
from spmdrl.sync.buckets import LARGEST, Traffic, best_count, choose_buckets, overhead_s, pieces_of
from spmdrl.sync.tables import DTYPES, FileTable, Want
from spmdrl.sync.verify import checksum, on_host
from spmdrl.world.machine.hardware import CPU_LINK, GPUS, gpu_link
from spmdrl.world.torch_internals import LOCAL_SCALAR, TorchDispatchMode
from tests.sync.gathered_plan import gathered_plan
from tests.sync.planned import (
    at,
    boxes_in_files,
    check_both_sides,
    plan_all,
    random_mesh_pair,
    sources_of,
)

BOUNDED = settings(max_examples=80, deadline=None, derandomize=True)
SIZES = st.integers(1024, 20_000)


@BOUNDED
@given(seed=st.integers(0, 10**9), bucket_bytes=SIZES)
def test_every_wanted_element_comes_once_as_when_all_boxes_were_gathered(seed, bucket_bytes):
    held, wants, parts = random_mesh_pair(seed)
    table, world = FileTable(parts), range(len(held))
    plans = plan_all(held, wants, parts, bucket_bytes=bucket_bytes)
    holders = [boxes_in_files(held[rank], parts, rank) for rank in world]
    gathered = gathered_plan(holders, wants)
    assert plans[0].traffic.receivers == tuple(ranks for ranks, _ in gathered)
    for ranks, pieces in gathered:
        before = [numpy.full(want.box.shape, -1) for want in wants[ranks[0]]]
        for source, want, box in pieces:
            before[want][at(box, wants[ranks[0]][want].box)] = source
        for rank in ranks:
            found = sources_of(plans[rank], wants[rank], table)
            for want, now, then in zip(wants[rank], found, before):
                assert now.min() >= 0
                pairs = set(zip(now.ravel().tolist(), then.ravel().tolist()))
                for new, was in pairs:  # the same, or one that has what the other has
                    assert holders[new][want.name] == holders[was][want.name]
                    assert (new in ranks) == (was in ranks)


@BOUNDED
@given(seed=st.integers(0, 10**9), bucket_bytes=SIZES)
def test_what_one_rank_sends_in_a_bucket_the_other_awaits(seed, bucket_bytes):
    held, wants, parts = random_mesh_pair(seed)
    plans = plan_all(held, wants, parts, bucket_bytes=bucket_bytes)
    check_both_sides(plans, FileTable(parts))


@BOUNDED
@given(seed=st.integers(0, 10**9), bucket_bytes=SIZES)
def test_no_bucket_is_larger_than_asked_and_blocks_hold_their_slices(seed, bucket_bytes):
    held, wants, parts = random_mesh_pair(seed)
    for plan in plan_all(held, wants, parts, bucket_bytes=bucket_bytes):
        blocks = plan.traffic.block_bytes(plan.num_buckets)
        assert max(plan.bucket_bytes) <= bucket_bytes or blocks.max() <= 32
        for rows, size in zip((plan.sent, plan.received), plan.bucket_bytes):
            places: dict[tuple[int, int], int] = {}
            used = numpy.zeros((plan.num_buckets, size), bool)
            for row in range(len(rows.bucket)):
                key = int(rows.bucket[row]), int(rows.offset[row])
                begin = places.get(key, key[1])
                end = begin + int(rows.nbytes[row])
                assert begin % DTYPES[rows.dtype[row]].itemsize == 0
                assert end <= size and not used[key[0], begin:end].any()
                used[key[0], begin:end] = True
                places[key] = end


@BOUNDED
@given(seed=st.integers(0, 10**9))
def test_each_byte_leaves_the_trainers_once_however_many_replicas(seed):
    held, wants, parts = random_mesh_pair(seed)
    plans = plan_all(held, wants, parts, bucket_bytes=4096)
    distinct = {tuple(own) for own in wants if own}
    nbytes = sum(w.box.numel * w.dtype.itemsize for own in distinct for w in own)
    assert plans[0].nbytes == nbytes
    sent = sum(int(plan.sent.nbytes.sum()) for plan in plans)
    kept = int(plans[0].traffic.nbytes[plans[0].traffic.is_local].sum())
    assert sent + kept == nbytes


@BOUNDED
@given(seed=st.integers(0, 10**9), copies=st.integers(2, 5))
def test_senders_that_hold_the_same_share_the_work(seed, copies):
    rng = random.Random(seed)
    shapes = {f"w{i}": (rng.randrange(1, 300), rng.randrange(1, 200)) for i in range(20)}
    parts = {name: Part.whole(name, shape) for name, shape in shapes.items()}
    wants = [Want(name, Box.whole(shape), torch.float32) for name, shape in shapes.items()]
    held = {name: TensorCut(shape) for name, shape in shapes.items()}
    plans = plan_all([held] * copies + [{}], [[]] * copies + [wants], parts, bucket_bytes=2**20)
    loads = plans[0].traffic.nbytes[:copies, 0]
    assert loads.max() - loads.min() <= 2 * 4


def test_replicas_take_equal_parts_and_a_colocated_source_keeps_its_own():
    parts = {"w": Part.whole("w", (64, 64))}
    halves = [{"w": TensorCut((64, 64), (0, 1), (CutAxis(2, 0),))}] * 2
    want = [Want("w", Box((0, 0), (64, 64)), torch.bfloat16)]
    split = plan_all(halves + [{}, {}], [[], [], want, want], parts, bucket_bytes=2**20)
    assert [plan.bucket_bytes for plan in split] == [(4096 + 16, 0)] * 2 + [(0, 2 * 4112)] * 2
    assert [plan.sent.target.tolist() for plan in split[:2]] == [[2], [3]]
    colocated = plan_all(halves, [want, want], parts, bucket_bytes=2**20)
    for plan in colocated:
        assert not len(plan.sent.target) and plan.received.target.tolist() == [0, 1]


def test_a_slow_source_with_much_to_send_spreads_it_over_all_replicas():
    parts = {"a": Part.whole("a", (900,)), "b": Part.whole("b", (100,))}
    held = [{"a": TensorCut((900,))}, {"b": TensorCut((100,))}, {}, {}]
    want = [Want(name, Box((0,), part.shape), torch.float32) for name, part in parts.items()]
    plans = plan_all(held, [[], [], want, want], parts, bucket_bytes=2**20)
    assert plans[0].sent.target.tolist() == [2, 3]
    assert plans[2].bucket_bytes[1] < 1.1 * 4000


def test_cuts_fall_between_rows_where_rows_are_short():
    shape = (999, 10)
    parts, held = {"w": Part.whole("w", shape)}, {"w": TensorCut(shape)}
    want = [Want("w", Box.whole(shape), torch.float32)]
    plan = plan_all([held, {}], [[], want], parts, bucket_bytes=4096)[0]
    pieces = list(pieces_of(plan.sent, FileTable(parts)))
    assert len(pieces) == plan.num_buckets > 9 and all(p.box.shape[1] == 10 for p in pieces)
    assert max(plan.bucket_bytes) <= 4096


def test_what_nobody_holds_or_not_alike_is_named():
    parts = {"norm": Part.whole("norm", (8,))}
    want = [Want("norm", Box((2,), (4,)), torch.float32)]
    with pytest.raises(ValueError, match=r"holds norm from \[2\], shape \[4\]"):
        plan_all([{"other": TensorCut((8,))}, {}], [[], want], parts, bucket_bytes=2**20)
    with pytest.raises(ValueError, match="an engine needs bias, which no trainer rank holds"):
        plan_all([{}, {}], [[], [Want("bias", want[0].box, torch.float32)]], parts, bucket_bytes=9)
    one = {"norm": TensorCut((8,), (0, 1), (CutAxis(2, 0),))}
    with pytest.raises(ValueError, match="norm: rank 1 does not hold the part that rank 0 says"):
        plan_all([one, {}, {}], [[], [], want], parts, bucket_bytes=2**20)
    with pytest.raises(ValueError, match="norm: some ranks cut it differently from others"):
        plan_all([one, one, {"norm": TensorCut((8,))}], [[], [], want], parts, bucket_bytes=2**20)


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


def coordinates(box: Box) -> list[tuple[int, ...]]:
    """Return every element's position."""
    return list(itertools.product(*(range(a, a + n) for a, n in zip(box.start, box.shape))))


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
    parts = cut_at_random(box, rng, cuts=4)
    views = [
        whole[p.start[0] : p.start[0] + p.shape[0], p.start[1] : p.start[1] + p.shape[1]]
        for p in parts
    ]
    turned = whole.t().contiguous().t()
    swapped = whole.flip(0)
    total, of_turned, of_swapped, *sums = on_host(
        [checksum(t, box, shape=shape) for t in (whole, turned, swapped)]
        + [checksum(v, p, shape=shape) for v, p in zip(views, parts)]
    )
    assert sum(sums) % 2**64 == of_turned == total
    assert torch.equal(swapped, whole) or of_swapped != total


class _HostReads(TorchDispatchMode):
    """Counts what waits for a device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is LOCAL_SCALAR
        return func(*args, **(kwargs or {}))


def test_checksums_do_not_wait_for_the_device(monkeypatch):
    monkeypatch.setitem(verify._ELEMENTS_AT_ONCE, "cpu", 100)  # strips of 5 rows
    box = Box((2, 3), (30, 17))
    with _HostReads() as reads:
        sums = []
        for dtype in (torch.bfloat16, torch.float32, torch.uint8, torch.int64):
            values = torch.arange(30 * 17).view(30, 17).to(dtype)
            sums.append(checksum(values, box, shape=(40, 40)))
        known = on_host(sums)
    assert reads.count == 0
    assert known == [0xB0CEC96B429226ED, 0xA81831027460B687, 0x385EBD133FA455CC, 0xA90416E903AF9670]
    assert on_host([]) == []


@BOUNDED
@given(nbytes=st.integers(10**6, 10**10), messages=st.integers(1, 500), gathers=st.booleans())
def test_the_chosen_number_of_buckets_takes_least_time(nbytes, messages, gathers):
    for link in (CPU_LINK, gpu_link(GPUS["H100"], is_one_node=False)):
        costs = dict(messages=messages, is_gathered=gathers)
        number = best_count(nbytes, link, **costs)
        assert nbytes / number <= LARGEST
        chosen = overhead_s(nbytes, number, link, **costs)
        for other in (number - 1, number + 1, 2 * number):
            if other >= max(1, nbytes / LARGEST):
                assert chosen <= 1.01 * overhead_s(nbytes, other, link, **costs)


def test_more_bytes_make_larger_buckets_up_to_a_bound():
    parts = {"w": Part.whole("w", (2**20, 2**10))}
    held = [{"w": TensorCut((2**20, 2**10), tuple(range(4)), (CutAxis(4, 0),))}] * 4 + [{}] * 4
    want = [Want("w", Box((0, 0), (2**20, 2**10)), torch.bfloat16)]
    plan = plan_all(held, [[]] * 4 + [want] * 4, parts, bucket_bytes=2**40)[4]
    sizes = []
    for factor in (1, 10, 100, 1000):
        traffic = Traffic(plan.traffic.receivers, plan.traffic.nbytes * factor)
        number = choose_buckets(traffic, gpu_link(GPUS["H100"], is_one_node=True))
        sizes.append(max(own.max() for own in traffic.bucket_bytes(number)))
    assert sizes == sorted(sizes) and sizes[0] < LARGEST / 2
    assert 0.9 * LARGEST < sizes[-1] <= LARGEST
