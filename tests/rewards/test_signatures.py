"""Reward signatures, value checks and the ready-made graders, in this process."""

from __future__ import annotations

import functools
import json
import pickle
import re
import struct

import numpy
import pytest

from spmdrl.rewards import graders
from spmdrl.rewards.samples import BadValue, RewardSample, Score, TrainerState, finite
from spmdrl.rewards.signatures import adapt, part_names
from spmdrl.workers.messages import Done, ListResult, RewardResult, Setup, TurnResult
from spmdrl.workers.reports import (
    BadReport,
    Began,
    Ready,
    Refused,
    Returned,
    pack_report,
    take_reports,
)
from spmdrl.workers.reward_jobs import RewardScorer
from spmdrl.workers.worker_process import QueuedJob, WorkerProcess

ROW = {
    "prompt": "2+2=",
    "data_source": "d",
    "reward_model": {"ground_truth": "4"},
    "extra_info": {"k": 1},
    "level": 5,
}


def score(function, text="4", row=ROW):
    return scores(function, [text], row=row)[0]


def scores(function, texts, row=ROW, **options):
    """Return what a function says of responses to one row, in one call."""
    samples = [RewardSample(row, text, [7, 8], False) for text in texts]
    return adapt(function, spec="f", **options)(samples)


def test_verl_functions_get_their_four_columns():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert (data_source, solution_str, ground_truth, extra_info) == ("d", "4", "4", {"k": 1})
        return {"score": 0.5, "acc": True, "note": "fine"}

    got = score(compute_score)
    assert (got.value, got.metrics, got.extras) == (0.5, {"acc": 1.0}, {"note": "fine"})

    def with_options(solution_str, ground_truth, **options):
        return float(sorted(options) == ["data_source", "extra_info"])

    assert score(with_options).value == 1.0


def test_the_reference_is_found_in_verl_and_plain_columns_or_named_as_missing():
    for row in ({"ground_truth": "4"}, {"answer": "4"}, {"reward_model": {"ground_truth": "4"}}):
        assert score(graders.exact, row={"prompt": "x"} | row).value == 1.0
    with pytest.raises(ValueError, match="no reference answer.*prompt, level"):
        score(graders.exact, row={"prompt": "x", "level": 1})
    assert score(graders.think_format, "<think>a</think>b", {"prompt": "x"}).value == 1.0


def test_trl_functions_get_lists_of_one_and_the_columns_they_name():
    def f(prompts, completions, completion_ids, level, log_metric, log_extra, absent=None):
        assert (prompts, completions, completion_ids) == (["2+2="], ["4"], [[7, 8]])
        assert absent is None
        log_metric("m", 2)
        log_extra("why", ["because"])
        return [float(level[0])]

    got = score(f)
    assert (got.value, got.metrics, got.extras) == (5.0, {"m": 2.0}, {"why": "because"})

    def all_columns(completions, **columns):
        return [float({"level", "data_source", "prompts"} <= columns.keys())]

    assert score(all_columns).value == 1.0
    with pytest.raises(ValueError, match="asks for column 'colour'"):
        score(lambda completions, colour: [1.0])


def test_functions_of_lists_get_all_samples_of_a_call():
    def longest(completions, level, log_extra, log_metric):
        assert level == [5, 5, 5]
        log_metric("most", max(map(len, completions)))
        log_extra("text", completions)
        return [float(len(c) == max(map(len, completions))) for c in completions]

    found = scores(longest, ["4", "four", "44"])
    assert [s.value for s in found] == [0.0, 1.0, 0.0]
    assert [s.extras["text"] for s in found] == ["4", "four", "44"]
    assert all(s.metrics == {"most": 4.0} for s in found)

    def batch(data_sources, solution_strs, ground_truths, extra_infos, **options):
        assert data_sources == ["d"] * 2 and ground_truths == ["4"] * 2 and not options
        assert all(info is ROW["extra_info"] for info in extra_infos)
        return [1.0, {"score": 0.5, "acc": 1}][: len(solution_strs)]

    one, two = scores(batch, ["4", "5"])
    assert (one.value, two.value, two.metrics) == (1.0, 0.5, {"acc": 1.0})
    assert scores(lambda solution_strs, ground_truths=None: [1], ["4"], row={})[0].value == 1.0
    with pytest.raises(ValueError, match="no reference answer"):
        scores(lambda solution_strs, ground_truths: [1], ["4"], row={})


def test_trainer_state_has_the_fields_that_trl_functions_read():
    def f(completions, trainer_state, **columns):
        done = trainer_state.global_step / trainer_state.max_steps
        return [done + trainer_state.epoch + trainer_state.num_train_epochs] * len(completions)

    sample = RewardSample(ROW, "4", [7], False, TrainerState(1, 4, 0.125, 3))
    (got,) = adapt(f, spec="f")([sample])
    assert got.value == 0.25 + 0.125 + 3
    with pytest.raises(AttributeError, match="no 'log_history' here; it has global_step, max_st"):
        score(lambda completions, trainer_state: trainer_state.log_history)


def test_one_bad_value_of_a_list_costs_its_sample_and_a_bad_list_all():
    def one_bad(completions):
        return [1.0, None, float("nan"), "x"]

    found = scores(one_bad, list("abcd"))
    assert [s.value for s in found] == [1.0, None, None, None]
    assert [bool(s.bad) for s in found] == [False, False, True, True] and "nan" in found[2].bad
    with pytest.raises(BadValue, match="each of 4 completions, got a list of 1.*scope sample"):
        scores(lambda completions: [1.0], list("abcd"))
    with pytest.raises(BadValue, match="got 1.0; a function that scores one at a time"):
        scores(lambda completions: 1.0, list("abcd"))
    assert [s.value for s in scores(lambda completions: 1.0, ["a"])] == [1.0]  # as it is told
    with pytest.raises(ValueError, match="expected one value for each of 2 completions, got 1"):
        scores(lambda completions, log_extra: log_extra("a", [1]), ["a", "b"])


def test_the_scope_is_the_functions_own_or_the_settings_or_by_the_form():
    def lists(completions):
        return []

    def single(solution_str, ground_truth):
        return 1.0

    def scope_of(function, scope="auto"):
        return adapt(function, spec="f", scope=scope).scope

    assert scope_of(lists) == scope_of(lists, "group") == "group"
    assert scope_of(lists, "sample") == scope_of(single, "group") == "sample"
    lists.scope, single.scope = "sample", "group"
    assert scope_of(functools.partial(lists), "group") == "sample"
    with pytest.raises(ValueError, match="(?s)its parameters take one sample.*solution_strs"):
        scope_of(single)
    lists.scope = "batch"
    with pytest.raises(ValueError, match="has scope 'batch'; expected sample, group"):
        scope_of(lists)


def test_trl_functions_get_messages_for_conversations():
    def f(prompts, completions):
        assert completions == [[{"role": "assistant", "content": "4"}]]
        return numpy.array([len(prompts[0])])

    talk = [{"role": "user", "content": "x"}]
    assert score(f, row={"prompt": talk}).value == 1.0
    assert score(f, row={"messages": talk + [{"role": "assistant", "content": "y"}]}).value == 1.0


def test_async_functions_and_reasoning_gym_graders_are_called():
    async def f(completions):
        return [3.0]

    assert score(f).value == 3.0
    assert score(lambda answer, entry: float(entry["level"])).value == 5.0


@pytest.mark.parametrize(
    "value", [1, True, 0.5, numpy.float32(0.5), numpy.int64(2), numpy.array(1.5), numpy.bool_(True)]
)
def test_numbers_of_all_kinds_are_finite_values(value):
    assert finite(value) == float(value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "1",
        b"1",
        float("nan"),
        -float("inf"),
        [1],
        {},
        numpy.float32("nan"),
        numpy.zeros(2),
        1j,
        object(),
    ],
)
def test_anything_else_is_a_bad_value(value):
    with pytest.raises(BadValue):
        finite(value)
    with pytest.raises(BadValue):
        score(lambda answer, entry: value)


@pytest.mark.parametrize("result", [[], [1.0, 2.0], 1j, None, "x"])
def test_trl_results_that_are_not_one_value_are_bad(result):
    with pytest.raises(BadValue):
        score(lambda completions: result)


def test_functions_combine_by_weight_and_none_leaves_one_out(tmp_path):
    (tmp_path / "r.py").write_text(
        "def a(completions): return [2.0]\n"
        "def b(completions, log_metric):\n    log_metric('m', 1)\n    return [3.0]\n"
        "def none(completions): return [None]\n"
        "def huge(completions): return [1e308]\n"
    )

    def scored(*names, weights):
        specs = [f"{tmp_path}/r.py:{n}" for n in names]
        functions = dict(zip(part_names(specs), specs))
        setup = Setup(functions=functions, weights=weights, scope="sample")
        return RewardScorer(setup).score(1, RewardSample(ROW, "4", [], False))

    got = scored("a", "b", "none", weights=(1.0, 0.5, 9.0)).result
    assert (got.value, got.parts, got.metrics) == (3.5, {"a": 2.0, "b": 3.0}, {"b/m": 1.0})
    nothing = f"none ({tmp_path}/r.py:5) returned None"
    assert scored("none", weights=(1.0,)).result == RewardResult(None, message=nothing)
    assert scored("huge", "huge", weights=(1.0, 1.0)).failure == "bad_value"
    assert scored("a", "a", weights=(1.0, 1.0)).result.parts == {"a_0": 2.0, "a_1": 2.0}


FACTS = {
    "concurrency": 2,
    "scopes": ["group"],
    "called": {"RewardList": "f (r.py:1)"},
    "environments": {},
}
TOOLS = {"tools": [], "tool_parser": "", "not_plain": ""}


def test_reports_survive_being_cut_anywhere():
    found = RewardResult(None, 0.1, {"a": 1 / 3}, {"m": -1e-300}, {"t": "\ud800 \n"})
    bad = RewardResult(None, failure="bad_value", message="no number")
    turn = TurnResult(
        None, b"\x00\xff", ({"role": "user", "content": ""},), False, 2.0, {"i": 1.0}, 3
    )
    reports = [
        Ready(1.5, FACTS | {"environments": {"rollout.environment": TOOLS}}),
        Began(2**61, 0.25),
        Done(1, 2.0, 0.5, None, "", found),
        Done(2, 2.0, 0.5, "error", "why", None),
        Done(4, 2.0, 0.5, None, "", ListResult(None, results=(found, bad))),
        Done(3, 2.0, 0.5, None, "", turn),
        Returned((1, 2)),
        Refused("no"),
    ]
    data = b"".join(map(pack_report, reports))
    for cut in range(0, len(data), 7):
        buffer = bytearray(data[:cut])
        first = list(take_reports(buffer))
        buffer += data[cut:]
        assert first + list(take_reports(buffer)) == reports
        assert not buffer


CALL = {"seconds": 1, "failure": None, "message": ""}
SCORE = CALL | {"value": 1, "parts": {}, "metrics": {}, "extras": {}, "retries": 0}
TURN = CALL | {"messages": [], "is_done": False, "reward": 1, "info": {}, "state": 0}


def done(kind="RewardResult", result=SCORE, **fields):
    fields = CALL | {"id": 1, "finished": 1, "result": [kind, result], "retries": 0} | fields
    return json.dumps(["Done", fields])


def ready(**facts):
    return json.dumps(["Ready", {"at": 1, "facts": FACTS | facts}])


def without(fields, name):
    return {key: value for key, value in fields.items() if key != name}


def sent(text):
    data = text.encode()
    return list(take_reports(bytearray(struct.pack("<4sII", b"spmd", len(data), 0) + data)))


def test_reports_that_are_right_are_read():
    assert sent(done())[0].result == RewardResult(None, 1.0, seconds=1.0)
    assert sent(done("ListResult", CALL | {"results": [["RewardResult", SCORE]]}))
    assert sent(done("TurnResult", TURN | {"messages": [{"role": "user", "content": ""}]}))
    failed = done(failure="error", result=None).replace('["RewardResult", null]', "null")
    assert sent(failed)[0].failure == "error"
    assert sent(ready()) and sent(ready(environments={"rollout.environment": TOOLS}))


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        "[" * 100_000,
        '["Done"]',
        '["Exec", {}]',
        '["Began", {"id": true, "at": 1}]',
        '["Began", {"id": 1, "at": NaN}]',
        '["Began", {"id": 1, "at": 1e999}]',
        f'["Began", {{"id": 1, "at": 1{"0" * 400}}}]',
        '["Began", {"id": 1, "at": 1, "by": 2}]',
        ready(concurrency=0),
        '["Ready", {"at": 1, "facts": []}]',
        ready(scopes=["all"]),
        ready(called={"Open": 1}),
        ready(environments=[]),
        ready(environments={"rollout.environment": []}),
        ready(environments={"rollout.environment": TOOLS | {"tools": ""}}),
        ready(environments={"rollout.environment": without(TOOLS, "tool_parser")}),
        '["Returned", {"ids": "12"}]',
        '["Returned", {"ids": [1.5]}]',
        '["Refused", {"text": 7}]',
        json.dumps(["RewardResult", SCORE]),
        done(result=None).replace('["RewardResult", null]', "null"),
        done(result={}),
        done(kind="Done"),
        done(result=without(SCORE, "parts")),
        done(result=SCORE | {"key": 1}),
        done(result=SCORE | {"value": "1"}),
        done(result=SCORE | {"parts": {"a": []}}),
        done(result=SCORE | {"extras": {"a": 1}}),
        done(result=SCORE | {"seconds": -1}),
        done(failure="no"),
        done(seconds=-1),
        done(retries=-1),
        done(retries=0.5),
        done("ListResult", CALL | {"results": [["TurnResult", TURN]]}),
        done("ListResult", CALL | {"results": [["RewardResult", SCORE | {"failure": "no"}]]}),
        done("TurnResult", TURN | {"messages": ["a"]}),
        done("TurnResult", TURN | {"messages": [{"role": "user"}]}),
        done("TurnResult", TURN | {"messages": [{"role": "user", "content": 1}]}),
        done("TurnResult", TURN | {"messages": [{"role": "user", "content": "\ud800"}]}),
    ],
)
def test_what_is_no_report_is_refused(text):
    with pytest.raises(BadReport):
        sent(text)


def test_a_worker_that_does_not_say_what_a_job_calls_costs_no_more_than_its_name():
    worker = object.__new__(WorkerProcess)
    worker.facts = sent(ready(called={}))[0].facts
    assert worker.called(QueuedJob(0, 1, "key", RewardSample, b"")) == "the function"


@pytest.mark.parametrize("data", [b"x" * 12, pickle.dumps([1] * 9), b"spmd" + b"\xff" * 8])
def test_what_has_no_head_of_a_report_is_refused_at_once(data):
    with pytest.raises(BadReport):
        list(take_reports(bytearray(data)))


# --------------------------------------------------------------------------- graders


def test_numeric_refuses_a_reference_without_a_number():
    with pytest.raises(ValueError, match="holds no number"):
        graders.numeric("d", "3", "three")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>hm\nso</think>\n42", 1.0),
        ("<think></think> 42", 1.0),
        ("42", 0.0),
        ("<think>a</think>", 0.0),
        ("<think>a</think>  \n", 0.0),
        ("<think>a 42", 0.0),
        ("<think>a</think>b<think>c</think>d", 0.0),
    ],
)
def test_think_format_wants_one_thought_and_an_answer(text, value):
    assert graders.think_format("d", text, None) == value


# --------------------------------------------------------------------------- as others write them


def test_functions_in_the_styles_of_verl_trl_and_reasoning_gym_run_as_they_are():
    def gsm8k(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
        assert method == "strict"
        found = re.findall(r"#### (\-?[0-9\.\,]+)", solution_str)
        return (score if found[-1] == ground_truth else format_score) if found else 0

    def by_source(data_source, solution_str, ground_truth, extra_info):
        assert data_source == "d" and extra_info == {"k": 1}
        return {"score": 1.0, "acc": True, "pred": "4"}

    def accuracy_reward(completions: list[list[dict[str, str]]], solution: list[str], **kwargs):
        contents = [completion[0]["content"] for completion in completions]
        return [float(s in c) if s else None for c, s in zip(contents, solution)]

    def reward_func(prompts, completions, completion_ids, trainer_state=None, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    assert score(gsm8k, "#### 4") == Score(1.0) and score(gsm8k, "4") == Score(0.0)
    assert score(by_source) == Score(1.0, {"acc": 1.0}, {"pred": "4"})
    talk = {"prompt": [{"role": "user", "content": "x"}], "solution": "4"}
    assert score(accuracy_reward, "is 4", talk).value == 1.0
    assert score(accuracy_reward, "is 4", talk | {"solution": ""}).value is None
    assert score(reward_func).value == 2.0

    reasoning_gym = pytest.importorskip("reasoning_gym")
    for name in ("leg_counting", "countdown", "letter_jumble"):
        data = reasoning_gym.create_dataset(name, size=1, seed=0)
        right, wrong = (
            score(data.score_answer, text, data[0]).value for text in (data[0]["answer"], "no idea")
        )
        assert right == 1.0 > wrong
