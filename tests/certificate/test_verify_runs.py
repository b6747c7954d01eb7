"""Steps of runs on several ranks, with adapters and with experts, taken again by `verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.built import small_model
from tests.helpers.runs import TINY, call, run

REWARD = """
def varied(prompts, completions, **columns): return [sum(map(ord, c)) % 7 / 7 for c in completions]
"""
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "two trainers": (3, {"layout.trainer-ranks": 2}),
    "tensor parallel": (3, {"layout.trainer-ranks": 2, "layout.tp": 2}),
    "adapters": (2, {"model.lora.rank": 4, "algorithm.kl-coef": 1e-3}),
    "experts": (2, {"model.moe.balance": "aux"}),
}
"""Ranks in all, and what a run has besides."""


def _made(kind: str, folder: Path) -> tuple[Path, int]:
    """Make a run of three recorded steps; return its folder and the ranks that trained."""
    ranks, flags = KINDS[kind]
    architecture = "qwen3_moe" if kind == "experts" else "qwen3"
    model = small_model(folder / "m", architecture=architecture, hidden_size=64, heads=2)
    (folder / "r.py").write_text(REWARD)
    made = TINY["rl"] | {
        "model.path": model,
        "output-dir": folder / "run",
        "steps": 3,
        "engine.kind": "transformers",
        "rewards.functions": f"{folder / 'r.py'}:varied",
        "rollout.record.every": 1,
        "checkpoint.every-steps": 2,
    }
    run("demo_grpo.yaml", ranks, **made | flags)
    return folder / "run", int(flags.get("layout.trainer-ranks", 1))


@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_steps_repeat_on_the_ranks_that_trained(kind, tmp_path):
    folder, trainers = _made(kind, tmp_path)
    alone = call("-m", "spmdrl", "verify", folder)
    if trainers > 1:
        assert alone.returncode == 2
        assert "the run trained on 2 ranks, and 1 are started here" in alone.stderr
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", trainers)
        alone = call(*launcher, "-m", "spmdrl", "verify", folder, OMP_NUM_THREADS="1")
    said = alone.stdout + alone.stderr
    assert alone.returncode == 0, said[-4000:]
    assert "equal bit for bit: 3 certified steps (0 to 2)" in said
    if kind == "two trainers":
        _refuse_what_is_missing(folder)


def _refuse_what_is_missing(folder: Path) -> None:
    for path in (folder / "rollouts").glob("step_000001_*"):
        path.unlink()
    said = call("-m", "spmdrl", "verify", folder, "--steps", "1")
    assert said.returncode == 2 and "steps 1 are not recorded" in said.stderr
