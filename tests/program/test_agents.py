"""Runs of real agents by train.py: repeated without the agent, killed in the middle of episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.built import small_model
from tests.helpers.runs import TINY, kill_all, metrics, run, start, wait_for
from tests.program.test_train import assert_same_end
from tests.rollout.timed_runs import decisions_of, rollouts_of

AGENT = """
import asyncio, pathlib, random

HERE = pathlib.Path(__file__).parent

async def ask(client, messages, **options):
    await asyncio.sleep(random.SystemRandom().random() * float((HERE / "late").read_text()))
    done = await client.chat.completions.create(model="policy", messages=messages, **options)
    return [choice.message.content or "" for choice in done.choices]

def user(text):
    return {"role": "user", "content": text}

async def solve(row, client):
    begin = [user(row["prompt"])]
    (first,) = await ask(client, begin, max_tokens=6)
    with open(HERE / "begun", "a") as file:
        file.write("x")
    place = (HERE / "begun").stat().st_size
    while (HERE / "gate").exists() and place > int((HERE / "gate").read_text()):
        await asyncio.sleep(0.02)
    known = [*begin, {"role": "assistant", "content": first}]
    both = await asyncio.gather(
        ask(client, [*known, user("1")], max_tokens=5),
        ask(client, [*known, user("2")], max_tokens=5, n=2),
    )
    words = [text for texts in both for text in texts]
    (last,) = await ask(client, [user("+".join(map(str, map(len, words))))], max_tokens=4)
    total = sum(map(ord, first + last + "".join(words)))
    return {"reward": total % 7 / 7, "words": len(words)}
"""
FLAGS = TINY["rl"] | {
    "steps": 3,
    "engine.kind": "transformers",
    "data.max-prompt-tokens": 40,
    "sampling.max-response-tokens": 32,
    "batch.prompts-per-step": 4,
    "batch.group-size": 2,
    "batch.tokens-per-microbatch": 1024,
    "checkpoint.every-steps": 1,
    "checkpoint.keep.last": 9,
    "layout.trainer-ranks": 1,
    "rollout.record.every": 1,
    "rewards.functions": "[]",
}


class AgentRuns:
    """Runs of one agent, which may answer late and may be held.

    Args:
        folder: of all of them.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.model = small_model(
            folder / "model", hidden_size=64, heads=2, initializer_std=0.2, chat_template=True
        )
        self.agent = folder / "agent.py"
        self.agent.write_text(AGENT)

    def flags(self, name: str, **more: Any) -> dict[str, Any]:
        """Return the flags of a run, by its name."""
        own = {"model.path": self.model, "output-dir": self.folder / name}
        return FLAGS | own | {"rollout.agent": f"{self.agent}:solve"} | more

    def run(self, name: str, *, late_s: float, **more: Any) -> Path:
        """Run to the end; return its folder.

        Args:
            late_s: seconds by which requests come late at most.
        """
        (self.folder / "late").write_text(str(late_s))
        run("demo_grpo.yaml", 2, **self.flags(name, **more))
        return self.folder / name


@pytest.fixture
def runs(tmp_path) -> AgentRuns:
    return AgentRuns(tmp_path)


def groups_of(out: Path) -> list[Any]:
    """Return the digests of a run's groups, by step."""
    return [row["groups"] for row in decisions_of(out) if "groups" in row]


@pytest.mark.proves(
    "agents", "replay_schedule", "in_flight", "lag", "split", "record", "transformers"
)
def test_a_run_repeats_without_its_agent(runs):
    flags = {"lag": 1, "rollout.schedule.in-flight": "true", "evaluate.every-steps": 2}
    flags |= {"data.eval-size": 4, "rollout.schedule.balance": "even"}
    once = runs.run("once", late_s=0.1, **flags)
    assert all(row["reward/agent/mean"] >= 0 for row in metrics(once))
    assert {row["agent/words"] for row in metrics(once)} == {3.0}
    runs.agent.unlink()
    again = runs.run("again", late_s=0.0, **flags, **{"rollout.replay-schedule": once})
    assert_same_end(once, again)
    assert rollouts_of(once) == rollouts_of(again)
    assert decisions_of(once) == decisions_of(again)


@pytest.mark.proves("agents", "split", "record", "transformers")
def test_a_run_that_is_killed_in_the_middle_of_episodes_ends_as_one_that_was_not(runs):
    exact = {"engine.exact": "true", "lag": 0, "algorithm.correction": "none"}
    whole = runs.run("whole", late_s=0.0, **exact)
    # Of the second step's eight episodes, six go on after their first request.
    (runs.folder / "begun").unlink()
    (runs.folder / "gate").write_text("14")
    killed = start("demo_grpo.yaml", 2, **runs.flags("killed", **exact))
    schedule = runs.folder / "killed" / "schedule"

    def is_held() -> bool:
        lines = [line for file in schedule.glob("*") for line in file.read_text().splitlines()]
        return sum('"ask": ' in line and '"train-1-' in line for line in lines) >= 8 + 6 * 2

    wait_for(killed, is_held, "the agents are not held", timeout_s=200)
    kill_all(killed)
    (runs.folder / "gate").unlink()
    again = runs.run("killed", late_s=0.0, **exact)
    begun = [row["agents"] for row in decisions_of(again) if "agents" in row]
    keys = [key for _, keys in begun for key in keys]
    assert len(keys) > len(set(keys)) == 24, "no agent began again"
    assert groups_of(again) == groups_of(whole)
    assert_same_end(whole, again)
