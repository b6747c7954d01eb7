"""Functions that score whole groups: when they are called, with what, and what a failure costs."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from spmdrl.config import Config, DataSettings, EvaluateSettings, RewardsSettings
from spmdrl.rewards.columns import function_problems, row_kinds
from spmdrl.rewards.samples import RewardSample
from spmdrl.rollout.episode import FinishedEpisode, Group
from spmdrl.rollout.loop import Loop
from spmdrl.rollout.packing import pack
from spmdrl.rollout.resumed_work import group_from_dict, group_to_dict
from spmdrl.rollout.sampled_source import group_hints
from spmdrl.rollout.step_scores import score_step
from spmdrl.rollout.sums import step_sums
from spmdrl.rollout.trajectory import Trajectory
from spmdrl.types import Prompt
from spmdrl.workers.joining import Call, ResultJoiner
from spmdrl.workers.messages import Done, ListResult, RewardResult
from spmdrl.workers.pool import RewardPool
from tests.helpers.built import small_model
from tests.helpers.pool_runs import drained, pool_of
from tests.helpers.runs import TINY, metrics, run
from tests.rollout.test_inputs import DRAW, PROMPTS, Engine, Link, Tokenizer

pytestmark = pytest.mark.timeout(300)
FUNCTIONS = """
import time

def longest(completions, log_metric, **columns):
    log_metric("calls", 1)
    log_metric("size", len(completions))
    words = [c.split()[0] for c in completions]
    if "raise" in words:
        raise KeyError("lost")
    if "hang" in words:
        time.sleep(1000)
    if "exit" in words:
        import os
        os._exit(3)
    most = max(map(len, completions))
    return [float("nan") if c == "nan" else float(len(c) == most) for c in completions]

async def waits(completions):
    return [float(len(completions)) for _ in completions]

def chars(solution_str, ground_truth):
    if solution_str.startswith("alone"):
        raise ValueError("no reward of this one")
    return {"score": len(solution_str) / 100, "letters": len(solution_str)}

def states(completions, trainer_state):
    state = trainer_state
    return [state.global_step + state.max_steps / 100 + state.epoch / 1000 for _ in completions]

def rank(completions, trainer_state):
    step = trainer_state.global_step
    return [len(completions) + step / 10 * (step // step) for _ in completions]

rank.scope = "step"

def places(completions):
    return list(map(float, range(len(completions))))

def none(completions):
    return [None for _ in completions]
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "r.py").write_text(FUNCTIONS)
    return f"{tmp_path}/r.py"


def scored(pool, **groups):
    """Hand in groups of texts, one sample of each after the other; return {key: result}."""
    prompt = Prompt(index=3, tokens=(1,), text="q", row={"prompt": "q", "answer": "1"})
    longest = max(map(len, groups.values()))
    for i in range(longest):
        for name, texts in groups.items():
            if i < len(texts):
                pool.submit(
                    (name, i),
                    prompt=prompt,
                    response_text=texts[i],
                    response_tokens=[1],
                    truncated=False,
                    group=name,
                )
    for name in groups:
        pool.close_group(name)
    return {r.key: r for r in sorted(drained(pool), key=lambda result: result.key)}


def test_a_function_of_lists_sees_each_group_whole_and_fails_for_all_of_it(place):
    with pool_of(f"{place}:longest", timeout_s=4.0) as pool:
        found = scored(
            pool,
            fine=["a", "a b c", "a b"],
            lost=["a", "raise b"],
            late=["hang b", "a"],
            ended=["a", "exit"],
            odd=["a b", "nan"],
            small=["a"],
        )
    values = {name: [found[k].value for k in sorted(found) if k[0] == name] for name, _ in found}
    assert values == {
        "fine": [0.0, 1.0, 0.0],
        "lost": [None, None],
        "late": [None, None],
        "ended": [None, None],
        "odd": [1.0, None],
        "small": [1.0],
    }
    assert found["fine", 0].metrics == {"calls": 1.0, "size": 3.0}
    failures = {name: found[name, 1].failure for name in ("lost", "late", "ended", "odd")}
    assert failures == {"lost": "error", "late": "timeout", "ended": "error", "odd": "bad_value"}
    for part in (
        "KeyError: 'lost'",
        "r.py:",
        "in longest",
        "2 samples of a group; all of them fail",
    ):
        assert part in found["lost", 0].message
    said = r"no result of \w+ \(.*r\.py:\d+\) within rewards.timeout_s = 4 s"
    assert re.search(said, found["late", 0].message)
    assert "all fail" not in found["odd", 1].message


def test_rewards_of_samples_and_of_groups_add_up_in_order(place):
    functions = (f"{place}:longest", f"{place}:chars", f"{place}:waits")
    with pool_of(*functions, weights=(1.0, 10.0, 0.1)) as pool:
        found = scored(pool, a=["x y", "x"], b=["alone", "x"])
    assert found["a", 0].value == pytest.approx(1.0 + 0.3 + 0.2)
    assert not pool._joiner._groups and not pool._joiner._partial
    assert list(found["a", 0].parts.items()) == [("chars", 0.03), ("longest", 1.0), ("waits", 2.0)]
    assert found["a", 0].metrics["chars/letters"] == 3.0
    # A sample that fails by itself was in its group all the same, and costs the others nothing.
    assert found["b", 0].failure == "error" and "no reward of this one" in found["b", 0].message
    assert found["b", 1].value == pytest.approx(0.0 + 0.1 + 0.2)


def test_the_scope_sample_gives_lists_of_one_and_none_for_all_is_a_failure(place):
    with pool_of(f"{place}:longest", scope="sample") as pool:
        found = scored(pool, a=["a", "a b"], b=["raise", "a"])
        assert not pool._joiner._groups and not pool._joiner._partial
    assert [r.value for r in found.values()] == [1.0, 1.0, None, 1.0]
    with pool_of(f"{place}:none", f"{place}:longest") as pool:
        assert [r.value for r in scored(pool, a=["a", "b c"]).values()] == [0.0, 1.0]
    with pool_of(f"{place}:none") as pool:
        assert {r.failure for r in scored(pool, a=["a", "b"]).values()} == {"bad_value"}


def test_a_worker_that_answers_for_too_few_samples_is_not_believed():
    joining = ResultJoiner()
    for i in range(2):
        joining.add(i, RewardSample({}, "", [], False), group="g", what="data row 0")
    call, work = joining.close("g")
    assert call == Call("group", (0, 1), "data row 0") and len(work.samples) == 2
    done = Done(1, 0.0, 1.0, result=ListResult(None, results=(RewardResult(None, 1.0),)))
    found = joining.add_result(call, done, scopes=["group"])
    assert [r.failure for r in found] == ["error"] * 2 and "for 1 of 2 samples" in found[0].message


@pytest.mark.parametrize("failure", [None, "error"])
def test_calls_of_a_group_that_were_made_again_count_once(failure):
    joining = ResultJoiner()
    for i in range(2):
        joining.add(i, RewardSample({}, "", [], False), group="g", what="data row 0")
    alone = Done(1, 0.0, 1.0, result=RewardResult(None, 1.0), retries=1)
    for i in range(2):
        assert not joining.add_result(Call("sample", (i,), ""), alone, scopes=["sample", "group"])
    call, _ = joining.close("g")
    each = ListResult(None, results=(RewardResult(None, 1.0),) * 2)
    done = Done(1, 0.0, 1.0, failure, "why", None if failure else each, 3)
    found = joining.add_result(call, done, scopes=["sample", "group"])
    assert [r.retries for r in found] == [1 + 3, 1]


def test_the_loop_scores_a_group_when_its_last_sample_is_drawn(place):
    with pool_of(f"{place}:waits") as pool:
        loop = Loop(Config(), tokenizer=Tokenizer(), pool=pool, link=Link())
        groups = [
            Group(number, 7, slot, prompt, version=2, draw=DRAW)
            for number, (slot, prompt) in enumerate(PROMPTS)
        ]
        engine, whole = Engine(), []
        for group in groups:
            loop.admit(group)
        while loop.is_busy:
            before = [len(group.samples) for group in groups]
            whole += loop.tick(engine)
            assert all(n in (0, DRAW.samples) for n in before), "a group is scored as one"
    assert {g.slot for g in whole} == {slot for slot, _ in PROMPTS}
    for group in groups:
        assert [s.reward.value for s in group.drawn_samples] == [float(DRAW.samples)] * DRAW.samples


def test_a_group_is_scored_in_the_order_of_its_samples_whichever_ended_first(place):
    joining = ResultJoiner()
    for i in (2, 10, 0, 1):
        sample = RewardSample({}, f"said {i}", [], False)
        joining.add(f"train-0-0-{i}", sample, group="g", what="a row", position=i)
    call, work = joining.close("g")
    assert [sample.text for sample in work.samples] == [f"said {i}" for i in (0, 1, 2, 10)]
    assert call.keys == tuple(f"train-0-0-{i}" for i in (0, 1, 2, 10))
    group = Group(0, 7, PROMPTS[0][0], PROMPTS[0][1], version=2, draw=DRAW)
    with pool_of(f"{place}:places") as pool:
        loop, engine = Loop(Config(), tokenizer=Tokenizer(), pool=pool, link=Link()), Engine()
        loop.admit(group)
        last, *others = loop._to_draw
        loop._to_draw = others
        while loop._to_draw or loop._drawing:
            loop.tick(engine)
        loop.start(last)
        while loop.is_busy:
            loop.tick(engine)
    assert [s.reward.value for s in group.drawn_samples] == [float(i) for i in range(DRAW.samples)]


def test_a_group_whose_last_sample_fails_before_it_is_scored_is_whole_without_it(place):
    draw = dataclasses.replace(DRAW, must_score=False)
    group = Group(0, 7, PROMPTS[0][0], PROMPTS[0][1], version=2, draw=draw)
    with pool_of(f"{place}:waits") as pool:
        loop, engine = Loop(Config(), tokenizer=Tokenizer(), pool=pool, link=Link()), Engine()
        loop.admit(group)
        lost = loop._to_draw.pop()
        while loop._to_draw or loop._drawing:
            assert not loop.tick(engine)
        assert not len(pool) and len(loop._outside) == draw.samples - 1
        loop._finish(lost, RewardResult(lost.key, failure="error", message="environment: lost"))
        while loop.is_busy:
            loop.tick(engine)
    values = [s.reward.value for s in group.drawn_samples]
    assert group.is_complete and values == [draw.samples - 1.0] * (draw.samples - 1) + [None]


def test_a_group_that_is_saved_before_it_is_whole_is_scored_whole_after_a_resume(place):
    group = Group(0, 7, PROMPTS[0][0], PROMPTS[0][1], version=2, draw=DRAW)
    with pool_of(f"{place}:waits") as pool:
        loop, engine = Loop(Config(), tokenizer=Tokenizer(), pool=pool, link=Link()), Engine()
        loop.admit(group)
        waiting = loop._to_draw.pop()
        while loop._to_draw or loop._drawing:
            loop.tick(engine)
        saved = group_to_dict(group, [*loop._outside.values(), waiting])
    assert len(saved["episodes"]) == DRAW.samples and not saved["samples"]
    group, episodes = group_from_dict(saved, number=0, draw=DRAW, prompt=PROMPTS[0][1])
    with pool_of(f"{place}:waits") as pool:
        loop = Loop(Config(), tokenizer=Tokenizer(), pool=pool, link=Link())
        for episode in episodes:
            loop.start(episode)
        while loop.is_busy:
            loop.tick(engine)
    assert [s.reward.value for s in group.drawn_samples] == [float(DRAW.samples)] * DRAW.samples


def test_a_function_of_steps_adds_to_what_was_scored_before(place):
    functions = (f"{place}:waits", f"{place}:rank")
    draw = dataclasses.replace(DRAW, must_score=False)
    groups = [Group(n, 7, slot, p, version=2, draw=draw) for n, (slot, p) in enumerate(PROMPTS)]
    with pool_of(*functions, weights=(1.0, 100.0)) as pool:
        loop = Loop(Config(), tokenizer=Tokenizer(), pool=pool, link=Link())
        engine = Engine()
        for group in groups:
            loop.admit(group)
        while loop.is_busy:
            loop.tick(engine)
        before = [s.reward for g in groups for s in g.drawn_samples]
        failed = dataclasses.replace(before[0], value=None, failure="error")
        groups[0].samples[0] = dataclasses.replace(groups[0].samples[0], reward=failed)
        pool.submit(
            "early",
            prompt=PROMPTS[0][1],
            response_text="a b",
            response_tokens=[1, 2],
            truncated=False,
        )  # that it is under way is no matter
        score_step(loop, groups, step=9)
        after = [s.reward for g in groups for s in g.drawn_samples]
        assert [r.key for r in drained(pool)] == ["early"]
        count = len(before) - 1
        for old, new in list(zip(before, after))[1:]:
            assert new.parts == old.parts | {"rank": count + 0.9}
            assert new.value == pytest.approx(old.value + 100 * (count + 0.9))
            assert new.key == old.key and new.metrics == old.metrics
        assert after[0] == failed
        groups[0].samples[0] = dataclasses.replace(groups[0].samples[0], text="x", reward=before[0])
        score_step(loop, groups, step=0)  # that it is 0 makes it fail, for all
        assert {s.reward.failure for g in groups for s in g.drawn_samples} == {"error"}
        message = groups[0].samples[0].reward.message
        assert f"{len(before)} samples of a step; all of them fail" in message


def test_a_row_that_functions_of_steps_alone_score_is_no_failure_before_the_step(place):
    group = Group(0, 7, PROMPTS[0][0], PROMPTS[0][1], version=2, draw=DRAW)
    with pool_of(f"{place}:none", f"{place}:rank") as pool:
        loop, engine = Loop(Config(), tokenizer=Tokenizer(), pool=pool, link=Link()), Engine()
        loop.admit(group)
        while loop.is_busy:
            loop.tick(engine)
        score_step(loop, [group], step=9)
    assert [s.reward.value for s in group.drawn_samples] == [DRAW.samples + 0.9] * DRAW.samples


def test_functions_are_told_which_step_the_samples_are_of(place):
    cfg = Config(
        steps=50,
        data=DataSettings(train="rows.jsonl"),
        rewards=RewardsSettings(functions=(f"{place}:states",)),
    )
    prompt = Prompt(index=3, tokens=(1,), text="q", row={"prompt": "q"})
    with RewardPool(cfg, steps_per_epoch=8.0) as pool:
        sample = dict(prompt=prompt, response_text="a", response_tokens=[1], truncated=False)
        for step in (0, 12):
            pool.submit(step, **sample, step=step)
        assert [r.value for r in drained(pool)] == [0.5, pytest.approx(12.5015)]


def test_what_functions_report_beside_their_values_are_metrics_and_texts_of_shown_samples():
    reward = RewardResult(
        None, 1.0, {"f": 1.0}, {"acc": 0.5, "pred": 7.0, "environment/won": 1.0}, {"why": "so"}
    )
    trajectory = Trajectory.from_prompt([1, 2])
    prompt = Prompt(index=3, tokens=(1, 2), text="q", row={"prompt": "q"})
    samples = [FinishedEpisode(0, i, prompt, (trajectory,), "a", reward) for i in range(2)]
    sums = step_sums(samples, is_first=True)
    assert sums["reward/acc/mean"] == (1.0, 2) and sums["environment/won"] == (2.0, 2)
    assert sums["reward/f/mean"] == (2.0, 2) and not any("pred" in name for name in sums)
    (shown,) = pack(samples, sums=sums, num_shown=1).samples
    assert shown.pop("reward_parts") == {"f": 1.0}
    assert shown == {"prompt": "q", "response": "a", "reward": 1.0, "reward/why": "so"}


def test_what_a_scope_cannot_be_used_with_is_refused(place):
    row = row_kinds([("a.jsonl:1", {"prompt": "q", "answer": "1"})])
    assert not function_problems([f"{place}:longest", f"{place}:chars"], row, scope="group")
    (problem,) = function_problems([f"{place}:chars"], row, scope="group")
    assert "rewards.scope: group" in problem and "completions" in problem
    assert not function_problems([f"{place}:longest"], row, scope="group", no_step="no")
    (problem,) = function_problems([f"{place}:longest"], row, scope="step", no_step="a share")
    assert "is called with whole steps, and a share" in problem
    (problem,) = function_problems([f"{place}:longest"], row, has_greedy=True)
    assert "rewards.scope to sample" in problem
    assert not function_problems([f"{place}:longest"], row, scope="sample", has_greedy=True)


COUNTS = """
def group(completions): return [len(completions) for _ in completions]
def step(completions, trainer_state):
    return [len(completions) + trainer_state.global_step / 8 for _ in completions]
def sample(completions): return [len(completions) + i / 8 for i in range(len(completions))]
step.scope, sample.scope = "step", "sample"
"""


def test_functions_of_groups_that_are_evaluated_one_by_one_are_hinted_at():
    cfg = Config(evaluate=EvaluateSettings(every_steps=2))
    (hint,) = group_hints(cfg, ("sample", "group"))
    assert hint.startswith("evaluate.samples: 1") and "set it to batch.group_size" in hint
    assert not group_hints(cfg, ("sample", "step")) and not group_hints(Config(), ("group",))
    many = Config(evaluate=EvaluateSettings(every_steps=2, samples=8))
    assert not group_hints(many, ("group",))


def test_a_run_calls_functions_with_samples_groups_and_steps(tmp_path):
    (tmp_path / "r.py").write_text(COUNTS)
    names = ("group", "step", "sample")
    flags = TINY["rl"] | {
        "model.path": small_model(tmp_path / "model", hidden_size=64, heads=2, kv_heads=1),
        "output-dir": tmp_path / "out",
        "steps": 2,
        "rewards.functions": f"[{', '.join(f'{tmp_path}/r.py:{n}' for n in names)}]",
        "evaluate.every-steps": 2,
        "evaluate.samples": 3,
        "data.eval-size": 4,
    }
    assert "get lists of one" not in run("demo_grpo.yaml", 2, **flags).output
    rows = metrics(tmp_path / "out")
    for step, row in enumerate(row for row in rows if "reward/mean" in row):
        assert row["reward/sample/mean"] == 1.0 and row["reward/group/mean"] == 4.0
        assert row["reward/step/mean"] == 32 + step / 8
    assert step == 1
    found = json.loads((tmp_path / "out" / "evaluations" / "evaluation_2.json").read_text())
    assert found["parts"] == {"group": 3.0, "step": 12.25, "sample": 1.0}
