"""Router replay in whole runs: killed and resumed, in a game of several turns, in flight."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import yaml

from spmdrl.rollout.recordings import find_recorded, read_header, read_table
from tests.helpers.built import small_model
from tests.helpers.runs import DELTA, HELD, ROOT, TINY, check_deltas, metrics, run, run_killed
from tests.program.test_train import assert_same_end


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = dict(architecture="qwen3_moe", initializer_std=0.1, chat_template=True)
    return small_model(tmp_path_factory.mktemp("model") / "moe", hidden_size=128, **options)


REWARD = (
    HELD
    + """
def varied(prompts, completions, **columns):
    wait_to_be_killed()
    return [sum(map(ord, c)) % 7 / 7 for c in completions]
"""
)


CARRIED_OVER = {
    "engine.kind": "vllm",
    "engine.dtype": "bfloat16",
    "engine.options": "{enable_expert_parallel: true}",
    "lag": 1,
    "rollout.schedule.in_flight": "true",
    "rollout.schedule.over_sample": "1.5",
    "rollout.schedule.max_staleness": "3",
    "sampling.max-response-tokens": 40,
    "checkpoint.every-steps": 2,
}
"""Samples of vLLM go on after updates and after a resume."""


def flags_of(model: Path, out: Path, **flags: object) -> dict[str, object]:
    own = {
        "model.path": model,
        "output-dir": out,
        "model.moe.replay": "true",
        "layout.placement": "split",
        "layout.trainer-ranks": 2,
        "layout.ep": 2,
        "rollout.record.every": "1",
        "rewards.functions": f"{out.parent / 'r.py'}:varied",
        "lag": 0,
    }
    return TINY["rl"] | own | flags


def check_recorded(out: Path, steps: int) -> list[dict]:
    """Every token of every sequence but the last has a route; return the sequences."""
    rows = []
    for step in range(steps):
        for path in find_recorded(out).files_of(step):
            assert read_header(path)["columns"]["routes"] == ["int8", 2, 2]
            rows += read_table(path).to_pylist()
    for row in rows:
        routes = numpy.frombuffer(row["routes"], "int8").reshape(-1, 2, 2)
        assert len(routes) == row["length"] > 1
        assert (routes[:-1] >= 0).all() and (routes[-1] == -1).all() and routes.max() < 8
    return rows


def check_metrics(out: Path, rows: list[dict]) -> None:
    for logged in metrics(out):
        own = [row["length"] for row in rows if row["step"] == logged["step"]]
        # Each sequence's last token is all that the trainer routes itself.
        assert logged["policy/router_replayed_frac"] == pytest.approx(1 - len(own) / sum(own))
        assert 0 <= logged["policy/router_disagreement"] < 0.2


@pytest.mark.kill
@pytest.mark.proves("moe", "moe_replay", "lag", "split", "record", "transformers")
def test_a_killed_and_resumed_run_with_replay_ends_bit_identical(model, tmp_path):
    (tmp_path / "r.py").write_text(REWARD)
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    flags = {  # with lag 1 a checkpoint holds a batch that was made ahead
        "engine.kind": "transformers",
        "engine.dtype": "bfloat16",
        "steps": 6,
        "lag": 1,
        "layout.trainer-ranks": 1,
        "layout.ep": 1,
        "checkpoint.every-steps": 1,
        "checkpoint.keep.last": "9",
        "batch.updates-per-step": 2,
        "rewards.timeout-s": 300,
    }
    again = flags_of(model, killed, **flags)
    run("demo_grpo.yaml", 2, **flags_of(model, whole, **flags))
    check_metrics(whole, check_recorded(whole, 6))
    assert any(logged["policy/router_disagreement"] > 0 for logged in metrics(whole))
    run_killed("demo_grpo.yaml", 2, rewards=tmp_path / "r.py", step=1, hold=3, **again)
    resumed = run("demo_grpo.yaml", 2, **again)
    assert "resume" in resumed.output
    assert_same_end(whole, killed)


@pytest.mark.grid
@pytest.mark.proves("moe", "moe_replay", "ep", "environments", "split", "record")
def test_turns_of_a_game_are_replayed_as_one_sequence(model, tmp_path):
    (tmp_path / "r.py").write_text(REWARD)
    game, out = yaml.safe_load((ROOT / "configs" / "demo_game.yaml").read_text()), tmp_path / "out"
    # A third of the vocabulary ends a turn, so that random play has several.
    game["sampling"] |= {"stop_token_ids": list(range(10, 42)), "max_response_tokens": 60}
    game["batch"] |= {"tokens_per_microbatch": 512}
    file = tmp_path / "game.yaml"
    file.write_text(yaml.safe_dump(game))
    flags = flags_of(model, out, **{"engine.kind": "vllm", "engine.dtype": "bfloat16"})
    run(str(file), 3, **flags, steps=2)
    resumed = run(str(file), 3, **flags, steps=3)
    assert "resume" in resumed.output
    rows = check_recorded(out, 3)
    assert sum(row["turns"] >= 2 for row in rows) > len(rows) / 2
    assert any(not all(row["response_mask"][row["response_mask"].index(True) :]) for row in rows)
    check_metrics(out, rows)


@pytest.mark.proves(
    "moe",
    "moe_replay",
    "ep",
    "inference_tp",
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
    flags = flags_of(model, out) | CARRIED_OVER | DELTA | {"layout.inference-tp": 2}
    run("demo_grpo.yaml", 4, **flags, steps=4)
    run("demo_grpo.yaml", 4, **flags, steps=8)
    rows = check_recorded(out, 8)
    mixed = [row for row in rows if len({v for v in row["policy_versions"] if v >= 0}) > 1]
    assert mixed, "no sample was drawn by several policies"
    check_metrics(out, rows)
    check_deltas(out)
