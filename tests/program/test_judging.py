"""Runs by train.py whose engine judges its own responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.built import small_model
from tests.helpers.runs import TINY, kill_all, metrics, run, start, wait_for
from tests.program.test_train import assert_same_end
from tests.rollout.timed_runs import back_to, decisions_of, rollouts_of

REWARD = r"""
from spmdrl.rewards.judge import judge

PLAIN = dict(url="engine", template="{response}", score_pattern=r"(\d)", high=9)
own = judge(**PLAIN, options={"max_tokens": 6})
"""
PLAYERS = r"""
import os

import openai

from spmdrl.environments.protocol import Turn, opening_messages

def user(text):
    return {"role": "user", "content": text}

class Turns:
    def __init__(self):
        self.turns = 0

    def reset(self, row):
        return opening_messages(row)

    def step(self, response):
        self.turns += 1
        return Turn(messages=[user(str(len(response.text)))], is_done=self.turns == 2)

def asked(data_source, solution_str, ground_truth, extra_info=None):
    url = os.environ["SPMDRL_JUDGE_URL"]
    client = openai.OpenAI(base_url=url, api_key=os.environ["SPMDRL_JUDGE_KEY"])
    answer = client.chat.completions.create(
        model="m", messages=[user(solution_str[-9:] + "?")], max_tokens=6
    )
    return sum(map(ord, answer.choices[0].message.content or "")) % 7 / 7

async def solve(row, client):
    messages = [user(row["prompt"])]
    for _ in range(2):
        answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=6)
        text = answer.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": text}, user(str(len(text)))]
"""

FLAGS = TINY["rl"] | {
    "layout.placement": "colocated",
    "lag": 0,
    "engine.kind": "transformers",
    "algorithm.correction": "none",
    "data.max-prompt-tokens": 16,
    "sampling.max-response-tokens": 8,
    "batch.prompts-per-step": 4,
    "rollout.record.every": 1,
    "rewards.judge.engine": "policy",
    "rewards.judge.max-prompt-tokens": 64,
    "rewards.judge.max-response-tokens": 8,
    "rewards.on-failure": "drop",
    "rewards.timeout-s": 100,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "colocated": (1, {}),
    "vllm, colocated": (1, {"engine.kind": "vllm"}),
    "vllm, engine of two ranks": (
        4,
        {
            "engine.kind": "vllm",
            "layout.placement": "split",
            "layout.trainer-ranks": 2,
            "layout.inference-tp": 2,
            "lag": 1,
        },
    ),
    "vllm, colocated, engine of two ranks": (2, {"engine.kind": "vllm", "layout.inference-tp": 2}),
    "vllm, frozen weights of two ranks": (
        2,
        {
            "engine.kind": "vllm",
            "layout.inference-tp": 2,
            "model.lora.rank": 8,
            "model.lora.push": "adapter",
            "rewards.judge.engine": "base",
        },
    ),
}
"""Of each its ranks and its flags."""


@pytest.fixture
def flags(tmp_path) -> dict[str, Any]:
    """Flags of runs of a random model, whose verdicts are its own random digits."""
    (tmp_path / "r.py").write_text(REWARD)
    (tmp_path / "players.py").write_text(PLAYERS)
    model = small_model(
        tmp_path / "model", hidden_size=64, heads=2, initializer_std=0.2, chat_template=True
    )
    return FLAGS | {"model.path": model, "rewards.functions": f"{tmp_path}/r.py:own"}


@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=pytest.mark.grid)])
@pytest.mark.proves("engine_judge", "colocated", "record", "transformers")
def test_a_policy_that_judges_itself_stays_exact(kind, flags, tmp_path):
    flags |= {"engine.exact": "true", "steps": 2, "output-dir": tmp_path / "once"}
    flags |= {"engine.kind": kind}
    run("demo_grpo.yaml", 1, **flags)
    for row in metrics(tmp_path / "once"):
        assert row["judge/requests"] == 16 and row["judge/tokens"] >= 16
        assert 0 < row["reward/mean"] < 1
        assert row["reward/mean"] == pytest.approx(row["reward/own/mean"])
        assert row["policy/mismatch_k1"] == 0


@pytest.mark.grid
@pytest.mark.timeout(900)
@pytest.mark.proves("engine_judge", "lora", "lora_push", "replay_schedule", "split", "record")
def test_a_policy_learns_what_its_frozen_weights_like_and_the_run_repeats(flags, tmp_path):
    flags |= {
        "layout.placement": "split",
        "engine.kind": "vllm",
        "model.lora.rank": 8,
        "model.lora.push": "adapter",
        "rewards.judge.engine": "base",
        "batch.prompts-per-step": 16,
        "batch.group-size": 8,
        "optimizer.lr": 0.005,
        "steps": 20,
    }
    once = tmp_path / "once"
    run("demo_grpo.yaml", 2, timeout_s=800, **flags | {"output-dir": once})
    rewards = [row["reward/mean"] for row in metrics(once)]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5, rewards
    again = tmp_path / "again"
    flags |= {"output-dir": again, "rollout.replay-schedule": once}
    run("demo_grpo.yaml", 2, timeout_s=800, **flags)
    assert_same_end(once, again)
    assert rollouts_of(once) == rollouts_of(again)
    assert decisions_of(once) == decisions_of(again)


def played(player: str, folder: Path) -> dict[str, Any]:
    """Return the flags of a run whose samples have two turns.

    Args:
        player: `environment` or `agent`; `none`: one turn.
    """
    own = {
        "none": {},
        "environment": {"rollout.environment": f"{{name: '{folder}/players.py:Turns'}}"},
        "agent": {"rollout.agent": f"{folder}/players.py:solve"},
    }
    return own[player] | {
        "rewards.functions": f"{folder}/players.py:asked",
        "data.max-prompt-tokens": 40,
        "sampling.max-response-tokens": 32,
        "steps": 2,
        "checkpoint.every-steps": 1,
        "checkpoint.keep.last": 9,
    }


@pytest.mark.parametrize(
    "layout",
    [
        "colocated",
        *(pytest.param(own, marks=pytest.mark.grid) for own in LAYOUTS if own != "colocated"),
    ],
)
@pytest.mark.parametrize(
    "player", ["environment", "agent", pytest.param("none", marks=pytest.mark.grid)]
)
@pytest.mark.timeout(600)
@pytest.mark.proves("engine_judge", "environments", "colocated", "record", "transformers")
@pytest.mark.proves("engine_judge", "agents", "colocated", "record", "transformers")
@pytest.mark.proves("engine_judge", "inference_tp", "lag", "split", "record")
def test_a_judged_run_of_several_turns_resumes_as_it_had_decided(player, layout, flags, tmp_path):
    ranks, own = LAYOUTS[layout]
    out = tmp_path / "out"
    flags |= own | played(player, tmp_path) | {"output-dir": out}
    run("demo_grpo.yaml", ranks, **flags)
    rows = metrics(out)
    for row in rows:
        assert row["judge/requests"] == 16 and 0 < row["reward/mean"] < 1
        assert row["reward/mean"] == pytest.approx(row["reward/asked/mean"])
    whole = [rollouts_of(out), decisions_of(out)]
    back_to(out, 1)
    run("demo_grpo.yaml", ranks, **flags)
    assert [rollouts_of(out), decisions_of(out)] == whole
    assert [row["policy/loss"] for row in metrics(out)] == [row["policy/loss"] for row in rows]


@pytest.mark.grid
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("player", ["environment", "agent", "none"])
@pytest.mark.timeout(600)
@pytest.mark.proves("engine_judge", "environments", "colocated", "replay_schedule", "record")
@pytest.mark.proves("engine_judge", "agents", "colocated", "replay_schedule", "record")
@pytest.mark.proves("engine_judge", "inference_tp", "lag", "split", "replay_schedule", "record")
@pytest.mark.proves("engine_judge", "inference_tp", "lora", "lora_push", "replay_schedule")
def test_a_judged_run_of_several_turns_repeats_without_its_functions(
    player, layout, flags, tmp_path
):
    ranks, own = LAYOUTS[layout]
    out = tmp_path / "out"
    again = tmp_path / "again"
    flags |= own | played(player, tmp_path)
    run("demo_grpo.yaml", ranks, **flags | {"output-dir": out})
    run("demo_grpo.yaml", ranks, **flags | {"output-dir": again, "rollout.replay-schedule": out})
    assert_same_end(out, again)
    assert rollouts_of(again) == rollouts_of(out)


@pytest.mark.kill
@pytest.mark.parametrize("player", ["none", "environment", "agent"])
@pytest.mark.timeout(600)
@pytest.mark.proves("engine_judge", "colocated", "record", "transformers")
def test_a_run_that_is_killed_amid_verdicts_ends_as_one_that_was_not(player, flags, tmp_path):
    flags |= played(player, tmp_path) | {"engine.exact": "true"}
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    run("demo_grpo.yaml", 1, **flags | {"output-dir": whole})
    under_way = start("demo_grpo.yaml", 1, **flags | {"output-dir": killed})

    def is_asked() -> bool:
        lines = [line for file in killed.glob("schedule/*.jsonl") for line in file.open()]
        return sum('"judge"' in line for line in lines) >= 16 + 3

    wait_for(under_way, is_asked, "the second step asks no judge", timeout_s=200)
    kill_all(under_way)
    assert len(metrics(killed)) == 1
    run("demo_grpo.yaml", 1, **flags | {"output-dir": killed})
    assert_same_end(whole, killed)
    assert rollouts_of(whole) == rollouts_of(killed)
