"""A frozen reference beside the policy, KL terms, and methods with whole-batch statistics."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from policy_runs import LENGTHS, batch, config, full_parameters, update
from ranks import run_ranks

from spmdrl.commands.create_model import create_model
from spmdrl.config import Config


def _model(where: Path, name: str = "start", **options: object) -> Path:
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


def _train(first: Config, configs: dict[str, Config], steps: int = 2) -> dict[str, dict]:
    """Train under each config as train.py does (annotate, credit, update), in one world."""
    from spmdrl.world import World

    world = World.start(first)
    found = {name: _train_one(cfg, world, steps) for name, cfg in configs.items()}
    world.close()
    return found


def _train_one(cfg: Config, world: object, steps: int) -> dict:
    from spmdrl.credit import advantages_of
    from spmdrl.roles import make_trainer

    trainer = make_trainer(cfg, world)
    own = batch(world.dp_index(world.rank), world.dp_size, updates=cfg.batch.updates_per_step)
    rewards = torch.linspace(0, 1, len(LENGTHS)).double().cos()
    own = dataclasses.replace(own, scalars=dataclasses.replace(own.scalars, rewards=rewards))
    sums = []
    for step in range(steps):
        annotated = trainer.annotate(own, step=step)
        advantages = advantages_of(annotated, cfg=cfg, world=world, step=step)
        sums.append(trainer.update(annotated, advantages, step=step))
    return {"sums": sums, "parameters": full_parameters(trainer)}


CASES = {
    "kl in the loss": dict(kl_coef=0.5, kl="k3"),
    "kl in the loss, unbiased, two updates": dict(
        kl_coef=0.5, kl="k1", updates=2, kl_options={"unbiased": True}
    ),
    "kl in the reward of sequences": dict(kl_coef=0.5, kl="k1", kl_in="reward", advantage="rloo"),
    "kl in the reward of tokens, whitened": dict(
        kl_coef=0.5, kl="k1", kl_in="reward", advantage="reinforce_plus_plus"
    ),
    "statistics of the whole batch": dict(
        loss="kl_cov", updates=2, loss_options={"select_frac": 0.2}
    ),
    "statistics with a correction of its own": dict(
        loss="m2po", correction="none", updates=2, loss_options={"threshold": 1.0}
    ),
    "tokens drawn by key": dict(
        loss="clip_cov", updates=2, loss_options={"select_frac": 0.5, "cov_low": 0.0}
    ),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, list[dict]]:
    """Results of every case by layout, per rank."""
    where = tmp_path_factory.mktemp("reference")
    folder, other = _model(where), _model(where, "reference", seed=7)
    results = {}
    layouts = {"one": {}, "dp": dict(world_size=2), "tp": dict(world_size=2, tp=2)}
    for name, layout in layouts.items():
        model = {"reference": {"path": str(other)}}
        configs = {
            case: config(folder, where, **options, **layout, model=model)
            for case, options in CASES.items()
        }
        first = next(iter(configs.values()))
        results[name] = run_ranks(layout.get("world_size", 1), _train, first, configs)
    return results


@pytest.mark.parametrize("layout", ["dp", "tp"])
@pytest.mark.parametrize("case", CASES)
def test_every_layout_trains_like_one_process(case, layout, trained):
    one = trained["one"][0][case]
    if "kl_coef" in CASES[case]:
        assert one["sums"][0]["policy/kl_ref_k3"][0] > 0.01
    for ours in (rank[case] for rank in trained[layout]):
        for a, b in zip(ours["sums"], one["sums"]):
            assert a.keys() == b.keys()
            for name, (x, n) in b.items():
                assert a[name][1] == pytest.approx(n, rel=1e-6), name
                assert math.isclose(a[name][0], x, rel_tol=1e-4, abs_tol=2e-5 * max(1, n)), (
                    name,
                    a[name],
                    (x, n),
                )
        for name, expected in one["parameters"].items():
            torch.testing.assert_close(ours["parameters"][name], expected, rtol=1e-4, atol=5e-6)


def _step_zero(cfg: Config) -> tuple[list, list]:
    """Return the columns of step 0, and whether the reference stays while the policy moves."""
    from spmdrl.roles import make_trainer
    from spmdrl.world import World

    world = World.start(cfg)
    trainer = make_trainer(cfg, world)
    own = batch(0, 1)
    first = trainer.annotate(own, step=0).columns
    update(trainer, own, step=0)
    second = trainer.annotate(own, step=1).columns
    world.close()
    return first, second


def test_the_reference_is_the_policy_at_first_and_stays(tmp_path):
    cfg = config(_model(tmp_path), tmp_path, kl_coef=0.1, kl_in="reward", kl="k1")
    first, second = run_ranks(1, _step_zero, cfg)[0]
    for before, after in zip(first[0], second[0]):
        assert torch.equal(before["old_logprobs"], before["ref_logprobs"])
        assert torch.equal(before["ref_logprobs"], after["ref_logprobs"])
        assert not torch.equal(before["old_logprobs"], after["old_logprobs"])


def test_a_strong_kl_holds_the_policy_at_the_reference(tmp_path):
    folder = _model(tmp_path)
    configs = {}
    for coef in (0.0, 50.0):
        cfg = config(folder, tmp_path, kl_coef=coef or 1e-9, kl="k2", loss="reinforce")
        configs[coef] = cfg
    results = run_ranks(1, _train, cfg, configs, 12)[0]
    found = {coef: r["sums"][-1]["policy/kl_ref_k3"] for coef, r in results.items()}
    free, held = (total / count for total, count in (found[0.0], found[50.0]))
    assert held < 0.5 * free, (held, free)
