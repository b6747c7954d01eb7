"""engine.exact in whole runs: killed and resumed with vLLM, and with pushes in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.built import small_model
from tests.helpers.runs import HELD, TINY, metrics, run, run_killed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model") / "model", hidden_size=64)


def flags_of(model: Path, out: Path, **flags: Any) -> dict[str, Any]:
    own = {
        "model.path": model,
        "model.compute-dtype": "bfloat16",
        "output-dir": out,
        "engine.exact": "true",
        "engine.dtype": "bfloat16",
        "lag": 0,
        "algorithm.correction": "none",
    }
    return TINY["rl"] | own | flags


@pytest.mark.kill
def test_a_killed_and_resumed_run_with_vllm_differs_by_no_bit(model: Path, tmp_path: Path):
    rewards = tmp_path / "r.py"
    rewards.write_text(
        HELD
        + """
def varied(prompts, completions, **columns):
    wait_to_be_killed()
    return [sum(map(ord, c)) % 7 / 7 for c in completions]
"""
    )
    flags = flags_of(model, tmp_path / "out") | {
        "engine.kind": "vllm",
        "steps": 4,
        "checkpoint.every-steps": 1,
        "checkpoint.keep.last": "9",
        "rewards.functions": f"{rewards}:varied",
        "rewards.timeout-s": 300,
    }
    run_killed("demo_grpo.yaml", 2, rewards=rewards, step=1, hold=3, **flags)
    resumed = run("demo_grpo.yaml", 2, **flags)
    assert "resume" in resumed.output
    rows = metrics(tmp_path / "out")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["policy/mismatch_logprob_diff"] == 0 for row in rows)
    assert all(row["policy/mismatch_k3"] == 0 for row in rows)


def test_tokens_after_a_push_in_flight_have_the_trainers_bits(model: Path, tmp_path: Path):
    flags = flags_of(model, tmp_path) | {
        "engine.kind": "transformers",
        "steps": 5,
        "lag": 1,
        "rollout.schedule.in_flight": "true",
        "sampling.max-response-tokens": 60,
    }
    run("demo_grpo.yaml", 2, **flags)
    rows = metrics(tmp_path)
    assert rows[0]["policy/mismatch_logprob_diff"] == 0, "all of it is sampled by the first weights"
    for row in rows:
        for name in ("policy/mismatch_logprob_diff", "policy/carried_gap"):
            assert not row.get(name), (row["step"], name, row[name])
