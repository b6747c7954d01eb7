"""Turns are played in real worker processes: any worker, any turn, killed at the deadline."""

from __future__ import annotations

import os
import re
import signal
import textwrap
import time

import pytest

from spmdrl.environments.conversation import Chat
from spmdrl.environments.protocol import Response
from spmdrl.environments.tool_calls import hermes
from spmdrl.workers.pool import RewardResult, TurnResult
from tests.helpers.chat_templates import chat_tokenizer
from tests.helpers.pool_runs import drained, pool_of, submit

ENVIRONMENT = '''
import os, threading, time
from spmdrl.environments.protocol import Turn

class Plain(str): pass

class Odd:
    """Does what the response says."""

    def __init__(self, *, greeting="hello"):
        self.greeting, self.pids = greeting, []
    def reset(self, row, seed):
        self.seed = seed
        if row.get("reset") == "hang": time.sleep(1000)
        if row.get("reset") == "raise": raise KeyError("lost")
        if row.get("reset") == "lock": self.client = {"lock": threading.Lock()}
        return [{"role": "user", "content": f"{self.greeting} {row['prompt']}"}]
    def step(self, response):
        self.pids.append(os.getpid())
        text = response.text
        if text == "hang": time.sleep(1000)
        if text == "exit": os._exit(7)
        if text == "raise": raise KeyError("lost")
        if text == "lock": self.lock = threading.Lock()
        if text == "nothing": return None
        if text == "slow": time.sleep(0.1)
        if text == "end":
            return Turn(is_done=True, reward=1.5, info={"pids": len(set(self.pids))})
        content = Plain(f"{self.seed} {len(self.pids)}")
        return Turn([{"role": "user", "content": content}], reward=0.25)

def length(completions, **columns):
    return [float(len(completions[0]))]
'''


@pytest.fixture
def place(tmp_path):
    path = tmp_path / "odd_env.py"
    path.write_text(ENVIRONMENT)
    return path


def opened(pool, *keys, **row):
    for seed, key in enumerate(keys):
        pool.open(key, row={"prompt": "you"} | row, seed=seed)
    return {r.key: r for r in drained(pool)}


def said(pool, environments, text):
    """Play one turn of several episodes."""
    for key, result in environments.items():
        pool.turn(key, environment=result.environment, response=Response(text))
    return {r.key: r for r in drained(pool)}


# --------------------------------------------------------------------------- episodes


def test_any_worker_plays_any_turn(place):
    with pool_of(environment={"name": f"{place}:Odd", "greeting": "hi"}, workers=2) as pool:
        pool.start()
        found = opened(pool, *range(8))
        assert found[3].messages == ({"role": "user", "content": "hi you"},)
        for turn in range(1, 5):
            # Jobs alternate between the workers: another order, another worker.
            found = said(pool, dict(reversed(found.items())), "slow")
            for key, result in found.items():
                assert result.failure is None, result.message
                assert result.messages == ({"role": "user", "content": f"{key} {turn}"},)
                assert type(result.messages[0]["content"]) is str
                assert result.reward == 0.25 and not result.is_done and result.seconds >= 0.1
        found = said(pool, found, "end")
    assert all(
        (r.is_done, r.reward, r.environment, r.messages) == (True, 1.5, b"", ())
        for r in found.values()
    )
    assert max(r.info["pids"] for r in found.values()) >= 2  # 3 if one was slow for a while


def test_episodes_outlive_the_pool_that_began_them(place):
    environment = {"name": f"{place}:Odd"}
    with pool_of(environment=environment) as pool:
        found = said(pool, opened(pool, "a"), "x")
    with pool_of(environment=environment) as pool:  # as after a restart from a checkpoint
        assert said(pool, found, "x")["a"].messages[0]["content"] == "0 2"


def test_a_killed_worker_costs_no_episode_between_turns(place):
    with pool_of(environment={"name": f"{place}:Odd"}) as pool:
        pool.start()
        found = opened(pool, "a", "b")
        os.kill(pool._workers[0].process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 100
        while pool._workers and time.monotonic() < deadline:
            assert pool.poll() == []
        found = said(pool, found, "x")
        assert [found[k].messages[0]["content"] for k in "ab"] == ["0 1", "1 1"]


# --------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("text", "failure", "words"),
    [
        ("raise", "error", r"KeyError: 'lost' \(.*odd_env.py"),
        ("exit", "error", "exit code 7"),
        ("nothing", "bad_value", "must return a Turn, got None"),
        ("lock", "bad_value", r"Odd.lock \(lock\) cannot be pickled"),
    ],
)
def test_a_failing_turn_costs_only_its_episode(place, text, failure, words):
    with pool_of(environment={"name": f"{place}:Odd"}) as pool:
        found = opened(pool, "a", "b", "c")
        for key, what in zip("abc", ("x", text, "x")):
            pool.turn(key, environment=found[key].environment, response=Response(what))
        a, b, c = drained(pool)
    assert [r.failure for r in (a, b, c)] == [None, failure, None]
    assert re.search(words, b.message), b.message
    assert b.environment == b"" and b.messages == () and c.messages


@pytest.mark.parametrize(
    ("reset", "failure", "words"),
    [
        ("raise", "error", "KeyError"),
        ("lock", "bad_value", r"Odd.client\['lock'\] \(lock\) cannot be pickled"),
    ],
)
def test_a_failing_opening_is_reported(place, reset, failure, words):
    with pool_of(environment={"name": f"{place}:Odd"}) as pool:
        result = opened(pool, "a", reset=reset)["a"]
    assert result.failure == failure and re.search(words, result.message), result.message


def test_hanging_turns_and_openings_are_killed_at_the_deadline(place):
    with pool_of(environment={"name": f"{place}:Odd"}, timeout_s=4.0) as pool:
        pool.start()
        found = opened(pool, "a", "b")
        pool.turn("a", environment=found["a"].environment, response=Response("hang"))
        pool.turn("b", environment=found["b"].environment, response=Response("x"))
        pool.open("c", row={"prompt": "p", "reset": "hang"})
        done = {r.key: r for r in drained(pool)}
    assert [done[k].failure for k in "abc"] == ["timeout", None, "timeout"]
    said = r"no result of Odd\.{} \(.*\.py:\d+\) within rewards.timeout_s = 4 s"
    assert re.fullmatch(said.format("step"), done["a"].message) and done["b"].messages
    assert re.fullmatch(said.format("reset"), done["c"].message)


def test_unusable_environments_are_refused_at_start():
    for environment, words in (
        ({"name": "guess_numbre"}, "did you mean guess_number"),
        ({"name": "guess_number", "hig": 3}, "did you mean high"),
        ({"max_turns": 3}, "rollout.environment.name"),
    ):
        with pool_of(environment=environment) as pool, pytest.raises(ValueError, match=words):
            pool.start()


# --------------------------------------------------------------------------- with rewards


def test_one_pool_scores_and_plays(place):
    with pool_of(f"{place}:length", environment={"name": f"{place}:Odd"}) as pool:
        pool.open("k", row={"prompt": "you"})
        submit(pool, "k", "abc")
        played, scored = drained(pool)
    assert isinstance(played, TurnResult) and isinstance(scored, RewardResult)
    assert (played.key, scored.key, scored.value) == ("k", "k", 3.0)


def test_without_functions_an_environments_own_rewards_are_all(place):
    with pool_of(environment={"name": f"{place}:Odd"}) as pool:
        submit(pool, 0, "abc")
        assert [r.value for r in drained(pool)] == [0.0]
        assert pool.environments["rollout.environment"]["tools"] == []
    with pool_of(environment={"name": "guess_number"}, train="task:guess_number") as pool:
        submit(pool, 0, "7", answer="7", data_source="task:guess_number")
        assert [(r.value, r.failure) for r in drained(pool)] == [(0.0, None)]


def test_the_last_response_of_a_tool_episode_is_graded():
    with pool_of(
        environment={"name": "tools", "tools": "calculator"}, train="task:addition"
    ) as pool:
        pool.start()
        tools = pool.environments["rollout.environment"]["tools"]
        assert [tool["function"]["name"] for tool in tools] == ["calculator"]
        row = {"prompt": "2+3=", "answer": "5", "data_source": "task:addition"}
        pool.open(0, row=row)
        text = '<tool_call>{"name": "calculator", "arguments": {"expression": "2+3"}}</tool_call>'
        result = drained(pool)[0]
        pool.turn(0, environment=result.environment, response=Response(text, hermes(text)))
        result = drained(pool)[0]
        assert result.messages[0]["content"] == "5" and result.info["tool_calls"] == 1
        pool.turn(0, environment=result.environment, response=Response("5"))
        assert drained(pool)[0].is_done
        submit(pool, 0, "5", **row)
        assert drained(pool)[0].value == 1.0


def test_tools_and_environments_leave_torch_out_of_the_workers(place):
    place.write_text(
        ENVIRONMENT
        + textwrap.dedent("""
        class Look(Odd):
            def step(self, response):
                import sys
                return Turn(is_done=True, info={"torch": "torch" in sys.modules})
    """)
    )
    with pool_of(environment={"name": f"{place}:Look"}) as pool:
        assert said(pool, opened(pool, 0), "x")[0].info == {"torch": 0.0}


# --------------------------------------------------------------------------- speed


def test_a_turn_costs_the_rank_less_than_a_millisecond():
    words = chat_tokenizer("qwen")
    chat = Chat(words, stop_token_ids=[words.eos_token_id])
    tokens = (*words("Is it 1000?", add_special_tokens=False)["input_ids"], words.eos_token_id)
    turns = dict(turns=[tokens] * 64, are_truncated=[False] * 64)
    row = {"prompt": "Guess my number from 1 to 100.", "answer": "7"}
    with pool_of(environment={"name": "guess_number", "max_turns": 20, "turn_cost": 0.01}) as pool:
        pool.start()
        began, calls = time.process_time(), 0
        for key in range(64):
            pool.open(key, row=row)
        live = drained(pool)
        for result in live:
            assert chat.encode_opening(list(result.messages))
        calls += len(live)
        for _ in range(10):
            for result, response in zip(live, chat.decode_turns(**turns)):
                pool.turn(result.key, environment=result.environment, response=response)
            live = drained(pool)
            for result in live:
                assert chat.encode_answer(tokens, list(result.messages))
            calls += len(live)
        cost_s = (time.process_time() - began) / calls
    assert live[0].messages == ({"role": "user", "content": "lower"},)
    print(f"{cost_s * 1e6:.0f} us of the rank's time per turn")
    assert cost_s < 1e-3, f"{cost_s * 1e6:.0f} us"
