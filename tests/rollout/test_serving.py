"""Requests of other programs in the engine of a run: bounded, continued, without effect on it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from spmdrl.agents.messages import NO_PARENT, SERVE, Answer, Ask
from spmdrl.check.settings import validate
from spmdrl.engine.protocol import Request
from spmdrl.rollout.decision_log import is_timed
from spmdrl.rollout.judging import JudgeSample, Question
from spmdrl.rollout.serving import _continued
from tests.helpers.built import changed, good, small_model
from tests.helpers.drawn import completion
from tests.rollout.agent_runs import Agents, Runs, config_of
from tests.rollout.test_judging import _nobody

PLACES = 2
ROUNDS = 12
LONGEST = 30


class Program(Agents):
    """Stands in for workers, and for a program that always has three requests under way."""

    def __init__(self, *, asks: bool = True, late: int | None = None):
        super().__init__(_nobody, late=late, score=lambda text: sum(map(ord, text)) % 7 / 7)
        self._num_asked = 0
        for _ in range(3 if asks else 0):
            self._ask()

    def _ask(self) -> None:
        id = self._num_asked
        self._num_asked += 1
        self.streams[SERVE, id] = Counter()
        tokens = (3, 4 + id % 11)
        self._asks.append(Ask(SERVE, id, NO_PARENT, tokens, 1 + id % 2, LONGEST, (), 1.0, id))

    def open(self, episode: str) -> str:
        return f"key of {episode}"

    def answer(self, answer: Answer) -> None:
        shown = {
            key: [token for part in self.shown.pop((SERVE, answer.id, key), []) for token in part]
            for key in range(len(answer.tokens))
        }
        assert all(list(answer.tokens[key])[: len(own)] == own for key, own in shown.items())
        self.answered.append(answer)
        del self.streams[SERVE, answer.id]
        if self._num_asked < ROUNDS:
            self._ask()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def runs(model, tmp_path, monkeypatch) -> Runs:
    return Runs(tmp_path, model, monkeypatch)


def served(serve: int = PLACES) -> dict[str, Any]:
    """Return changes of a config by which its engine answers other programs."""
    rollout = dict(agent="", serve=serve)
    return dict(rewards=dict(functions=("f.py:own",)), rollout=rollout, steps=6)


@pytest.mark.parametrize("late", [None, 3])
def test_requests_go_on_over_updates_and_change_no_sample(late, runs):
    program = Program(late=late)
    own = dict(is_invariant=True, evaluates=True)
    result = runs.run("served", agents=program, **own, **served())
    alone = runs.run("alone", agents=Program(asks=False, late=late), **own, **served(serve=0))
    assert result.numbers() == alone.numbers()
    seen = [request for request in result.engine.seen if request.key.startswith(SERVE)]
    parts = Counter(request.key for request in seen)
    assert max(parts.values()) > 1, "no request outlived a step"
    assert program.answered and not any(answer.refusal for answer in program.answered)
    for answer in program.answered:
        assert len(answer.tokens) == 1 + answer.id % 2
        for tokens, logprobs in zip(answer.tokens, answer.logprobs):
            assert 0 < len(tokens) == len(logprobs) <= LONGEST
    for key in parts:
        prompts = [request.prompt for request in seen if request.key == key]
        rest = [request.max_tokens for request in seen if request.key == key]
        assert all(b[: len(a)] == a for a, b in zip(prompts, prompts[1:]))
        assert {len(prompt) + left for prompt, left in zip(prompts, rest)} == {2 + rest[0]}
    sums = [share.sums for share in result.shares.values()]
    counted = sum(own[f"{SERVE}/requests"][0] for own in sums)
    assert 0 < counted <= len(program.answered)
    assert f"{SERVE}/requests" not in alone.shares[0].sums


def test_none_enters_during_an_evaluation(runs):
    result = runs.run("served", agents=Program(), evaluates=True, **served())
    keys = [request.key for request in result.engine.seen]
    kinds = [key.partition("-")[0] for key in keys]
    assert "eval" in kinds
    for number, kind in enumerate(kinds):
        if kind == SERVE:
            before = [own for own in kinds[:number] if own != SERVE]
            assert before[-1] == "train", "in an evaluation"


def test_the_rest_of_a_sample_begins_after_what_was_drawn():
    ask = Ask(SERVE, 0, NO_PARENT, (3, 4), 1, 9, (), 1.0, 5)
    question = Question(ask, 0, 0.0, True)
    request = Request("serve-0-0", (3, 4), 9, 1.0, 5, (1,))
    sample = JudgeSample(question, 0, request)
    for tokens in ([7, 8], [9]):
        sample = _continued(sample, completion(tokens, key="serve-0-0"))
    assert sample.request.prompt == (3, 4, 7, 8, 9)
    assert (sample.request.max_tokens, sample.request.num_begun) == (6, 3)
    assert sample.request.seed not in (5, None)
    assert sample.begun is not None
    assert torch.equal(sample.begun.tokens, torch.tensor([7, 8, 9]))


def test_a_prompt_that_fills_a_sequence_is_refused_by_name(runs):
    program = Program(asks=False)
    program._asks.append(Ask(SERVE, 0, NO_PARENT, (3,) * 2000, 1, 9, (), 1.0, 0))
    program.streams[SERVE, 0] = Counter()
    program._num_asked = ROUNDS
    runs.run("long", agents=program, **served() | dict(steps=1))
    (answer,) = program.answered
    assert answer.refusal.startswith("the messages have 2000 tokens; at most ")


def test_a_run_with_an_endpoint_needs_no_schedule(model, tmp_path):
    assert not is_timed(changed(config_of(model, tmp_path), **served()))


STOLEN = dict(rollout=dict(schedule=dict(balance="steal")))


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            dict(engine=dict(exact=False)),
            "rollout.serve: 4 with deterministic true and engine.exact false; requests of other",
        ),
        (dict(rollout=dict(agent="a.py:solve")), "rollout.serve: 4 with rollout.agent a.py:solve"),
        (
            dict(rollout=dict(environment=dict(name="guess_number"))),
            "rollout.serve: 4 with rollout.environment",
        ),
        (
            dict(rewards=dict(functions=("f.py:own",), judge=dict(engine="policy"))),
            "rollout.serve: 4 with rewards.judge.engine policy",
        ),
        (
            dict(lag=1, rollout=dict(schedule=dict(in_flight=True))),
            "rollout.serve: 4 with rollout.schedule.in_flight true",
        ),
        (
            dict(rollout=dict(schedule=dict(over_sample=1.5))),
            "rollout.serve: 4 with rollout.schedule.over_sample 1.5",
        ),
        (
            dict(rollout=dict(schedule=dict(dynamic=3))),
            "rollout.serve: 4 with rollout.schedule.dynamic 3",
        ),
        (STOLEN, "rollout.serve: 4 with rollout.schedule.balance steal"),
        (dict(engine=dict(max_num_seqs=7)), "rollout.serve: 4 with engine.max_num_seqs 7"),
        (
            dict(engine=dict(options={"speculative_config": {"num_speculative_tokens": 3}})),
            "rollout.serve: 4 with engine.options.speculative_config",
        ),
        (dict(rollout=dict(replay_schedule="runs/a")), "time decides nothing in this run"),
        (dict(rollout=dict(record=dict(replay="runs/a"))), "so no engine can answer"),
    ],
)
def test_what_does_not_go_with_an_endpoint_is_refused_by_name(changes, words):
    cfg = good(rollout=dict(serve=4), engine=dict(exact=True))
    assert not [problem for problem in validate(cfg) if "serve" in problem]
    problems = validate(changed(cfg, **changes))
    assert any(words in problem for problem in problems), problems


def test_sums_that_do_not_repeat_need_no_exact_engine():
    cfg = good(rollout=dict(serve=4), deterministic=False)
    assert not [problem for problem in validate(cfg) if "rollout.serve" in problem]
