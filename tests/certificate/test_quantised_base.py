"""Certificates of runs over a quantised base: repeated, resumed, taken again, and spoiled."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

from spmdrl.certificate.compare import step_differences
from spmdrl.certificate.fingerprint_collector import FingerprintCollector
from spmdrl.certificate.lines import NAME
from spmdrl.credit import advantages_of
from spmdrl.model.tensor_parts import local_part
from spmdrl.tools.commands import diff
from tests.helpers import built
from tests.helpers.policy_runs import config, own_batch, small_model
from tests.helpers.runs import TINY, command, run
from tests.helpers.worlds import another_trainer, with_trainer
from tests.model.test_lora import set_b
from tests.model.test_moe import make_moe

REWARD = """
def varied(prompts, completions, **columns): return [sum(map(ord, c)) % 7 / 7 for c in completions]
"""
DENSE = "model.layers.1.self_attn.q_proj"
EXPERTS = "model.layers.1.mlp.experts.down_proj"


def _flip(tensor: Tensor, dtype: torch.dtype) -> None:
    local_part(tensor).flatten()[:1].view(dtype)[0] ^= 1


@torch.no_grad()
def _plant(trainer: Any, name: str) -> None:
    shards = trainer.policy.model.named_shards()
    own = shards[name]
    _flip(own, torch.uint8 if own.dtype == torch.uint8 else torch.int32)


def _content(trainer: Any, plant: str = "") -> dict[str, Any]:
    """Return what a step comes to, with one bit of a tensor changed before it."""
    collector = FingerprintCollector(
        trainer.world, trainer, is_due=lambda step: True, with_norms=lambda step: True
    )
    set_b(trainer)
    if plant:
        _plant(trainer, plant)
    own = trainer.annotate(own_batch(trainer.world), step=0)
    advantages = advantages_of(own, cfg=trainer.cfg, world=trainer.world, step=0)
    updated = trainer.update(own, advantages, step=0)
    return collector.content(0, own, advantages, updated)


def _with_plants(trainer: Any, plants: list[str]) -> list[list[str]]:
    plain = _content(trainer)
    spoiled = [_content(another_trainer(trainer), plant) for plant in ("", *plants)]
    return [[str(one) for one in step_differences(plain, own)] for own in spoiled]


@pytest.mark.parametrize("kind, is_moe", [("nf4", True), ("int8", False)])
def test_a_changed_bit_is_the_first_difference_and_a_repeated_step_has_none(kind, is_moe, tmp_path):
    folder = make_moe(tmp_path, "qwen3_moe") if is_moe else small_model(tmp_path)
    lora = {"lora": {"rank": 3, "alpha": 12, "base": kind}}
    cfg = config(folder, tmp_path / "out", model=lora, advantage="grpo", kl_coef=0.1)
    of_base = EXPERTS if is_moe else f"{DENSE}.weight"
    adapter = f"{EXPERTS}_lora_A" if is_moe else f"{DENSE}.lora_A.weight"
    ((again, of_adapter, of_code),) = with_trainer(cfg, _with_plants, [adapter, of_base])
    assert not again
    assert of_adapter[0].startswith(f"weight {adapter} before the update"), of_adapter[:3]
    # Frozen weights have no line. What they change has.
    assert of_code[0].startswith("column ref_logprobs: differs"), of_code[:3]


@pytest.mark.proves("lora", "lora_base", "record", "transformers", "split")
@pytest.mark.parametrize("base", ["nf4", pytest.param("int8", marks=pytest.mark.grid)])
def test_a_run_is_resumed_and_its_steps_are_taken_again_bit_by_bit(base, tmp_path, capsys):
    model = built.small_model(tmp_path / "model", hidden_size=64, heads=2, kv_heads=1)
    (tmp_path / "r.py").write_text(REWARD)
    flags = TINY["rl"] | {
        "model.path": model,
        "model.lora.rank": 4,
        "model.lora.base": base,
        "algorithm.kl-coef": 1e-3,
        "optimizer.lr": 1e-3,
        "engine.kind": "transformers",
        "rewards.functions": f"{tmp_path / 'r.py'}:varied",
        "rollout.record.every": 1,
        "checkpoint.every-steps": 1,
        "checkpoint.keep.last": 9,
        "steps": 3,
    }
    first, again = tmp_path / "first", tmp_path / "again"
    run("demo_grpo.yaml", 2, **flags | {"output-dir": first})
    shutil.copytree(first, again)
    for step in (2, 3):
        shutil.rmtree(again / "checkpoints" / f"step_{step}")
    run("demo_grpo.yaml", 2, **flags | {"output-dir": again})
    assert (again / NAME).read_bytes() == (first / NAME).read_bytes()
    assert diff.main([str(first), str(again)]) == 0
    assert capsys.readouterr().out == "equal bit for bit: 3 certified steps (0 to 2)\n"
    assert "equal bit for bit: 3 certified steps (0 to 2)" in command("verify", first).output
