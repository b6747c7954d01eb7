"""Runs of many features at once: each covers the pairs that no test of its own proves.

Three steps of train.py per run. Each must end well, train (finite losses, a gradient), push weights
and, where the newest weights sample, agree with its engine about log-probabilities.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import tests.helpers.torchao  # noqa: F401
from spmdrl.tools.commands.create_model import create_model
from tests.helpers.quantised_files import quantise
from tests.helpers.runs import TINY, metrics, run
from tests.program.test_see_objectives import reward_model

STEPS = 3
REWARD = """
def varied(prompts, completions, **columns): return [sum(map(ord, c)) % 7 / 7 for c in completions]
"""
SIZES = {"hidden_size": 128, "layers": 2, "heads": 2, "kv_heads": 2, "initializer_std": 0.1}
FLAGS: dict[str, dict[str, Any]] = {
    "lora": {"model.lora.rank": 4},
    "lora_push": {"model.lora.rank": 4, "model.lora.push": "adapter"},
    "moe_replay": {"model.moe.replay": "true"},
    "moe_balance": {"model.moe.balance": "aux"},
    "drafts": {
        "engine.options": "{speculative_config: {method: ngram, num_speculative_tokens: 4, "
        "prompt_lookup_min: 1}}"
    },
    "lag": {"lag": 1},
    "steal": {"rollout.schedule.balance": "steal"},
    "dynamic": {"rollout.schedule.dynamic": 30},
    "curriculum": {"rollout.schedule.curriculum": 0.5},
    "truncated": {"sampling.top-p": 0.9},
    "penalties": {"sampling.presence-penalty": 0.5},
    "critic": {"algorithm.advantage": "gae"},
    "kl_reference": {"algorithm.kl-coef": 0.1},
    "epochs": {"batch.epochs": 2},
    "distillation": {
        "algorithm.objective": "on_policy_distill",
        "algorithm.loss": "divergence",
        "algorithm.loss-options": "{}",
    },
    "muon": {"optimizer.kind": "muon"},
    "int8_optimizer": {"model.memory.optimizer-dtype": "int8"},
    # A factor that three steps do not have to find by halving.
    "float16": {
        "model.compute-dtype": "float16",
        "engine.dtype": "float16",
        "optimizer.loss-scale.initial": 16,
    },
    "record": {"rollout.record.every": 1},
}
AXES = {"tp": 2, "cp": 2, "ep": 2, "inference_tp": 2}


def layout(features: set[str]) -> dict[str, Any]:
    """Return the smallest layout that has a mesh, an engine and a placement."""
    cut = {name: size for name, size in AXES.items() if name in features}
    tp_cp = cut.get("tp", 1) * cut.get("cp", 1)
    trains = max(tp_cp, cut.get("ep", 1))
    replicas = 2 if "steal" in features else 1
    samples = replicas * cut.get("inference_tp", 1)
    flags = {f"layout.{name.replace('_', '-')}": size for name, size in cut.items()}
    if "colocated" in features:
        both = max(trains, samples)
        return flags | {"layout.placement": "colocated", "layout.world-size": both}
    if "inference_tp" in features:
        trains = max(trains, 2)  # vLLM counts its groups from rank 0
    placed = {"layout.placement": "split", "layout.trainer-ranks": trains}
    return flags | placed | {"layout.world-size": trains + samples}


def model_of(folder: Path, features: set[str]) -> Path:
    architecture = "qwen3_moe" if "moe" in features else "qwen3"
    path = create_model(folder, architecture=architecture, **SIZES)
    return quantise(path, kind="compressed") if "quantised" in features else path


def flags_of(where: Path, features: set[str]) -> dict[str, Any]:
    """Return the flags of a run, for the demo's config."""
    (where / "r.py").write_text(REWARD)
    model = model_of(where / "model", features)
    flags = TINY["rl"] | {
        "model.path": model,
        "output-dir": where / "run",
        "rewards.functions": f"{where / 'r.py'}:varied",
        "optimizer.lr": 1e-3,
        "optimizer.warmup-steps": 0,
        "sampling.max-response-tokens": 16,
        "stream.verify-every": 1,
        "lag": 0,
        "steps": STEPS,
    }
    if "reward_model" in features:
        reward_model(where / "scorer", create_model(where / "plain", **SIZES))
        flags["rewards.functions"] = f"model:{where / 'scorer'}"
    if "distillation" in features:
        sizes = SIZES | {"initializer_std": 0.2, "seed": 3}
        flags["model.teacher"] = create_model(where / "teacher", **sizes)
    for name in FLAGS:
        if name in features:
            flags |= FLAGS[name]
    return flags | layout(features)


def check(rows: list[dict], features: set[str]) -> None:
    assert [row["step"] for row in rows] == list(range(STEPS))
    for row in rows:
        assert math.isfinite(row["policy/loss"])
        assert row["policy/grad_norm"] > 0 and row["sync/bytes"] > 0
        if "float16" not in features:
            assert row["policy/skipped_updates"] == 0
    limit = 1e-6
    if "float16" in features or ("moe" in features and "moe_replay" not in features):
        limit = 1e-3
    if "distillation" not in features:
        fresh = [row["policy/mismatch_k3"] for row in rows if not row.get("policy/staleness")]
        assert fresh and max(fresh) < limit
    if "drafts" in features:
        assert any(row["rollout/draft_accepted_frac"] > 0 for row in rows)
    if "critic" in features:
        assert all(row["value/loss"] > 0 for row in rows)
    if "lora" in features and "kl_reference" in features:
        assert rows[-1]["policy/kl_ref_k3"] > rows[0]["policy/kl_ref_k3"]


def train(where: Path, features: set[str]) -> None:
    flags = flags_of(where, features)
    world_size = flags.pop("layout.world-size")
    run("demo_grpo.yaml", world_size, timeout_s=600, **flags)
    check(metrics(where / "run"), features)


@pytest.mark.grid
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            0,
            marks=pytest.mark.proves(
                "moe",
                "moe_balance",
                "ep",
                "tp",
                "cp",
                "inference_tp",
                "colocated",
                "truncated",
                "penalties",
                "reward_model",
                "epochs",
                "int8_optimizer",
            ),
        ),
        pytest.param(
            1,
            marks=pytest.mark.proves(
                "lora",
                "lora_push",
                "quantised",
                "colocated",
                "steal",
                "dynamic",
                "truncated",
                "penalties",
                "critic",
                "kl_reference",
                "int8_optimizer",
                "float16",
            ),
        ),
        pytest.param(
            2,
            marks=pytest.mark.proves(
                "moe",
                "moe_replay",
                "moe_balance",
                "cp",
                "split",
                "lag",
                "curriculum",
                "drafts",
                "penalties",
                "critic",
                "kl_reference",
                "int8_optimizer",
                "record",
            ),
        ),
        pytest.param(
            3,
            marks=pytest.mark.proves(
                "lora",
                "lora_push",
                "quantised",
                "cp",
                "inference_tp",
                "colocated",
                "dynamic",
                "truncated",
                "penalties",
                "epochs",
                "int8_optimizer",
                "float16",
            ),
        ),
        pytest.param(
            4,
            marks=pytest.mark.proves(
                "moe",
                "moe_replay",
                "moe_balance",
                "ep",
                "tp",
                "cp",
                "colocated",
                "steal",
                "reward_model",
                "epochs",
                "distillation",
                "int8_optimizer",
            ),
        ),
        pytest.param(
            5,
            marks=pytest.mark.proves(
                "moe",
                "moe_replay",
                "moe_balance",
                "ep",
                "split",
                "curriculum",
                "truncated",
                "drafts",
                "penalties",
                "critic",
                "kl_reference",
                "muon",
                "record",
            ),
        ),
        pytest.param(
            6,
            marks=pytest.mark.proves(
                "moe",
                "moe_replay",
                "moe_balance",
                "tp",
                "colocated",
                "steal",
                "dynamic",
                "kl_reference",
                "epochs",
                "muon",
            ),
        ),
    ],
)
def test_features_train_together(request, tmp_path, number):
    marker = request.node.get_closest_marker("proves")
    train(tmp_path, set(marker.args))
