"""Moments in 8 bits: torchao's updates, near float32's, resumed bit for bit or on other layouts."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from spmdrl.check.values import value_problems
from spmdrl.config import MemorySettings, OptimizerSettings
from spmdrl.model.tensor_parts import local_part
from spmdrl.train import adamw as optimizer
from spmdrl.train.adamw import AdamW
from tests.helpers.checkpoint_runs import after_two_updates
from tests.helpers.comparing import differing
from tests.helpers.policy_runs import batch, changed, config, small_model, update
from tests.helpers.torchao import needs_torchao
from tests.helpers.worlds import another_trainer, with_trainer

_model = functools.partial(small_model, hidden_size=64, heads=2, intermediate=96)
EIGHT = {"optimizer_dtype": "int8"}


def _tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {"w": torch.randn(96, 100, generator=generator), "norm": torch.ones(64)}


def _gradients(parameters: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    return {name: (p * (step + 1)).sin() * 10.0 ** (step % 3 - 1) for name, p in parameters.items()}


@needs_torchao
def test_updates_are_those_of_torchaos_adamw(monkeypatch):
    from torchao.optim import AdamW8bit

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # its step, as it is
    mine = {n: p[:96, :96].contiguous() if p.dim() > 1 else p for n, p in _tensors().items()}
    theirs = {name: torch.nn.Parameter(p.clone()) for name, p in mine.items()}
    monkeypatch.setattr(optimizer, "_CHUNK", 1024)  # in pieces
    ours = AdamW(
        mine,
        no_decay=set(),
        options=OptimizerSettings(beta2=0.999, weight_decay=0.1),
        dtype=torch.int8,
    )
    torchaos = AdamW8bit(
        [
            {"params": [theirs["w"]], "weight_decay": 0.1},
            {"params": [theirs["norm"]], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.999),
    )
    for step in range(5):
        gradients = _gradients(mine, step)
        for name, p in theirs.items():
            p.grad = gradients[name].clone()
        ours.step(gradients, lr=1e-2)
        torchaos.step()
        for name, p in theirs.items():
            torch.testing.assert_close(mine[name], p.detach(), rtol=1e-5, atol=1e-6)
    state = ours.state_dict()
    codes = torchaos.state[theirs["w"]]["exp_avg"].codes
    assert state["exp_avg"]["w"].dtype == torch.uint8
    assert (state["exp_avg"]["w"].flatten() == codes.flatten()).float().mean() > 0.999
    assert state["exp_avg"]["norm"].dtype == torch.float32  # few elements


@needs_torchao
def test_scales_cut_otherwise_keep_the_values_nearly_and_alike_cut_exactly():
    from spmdrl.model.tensor_parts import BlockValues
    from spmdrl.train.eight_bits import BLOCK, Quantised

    values = torch.randn(1000, generator=torch.Generator().manual_seed(1)).cumsum(0)
    for is_signed, own in ((True, values), (False, values.square())):
        whole = Quantised.zeros(1000, is_signed=is_signed)
        whole.copy_(own)
        read = whole.to(own.device, torch.float32)
        each = BlockValues("w", own, whole.scales, BLOCK).tensor
        largest = torch.cat([b.abs().max().expand(len(b)) for b in own.split(BLOCK)])
        assert ((read - own).abs() <= 0.05 * largest).all()
        again = Quantised.zeros(1000, is_signed=is_signed)
        again.codes[:1000].copy_(whole.codes[:1000])
        again.take_scales(each)
        assert torch.equal(again.scales, whole.scales)
        assert torch.equal(again.to(own.device, torch.float32), read)
        part = Quantised.zeros(600, is_signed=is_signed)  # of another layout: from 300 to 900
        part.codes[:600].copy_(whole.codes[300:900])
        part.take_scales(each[300:900])
        found = part.to(own.device, torch.float32)
        assert not torch.equal(found, read[300:900])
        assert ((found - read[300:900]).abs() <= 0.03 * read.abs().max()).all()


def _train(first: Any) -> dict[str, dict]:
    found = {}
    for name, memory in {"float32": {}, "int8": EIGHT}.items():
        cfg = changed(first.cfg, model={"memory": MemorySettings(**memory)})
        trainer = another_trainer(first, cfg)
        losses = [update(trainer, batch(0, 1), step=s)["policy/loss"][0] for s in range(15)]
        kept = [t for own in trainer.policy.optimizer._moments.values() for t in own.values()]
        found[name] = {
            "losses": losses,
            "bytes": sum(
                t.nbytes if isinstance(t, Tensor) else t.codes.nbytes + t.scales.nbytes
                for t in kept
            ),
        }
    sizes = [p.numel() for p in trainer.weights.shards().values()]
    large = sum(size for size in sizes if size >= 4096)
    return found | {"large": large, "small": sum(sizes) - large}


@needs_torchao
def test_a_model_learns_as_with_float32_moments_in_a_quarter_of_their_bytes(tmp_path):
    found = with_trainer(config(_model(tmp_path), tmp_path, objective="sft"), _train)[0]
    full, eight = found["float32"], found["int8"]
    assert full["bytes"] == 8 * (found["large"] + found["small"])
    # Blocks are filled up: at most one more for each of some twenty tensors and two moments.
    least = 2 * (1 + 4 / 256) * found["large"] + 8 * found["small"]
    assert least <= eight["bytes"] <= least + 40 * 260 and eight["bytes"] < 0.4 * full["bytes"]
    assert eight["losses"] != full["losses"] and full["losses"][-1] < 0.7 * full["losses"][0]
    for ours, theirs in zip(eight["losses"], full["losses"]):
        assert ours == pytest.approx(theirs, rel=0.03)


def _resumed(trainer: Any, is_new: bool) -> dict[str, Tensor]:
    """Take three updates, with a checkpoint after two; or the third one from that checkpoint."""
    own = after_two_updates(trainer, is_new=is_new)
    moments = {
        f"{key}/{name}": (
            kept if isinstance(kept, Tensor) else kept.to(trainer.world.device, torch.float32)
        ).clone()
        for key, part in trainer.policy.optimizer._moments.items()
        for name, kept in part.items()
    }
    update(trainer, own, step=2)
    local = {name: local_part(p).clone() for name, p in trainer.weights.shards().items()}
    return local | moments


@needs_torchao
def test_a_resumed_run_repeats_the_bits_and_another_layout_reads_it(tmp_path):
    cfg = config(_model(tmp_path), tmp_path / "run", world_size=2, model={"memory": EIGHT})
    straight, resumed = (with_trainer(cfg, _resumed, is_new) for is_new in (True, False))
    for before, after in zip(straight, resumed):
        assert not differing(after, before)
    alone = config(cfg.model.path, tmp_path / "run", model={"memory": EIGHT})
    (whole,) = with_trainer(alone, _resumed, False)
    for name in straight[0]:
        parts = torch.cat([part[name].flatten() for part in straight])
        own = whole[name].flatten()
        if "/" not in name:  # weights, after one more update of nearly the same moments
            torch.testing.assert_close(own, parts, rtol=0.05, atol=5e-3)
            continue
        assert ((own - parts).abs() <= 0.03 * parts.abs().max()).all(), name


def test_it_is_refused_with_the_command_where_torchao_is_missing(tmp_path, monkeypatch):
    cfg = config("model", tmp_path, model={"memory": EIGHT})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert any("pip install --no-deps torchao==0.18.0" in p for p in value_problems(cfg))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert not any("torchao" in p for p in value_problems(cfg))
