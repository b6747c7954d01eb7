"""Runs by train.py whose engine judges its own responses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.built import small_model
from tests.helpers.runs import TINY, metrics, run
from tests.program.test_train import assert_same_end
from tests.rollout.timed_runs import decisions_of, rollouts_of

REWARD = r"""
from spmdrl.rewards.judge import judge

PLAIN = dict(url="engine", template="{response}", score_pattern=r"(\d)", high=9)
own = judge(**PLAIN, options={"max_tokens": 6})
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


@pytest.fixture
def flags(tmp_path) -> dict[str, Any]:
    """Flags of runs of a random model, whose verdicts are its own random digits."""
    (tmp_path / "r.py").write_text(REWARD)
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
