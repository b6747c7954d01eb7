"""GRPO of adapters by the program, as a user starts it: it improves, and goes on bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spmdrl.model.lora.files import write_adapter
from spmdrl.model.lora.layers import Adapters, initial_a
from spmdrl.model.lora.targets import LoraForm
from spmdrl.rollout.recordings import find_recorded, read_table
from spmdrl.tools.commands.create_model import create_model
from tests.helpers.built import small_model
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


def _moe_flags(where: Path) -> dict[str, Any]:
    """Flags of a mixture that begins with an adapter of all its layers and experts."""
    (where / "r.py").write_text(REWARD)
    sizes = {"hidden_size": 64, "heads": 2, "initializer_std": 0.1}
    begin = small_model(where / "model", architecture="qwen3_moe", **sizes)
    return TINY["rl"] | {
        "model.path": begin,
        "model.lora.path": _random_adapter(begin, where / "adapter"),
        "rewards.functions": f"{where / 'r.py'}:digits",
        "optimizer.lr": 0.003,
        "optimizer.warmup-steps": 0,
        "stream.verify-every": 1,
    }


@pytest.mark.proves(
    "moe", "lora", "lora_push", "in_flight", "over_sample", "lag", "split", "record"
)
def test_a_mixture_trains_in_flight_with_adapters_in_vllm_and_goes_on(tmp_path):
    out = tmp_path / "out"
    flags = _moe_flags(tmp_path) | {
        "output-dir": out,
        "model.lora.push": "adapter",
        "lag": 1,
        "rollout.schedule.in-flight": "true",
        "rollout.schedule.over-sample": 1.5,
        "rollout.schedule.max-staleness": 3,
        "sampling.max-response-tokens": 40,
        "rollout.record.every": 1,
        "checkpoint.every-steps": 2,
    }
    run("demo_grpo.yaml", 2, **flags, steps=2)
    resumed = run("demo_grpo.yaml", 2, **flags, steps=4)
    assert "resume" in resumed.output
    rows = metrics(out)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert abs(rows[0]["policy/mismatch_k1"]) < 1e-5  # of adapters that are not zero
    assert all(row["policy/grad_norm"] > 0 for row in rows)
    files = [path for step in range(4) for path in find_recorded(out).files_of(step)]
    samples = [row for path in files for row in read_table(path).to_pylist()]
    versions = [{v for v in row["policy_versions"] if v >= 0} for row in samples]
    assert any(len(own) > 1 for own in versions), "no sample was drawn by several policies"


@pytest.mark.grid
@pytest.mark.proves("moe", "lora", "lora_push", "ep", "inference_tp", "split")
def test_a_mixture_trains_with_adapters_in_vllm_as_with_merged_weights(tmp_path):
    rows, flags = {}, _moe_flags(tmp_path)
    for push in ("merged", "adapter"):
        own = {
            "model.lora.push": push,
            "lag": 0,
            "layout.trainer-ranks": 2,
            "layout.ep": 2,
            "layout.inference-tp": 2,
            "engine.options": "{enable_expert_parallel: true}",
            "steps": 3,
            "output-dir": tmp_path / push,
        }
        run("demo_grpo.yaml", 4, **flags | own)
        rows[push] = metrics(tmp_path / push)
        assert max(abs(row["policy/mismatch_k1"]) for row in rows[push]) < 1e-5
    for merged, own in zip(rows["merged"], rows["adapter"], strict=True):
        assert own["reward/mean"] == merged["reward/mean"]
        assert own["policy/loss"] == pytest.approx(merged["policy/loss"], abs=1e-4)
        assert own["policy/grad_norm"] == pytest.approx(merged["policy/grad_norm"], rel=1e-2)
    later = [push[-1]["sync/bytes"] for push in (rows["adapter"], rows["merged"])]
    assert later[0] < later[1] / 2
