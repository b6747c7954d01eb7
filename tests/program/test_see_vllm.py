"""Models that see, by train.py with vLLM: ahead of the trainer, killed and resumed, colocated, over
several ranks, in bfloat16, with adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spmdrl.tools.commands.create_model import TowerSizes, create_model
from tests.engine.test_vision import assert_exact, in_each, seeing_cfg
from tests.helpers.runs import HELD, TINY, command, metrics, run, run_killed
from tests.helpers.worlds import in_world
from tests.program.test_see import SCENES
from tests.program.test_train import assert_same_end

pytestmark = [pytest.mark.usefixtures("torchvision"), pytest.mark.grid]
REWARDS = """
def spread(prompts, completions, images, answer, **columns):
    wait_to_be_killed()
    assert all(one["bytes"][1:4] == b"PNG" for row in images for one in row) and len(answer) == 4
    return [sum(map(ord, text)) % 7 / 7 for text in completions]
"""


def seeing(folder: Path, architecture: str = "qwen2_5_vl", **sizes: Any) -> Path:
    """Write a small model that sees."""
    sizes = dict(hidden_size=64, layers=2, heads=2, kv_heads=2, intermediate=96) | sizes
    tower = TowerSizes(width=32, layers=2, fan_in=True)
    return create_model(
        folder, architecture=architecture, tower=tower, initializer_std=0.12, **sizes
    )


def flags(model: Path, out: Path, **more: Any) -> dict[str, Any]:
    """Return flags of a run of four steps, with rewards of its own beside the model."""
    rewards = model.with_name("r.py")
    rewards.write_text(HELD + REWARDS)
    own = {"model.path": model, "output-dir": out, "steps": 4, "checkpoint.every-steps": 2}
    own |= {"rewards.functions": f"{rewards}:spread", "data.task-options": json.dumps(SCENES)}
    return TINY["rl"] | own | more


def assert_learns(out: Path, *, gap: float) -> list[float]:
    """Check that a run took its steps, and that engine and trainer computed the same where the one
    had the other's weights; return the staleness of each step."""
    rows = metrics(out)
    assert len(rows) >= 4 and all(row["sync/bytes"] > 0 for row in rows)
    assert all(row["policy/grad_norm"] > 0 for row in rows[:2])
    fresh = [row["policy/mismatch_k3"] for row in rows if not row["policy/staleness"]]
    assert max(fresh) < gap, fresh
    return [row["policy/staleness"] for row in rows]


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable")
def test_a_run_ahead_is_killed_and_goes_on_as_if_it_never_was(tmp_path):
    model, own = seeing(tmp_path / "init"), {"rewards.timeout-s": 300, "steps": 6}
    whole, again, rewards = (tmp_path / name for name in ("whole", "again", "r.py"))
    run("demo_see.yaml", 2, **flags(model, whole, **own))
    assert assert_learns(whole, gap=1e-6) == [0, 1, 1, 1, 1, 1]
    run_killed("demo_see.yaml", 2, rewards=rewards, step=2, hold=4, **flags(model, again, **own))
    run("demo_see.yaml", 2, **flags(model, again, **own))
    assert_same_end(whole, again)
    assert_exported(whole, model)


def assert_exported(run_folder: Path, model: Path) -> None:
    """Check that an export has all parts as trained, and that vLLM draws by it what transformers
    does."""
    out = run_folder.with_name("exported")
    command("export", run_folder, "--out", out, "--dtype", "float32")
    before, after = (load_file(folder / "model.safetensors") for folder in (model, out))
    assert before.keys() == after.keys() and sum("visual" in name for name in after) > 10
    assert not [name for name in before if torch.equal(before[name], after[name])]
    (found,) = in_world(seeing_cfg(out, kind="vllm"), in_each, {"exported": str(out)})
    assert_exact(found)


COLOCATED = {"layout.placement": "colocated"}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "colocated, in bfloat16, recomputed": (
        "qwen3_vl",
        1,
        COLOCATED
        | {
            "model.compute-dtype": "bfloat16",
            "engine.dtype": "bfloat16",
            "model.memory.activation-checkpointing": "full",
        },
    ),
    "an engine of tp 2, over-sampled": (
        "internvl",
        4,
        {"layout.trainer-ranks": 2, "layout.inference-tp": 2}
        | {"rollout.schedule.over-sample": 1.5},
    ),
    "in flight, of longer answers": (
        "qwen3_vl",
        2,
        {"lag": 2, "rollout.schedule.in-flight": "true", "sampling.max-response-tokens": 24}
        | {"engine.max-num-seqs": 8},
    ),
    "adapters of the tower, merged": (
        "qwen3_vl_moe",
        2,
        {
            "model.lora.rank": 4,
            "model.lora.targets": json.dumps(["visual.blocks.0.attn.qkv", "q_proj", "experts"]),
        },
    ),
    **{
        f"adapters of the language model, in the engine of a {family}": (
            family,
            2,
            {"model.lora.rank": 4, "model.lora.push": "adapter"},
        )
        for family in ("qwen2_5_vl", "qwen3_vl", "internvl")
    },
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.proves("images", "colocated")
@pytest.mark.proves("images", "inference_tp", "over_sample", "split")
@pytest.mark.proves("images", "in_flight", "lag", "split")
@pytest.mark.proves("images", "moe", "lora", "split")
@pytest.mark.proves("images", "lora", "lora_push", "split")
def test_a_run_takes_its_steps(name, tmp_path):
    architecture, ranks, own = CASES[name]
    model, out = seeing(tmp_path / "init", architecture), tmp_path / "out"
    at_once = {"lag": 0, "stream.verify-every": 1}
    run("demo_see.yaml", ranks, **flags(model, out, **at_once | own))
    staleness = assert_learns(out, gap=1e-2 if "bfloat16" in name else 1e-6)
    assert any(staleness) == ("over-sampled" in name or "in flight" in name)
