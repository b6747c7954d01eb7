"""The engine judges for reward functions: verdicts reach them, and a run repeats without them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from spmdrl.agents.messages import JUDGE, NO_PARENT, Answer, Ask
from spmdrl.check.settings import validate
from spmdrl.data.hashed import hashed
from spmdrl.rollout.decision_log import is_timed
from spmdrl.rollout.idle import Idle
from spmdrl.workers.messages import RewardResult
from tests.helpers.built import changed, good, small_model
from tests.rollout.agent_runs import Agents, Call, Runs, config_of

ROUNDS = 2
LIMIT = 6


def _nobody(seed: int) -> Any:
    raise AssertionError("no agent may run")


def _without_reward(seed: int) -> Any:
    (answer,) = yield [Call((3, 4 + seed % 5))]
    yield [Call((5,), answer.nodes[0])]
    return None, {"own": 2.0}


class Judged(Agents):
    """Stands in for workers whose function asks the judge about a response, and then about the
    verdict.

    Args:
        agent: plays the episodes, if the run has one.
        gives_up: share of the samples whose deadline is over before the second verdict.
        is_open: whether functions may be called.
    """

    def __init__(
        self,
        agent: Any = _nobody,
        *,
        late: int | None = None,
        scopes: tuple[str, ...] = ("sample",),
        gives_up: float = 0.0,
        is_open: bool = True,
    ):
        super().__init__(agent, late=late, score=float, scopes=scopes)
        self.gives_up = gives_up
        self.is_open = is_open
        self.submitted: list[str] = []
        self.refused: list[str] = []
        self._rounds: dict[int, tuple[str, int]] = {}
        self._chance = random.Random(late)

    def submit(self, key: str, *, response_tokens: list[int], group: str, **_: Any) -> None:
        assert self.is_open, "a function is called"
        self.submitted.append(key)
        if "group" not in self.scopes:
            self._ask(key, hashed(str(response_tokens)), number=0)
        else:
            self._groups.setdefault(group, []).append((key, response_tokens))

    def close_group(self, group: str) -> None:
        for key, tokens in self._groups.pop(group, []):
            self._ask(key, hashed(str(tokens)), number=0)

    def _ask(self, key: str, about: int, *, number: int) -> None:
        id = len(self._rounds)
        self._rounds[id] = (key, number)
        tokens = (3, 4 + about % 11, 4 + about % 13)
        self._asks.append(Ask(JUDGE, id, NO_PARENT, tokens, 1, LIMIT, (), 0.7, 0))

    def answer(self, answer: Answer) -> None:
        if answer.episode != JUDGE:
            super().answer(answer)
            return
        self.answered.append(answer)
        key, number = self._rounds[answer.id]
        if answer.refusal:
            self.refused.append(key)
            return
        verdict = sum(answer.tokens[0])
        if number + 1 < ROUNDS:
            self._ask(key, verdict, number=number + 1)
            if self._chance.random() < self.gives_up:
                self._results.append(RewardResult(key, failure="timeout", message="late"))
                self._rounds[len(self._rounds) - 1] = (key, ROUNDS)
        elif number < ROUNDS:
            own = dict(parts={"own": verdict / 9}, metrics={"n": 2.0}, extras={"reply": "x"})
            self._results.append(RewardResult(key, verdict / 9, **own))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def runs(model, tmp_path, monkeypatch) -> Runs:
    return Runs(tmp_path, model, monkeypatch)


def judged(**rollout: Any) -> dict[str, Any]:
    """Return changes of a config by which its engine judges."""
    own = dict(functions=("f.py:own",), judge=dict(engine="policy"))
    return dict(rewards=own, rollout=dict(agent="") | rollout, steps=4)


def rewards_of(result: Any) -> list[float]:
    return [float(r) for share in result.shares.values() for r in share.scalars.rewards]


# --------------------------------------------------------------------------- verdicts


def test_verdicts_reach_the_functions_and_are_not_trained_on(runs):
    agents = Judged()
    result = runs.run("once", agents=agents, **judged())
    rewards = rewards_of(result)
    assert len(rewards) == 16 and len({*rewards}) > 3
    assert len(agents.answered) == 16 * ROUNDS
    for share in result.shares.values():
        assert share.sums["judge/requests"] == (4 * ROUNDS, 1)
        assert share.sums["judge/prompt_tokens"] == (4 * ROUNDS * 3, 1)
        assert share.sums["judge/tokens"][0] > 0 < share.sums["judge/engine_s"][0]
        assert share.sums["judge/request_s"][1] == 4 * ROUNDS
        assert len(share.scalars.rewards) == 4
    asked = [request for request in result.engine.seen if request.key.startswith(JUDGE)]
    assert len(asked) == 16 * ROUNDS and not any(request.is_of_base for request in asked)
    assert {request.temperature for request in asked} == {0.7}
    seeds = {(request.prompt, request.seed) for request in asked}
    assert len(seeds) == len({prompt for prompt, _ in seeds})  # the question alone decides


def test_a_question_that_is_too_long_is_refused_by_name(runs):
    agents = Judged()
    changes = judged()
    changes["rewards"] |= dict(judge=dict(engine="policy", max_prompt_tokens=2), on_failure="drop")
    agents.answer = lambda answer: (  # type: ignore[method-assign]
        agents.answered.append(answer),
        agents._results.append(
            RewardResult(agents._rounds[answer.id][0], failure="error", message=answer.refusal)
        ),
    )
    result = runs.run("long", agents=agents, **changes | dict(steps=1))
    assert not result.shares[0].scalars.is_valid.any()
    (why,) = {answer.refusal for answer in agents.answered}
    assert why == "the messages have 3 tokens, above rewards.judge.max_prompt_tokens = 2"


def test_places_are_empty_for_the_reward_while_the_judge_alone_draws():
    for judging, cause in ((0, "tail"), (1, "tail"), (2, "reward")):
        idle = Idle(4)
        idle.count_step(8.0, drawing=2, playing=0, judging=judging)
        assert idle.take()[f"time/engine_idle_{cause}"][0] == 4.0


# --------------------------------------------------------------------------- runs that repeat


@pytest.mark.parametrize("scopes", [("sample",), ("group",)])
@pytest.mark.parametrize("gives_up", [0.0, 0.4])
def test_a_run_repeats_without_its_functions(scopes, gives_up, runs):
    options = dict(scopes=scopes, gives_up=gives_up)
    late = runs.run("late", agents=Judged(late=3, **options), evaluates=True, **judged())
    other = runs.run("other", agents=Judged(late=4, **options), evaluates=True, **judged())
    assert late.numbers() != other.numbers()  # timing decides
    agents = Judged(is_open=False, **options)
    more = judged() | runs.replayed("late", **judged())
    again = runs.run("again", agents=agents, evaluates=True, **more)
    assert again.numbers() == late.numbers() and not agents.answered
    assert runs.decisions("again") == runs.decisions("late")
    valid = [bool(v) for share in late.shares.values() for v in share.scalars.is_valid]
    assert all(valid) is (gives_up == 0)


def test_a_run_whose_agents_are_judged_repeats_without_both(runs):
    changes = judged(agent="agent.py:solve")
    late = runs.run("late", agents=Judged(_without_reward, late=3), evaluates=True, **changes)
    assert len({*rewards_of(late)}) > 2
    agents = Judged(is_open=False)
    more = changes | runs.replayed("late", **changes)
    again = runs.run("again", agents=agents, evaluates=True, **more)
    assert again.numbers() == late.numbers() and not agents.begun
    assert runs.decisions("again") == runs.decisions("late")


@pytest.mark.parametrize("gives_up", [0.0, 0.4])
def test_a_resumed_run_repeats_what_is_written_without_functions(gives_up, runs):
    first = Judged(late=5, gives_up=gives_up)
    once = runs.run("once", agents=first, evaluates=True, **judged())
    assert bool(first.refused) is (gives_up > 0), "nothing was left over"
    decisions = runs.decisions("once")
    agents = Judged(is_open=False)
    again = runs.run("once", agents=agents, resumed=once, step=2, evaluates=True, **judged())
    assert runs.decisions("once") == decisions
    again.shares |= {done: once.shares[done] for done in range(2)}
    again.evaluations |= {done: once.evaluations[done] for done in range(1, 3)}
    assert again.numbers() == once.numbers()


@pytest.mark.parametrize("scopes", [("sample",), ("group",)])
@pytest.mark.parametrize("kill_at", [23, 55, 71])
def test_a_run_that_is_killed_amid_verdicts_goes_on(kill_at, scopes, runs):
    own = dict(is_invariant=True, evaluates=True)
    whole = runs.run("whole", agents=Judged(late=5, scopes=scopes), **own, **judged())
    killed = runs.run(
        "killed", agents=Judged(late=5, scopes=scopes), kill_at=kill_at, **own, **judged()
    )
    step = max(killed.states, default=0)
    assert step < 4, "it was not killed"
    agents = Judged(late=7, scopes=scopes)
    resumed = runs.run(
        "killed", agents=agents, resumed=killed if step else None, step=step, **own, **judged()
    )
    assert agents.submitted, "the journal had all"
    resumed.shares |= {k: v for k, v in killed.shares.items() if k < step}
    resumed.evaluations |= {k: v for k, v in killed.evaluations.items() if k <= step}
    assert resumed.numbers() == whole.numbers()
    more = judged() | runs.replayed("killed", **judged())
    again = runs.run("again", agents=Judged(scopes=scopes, is_open=False), **own, **more)
    assert again.numbers() == resumed.numbers()


def test_runs_with_a_judge_write_their_decisions(model, tmp_path):
    cfg = changed(config_of(model, tmp_path), **judged())
    assert is_timed(cfg)
    assert not is_timed(changed(cfg, rewards=dict(judge=dict(engine="none"))))


# --------------------------------------------------------------------------- what is refused

ADAPTER = dict(lora=dict(rank=4, push="adapter"))


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(rewards=dict(judge=dict(engine="base"))), "base with model.lora.push merged; only"),
        (
            dict(rewards=dict(judge=dict(engine="base")), model=dict(lora=dict(rank=4))),
            "base with model.lora.push merged; only",
        ),
        (
            dict(rewards=dict(functions=())),
            "policy with rewards.functions empty; no function can ask",
        ),
        (
            dict(lag=1, rollout=dict(schedule=dict(in_flight=True))),
            "policy with rollout.schedule.in_flight true; checkpoints do not",
        ),
        (
            dict(rollout=dict(schedule=dict(over_sample=1.5))),
            "policy with rollout.schedule.over_sample 1.5; checkpoints do not",
        ),
        (
            dict(rewards=dict(judge=dict(engine="none", max_prompt_tokens=7))),
            "rewards.judge.max_prompt_tokens: 7 with rewards.judge.engine none",
        ),
        (
            dict(engine=dict(options={"speculative_config": {"num_speculative_tokens": 3}})),
            "policy with engine.options.speculative_config",
        ),
    ],
)
def test_what_does_not_go_with_a_judge_is_refused_by_name(changes, words):
    cfg = good(rewards=dict(functions=("f.py:own",), judge=dict(engine="policy")))
    assert not [problem for problem in validate(cfg) if "judge" in problem]
    assert any(words in problem for problem in validate(changed(cfg, **changes)))


def test_frozen_weights_judge_where_engines_get_adapters():
    own = dict(functions=("f.py:own",), judge=dict(engine="base"))
    assert not [p for p in validate(good(rewards=own, model=ADAPTER)) if "judge" in p]
