"""Episodes of agents in the loop: what they ask for becomes requests, what is drawn becomes traces,
and a run repeats without its agents."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from spmdrl.agents.messages import NO_PARENT, Ask
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.errors import RewardFailed
from spmdrl.rollout.decision_log import is_timed
from tests.helpers.built import changed, small_model
from tests.rollout.agent_runs import Agents, Call, Result, Runs, config_of, wanderer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def runs(model, tmp_path, monkeypatch) -> Runs:
    return Runs(tmp_path, model, monkeypatch)


AHEAD = dict(steps=4, lag=1, rollout=dict(schedule=dict(in_flight=True, over_sample=1.5)))
"""Episodes go on over new weights and over checkpoints."""
KINDS = {"plain": {}, "ahead": AHEAD}
NO_AGENT = "no agent runs"


def drawn_by(result: Result) -> Counter:
    """Return how often each sampled token, with its logprob and version, is trained on."""
    found: Counter = Counter()
    for share in result.shares.values():
        own = share.response_mask
        columns = (share.tokens[own], share.rollout_logprobs[own], share.policy_versions[own])
        found.update(zip(*(column.tolist() for column in columns)))
    return found


# --------------------------------------------------------------------------- what is trained on


def test_every_token_that_an_agent_got_is_trained_on_once(runs):
    result = runs.run("once")
    assert result.agents is not None
    got: Counter = Counter()
    for answer in result.agents.answered:
        version = int(answer.episode.split("-")[1])  # lag 0: that of the step
        for tokens, logprobs in zip(answer.tokens, answer.logprobs, strict=True):
            got.update(zip(tokens, logprobs, [version] * len(tokens)))
    assert drawn_by(result) == got and got.total() > 100
    for share in result.shares.values():
        # Two traces that continue the first answer, two samples of the summary: one may go on.
        pairs = Counter(zip(share.scalars.group_ids.tolist(), share.scalars.sample_ids.tolist()))
        assert pairs == dict.fromkeys([(0, 0), (0, 1), (1, 0), (1, 1)], 4)
        assert share.sums["reward/agent/mean"][1] == 4
        assert share.sums["agent/calls"][1] == 4


def test_tokens_keep_the_versions_that_drew_them_over_new_weights(runs):
    result = runs.run("ahead", late=1, is_invariant=True, **AHEAD)
    versions = [share.policy_versions[share.response_mask] for share in result.shares.values()]
    spans = [(own.min().item(), own.max().item()) for own in versions]
    assert any(least < most for least, most in spans)
    assert all(step - 2 <= least and most <= step for step, (least, most) in enumerate(spans))


@pytest.mark.parametrize("kind", KINDS)
def test_agents_that_read_along_are_shown_each_token_once_and_change_nothing(kind, runs):
    plain = runs.run("plain", late=1, **KINDS[kind])
    agents = Agents(wanderer, late=1, streams=True)
    read = runs.run("read", late=1, agents=agents, **KINDS[kind])
    assert read.numbers() == plain.numbers()
    early = _check_shown(agents)
    assert early > 10


def test_an_agent_that_begins_again_is_shown_all_from_the_beginning(runs):
    agents = Agents(wanderer, late=1, streams=True, losses=1)
    runs.run("read", late=1, agents=agents)
    assert len(agents.begun) > len(set(agents.begun))
    assert _check_shown(agents) > 10


def _check_shown(agents: Agents) -> int:
    """Check what was shown of each answer; return how many came in several pieces."""
    early = 0
    for answer in agents.answered:
        for sample, tokens in enumerate(answer.tokens):
            pieces = agents.shown.get((answer.episode, answer.id, sample), [])
            joined = [token for piece in pieces for token in piece]
            assert joined == list(tokens[: len(joined)])
            early += len(pieces) > 1
    return early


def test_traces_are_the_tokens_that_the_engine_read_and_drew(runs):
    result = runs.run("once", is_invariant=True)
    assert result.engine is not None
    prompts = {request.prompt for request in result.engine.seen}
    for share in result.shares.values():
        for begin, end in zip(share.cu_seqlens, share.cu_seqlens[1:]):
            tokens = share.tokens[begin:end].tolist()
            starts = [at for at in range(1, len(tokens)) if tuple(tokens[:at]) in prompts]
            assert starts, "the engine was asked for other tokens"


# --------------------------------------------------------------------------- runs that repeat


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_repeats_without_agents_and_gateway(kind, runs):
    changes = KINDS[kind]
    late = runs.run("late", late=3, evaluates=True, **changes)
    other = runs.run("other", late=4, evaluates=True, **changes)
    assert late.numbers() != other.numbers()  # timing decides
    agents = Agents(lambda seed: pytest.fail(NO_AGENT))
    more = runs.replayed("late", **changes)
    again = runs.run("again", evaluates=True, agents=agents, **more)
    assert again.numbers() == late.numbers()
    assert runs.decisions("again") == runs.decisions("late")
    assert agents.started == 0 and not agents.begun and not agents.answered


@pytest.mark.parametrize("step, late", [(1, 2), (2, 13)])
def test_a_resumed_run_repeats_what_is_written_without_agents(step, late, runs):
    once = runs.run("once", late=late, evaluates=True, **AHEAD)
    saved = once.states[step]["waiting"]
    episodes = [episode for group in saved for episode in group["episodes"]]
    nodes = [node for episode in episodes for node in episode["tree"]["nodes"]]
    assert any(node["is_complete"] for node in nodes)
    assert any(not node["is_complete"] and len(node["sampled"]["tokens"]) for node in nodes)
    decisions = runs.decisions("once")
    agents = Agents(lambda seed: pytest.fail(NO_AGENT))
    again = runs.run("once", agents=agents, resumed=once, step=step, evaluates=True, **AHEAD)
    assert not agents.begun
    assert runs.decisions("once") == decisions
    again.shares |= {done: once.shares[done] for done in range(step)}
    again.evaluations |= {done: once.evaluations[done] for done in range(1, step + 1)}
    assert again.numbers() == once.numbers()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kill_at", [30, 47, 62])
def test_a_run_that_is_killed_in_the_middle_of_episodes_goes_on(kill_at, kind, runs):
    changes = KINDS[kind]
    late = None if kind == "plain" else 5
    whole = runs.run("whole", late=late, is_invariant=True, evaluates=True, **changes)
    killed = runs.run(
        "killed", late=late, is_invariant=True, evaluates=True, kill_at=kill_at, **changes
    )
    step = max(killed.states, default=0)
    assert step < 3, "it was not killed"
    resumed = runs.run(
        "killed",
        late=late,
        is_invariant=True,
        evaluates=True,
        resumed=killed if step else None,
        step=step,
        **changes,
    )
    assert resumed.agents is not None and resumed.agents.begun
    resumed.shares |= {k: v for k, v in killed.shares.items() if k < step}
    resumed.evaluations |= {k: v for k, v in killed.evaluations.items() if k <= step}
    if kind == "plain":  # each token is of one version, so that timing changes nothing
        assert resumed.numbers() == whole.numbers()
    more = runs.replayed("killed", **changes)
    again = runs.run("again", None, is_invariant=True, evaluates=True, **more)
    assert again.numbers() == resumed.numbers()


@pytest.mark.parametrize("kind", KINDS)
def test_agents_that_are_lost_with_their_worker_begin_again_once(kind, runs, caplog):
    changes = KINDS[kind]
    late = None if kind == "plain" else 5
    whole = runs.run("whole", late=late, is_invariant=True, evaluates=True, **changes)
    losing = Agents(wanderer, late=late, losses=1)
    lost = runs.run("lost", agents=losing, is_invariant=True, evaluates=True, **changes)
    assert "the worker process ended with signal 9; 1 agents begin again" in caplog.text
    assert set(Counter(losing.begun).values()) == {1, 2}
    assert all(share.scalars.is_valid.all() for share in lost.shares.values())
    if kind == "plain":  # what they had asked gets the same answers
        assert lost.numbers() == whole.numbers()
    again = runs.run(
        "again", None, is_invariant=True, evaluates=True, **runs.replayed("lost", **changes)
    )
    assert again.numbers() == lost.numbers()


def test_an_agent_that_is_lost_twice_fails(runs, caplog):
    losing = Agents(wanderer, losses=2)
    result = runs.run("lost", agents=losing)
    assert max(Counter(losing.begun).values()) == 2
    assert "agent: the worker process ended with signal 9" in caplog.text
    valid = [own.scalars.is_valid.tolist() for own in result.shares.values()]
    assert {True, False} == {one for own in valid for one in own}
    assert sum(own.sums["reward/errors"][0] for own in result.shares.values()) > 0


def test_the_time_of_agents_runs_only_while_they_are_answered(runs):
    result = runs.run("once", late=2, evaluates=True, **AHEAD)
    assert result.agents is not None
    stretches = [own for own in result.agents.served if own]
    assert result.agents.served == [own for kind in stretches for own in (kind, "")]
    assert stretches.count("eval") == 4 and stretches.count("train") >= 4


def test_runs_of_agents_write_their_decisions(model, tmp_path):
    cfg = config_of(model, tmp_path)
    assert is_timed(cfg)
    assert is_timed(changed(cfg, rollout=dict(agent="", agent_command=("solve",))))
    assert not is_timed(changed(cfg, rollout=dict(agent="")))


# --------------------------------------------------------------------------- how episodes end


def asks_once(seed: int):
    yield [Call((3, 4))]
    return 0.5, {}


def without_reward(seed: int):
    (answer,) = yield [Call((3, 4))]
    yield [Call((5,), answer.nodes[0])]
    return None, {"own": 2.0}


def silent(seed: int):
    return 1.0, {}
    yield []


def broken(seed: int):
    yield [Call((3, 4))]
    raise KeyError("lost")


@pytest.mark.parametrize(
    "agent, failure, message",
    [
        (silent, "error", "agent: it ended without a single answer of the policy"),
        (broken, "error", "agent: KeyError: 'lost'"),
    ],
)
def test_an_episode_without_reward_fails_alone_and_by_name(agent, failure, message, runs, caplog):
    def sometimes(seed: int):
        return (yield from (agent if seed % 2 else asks_once)(seed))

    result = runs.run("once", sometimes)
    assert message in caplog.text
    valid = [own.scalars.is_valid.tolist() for own in result.shares.values()]
    assert {True, False} == {one for own in valid for one in own}
    sums = [own.sums for own in result.shares.values()]
    failed = sum(own["rollout/failed_rewards"][0] for own in sums)
    assert failed == sum(own["reward/errors"][0] for own in sums) > 0
    again = runs.run("again", None, **runs.replayed("once"))
    assert again.numbers() == result.numbers()


def test_the_first_failed_agent_ends_the_run_if_rewards_must_not_fail(runs):
    with pytest.raises(RewardFailed, match="error after .* s: agent: KeyError: 'lost'"):
        runs.run("once", broken, rewards=dict(on_failure="fail"))
    assert not any("lost" in line for line in runs.decisions("once"))
    resumed = runs.run("once", asks_once, rewards=dict(on_failure="fail"))
    assert len(resumed.shares) == 3


@pytest.mark.parametrize("scope", ["sample", "group"])
def test_reward_functions_score_the_last_answer_of_an_agent_that_returns_no_reward(scope, runs):
    def half(seed: int):
        return (yield from (without_reward if seed % 2 else asks_once)(seed))

    agents = Agents(half, score=lambda text: len(text) / 8, scopes=(scope,))
    result = runs.run("once", agents=agents)
    tokenizer = load_tokenizer(config_of(runs.model, runs.folder))
    seen = set()
    for share in result.shares.values():
        assert share.scalars.is_valid.all()
        for row, (begin, end) in enumerate(zip(share.cu_seqlens, share.cu_seqlens[1:])):
            turns = int((share.scalars.turns[row, :, 1] != -2).sum())
            reward = share.scalars.rewards[row].item()
            seen.add(turns)
            if turns == 1:
                assert reward == 0.5
                continue
            mask = share.response_mask[begin:end].tolist()
            last = share.tokens[begin:end][len(mask) - mask[::-1].index(False) :]
            assert len(last) < sum(mask)
            (text,) = tokenizer.batch_decode([last.tolist()], skip_special_tokens=True)
            assert reward == len(text) / 8
    assert seen == {1, 2}
    sums = [own.sums for own in result.shares.values()]
    assert sum(own["agent/own"][1] for own in sums) == sum(
        own["reward/scored/mean"][1] for own in sums
    )


def test_a_request_without_room_is_refused_and_the_agent_may_go_on(runs):
    limits = dict(data=dict(max_prompt_tokens=8), sampling=dict(max_response_tokens=6))
    refusals: list[list[str]] = []

    def fills(seed: int):
        (first,) = yield [Call(tuple(range(3, 12)))]
        (answer,) = yield [Call((3,) * 8, max_tokens=4)]
        (second,) = yield [Call((4,) * 10, answer.nodes[0])]
        while not answer.refusal:
            (answer,) = yield [Call((4,), answer.nodes[0], max_tokens=99)]
        refusals.append([first.refusal, second.refusal, answer.refusal])
        return 1.0, {}

    result = runs.run("once", fills, **limits)
    assert len(refusals) == 12
    ends = ("of this conversation are answers; 6 are allowed", "from 1 to 13 are allowed")
    for first, second, last in refusals:
        assert first == "the messages have 9 tokens, above 8 for a first prompt"
        assert second.endswith("tokens; from 1 to 13 are allowed")
        assert last.endswith(ends)
    for share in result.shares.values():
        assert share.scalars.lengths.max() <= 14 and share.scalars.response_lengths.max() <= 6
        assert share.scalars.is_valid.all()


def test_requests_that_an_agent_leaves_behind_are_dropped(runs):
    def leaves(seed: int):
        yield [Call((3, 4))]
        return 0.5, {}

    class Leaving(Agents):
        def solve(self, key: str, **more: object) -> None:
            super().solve(key, **more)
            self._asks.append(Ask(key, 77, NO_PARENT, (9, 9, 9), 2, 20, ()))

    def agents(late: int) -> Leaving:
        return Leaving(leaves, late=late)

    result = runs.run("once", agents=agents(2), evaluates=True, **AHEAD)
    assert result.engine is not None
    asked = sum(request.prompt[:3] == (9, 9, 9) for request in result.engine.seen)
    assert asked > 4
    kept = sum((own.scalars.lengths > 20).sum().item() for own in result.shares.values())
    assert kept < asked
    again = runs.run("again", None, evaluates=True, **runs.replayed("once", **AHEAD))
    assert again.numbers() == result.numbers()
    resumed = runs.run("once", agents=agents(3), resumed=result, step=2, evaluates=True, **AHEAD)
    assert {2, 3} == set(resumed.shares)
    for step, share in resumed.shares.items():
        assert torch.equal(share.tokens, result.shares[step].tokens)


def test_an_idle_engine_waits_for_agents_and_not_in_a_loop(runs):
    result = runs.run("once", late=1)
    assert result.agents is not None and result.engine is not None
    # Each wait ends with something that arrived.
    assert 0 < result.agents.waited <= len(result.agents.answered) + 12


def test_a_replay_that_has_no_decisions_of_an_agent_says_so(runs):
    runs.run("once")
    with pytest.raises(RuntimeError, match="evaluate .* of step 1, .* has agents to start"):
        runs.run("again", None, evaluates=True, **runs.replayed("once"))
