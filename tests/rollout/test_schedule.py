"""Admission and closing: quotas are met, in order, and no group is trained on too late."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import strategies as st

from spmdrl.check.values import schedule_problems
from spmdrl.config import Config, RolloutSettings, ScheduleSettings
from spmdrl.rollout.filling import StepFiller
from spmdrl.rollout.staleness import Rules, choose_groups, least_staleness, make_rules, num_to_admit
from tests.helpers.built import examples


@examples(
    300,
    data=st.data(),
    quota=st.integers(1, 4),
    over=st.sampled_from([1.0, 1.25, 1.5, 2.0, 3.0]),
    lag=st.integers(0, 3),
    slack=st.integers(0, 2),
    is_cut=st.booleans(),
)
def test_every_step_closes_and_none_is_stale_under_any_order_of_finishing(
    data, quota, over, lag, slack, is_cut
):
    """A replica and its trainer, with groups that finish in any order, at any time.

    `is_cut`: generation ahead of the step may be interrupted at any tick, as in-flight
    updates do; otherwise it goes on until all steps up to the lag are complete. In flight, groups
    of later steps are admitted while a step is completed.
    """
    bound = least_staleness(over, lag=lag) + slack
    rules = make_rules(quota, over_sample=over, lag=lag, max_staleness=bound)
    steps, number, next_step = 6, 0, 0
    versions: dict[int, int] = {}
    complete: set[int] = set()
    taken: dict[int, list[tuple[int, int]]] = {}
    for version in range(steps):
        for last, may_stop in ((version, False), (version + lag, is_cut)):
            last_step = version + lag if is_cut else last
            while next_step <= last:
                for _ in range(
                    num_to_admit(
                        rules,
                        len(versions),
                        next_step=next_step,
                        last_step=last_step,
                        version=version,
                    )
                ):
                    versions[number] = version
                    number += 1
                chosen = choose_groups(rules, versions, complete=complete, step=next_step)
                if chosen is not None:
                    assert len(chosen) == quota and set(chosen) <= complete
                    taken[next_step] = [(n, versions.pop(n)) for n in chosen]
                    complete -= set(chosen)
                    next_step += 1
                    continue
                if may_stop and data.draw(st.booleans()):
                    break
                running = sorted(set(versions) - complete)
                assert running, "nothing runs, and the step cannot close: stuck"
                complete.add(data.draw(st.sampled_from(running)))
    for step in range(steps):
        assert max(step - version for _, version in taken[step]) <= bound
        if over == 1:
            assert [n for n, _ in taken[step]] == list(range(step * quota, (step + 1) * quota))
    numbers = [n for groups in taken.values() for n, _ in groups]
    assert len(numbers) == len(set(numbers))


def test_over_sampling_closes_with_the_first_that_are_complete_and_keeps_the_rest():
    rules = make_rules(2, over_sample=2.0, lag=0, max_staleness="auto")
    assert rules == Rules(quota=2, lookahead=4, max_staleness=1)
    versions = dict.fromkeys(range(4), 5)
    assert num_to_admit(rules, 0, next_step=5, last_step=5, version=5) == 4
    assert choose_groups(rules, versions, complete={3}, step=5) is None
    assert choose_groups(rules, versions, complete={3, 1}, step=5) == [1, 3]
    # Those left behind come from version 5, and must be in step 6.
    left = {0: 5, 2: 5, 4: 6, 5: 6}
    assert num_to_admit(rules, 2, next_step=6, last_step=6, version=6) == 2
    assert choose_groups(rules, left, complete={4, 5}, step=6) is None
    assert choose_groups(rules, left, complete={0, 4, 5}, step=6) is None
    assert choose_groups(rules, left, complete={0, 2, 4}, step=6) == [0, 2]


def test_dynamic_sampling_may_replace_groups_of_each_step_under_way():
    filler = StepFiller.__new__(StepFiller)
    filler.schedule = ScheduleSettings(dynamic=2)
    filler.rules = make_rules(4, over_sample=1.0, lag=1, max_staleness="auto")
    filler.next = 3
    sample = SimpleNamespace(reward=SimpleNamespace(value=0.5))
    filler._dropped = [SimpleNamespace(drawn_samples=[sample])]
    for last, most in ((2, 4), (3, 4), (4, 8)):
        filler._check_dropped(most, last=last)
        with pytest.raises(RuntimeError, match="step 3: rollout.schedule.dynamic 2 is used up"):
            filler._check_dropped(most + 1, last=last)


def test_a_replica_without_a_share_admits_nothing_and_closes_at_once():
    rules = make_rules(0, over_sample=1.5, lag=1, max_staleness="auto")
    assert num_to_admit(rules, 0, next_step=0, last_step=3, version=0) == 0
    assert choose_groups(rules, {}, complete=(), step=0) == []


def cfg_of(**schedule) -> Config:
    return Config(rollout=RolloutSettings(schedule=ScheduleSettings(**schedule)), lag=1)


@pytest.mark.parametrize(
    "schedule, balance",
    [
        ({}, "length"),
        ({"dynamic": 3}, "length"),
        ({"over_sample": 1.5}, "steal"),
        ({"in_flight": True}, "steal"),
        ({"in_flight": True, "balance": "even"}, "even"),
    ],
)
def test_work_is_taken_over_where_timing_decides_on_the_batch_anyway(schedule, balance):
    assert cfg_of(**schedule).rollout.schedule.dealing == balance
    assert not [*schedule_problems(cfg_of(**schedule))]
