"""The plan that cuts a batch: complete, within budget, balanced, the same everywhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.data.microbatch_plan import Partition, partition


def cut(lengths: list[int], *, groups: int = 0, **options: int) -> Partition:
    ids = torch.arange(len(lengths)) * max(groups, 1) // max(len(lengths), 1)
    options = dict(dp_size=1, tokens_per_microbatch=100) | options
    return partition(torch.tensor(lengths, dtype=torch.int64), group_ids=ids, **options)


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60),
    dp_size=st.integers(1, 5),
    num_updates=st.integers(1, 3),
    groups=st.integers(1, 12),
    budget=st.integers(100, 400),
)
@settings(max_examples=200, deadline=None)
def test_every_sequence_is_placed_once_and_no_budget_is_broken(
    lengths, dp_size, num_updates, groups, budget
) -> None:
    plan = cut(
        lengths,
        groups=groups,
        dp_size=dp_size,
        num_updates=num_updates,
        tokens_per_microbatch=budget,
    )
    seen = []
    assert len(plan.num_microbatches) == num_updates
    for update, count in enumerate(plan.num_microbatches):
        assert count >= 1
        for dp in range(dp_size):
            for m in range(count):
                rows = plan.rows(dp, update=update, microbatch=m).tolist()
                assert rows == sorted(rows)
                assert sum(lengths[row] for row in rows) <= budget
                seen += rows
    assert sorted(seen) == list(range(len(lengths)))


@given(lengths=st.lists(st.integers(1, 50), min_size=6, max_size=40), num_updates=st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_groups_stay_whole_and_updates_get_equal_shares_in_order(lengths, num_updates) -> None:
    ids = torch.arange(len(lengths)) % 6 * 7  # not contiguous, not from 0
    plan = partition(
        torch.tensor(lengths),
        group_ids=ids,
        dp_size=2,
        tokens_per_microbatch=64,
        num_updates=num_updates,
    )
    of_group = [plan.update_ids[ids == g].unique() for g in ids.unique()]
    assert all(len(updates) == 1 for updates in of_group)
    order = [int(updates) for updates in of_group]
    assert order == sorted(order)
    shares = [order.count(u) for u in range(num_updates)]
    assert max(shares) - min(shares) <= 1 and sum(shares) == 6


@given(
    lengths=st.lists(st.integers(20, 60), min_size=64, max_size=128),
    dp_size=st.sampled_from([2, 4]),
)
@settings(max_examples=50, deadline=None)
def test_dp_ranks_carry_nearly_the_same_tokens(lengths, dp_size) -> None:
    plan = cut(lengths, dp_size=dp_size, tokens_per_microbatch=512)
    loads = torch.zeros(dp_size).index_add(0, plan.dp_ids, torch.tensor(lengths).float())
    assert (loads.max() - loads.min()) <= 0.1 * loads.mean()


@given(
    sizes=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=30),
    dp_size=st.integers(1, 4),
    num_updates=st.integers(1, 3),
    budget=st.integers(120, 300),
)
@settings(max_examples=100, deadline=None)
def test_whole_groups_share_a_micro_batch_within_the_budget(
    sizes, dp_size, num_updates, budget
) -> None:
    lengths = [n for group in sizes for n in group]
    ids = torch.tensor([7 * g for g, group in enumerate(sizes) for _ in group])
    mixed = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(len(lengths)))
    lengths, ids = torch.tensor(lengths)[mixed], ids[mixed]
    options = dict(dp_size=dp_size, num_updates=num_updates, tokens_per_microbatch=budget)
    plan = partition(lengths, group_ids=ids, whole_groups=True, **options)
    places = torch.stack([plan.update_ids, plan.dp_ids, plan.microbatch_ids], dim=1)
    assert all(len(places[ids == g].unique(dim=0)) == 1 for g in ids.unique())
    for place in places.unique(dim=0):
        assert int(lengths[(places == place).all(dim=1)].sum()) <= budget
    assert torch.equal(plan.update_ids, partition(lengths, group_ids=ids, **options).update_ids)
    for update, count in enumerate(plan.num_microbatches):
        assert max(plan.microbatch_ids[plan.update_ids == update].tolist(), default=-1) < count


@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=40), dp_size=st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_groups_of_one_are_placed_as_sequences_are(lengths, dp_size) -> None:
    ids, options = torch.arange(len(lengths)), dict(dp_size=dp_size, tokens_per_microbatch=128)
    plans = [
        partition(torch.tensor(lengths), group_ids=ids, whole_groups=whole, **options)
        for whole in (False, True)
    ]
    assert torch.equal(plans[0].dp_ids, plans[1].dp_ids)
    assert torch.equal(plans[0].microbatch_ids, plans[1].microbatch_ids)


def test_a_whole_group_above_the_budget_is_refused_with_its_sizes() -> None:
    lengths, ids = torch.tensor([60, 10, 50]), torch.tensor([4, 2, 4])
    with pytest.raises(
        ValueError,
        match=r"tokens_per_microbatch: the 2 sequences of group 4, .* "
        r"60 \+ 50 = 110 tokens, above .* 100; .* least 110",
    ):
        partition(lengths, group_ids=ids, dp_size=1, tokens_per_microbatch=100, whole_groups=True)
    partition(lengths, group_ids=ids, dp_size=1, tokens_per_microbatch=100)


def test_no_more_micro_batches_than_the_tokens_need_when_they_fit_evenly() -> None:
    assert cut([10] * 40, dp_size=2).num_microbatches == (2,)
    assert cut([10] * 41, dp_size=2).num_microbatches == (3,)
    assert cut([60] * 4, dp_size=2).num_microbatches == (2,)  # two of 60 do not fit one budget


def test_one_very_long_sequence_has_a_micro_batch_for_itself() -> None:
    plan = cut([100, *[5] * 20], dp_size=2)
    assert plan.num_microbatches == (1,)
    assert plan.rows(int(plan.dp_ids[0]), update=0, microbatch=0).tolist() == [0]


def test_quadratic_cost_evens_out_long_and_short() -> None:
    plan = cut([80, *[10] * 16], dp_size=2, tokens_per_microbatch=1000, quadratic_tokens=10)
    with_long = plan.dp_ids == plan.dp_ids[0]
    assert int(with_long.sum()) == 1  # 80 + 80^2 / 10 outweighs sixteen of 10 + 10
    linear = cut([80, *[10] * 16], dp_size=2, tokens_per_microbatch=1000, quadratic_tokens=10**9)
    assert int((linear.dp_ids == linear.dp_ids[0]).sum()) == 5


def test_fewer_sequences_than_ranks_leave_ranks_with_empty_micro_batches() -> None:
    plan = cut([7], dp_size=3, num_updates=2, groups=1)
    assert plan.num_microbatches == (1, 1)
    sizes = [len(plan.rows(dp, update=u, microbatch=0)) for u in (0, 1) for dp in range(3)]
    assert sorted(sizes) == [0, 0, 0, 0, 0, 1]


def test_no_sequences_at_all_still_make_one_micro_batch() -> None:
    assert cut([], dp_size=2).num_microbatches == (1,)


def test_a_sequence_above_the_budget_is_refused_with_both_numbers() -> None:
    with pytest.raises(
        ValueError,
        match=r"tokens_per_microbatch: .* 101 tokens, above the budget "
        r"of 100; raise it to at least 101",
    ):
        cut([3, 101])


# --------------------------------------------------------------------------- balance and time


def loads(plan: Partition, lengths: torch.Tensor, *, dp_size: int) -> list[torch.Tensor]:
    """Return the cost of each (micro-batch, dp rank) of every update: [count, dp_size] float64."""
    costs = lengths + lengths.double() ** 2 / 24576
    found = []
    for update, count in enumerate(plan.num_microbatches):
        own = plan.update_ids == update
        places = plan.microbatch_ids[own] * dp_size + plan.dp_ids[own]
        flat = torch.zeros(count * dp_size, dtype=torch.float64).index_add(0, places, costs[own])
        found.append(flat.view(count, dp_size))
    return found


def busiest(load: torch.Tensor) -> float:
    """Return the cost of the rank that has most, in shares of the mean rank's."""
    return float(load.sum(0).max() / load.sum(0).mean())


def lockstep(load: torch.Tensor) -> float:
    """Return the cost of the slowest of each round, in shares of the mean rank's: what ranks take
    that meet in every layer."""
    return float(load.max(1).values.sum() / load.sum(0).mean())


def plainly(lengths: list[int], *, dp_size: int, budget: int) -> list[list[int]]:
    """Fill bins as the docstring says, one unit after another, looking at every bin."""
    count = max(1, -(-sum(lengths) // (budget * dp_size)))
    while True:
        bins: list[list[int]] = [[] for _ in range(count * dp_size)]
        for length in sorted(lengths, reverse=True):
            able = [own for own in bins if sum(own) + length <= budget]
            if not able:
                break
            min(able, key=lambda own: sum(n * 24576 + n * n for n in own)).append(length)
        else:
            return bins
        count += 1


@given(
    lengths=st.lists(st.integers(1, 100), max_size=60),
    dp_size=st.integers(1, 5),
    budget=st.sampled_from([100, 170, 400]),
)
@settings(max_examples=200, deadline=None)
def test_bins_are_those_of_a_plain_loop_where_they_are_even(lengths, dp_size, budget) -> None:
    """Costs are nearly linear here: neither count nor balance is worse, and mostly all is equal."""
    plan = cut(lengths, dp_size=dp_size, tokens_per_microbatch=budget)
    bins = plainly(lengths, dp_size=dp_size, budget=budget)
    count = len(bins) // dp_size
    assert plan.num_microbatches == (count,)
    sums = sorted((sum(n * 24576 + n * n for n in own) for own in bins), reverse=True)
    least = max(sum(sums) / dp_size, max((n * 24576 + n * n for n in lengths), default=0))
    members = [
        sorted(lengths[row] for row in plan.rows(dp, update=0, microbatch=m))
        for m in range(count)
        for dp in range(dp_size)
    ]
    if sum(sums[::dp_size]) <= 1.02 * least:
        assert sorted(members) == sorted(sorted(own) for own in bins)
    ours = sorted((sum(n * 24576 + n * n for n in own) for own in members), reverse=True)
    assert sum(ours[::dp_size]) <= sum(sums[::dp_size])


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=7), dp_size=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_few_sequences_get_nearly_the_best_of_all_plans(lengths, dp_size) -> None:
    """Against every way to place them: one micro-batch more at most, and the slowest of each
    round at most 4/3 of the least, as without a budget (Graham 1969; 1.31 in 50000 drawn)."""
    budget = 12
    plan = cut(lengths, dp_size=dp_size, tokens_per_microbatch=budget)
    fewest = next(c for c in range(1, 8) if best_lockstep(lengths, dp_size, c, budget) is not None)
    (count,) = plan.num_microbatches
    assert fewest <= count <= fewest + 1
    (load,) = loads(plan, torch.tensor(lengths), dp_size=dp_size)
    ours, best = float(load.max(1).values.sum()), best_lockstep(lengths, dp_size, count, budget)
    assert best is not None and best - 1e-9 <= ours <= 4 / 3 * best


def best_lockstep(lengths: list[int], dp_size: int, count: int, budget: int) -> float | None:
    """Return the least cost over all ways to place sequences into count * dp_size bins."""
    found: list[float] = []

    def place(rest: list[int], bins: list[int], costs: list[float]) -> None:
        if not rest:
            found.append(sum(sorted(costs, reverse=True)[::dp_size]))
            return
        tried = set()
        for b, (room, cost) in enumerate(zip(bins, costs)):
            if room >= rest[0] and (room, cost) not in tried:
                tried.add((room, cost))
                own = rest[0] + rest[0] ** 2 / 24576
                place(
                    rest[1:],
                    [*bins[:b], room - rest[0], *bins[b + 1 :]],
                    [*costs[:b], cost + own, *costs[b + 1 :]],
                )

    place(sorted(lengths, reverse=True), [budget] * (count * dp_size), [0.0] * (count * dp_size))
    return min(found, default=None)


def long_tailed(count: int, *, mu: float = 7.6) -> torch.Tensor:
    """Return lognormal lengths of 16 to 30000 tokens: [count] int64."""
    normal = torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (mu + normal).exp().long().clamp(16, 30000)


def test_a_long_tail_waits_for_itself() -> None:
    """With all bins alike the slowest took 1.21 to 1.23 of the mean rank, and the busiest as much.
    1.08 to 1.10 is the least possible: the rest must find room beside the long ones."""
    lengths = long_tailed(16384, mu=8.0)
    plan = partition(
        lengths,
        group_ids=torch.arange(16384) // 8,
        dp_size=256,
        tokens_per_microbatch=32768,
        num_updates=4,
    )
    assert plan.num_microbatches == (3, 3, 3, 3)
    for load in loads(plan, lengths, dp_size=256):
        assert busiest(load) <= lockstep(load) < 1.115


def test_a_batch_of_many_sequences_is_planned_in_well_under_a_step() -> None:
    import time

    for count, dp_size, seconds in ((8192, 64, 0.1), (65536, 512, 1.0)):
        lengths = long_tailed(count)
        began = time.thread_time()
        plan = partition(
            lengths,
            group_ids=torch.arange(count) // 8,
            dp_size=dp_size,
            tokens_per_microbatch=32768,
        )
        assert time.thread_time() - began < seconds
        (load,) = loads(plan, lengths, dp_size=dp_size)
        assert busiest(load) < 1.02 and lockstep(load) < 1.02
        assert plan.num_microbatches == (-(-int(lengths.sum()) // (32768 * dp_size)),)


def test_a_group_that_shares_its_prompt_stays_together_if_ranks_are_still_equal():
    ids = torch.arange(4).repeat_interleave(8)
    lengths = torch.full((32,), 1088)
    shared = torch.where(torch.arange(32) % 8 > 0, 1000, 0)
    options = dict(group_ids=ids, tokens_per_microbatch=4096, shared=shared)
    for dp_size, pieces in ((1, 1), (4, 1), (8, 2)):
        plan = partition(lengths, dp_size=dp_size, **options)
        where = plan.dp_ids * 100 + plan.microbatch_ids
        assert all(len(where[ids == group].unique()) == pieces for group in range(4))
        assert len(where.unique()) == 4 * pieces
    # Alone a sequence takes its length; after another one what it adds, and copies of keys.
    tight = partition(lengths, dp_size=1, **{**options, "tokens_per_microbatch": 1700})
    _, counts = (ids * 100 + tight.microbatch_ids).unique(return_counts=True)
    assert counts.max() == 3  # 1088 + 2 * (88 + 125) tokens, and no third


def test_nothing_shared_changes_no_plan():
    drawn = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 300, (60,), generator=drawn)
    ids = torch.arange(60) // 6
    options = dict(group_ids=ids, dp_size=3, tokens_per_microbatch=900, num_updates=2)
    plain = partition(lengths, **options)
    zeros = partition(lengths, shared=torch.zeros_like(lengths), **options)
    assert torch.equal(plain.dp_ids, zeros.dp_ids)
    assert torch.equal(plain.microbatch_ids, zeros.microbatch_ids)
