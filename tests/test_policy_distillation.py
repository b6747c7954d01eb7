"""Distillation on the rows' tokens: against plain transformers, on every layout, and learning."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from policy_runs import batch, config, full_parameters, sequence, update
from ranks import run_ranks
from torch import Tensor

from spmdrl.commands.create_model import create_model
from spmdrl.config import Config


def _model(where: Path, name: str, **options: object) -> Path:
    return create_model(
        where / name,
        architecture="qwen3",
        hidden_size=32,
        layers=2,
        heads=4,
        kv_heads=2,
        intermediate=48,
        **options,
    )


def _cfg(
    where: Path,
    student: Path,
    teacher: Path,
    *,
    world_size: int = 1,
    tp: int = 1,
    loss: str = "divergence",
    **options,
) -> Config:
    cfg = config(
        student,
        where,
        world_size=world_size,
        tp=tp,
        objective="distill",
        loss=loss,
        loss_options=options,
        model={"teacher": str(teacher)},
    )
    return replace(cfg, optimizer=replace(cfg.optimizer, max_grad_norm=0.0))


def _train(cfg: Config, steps: int) -> dict:
    from spmdrl.roles import make_trainer
    from spmdrl.world import World

    world = World.start(cfg)
    trainer = make_trainer(cfg, world)
    own = batch(world.dp_index(world.rank), world.dp_size)
    sums = [update(trainer, own, step=step) for step in range(steps)]
    whole = full_parameters(trainer)
    world.close()
    return {"sums": sums, "parameters": whole}


def _kl(p: Tensor, q: Tensor) -> float:
    return float((p.exp() * (p - q)).sum())


def _top(p: Tensor, q: Tensor, k: int) -> float:
    """Return KL(p || q) over p's k most likely tokens and one outcome for the rest."""
    ids = p.argsort(descending=True)
    p, q = (torch.cat([x[ids[:k]], x[ids[k:]].exp().sum().log()[None]]) for x in (p, q))
    return _kl(p, q)


def _by_transformers(student: Path, teacher: Path, compare: Callable) -> float:
    """Return the mean of `compare` per response token, from full logits and a plain sum."""
    from transformers import AutoModelForCausalLM

    models = [
        AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32).eval()
        for p in (student, teacher)
    ]
    total, count = 0.0, 0
    for micro in batch(0, 1).updates[0]:
        for at, index in enumerate(micro.sequence_ids.tolist()):
            if index == 4:  # not valid
                continue
            row, begin = sequence(index), int(micro.cu_seqlens[at])
            with torch.no_grad():
                q, p = (torch.log_softmax(m(row[None]).logits[0].double(), -1) for m in models)
            for t in range(1, len(row)):
                if micro.response_mask[begin + t]:
                    total += compare(p[t - 1], q[t - 1])
                    count += 1
    return total / count


CASES = {
    "forward": (dict(kind="forward"), lambda p, q: _kl(p, q)),
    "reverse": (dict(kind="reverse"), lambda p, q: _kl(q, p)),
    "top": (dict(loss="distill_topk", k=5), lambda p, q: _top(p, q, 5)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_that_of_plain_transformers_and_falls_alike_on_every_layout(case, tmp_path):
    options, compare = CASES[case]
    student, teacher = (
        _model(tmp_path, "student"),
        _model(tmp_path, "teacher", seed=3, initializer_std=0.3),
    )
    one = run_ranks(1, _train, _cfg(tmp_path, student, teacher, **options), 4)[0]
    losses = [sums["policy/loss"][0] for sums in one["sums"]]
    assert losses[0] == pytest.approx(_by_transformers(student, teacher, compare), rel=1e-4)
    assert losses[-1] < 0.9 * losses[0], losses
    for layout in ({}, {"tp": 2}):
        cfg = _cfg(tmp_path, student, teacher, world_size=2, **layout, **options)
        for ours in run_ranks(2, _train, cfg, 4):
            for a, b in zip(ours["sums"], one["sums"]):
                assert a.keys() == b.keys()
                for name in ("policy/loss", "policy/distill", "policy/grad_norm"):
                    assert math.isclose(a[name][0], b[name][0], rel_tol=1e-5), (layout, name)
            for name, expected in one["parameters"].items():
                torch.testing.assert_close(ours["parameters"][name], expected, rtol=1e-4, atol=1e-5)
    has_mass = "policy/distill_teacher_mass" in one["sums"][0]
    assert has_mass == (case == "top")


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path):
    student = _model(tmp_path, "student")
    teacher = _model(tmp_path, "other")
    described = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps(described | {"vocab_size": 200}))
    with pytest.raises(AssertionError, match="model.teacher: has a vocabulary of"):
        run_ranks(1, _train, _cfg(tmp_path, student, teacher), 1)
