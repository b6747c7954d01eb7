"""Reward pools with real workers, what is handed to them, and which processes they have."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from spmdrl.config import Config, DataSettings, RewardsSettings, RolloutSettings
from spmdrl.types import Prompt
from spmdrl.workers.pool import RewardPool


def pool_of(*functions, timeout_s=30.0, train="rows.jsonl", environment=None, **rewards):
    """Make a pool of one worker, unless told."""
    cfg = Config(
        data=DataSettings(train=train, size=10),
        rollout=RolloutSettings(environment=environment or {}),
        rewards=RewardsSettings(functions=functions, timeout_s=timeout_s, **rewards),
    )
    return RewardPool(cfg)


def submit(pool, key, text, **row):
    """Hand in a response."""
    prompt = Prompt(index=0, tokens=(1,), text="q", row={"prompt": "q", "answer": "1"} | row)
    pool.submit(key, prompt=prompt, response_text=text, response_tokens=[1, 2], truncated=False)


def results(pool, texts):
    """Hand in responses; return their results, in order."""
    for key, text in enumerate(texts):
        submit(pool, key, text)
    found = drained(pool)
    assert [r.key for r in found] == list(range(len(texts)))
    return found


def drained(pool):
    """Wait for every call; return the results in the order of their keys."""
    return sorted(results_of(pool), key=lambda result: result.key)


def results_side_by_side(pools, texts):
    """Hand in each pool's responses; return {name: its results, in order}.

    Args:
        pools: {name: pool}
        texts: {name: responses}
    """
    for name, pool in pools.items():
        for key, text in enumerate(texts[name]):
            submit(pool, key, text)
    found = {name: [] for name in pools}
    while any(map(len, pools.values())):
        for name, pool in pools.items():
            found[name] += pool.poll()
        time.sleep(0.02)
    for name, pool in pools.items():
        found[name] += pool.poll()
        found[name].sort(key=lambda result: result.key)
        assert [result.key for result in found[name]] == list(range(len(texts[name]))), name
    return found


def results_of(pool):
    """Yield results as soon as they are there, until every call is done."""
    yield from pool.poll()
    while len(pool):
        pool.wait()
        yield from pool.poll()


def wait_until(condition, timeout_s=100.0):
    """Return what a condition comes to, as soon as it holds."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return value


def group_members(group):
    """Return the living processes of a process group."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended while we looked
            state, _, own_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(own_group) == group and state != "Z":
                members.append(int(stat.parent.name))
    return members


def wait_until_gone(group):
    """Wait until no process of a group lives: a killed one takes a moment."""
    assert wait_until(lambda: not group_members(group)), f"{group_members(group)} live on"
