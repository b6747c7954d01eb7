"""GRPO of adapters by the program, as a user starts it: it improves, and goes on bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spmdrl.model.lora.files import write_adapter
from spmdrl.model.lora.layers import Adapters, initial_a
from spmdrl.model.lora.targets import LoraForm
from spmdrl.tools.commands.create_model import create_model
from tests.helpers.policy_runs import meta_model
from tests.helpers.runs import HELD, TINY, metrics, run, run_killed
from tests.program.test_train import assert_same_end

REWARD = (
    HELD
    + """
def digits(data_source, solution_str, ground_truth, extra_info=None):
    wait_to_be_killed()
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))
"""
)


def _random_adapter(model: Path, out: Path) -> Path:
    """An adapter whose B is not zero: engines do not have the weights that training begins with."""
    hf_model = meta_model(model)
    names = Adapters(hf_model, LoraForm(rank=8, alpha=32, targets="all-linear")).names
    out.mkdir()
    tensors = {
        n: 0.1 * initial_a(n, tuple(hf_model.get_parameter(n).shape), init="kaiming", seed=5)
        for n in names
    }
    write_adapter(out, tensors, rank=8, alpha=32, use_rslora=False, base=str(model))
    return out


def _flags(where: Path) -> dict[str, Any]:
    """Flags of GRPO from a new model, for rewards of a new file."""
    (where / "r.py").write_text(REWARD)
    begin = create_model(
        where / "model", hidden_size=64, layers=2, heads=2, kv_heads=1, initializer_std=0.1
    )
    return TINY["rl"] | {
        "model.path": begin,
        "rewards.functions": f"{where / 'r.py'}:digits",
        "optimizer.lr": 0.01,
        "lag": 0,
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.proves("lora", "kl_reference", "transformers", "split")
def test_grpo_of_adapters_improves_and_a_killed_run_ends_bit_identical(tmp_path):
    flags = _flags(tmp_path)
    flags |= {
        "model.lora.path": _random_adapter(flags["model.path"], tmp_path / "a"),
        "engine.kind": "transformers",
        "algorithm.kl-coef": 1e-3,
        "batch.prompts-per-step": 16,
        "batch.group-size": 8,
        "engine.max-num-seqs": 128,
        "stream.verify-every": 4,
        "steps": 10,
        "checkpoint.every-steps": 3,
        "rewards.timeout-s": 300,
    }
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run("demo_grpo.yaml", 2, **flags | {"output-dir": whole})
    rows = metrics(whole)
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3, rewards
    assert rows[-1]["policy/kl_ref_k3"] > rows[0]["policy/kl_ref_k3"] > 0
    assert max(row["policy/mismatch_k3"] for row in rows) < 1e-6  # engines have what is trained
    run_killed(
        "demo_grpo.yaml",
        2,
        rewards=tmp_path / "r.py",
        step=3,
        hold=6,
        **flags | {"output-dir": killed},
    )
    # What goes through the engine's own loader is the same.
    run("demo_grpo.yaml", 2, **flags | {"output-dir": killed, "stream.mode": "reload"})
    assert_same_end(whole, killed)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.proves("lora", "lora_push", "split")
def test_vllm_draws_with_adapters_of_its_own_as_it_does_with_merged_weights(tmp_path):
    rows, flags = {}, _flags(tmp_path)
    for push in ("merged", "adapter"):
        out = tmp_path / push
        own = {
            "model.lora.rank": 8,
            "model.lora.push": push,
            "stream.verify-every": 1,
            "steps": 4,
            "checkpoint.every-steps": 0,
            "output-dir": out,
        }
        run("demo_grpo.yaml", 2, timeout_s=400, **flags | own)
        rows[push] = metrics(out)
        assert max(abs(row["policy/mismatch_k1"]) for row in rows[push]) < 1e-4
    for merged, own in zip(rows["merged"], rows["adapter"], strict=True):
        assert own["sync/bytes"] < merged["sync/bytes"] / 3
    # The same seeds, and weights that differ by rounding: at first the same samples.
    assert rows["adapter"][0]["reward/mean"] == rows["merged"][0]["reward/mean"]
    assert rows["adapter"][-1]["policy/grad_norm"] > 0
