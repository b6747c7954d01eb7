"""A frozen reference beside the policy, KL terms, and methods with whole-batch statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spmdrl.config import Config
from tests.helpers.comparing import assert_near, assert_same_sums, full_parameters
from tests.helpers.policy_runs import (
    LENGTHS,
    config,
    own_batch,
    small_model,
    step_as_train_does,
    update,
)
from tests.helpers.worlds import in_world, make_trainer, with_trainer


def _train(configs: dict[Any, Config], steps: int = 2) -> list[dict[Any, dict]]:
    """Train under each config as train.py does, in one world."""
    return in_world(next(iter(configs.values())), _train_each, configs, steps)


def _train_each(world: Any, configs: dict[Any, Config], steps: int) -> dict[Any, dict]:
    found, rewards = {}, torch.linspace(0, 1, len(LENGTHS)).double().cos()
    for name, cfg in configs.items():
        world.cfg = cfg
        trainer, own = make_trainer(cfg, world), own_batch(world, rewards=rewards)
        sums = [step_as_train_does(trainer, own, step=step)[2] for step in range(steps)]
        found[name] = {"sums": sums, "parameters": full_parameters(trainer)}
    return found


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
    """Results of every case by layout, per rank; tensor parallel ones: test_parity_grid.py."""
    where = tmp_path_factory.mktemp("reference")
    folder, other = small_model(where), small_model(where, "reference", seed=7)
    results = {}
    for name, layout in {"one": {}, "dp": dict(world_size=2)}.items():
        model = {"reference": {"path": str(other)}}
        configs = {
            case: config(folder, where, **options, **layout, model=model)
            for case, options in CASES.items()
        }
        results[name] = _train(configs)
    return results


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_like_one(case, trained):
    one = trained["one"][0][case]
    if "kl_coef" in CASES[case]:
        assert one["sums"][0]["policy/kl_ref_k3"][0] > 0.01
    for ours in (rank[case] for rank in trained["dp"]):
        assert_same_sums(ours["sums"], one["sums"], rel=1e-4, abs_=2e-5)
        assert_near(ours["parameters"], one["parameters"], rtol=1e-4, atol=5e-6)


def _step_zero(trainer: Any) -> tuple[list, list]:
    """Return the columns of step 0, and whether the reference stays while the policy moves."""
    own = own_batch(trainer.world)
    first = trainer.annotate(own, step=0).columns
    update(trainer, own, step=0)
    return first, trainer.annotate(own, step=1).columns


def test_the_reference_is_the_policy_at_first_and_stays(tmp_path):
    cfg = config(small_model(tmp_path), tmp_path, kl_coef=0.1, kl_in="reward", kl="k1")
    first, second = with_trainer(cfg, _step_zero)[0]
    for before, after in zip(first[0], second[0]):
        assert torch.equal(before["old_logprobs"], before["ref_logprobs"])
        assert torch.equal(before["ref_logprobs"], after["ref_logprobs"])
        assert not torch.equal(before["old_logprobs"], after["old_logprobs"])


def test_a_strong_kl_holds_the_policy_at_the_reference(tmp_path):
    folder = small_model(tmp_path)
    configs = {
        coef: config(folder, tmp_path, kl_coef=coef or 1e-9, kl="k2", loss="reinforce")
        for coef in (0.0, 50.0)
    }
    results = _train(configs, 12)[0]
    found = {coef: r["sums"][-1]["policy/kl_ref_k3"] for coef, r in results.items()}
    free, held = (total / count for total, count in (found[0.0], found[50.0]))
    assert held < 0.5 * free, (held, free)
