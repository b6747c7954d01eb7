"""The demo of `make agent`, cut short."""

from __future__ import annotations

import json

import pytest

from tests.helpers.built import small_model
from tests.helpers.runs import ROOT, TINY, call, metrics, run


@pytest.mark.proves("transformers", "colocated")
def test_the_demos_agent_trains_a_model(tmp_path):
    flags = TINY["rl"] | {
        "model.path": small_model(tmp_path / "model", chat_template=True),
        "output-dir": tmp_path / "run",
        "layout.placement": "colocated",
        "layout.trainer-ranks": 1,
        "lag": 0,
        "engine.kind": "transformers",
        "rollout.agents-at-once": 8,
        "batch.prompts-per-step": 2,
        "steps": 2,
    }
    run("demo_agent.yaml", 1, **flags)
    calls = [line["agent/calls"] for line in metrics(tmp_path / "run") if "agent/calls" in line]
    assert calls == [0.0, 0.0]  # a random model writes none


def test_its_warm_start_has_the_agents_own_conversations(tmp_path):
    out = tmp_path / "rows.jsonl"
    config = ROOT / "configs" / "demo_agent.yaml"
    done = call(ROOT / "benchmarks" / "demonstrations.py", config, out, "--count", 40)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.open()]
    assert len(rows) > 40
    kinds = {tuple(message["role"] for message in row["messages"]) for row in rows}
    assert kinds == {("user", "assistant"), ("user", "assistant", "tool", "assistant")}
    assert all(row["tools"][0]["function"]["name"] == "add" for row in rows)
