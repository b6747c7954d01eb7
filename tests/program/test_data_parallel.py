"""Whole runs whose engine replica has data-parallel attention: killed and resumed, in flight."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.built import small_model
from tests.helpers.runs import DELTA, TINY, check_deltas, metrics, run, run_killed
from tests.program.test_router_replay import CARRIED_OVER, REWARD, check_metrics, check_recorded
from tests.program.test_train import assert_same_end

pytestmark = pytest.mark.grid


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = dict(architecture="qwen3_moe", initializer_std=0.1, chat_template=True)
    return small_model(tmp_path_factory.mktemp("model") / "moe", hidden_size=128, **options)


def flags_of(model: Path, out: Path, **flags: object) -> dict[str, object]:
    """Return flags of two ranks that train and an engine of two that generate."""
    own = {
        "model.path": model,
        "output-dir": out,
        "layout.placement": "split",
        "layout.trainer-ranks": 2,
        "layout.ep": 2,
        "layout.inference-dp": 2,
        "engine.kind": "vllm",
        "engine.options": "{enable_expert_parallel: true}",
        "rewards.functions": f"{out.parent / 'r.py'}:varied",
        "lag": 1,
    }
    return TINY["rl"] | own | flags


@pytest.mark.kill
@pytest.mark.proves("moe", "inference_dp", "ep", "lag", "split")
def test_a_killed_and_resumed_run_ends_bit_identical(model, tmp_path):
    (tmp_path / "r.py").write_text(REWARD)
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    flags = {
        "engine.dtype": "float32",
        "steps": 4,
        "checkpoint.every-steps": 1,
        "checkpoint.keep.last": "9",
        "rewards.timeout-s": 300,
    }
    again = flags_of(model, killed, **flags)
    run("demo_grpo.yaml", 4, **flags_of(model, whole, **flags))
    gaps = [row["policy/mismatch_k3"] for row in metrics(whole)]
    assert len(gaps) == 4 and all(gap < 1e-3 for gap in gaps), gaps
    run_killed("demo_grpo.yaml", 4, rewards=tmp_path / "r.py", step=1, hold=3, **again)
    resumed = run("demo_grpo.yaml", 4, **again)
    assert "resume" in resumed.output
    assert_same_end(whole, killed)


@pytest.mark.proves(
    "moe",
    "moe_replay",
    "inference_dp",
    "ep",
    "delta",
    "in_flight",
    "over_sample",
    "lag",
    "split",
    "record",
)
def test_samples_that_are_carried_over_updates_and_a_resume_keep_their_routes(model, tmp_path):
    (tmp_path / "r.py").write_text(REWARD)
    out = tmp_path / "out"
    flags = flags_of(model, out) | CARRIED_OVER | DELTA
    flags |= {"model.moe.replay": "true", "rollout.record.every": "1"}
    run("demo_grpo.yaml", 4, **flags, steps=3)
    run("demo_grpo.yaml", 4, **flags, steps=6)
    rows = check_recorded(out, 6)
    mixed = [row for row in rows if len({v for v in row["policy_versions"] if v >= 0}) > 1]
    assert mixed, "no sample was drawn by several policies"
    check_metrics(out, rows)
    check_deltas(out)


@pytest.mark.proves("moe", "inference_dp", "inference_tp", "colocated", "tp", "environments")
def test_ranks_of_a_tensor_parallel_part_play_a_game_in_turns_with_training(model, tmp_path):
    flags = flags_of(model, tmp_path / "out")
    flags |= {
        "layout.placement": "colocated",
        "layout.tp": 2,
        "layout.inference-tp": 2,
        "engine.dtype": "bfloat16",
        "lag": 0,
        "steps": 2,
        "batch.prompts-per-step": 4,
        "batch.tokens-per-microbatch": 512,
        "sampling.max-response-tokens": 40,
    }
    del flags["rewards.functions"]
    run("demo_game.yaml", 4, **flags)
    assert [row["step"] for row in metrics(tmp_path / "out")] == [0, 1]
