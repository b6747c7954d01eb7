"""Plans of steps: a function of seed, step and what was measured in time; the curriculum."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.data.prompt_order import Order
from spmdrl.data.prompt_plan import Measured, PromptPlanner, choose
from spmdrl.rollout.resumed_work import Share
from spmdrl.rollout.row_source import RowSource
from spmdrl.rollout.step_prompts import StepPrompts
from spmdrl.tools.small_models.character_tokenizer import character_tokenizer
from spmdrl.types import Scalars
from tests.helpers.built import changed, made, refused
from tests.helpers.ragged import scalars_of

ALWAYS, NEVER, MIXED = [1.0, 1.0], [0.0, 0.3], [1.0, 0.0]


def batch(rows, rewards, *, lengths=None, is_valid=None) -> Scalars:
    """Groups of two samples, in the order given."""
    count = 2 * len(rows)
    return scalars_of(
        torch.tensor(rewards).flatten(),
        torch.arange(count) // 2,
        response_lengths=lengths or (),
        is_valid=is_valid or [True] * count,
        rows=torch.tensor(rows).repeat_interleave(2),
    )


def test_means_move_half_way_and_failed_rewards_count_in_none():
    known = Measured()
    known.observe(batch([7, 3], [ALWAYS, MIXED], lengths=[2, 4, 10, 20]))
    assert known.rates == {7: 1.0, 3: 0.5} and known.lengths == {7: 3.0, 3: 15.0}
    assert known.length == 9.0 and known.is_settled(7) and not known.is_settled(3)
    assert not known.is_settled(99)  # never sampled
    known.observe(batch([7, 5], [[0.0, 0.0], [1.0, 1.0]], is_valid=[True, False, False, False]))
    assert known.rates == {7: 0.5, 3: 0.5} and known.lengths == {7: 3.5, 3: 15.0, 5: 4.0}
    assert known.length == 6.5
    known.observe(batch([3], [NEVER]))
    assert known.rates[3] == 0.25
    for _ in range(3):
        known.observe(batch([3], [NEVER]))
    assert known.is_settled(3)  # 1/32: hardly ever solved of late


@given(num_rows=st.integers(1, 20), data=st.data(), keep=st.sampled_from([0.01, 0.25, 0.9, 1.0]))
def test_a_step_is_full_of_different_rows_and_only_settled_ones_are_passed_over(
    num_rows, data, keep
):
    per_step = data.draw(st.integers(1, num_rows))
    settled = data.draw(st.sets(st.integers(0, num_rows - 1)))
    order = Order(num_rows, per_step=per_step, seed=data.draw(st.integers(0, 9)), shuffle=True)
    cursor = 0
    for _step in range(6):
        before = cursor
        rows, cursor, passed = choose(order, cursor, is_settled=settled.__contains__, keep=keep)
        assert len(rows) == len(set(rows)) == per_step and 0 < cursor - before <= 2 * num_rows
        seen = {order.row(place) for place in range(before, cursor)}
        assert seen - set(rows) <= settled and len(seen) == per_step + passed
        if keep == 1 or not settled:
            assert not passed


def test_settled_rows_come_at_the_share_that_is_asked_for():
    order = Order(200, per_step=20, seed=3, shuffle=True)
    settled, cursor, drawn = set(range(100)), 0, Counter()
    for _ in range(200):
        rows, cursor, _ = choose(order, cursor, is_settled=settled.__contains__, keep=0.25)
        drawn.update(row in settled for row in rows)
    # In an epoch 100 others and a quarter of 100: expected share 0.2, standard error 0.005.
    assert drawn.total() == 4000
    assert drawn[True] / drawn.total() == pytest.approx(0.2, abs=0.02)


def planner(*, keep=1.0, horizon=2, history=1) -> PromptPlanner:
    order = Order(10, per_step=4, seed=5, shuffle=True)
    return PromptPlanner(order, kept=range(100, 110), horizon=horizon, keep=keep, history=history)


def test_without_a_curriculum_rows_are_the_order_and_lengths_what_was_measured():
    plans, order = planner(), Order(10, per_step=4, seed=5, shuffle=True)
    assert plans.at(0).lengths == plans.at(1).lengths == (0.0,) * 4
    rows = [100 + i for i in plans.at(0).rows]
    plans.observe(batch(rows, [MIXED] * 4, lengths=[1, 3, 4, 4, 5, 5, 6, 6]), step=0)
    known = dict(zip(rows, (2.0, 4.0, 5.0, 6.0)))
    assert plans.at(2).lengths == tuple(known.get(100 + i, 4.25) for i in plans.at(2).rows)
    assert [plans.at(k).rows for k in range(3)] == [tuple(order.at(k)) for k in range(3)]
    with pytest.raises(AssertionError, match="step 3 is not planned"):
        plans.at(3)  # what step 1 measured belongs to it
    assert planner(horizon=0).at(77).rows == tuple(order.at(77))


def run(plans: PromptPlanner, begin: int, end: int) -> list:
    """Solve even rows always and the others half the time."""
    found = []
    for step in range(begin, end):
        rows = [100 + i for i in plans.at(step).rows]
        found.append(plans.at(step))
        plans.observe(batch(rows, [MIXED if row % 2 else ALWAYS for row in rows]), step=step)
    return found


def test_what_is_always_solved_comes_less_often_and_a_resume_changes_nothing():
    whole = run(planner(keep=0.1), 0, 40)
    drawn = Counter(row % 2 for plan in whole[10:] for row in plan.rows)
    assert drawn[0] < 0.3 * drawn[1]
    assert sum(plan.passed_over for plan in whole) > 20
    assert whole[-1].measured == 10 and whole[-1].settled == 5
    assert whole[0].passed_over == whole[1].passed_over == 0  # nothing was measured yet
    stopped = planner(keep=0.1)
    first = run(stopped, 0, 17)
    resumed = planner(keep=0.1)
    resumed.load_state_dict(stopped.state_dict(), step=17)
    # Groups under way are of steps before.
    assert [resumed.at(k) for k in (15, 16)] == first[15:]
    assert first + run(resumed, 17, 40) == whole


def test_a_state_of_other_batches_is_planned_anew_from_the_step():
    stopped, other = (
        planner(),
        PromptPlanner(Order(10, per_step=2, seed=5, shuffle=True), kept=range(100, 110), horizon=2),
    )
    run(stopped, 0, 3)
    other.load_state_dict(stopped.state_dict(), step=3)
    assert other.at(3).rows == tuple(other.order.at(3)) and len(other.at(4).rows) == 2
    assert max(other.at(3).lengths) == 4.0


def test_a_state_of_another_number_of_rows_is_refused_unless_that_is_allowed():
    stopped = planner()
    run(stopped, 0, 3)
    fewer = Order(6, per_step=4, seed=5, shuffle=True)
    resumed = PromptPlanner(fewer, kept=range(100, 106), horizon=2)
    with refused("data.train: has 6 usable rows and had 10", "--checkpoint.allow-config-change"):
        resumed.load_state_dict(stopped.state_dict(), step=3)
    resumed.load_state_dict(stopped.state_dict(), step=3, allow_change=True)
    assert [resumed.at(step).rows for step in (3, 4)] == [tuple(fewer.at(3)), tuple(fewer.at(4))]


def test_measurements_of_rows_are_not_taken_over_to_other_data(tmp_path, caplog):
    file = tmp_path / "rows.jsonl"
    cfg = made(
        data=dict(train=str(file)),
        batch=dict(prompts_per_step=4),
        rollout=dict(schedule=dict(curriculum=0.1)),
        checkpoint=dict(allow_config_change=True),
    )
    order = Order(10, per_step=4, seed=5, shuffle=True)
    source = SimpleNamespace(order=order, kept=range(100, 110))

    def prompts(text: str, *, replica: int = 0) -> StepPrompts:
        file.write_text(text)
        return StepPrompts(cfg, source, share=Share(replica, 2, is_shared=False), max_staleness=1)

    stopped = prompts("a")
    run(stopped.planner, 0, 17)
    state = stopped.state_dict()
    known = stopped.planner.measured
    for text, replica in (("a", 0), ("a", 1), ("b", 1), ("b", 0)):
        resumed = prompts(text, replica=replica)
        resumed.load_state_dict(state, step=17)
        found = resumed.planner.measured
        expected = known if text == "a" else Measured(length=known.length)
        assert found == expected, (text, replica)
        assert ("measured again" in caplog.text) is ((text, replica) == ("b", 0))
    assert known.rates


def test_a_resume_of_an_offline_objective_refuses_another_number_of_rows(tmp_path):
    rows = tmp_path / "rows.jsonl"
    cfg = made(
        algorithm=dict(objective="sft"),
        data=dict(train=str(rows), max_prompt_tokens=16),
        batch=dict(prompts_per_step=2),
        model=dict(path="m"),
    )

    def source_of(count, *, rank=0, cfg=cfg):
        row = json.dumps({"prompt": "a", "completion": "b"}) + "\n"
        rows.write_text(row * count)
        return RowSource(cfg, SimpleNamespace(rank=rank), tokenizer=character_tokenizer())

    state = source_of(5).state_dict()
    assert source_of(5, rank=1).state_dict() is None
    source_of(5).load_state_dict([state], 1)
    with refused("data.train: has 4 usable rows and had 5", "--checkpoint.allow-config-change"):
        source_of(4, rank=1).load_state_dict([state], 1)
    allowed = changed(cfg, checkpoint=dict(allow_config_change=True))
    source_of(4, cfg=allowed).load_state_dict([state], 1)
