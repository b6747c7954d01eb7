"""Agents in real workers: what they return, and how those that fail end alone."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest

from spmdrl.agents.containers import make_labels
from spmdrl.workers.agent_queue import AgentQueue
from spmdrl.workers.messages import LOST, Serve, Solve
from spmdrl.workers.pool import RewardPool
from spmdrl.workers.worker_process import QueuedJob
from tests.helpers.built import made, refused
from tests.helpers.chat_templates import chat_tokenizer
from tests.helpers.gateway_runs import agent_config, gateway_in_thread, standing_in

END = "<|im_end|>"
AGENTS = """\
import asyncio, json, os, random, socket, sys, time

ASK = [{"role": "user", "content": "2+2?"}]

async def text(client, **options):
    answer = await client.chat.completions.create(model="m", messages=ASK, **options)
    return answer.choices[0].message.content

async def solve(row, client):
    return {"reward": float(await text(client) == row["answer"]), "asked": 1}

def plain(row, client):
    answer = client.chat.completions.create(model="m", messages=ASK)
    return float(answer.choices[0].message.content == row["answer"])

def from_the_environment(row, client):
    import openai

    answer = openai.OpenAI(max_retries=0).chat.completions.create(model="m", messages=ASK)
    return float(answer.choices[0].message.content == row["answer"])

async def nothing(row, client):
    await text(client)

async def fail():
    raise KeyError("lost in a group")

async def seeded(row, client, seed):
    return {"reward": seed, "drawn": random.random()}

async def hostile(row, client):
    do = row["do"]
    if do == "raise":
        raise KeyError("lost")
    if do == "exit":
        os._exit(3)
    if do == "sys.exit":
        sys.exit(0)
    if do == "crash":
        os.kill(os.getpid(), 11)
    if do == "block":
        time.sleep(600)  # its event loop too
    if do == "hang":
        await asyncio.sleep(600)
    if do == "text":
        return "good"
    if do == "nan":
        return {"reward": float("nan")}
    if do == "child":
        if os.fork() == 0:
            time.sleep(600)
        return 1.0
    if do == "daemon":
        if os.fork() == 0:
            os.setsid()
            for _ in range(8):
                os.fork()
            time.sleep(600)
        return 1.0
    if do == "killed":
        os.kill(os.getpid(), 9)  # as the kernel does when memory is short
    if do == "connections":
        place = client.base_url.host, client.base_url.port
        held = [socket.create_connection(place, timeout=20) for _ in range(1000)]
        found = float(await text(client) == "4")
        return found * len(held) / 1000
    if do == "memory":
        held = bytearray(3 << 30)
        for at in range(0, len(held), 4096):
            held[at] = 1
    if do == "print":
        print("x" * 2**24)
    if do == "close":
        os.closerange(0, 1000)
    if do == "name":
        return {"reward": 1.0, "../reward/mean": 3}
    if do == "long":
        raise ValueError("y" * 5000)
    if do == "group":
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
    if do == "insist":
        while True:
            await asyncio.gather(*[text(client) for _ in range(9)], return_exceptions=True)
    if do == "flood":
        asks = [text(client) for _ in range(100)]
        found = await asyncio.gather(*asks, return_exceptions=True)
        assert any(isinstance(error, Exception) for error in found)
    return float(await text(client) == "4")
"""


@contextlib.contextmanager
def running(tmp_path, agent="solve", *, write=None, **rollout):
    """Yield a pool whose agent is a function of AGENTS, and a stand-in leader."""
    file = tmp_path / "agents.py"
    file.write_text(AGENTS)
    own = dict(agent=f"{file}:{agent}" if agent else "", agent_timeout_s=60.0, agents_at_once=4)
    rewards = rollout.pop("rewards", {})
    cfg = agent_config(tmp_path / "m", rollout=own | rollout, rewards=rewards)
    write = write or (lambda ask: ["4" + END] * ask.samples)
    with gateway_in_thread(cfg) as gateway, RewardPool(cfg) as pool:
        with standing_in(gateway, chat_tokenizer("qwen"), write) as leader:
            pool.serve_agents("train")
            yield pool, leader


def start(pool, leader, key, row, seed=0, purpose="train"):
    pool.solve(
        key,
        row=row,
        seed=seed,
        purpose=purpose,
        base_url=leader.gateway.address,
        api_key=leader.open(key),
    )


def solved(pool, leader, *rows, seed=0):
    """Run an episode for each row; return {number: its result}."""
    for i, row in enumerate(rows):
        start(pool, leader, str(i), row, seed + i)
    return ended(pool, len(rows))


def ended(pool, count, *, left=0, within_s=90.0):
    """Wait until so many episodes have ended, and others are left; return {number: result}."""
    found = {}
    until = time.monotonic() + within_s
    while len(found) < count:
        assert time.monotonic() < until, f"{found} of {count}"
        found |= {int(result.key): result for result in pool.poll()}
        if len(found) < count:
            pool.wait()
    assert len(pool) == left
    return found


def wait_for_two_held(pool, leader):
    """Wait until the leader holds the requests of two agents."""
    until = time.monotonic() + 30
    while len(leader._held) < 2 and time.monotonic() < until:
        pool.poll()
        pool.wait()


@pytest.mark.parametrize("agent", ["solve", "plain", "from_the_environment"])
def test_an_agent_asks_the_policy_and_returns_its_reward(tmp_path, agent):
    with running(tmp_path, agent) as (pool, leader):
        found = solved(pool, leader, {"answer": "4"}, {"answer": "5"})
        assert [found[i].failure for i in (0, 1)] == [None, None], found
        assert [found[i].value for i in (0, 1)] == [1.0, 0.0]
        assert found[0].metrics == ({"asked": 1.0} if agent == "solve" else {})
        assert sorted(ask.episode for ask in leader.asks) == ["0", "1"]
        assert 0 < found[0].seconds < 60


def test_a_seed_decides_what_an_agent_draws(tmp_path):
    with running(tmp_path, "seeded") as (pool, leader):
        first, second = (solved(pool, leader, {}, {}, seed=7) for _ in range(2))
        assert (first[0].value, first[1].value) == (7.0, 8.0)
        assert first[0].metrics == second[0].metrics != first[1].metrics


def test_an_agent_without_a_reward_needs_a_function(tmp_path):
    with running(tmp_path, "nothing") as (pool, leader):
        result = solved(pool, leader, {})[0]
        assert result.failure == "bad_value"
        assert "returned no reward, and rewards.functions has none" in result.message
        assert "agents.py" in result.message
    grade = tmp_path / "grade.py"
    grade.write_text("def grade(completions, **columns):\n    return [1.0] * len(completions)\n")
    with running(tmp_path, "nothing", rewards=dict(functions=(f"{grade}:grade",))) as (
        pool,
        leader,
    ):
        result = solved(pool, leader, {})[0]
        assert (result.failure, result.value) == (None, None)


FAULTS = {
    "raise": ("error", "hostile (", "KeyError: 'lost'", "agents.py:"),
    "exit": ("error", "hostile (", "ended with exit code 3 and without a result"),
    "sys.exit": ("error", "SystemExit"),
    "crash": ("error", "ended with signal 11 and without a result"),
    "text": ("bad_value", "the agent returned no reward: ", "'good'"),
    "nan": ("bad_value", "the agent returned 'reward': ", "nan"),
    "flood": ("error", "hostile (", "more than rollout.agent_max_requests = 8 answers"),
    "memory": ("error", "rewards.worker_memory_gib = 1"),
    "block": ("timeout", "no result of hostile", "within rollout.agent_timeout_s = 8 s"),
    "hang": ("timeout", "no result of hostile", "within rollout.agent_timeout_s = 8 s"),
    "child": (None,),
    "daemon": (None,),
    "killed": ("error", "hostile (", "ended with signal 9 and without a result"),
    "connections": (None,),
    "print": (None,),
    "close": ("error", "without a result"),
    "name": ("bad_value", "a number named '../reward/mean'"),
    "long": ("error", "ValueError: yyy", "agents.py:"),
    "group": ("error", "ExceptionGroup", "the first of them KeyError: 'lost in a group'"),
    "insist": ("timeout", "more than rollout.agent_max_requests = 8 answers"),
    "": (None,),
}


def test_an_agent_that_fails_costs_its_own_sample_alone(tmp_path, capfd):
    limits = dict(agent_timeout_s=8.0, agent_max_requests=8, agents_at_once=len(FAULTS))
    rewards = dict(worker_memory_gib=1.0)
    with running(tmp_path, "hostile", **limits, rewards=rewards) as (pool, leader):
        found = solved(pool, leader, *({"do": name} for name in FAULTS))
        for result, (name, (failure, *says)) in zip(
            map(found.get, range(len(FAULTS))), FAULTS.items()
        ):
            assert result.failure == failure, (name, result)
            assert not [text for text in says if text not in result.message], (name, result.message)
            assert failure or result.value == 1.0
        worker = pool._agents._workers[0]
        assert worker.num_done == len(FAULTS)  # and it is the same process
        assert solved(pool, leader, {"do": ""})[0].value == 1.0
        assert not _left_below(worker.process.pid)
    assert 0 < capfd.readouterr().err.count("x" * 100) <= 2**16 / 100


def _left_below(pid):
    """Return the processes of agents that still run below a worker's subreaper."""
    until = time.monotonic() + 5
    while True:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            (worker,) = file.read().split()
        with open(f"/proc/{worker}/task/{worker}/children") as file:
            left = file.read().split()
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.02)


def test_only_so_many_agents_run_at_a_time(tmp_path):
    with running(tmp_path, "solve", agents_at_once=2) as (pool, leader):
        leader.is_held.set()
        for i in range(5):
            start(pool, leader, str(i), {"answer": "4"})
        wait_for_two_held(pool, leader)
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            pool.poll()
            pool.wait()
        assert len(leader._held) == 2
        leader.is_held.clear()
        assert {r.value for r in ended(pool, 5).values()} == {1.0}


COMMAND = """\
import json, os, sys
import openai

row = json.load(open(os.environ["SPMDRL_ROW"]))
print("here", flush=True)
if row.get("exit"):
    print("no luck", file=sys.stderr)
    sys.exit(row["exit"])
answer = openai.OpenAI().chat.completions.create(
    model="m", messages=[{"role": "user", "content": "2+2?"}]
)
right = answer.choices[0].message.content == row["answer"]
result = row.get("write") or json.dumps({"reward": float(right), "asked": 1})
with open(os.environ["SPMDRL_RESULT"], "w") as file:
    file.write(result)
print("x" * 10**6)
"""


def test_a_command_is_an_agent_too(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(COMMAND)
    command = (sys.executable, str(program))
    with running(tmp_path, "", agent_command=command) as (pool, leader):
        rows = ({"answer": "4"}, {"exit": 7}, {"answer": "4", "write": "{"})
        found = solved(pool, leader, *rows)
        assert (found[0].failure, found[0].value, found[0].metrics) == (None, 1.0, {"asked": 1.0})
        assert found[1].failure == "error"
        assert "program.py: it ended with exit code 7" in found[1].message
        assert "no luck" in found[1].message and "solve.py" not in found[1].message
        assert found[2].failure == "bad_value" and "not valid JSON" in found[2].message


def test_what_cannot_be_an_agent_is_refused_at_start(tmp_path):
    file = tmp_path / "agents.py"
    file.write_text(
        textwrap.dedent("""\
            def alone(row): ...
            async def many(row, client):
                yield 1
            good = 3
        """)
    )
    cases = {
        f"{file}:alone": [
            "rollout.agent: ",
            "cannot be called as solve(row, client)",
            "agents.py:1",
        ],
        f"{file}:many": ["is a generator"],
        f"{file}:good": ["has no function 'good'"],
        "nowhere.py:solve": ["cannot import 'nowhere.py'"],
    }
    for agent, says in cases.items():
        cfg = made(data=dict(train="rows.jsonl"), rollout=dict(agent=agent))
        with RewardPool(cfg) as pool, refused(*says):
            pool.start()
    cfg = made(data=dict(train="rows.jsonl"), rollout=dict(agent_command=("no-such-program",)))
    with RewardPool(cfg) as pool, refused("rollout.agent_command: no program 'no-such-program'"):
        pool.start()


def test_agents_are_lost_with_their_worker_and_others_run_in_the_next_one(tmp_path):
    with running(tmp_path, "hostile", agents_at_once=2) as (pool, leader):
        leader.is_held.set()
        for i in range(3):
            start(pool, leader, str(i), {"do": ""})
        wait_for_two_held(pool, leader)
        reaper = pool._agents._workers[0].process.pid
        with open(f"/proc/{reaper}/task/{reaper}/children") as file:
            os.kill(int(file.read()), 9)
        lost = ended(pool, 2, left=1)
        assert {own.failure for own in lost.values()} == {LOST} and sorted(lost) == [0, 1]
        assert "the worker process ended with signal 9" in lost[0].message
        leader.is_held.clear()
        assert ended(pool, 1)[2].value == 1.0
        for i in lost:
            start(pool, leader, str(i), {"do": ""})
        assert {own.value for own in ended(pool, 2).values()} == {1.0}


def test_the_time_of_an_agent_that_nobody_answers_stands_still(tmp_path):
    with running(tmp_path, "solve", agents_at_once=1, agent_timeout_s=3.0) as (pool, leader):
        leader.holds = {"0", "1"}
        leader.is_held.set()
        for key in ("0", "1"):
            start(pool, leader, key, {"answer": "4"})
        until = time.monotonic() + 30
        while not leader._held and time.monotonic() < until:
            pool.poll()
            pool.wait()
        pool.serve_agents("eval")
        began = time.monotonic()
        # It finds room, because the one of another purpose is held; so is the one that waits.
        start(pool, leader, "2", {"answer": "4"}, purpose="eval")
        assert ended(pool, 1, left=2)[2].value == 1.0
        while time.monotonic() < began + 3.5:
            assert not pool.poll()
            pool.wait()
        pool.serve_agents("train")
        leader.is_held.clear()
        found = ended(pool, 2)
        assert [found[i].value for i in (0, 1)] == [1.0, 1.0] and found[0].seconds < 3


def test_the_deadline_of_a_worker_counts_the_time_of_agents_that_are_served():
    cfg = made(data=dict(train="rows.jsonl"), rollout=dict(agent="a.py:solve"))
    queue = AgentQueue(cfg, make_labels("."))
    jobs = {}
    for id, (purpose, began) in enumerate([("train", 0.0), ("eval", 990.0), ("eval", None)]):
        jobs[id] = QueuedJob(id, id, id, Solve, b"", purpose, began=began)
    worker = SimpleNamespace(jobs=jobs)
    for purpose, since, expected in (("eval", 900.0, 10.0), ("train", 997.0, 3.0), ("", 997.0, 0)):
        queue._served = Serve(purpose)
        queue._served_since = since
        assert queue._running_s(worker, 1000.0) == expected
