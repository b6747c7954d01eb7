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


def test_a_batch_of_many_sequences_is_planned_in_well_under_a_step() -> None:
    import time

    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(100, 4000, (4096,), generator=g)
    began = time.thread_time()
    partition(lengths, group_ids=torch.arange(4096) // 8, dp_size=16, tokens_per_microbatch=16384)
    assert time.thread_time() - began < 2.0
