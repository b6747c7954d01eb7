"""Features that users combine train together by train.py, three steps on two ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from spmdrl.tools.commands.create_model import create_model
from tests.helpers.built import small_model
from tests.helpers.quantised_files import quantise
from tests.helpers.runs import DELTA, TINY, check_deltas, metrics, run

REWARD = """
def varied(prompts, completions, **columns): return [sum(map(ord, c)) % 7 / 7 for c in completions]
"""
STEPS = 3
LORA = {"model.lora.rank": 4}
IN_FLIGHT = {"lag": 1, "rollout.schedule.in-flight": "true"}
STEAL = {"layout.placement": "colocated", "lag": 0, "rollout.schedule.balance": "steal"}
OVER_SAMPLE = {"rollout.schedule.over-sample": 1.5}
GAE = {"algorithm.advantage": "gae"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("model") / "start"
    return create_model(where, hidden_size=64, layers=2, heads=2, kv_heads=1, initializer_std=0.1)


def train(model: Path, out: Path, *, config: str = "demo_grpo.yaml", **own: Any) -> list[dict]:
    """Run three steps; return their metrics, checked for what any of them must be."""
    out.mkdir()
    (out / "r.py").write_text(REWARD)
    flags = TINY["rl"] | {
        "model.path": model,
        "output-dir": out / "run",
        "engine.kind": "transformers",
        "rewards.functions": f"{out / 'r.py'}:varied",
        "optimizer.lr": 1e-3,
        "optimizer.warmup-steps": 0,
        "sampling.max-response-tokens": 16,
        "stream.verify-every": 1,
        "steps": STEPS,
    }
    run(config, 2, **flags | own)
    rows = metrics(out / "run")
    assert [row["step"] for row in rows] == list(range(STEPS))
    for row in rows:
        assert math.isfinite(row["policy/loss"]) and row["policy/skipped_updates"] == 0
        assert row["policy/grad_norm"] > 0 and row["sync/bytes"] > 0
    return rows


def check_gap(rows: list[dict]) -> None:
    """Check that the engine samples by the weights that train, where it has the newest."""
    fresh = [row["policy/mismatch_k3"] for row in rows if not row["policy/staleness"]]
    assert fresh and max(fresh) < 1e-6


@pytest.mark.proves(
    "lora", "delta", "in_flight", "lag", "split", "epochs", "kl_reference", "transformers"
)
def test_adapters_train_in_flight_for_two_epochs_with_a_kl_to_the_model_without_them(
    model, tmp_path
):
    more = {"batch.epochs": 2, "algorithm.kl-coef": 0.1}
    rows = train(model, tmp_path / "out", **LORA, **IN_FLIGHT, **more, **DELTA)
    check_gap(rows)
    check_deltas(tmp_path / "out" / "run")
    assert [row["policy/staleness"] > 0 for row in rows] == [False, True, True]
    assert rows[-1]["policy/kl_ref_k3"] > rows[0]["policy/kl_ref_k3"]


@pytest.mark.grid
@pytest.mark.proves("critic", "steal", "colocated", "muon", "transformers")
def test_a_value_model_trains_where_replicas_take_over_prompts(model, tmp_path):
    rows = train(model, tmp_path / "out", **GAE, **STEAL, **{"optimizer.kind": "muon"})
    check_gap(rows)
    assert all(row["value/loss"] > 0 for row in rows)


@pytest.mark.grid
@pytest.mark.proves("lora", "critic", "steal", "colocated", "transformers")
def test_adapters_train_with_a_value_model_where_replicas_take_over_prompts(model, tmp_path):
    rows = train(model, tmp_path / "out", **LORA, **GAE, **STEAL)
    check_gap(rows)
    assert all(row["value/loss"] > 0 for row in rows)


@pytest.mark.grid
@pytest.mark.proves("distillation", "in_flight", "over_sample", "lag", "split", "transformers")
def test_a_teacher_is_followed_in_flight_with_more_groups_under_way(model, tmp_path):
    teacher = create_model(
        tmp_path / "teacher", hidden_size=64, layers=2, heads=2, kv_heads=1, initializer_std=0.2
    )
    flags = {
        "algorithm.objective": "on_policy_distill",
        "algorithm.loss": "divergence",
        "algorithm.loss-options": "{}",
        "model.teacher": teacher,
        "rollout.schedule.over-sample": 1.5,
    }
    rows = train(model, tmp_path / "out", **IN_FLIGHT, **flags | {"algorithm.correction": "tis"})
    assert all(row["policy/loss"] > 0 for row in rows)


def taught_by_sources(where: Path, *, teachers: tuple[Any, Any], prompts: tuple[str, str]) -> dict:
    """Return flags of on-policy distillation with two sources of sums and differences."""
    sources = []
    for sign, teacher, prompt in zip("+-", teachers, prompts):
        file = where / f"rows{len(sources)}.jsonl"
        rows = [{"prompt": f"9{sign}{i}=", "answer": str(9 - i)} for i in range(9)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources.append({"path": str(file), "teacher": str(teacher), "teacher_prompt": prompt})
    return {
        "algorithm.objective": "on_policy_distill",
        "algorithm.loss": "divergence",
        "algorithm.loss-options": "{}",
        "algorithm.correction": "tis",
        "data.train": json.dumps(sources),
        "data.eval": "",
        "data.task-options": "{}",
        "evaluate.every-steps": 0,
        "data.size": 0,
        "data.max-teacher-prompt-tokens": 64,
    }


@pytest.mark.proves(
    "distillation", "teachers", "teacher_prompt", "truncated", "lag", "split", "transformers"
)
def test_the_policy_follows_itself_with_a_hint_and_a_teacher_of_another_source(model, tmp_path):
    teacher = create_model(
        tmp_path / "teacher", hidden_size=96, layers=1, heads=2, kv_heads=1, initializer_std=0.2
    )
    prompts = ("{answer};{prompt}", "")
    flags = taught_by_sources(tmp_path, teachers=("policy", teacher), prompts=prompts)
    rows = train(model, tmp_path / "out", **flags, **{"sampling.top-p": 0.9})
    assert all(row["policy/loss"] > 0 for row in rows)
    assert all(row["rollout/kept_all_frac"] < 1 for row in rows)


@pytest.mark.grid
@pytest.mark.proves(
    "distillation",
    "teachers",
    "teacher_prompt",
    "lora",
    "lag",
    "in_flight",
    "epochs",
    "split",
    "transformers",
)
def test_adapters_follow_the_model_without_them_in_flight_for_two_epochs(model, tmp_path):
    teacher = create_model(
        tmp_path / "teacher", hidden_size=64, layers=2, heads=2, kv_heads=1, initializer_std=0.2
    )
    prompts = ("{answer};{prompt}", "{prompt}{answer};{prompt}")
    flags = taught_by_sources(tmp_path, teachers=("reference", teacher), prompts=prompts)
    rows = train(model, tmp_path / "out", **LORA, **IN_FLIGHT, **flags, **{"batch.epochs": 2})
    assert all(row["policy/loss"] > 0 for row in rows)


@pytest.mark.grid
@pytest.mark.proves("critic", "in_flight", "over_sample", "lag", "split", "transformers")
def test_a_value_model_trains_in_flight_with_more_groups_under_way(model, tmp_path):
    rows = train(model, tmp_path / "out", **GAE, **IN_FLIGHT, **OVER_SAMPLE)
    check_gap(rows)
    assert all(row["value/loss"] > 0 for row in rows)


@pytest.mark.grid
@pytest.mark.proves(
    "quantised", "lora", "in_flight", "over_sample", "lag", "split", "transformers", "kl_reference"
)
def test_adapters_of_quantised_weights_train_in_flight(tmp_path):
    folder = create_model(
        tmp_path / "model", hidden_size=64, layers=2, heads=2, kv_heads=1, initializer_std=0.1
    )
    quantised = quantise(folder, kind="compressed")
    more = {"algorithm.kl-coef": 0.1}
    rows = train(quantised, tmp_path / "out", **LORA, **IN_FLIGHT, **OVER_SAMPLE, **more)
    check_gap(rows)
    assert rows[-1]["policy/kl_ref_k3"] > rows[0]["policy/kl_ref_k3"]


@pytest.mark.grid
@pytest.mark.proves("environments", "colocated", "lora", "steal", "transformers")
def test_games_are_played_by_adapters_where_each_rank_does_both(tmp_path):
    sizes = {"hidden_size": 64, "heads": 2, "initializer_std": 0.2}
    model = small_model(tmp_path / "model", chat_template=True, **sizes)
    flags = {"layout.trainer-ranks": 1, "sampling.max-response-tokens": 60}
    stops = json.dumps([*range(10, 42)])  # a third of the vocabulary ends a turn
    flags |= {"sampling.stop-token-ids": stops}
    rows = train(model, tmp_path / "out", config="demo_game.yaml", **LORA, **STEAL, **flags)
    check_gap(rows)
    assert all(row["rollout/turns"] > 1 for row in rows)
