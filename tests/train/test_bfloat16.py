"""Value and reward models that compute in bfloat16: finite, and near what float32 gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spmdrl.config import Config
from tests.helpers.policy_runs import changed, own_batch, small_model, step_as_train_does
from tests.helpers.worlds import in_world, make_trainer
from tests.train import test_critic, test_preference

STEPS = 8


def _both(world: Any, rewarding: Config) -> dict[str, dict]:
    """Train a policy with its value model, and a reward model, in each dtype."""
    critic, found = world.cfg, {}
    for dtype in ("float32", "bfloat16"):
        value, reward = (
            changed(cfg, model={"compute_dtype": dtype}) for cfg in (critic, rewarding)
        )
        trainer = make_trainer(value, world)
        own = own_batch(world, rewards=test_critic.REWARDS_OF)
        steps = [step_as_train_does(trainer, own, step=step) for step in range(STEPS)]
        model = trainer.companions["critic"].model
        columns = torch.cat([c["values"] for c in trainer.annotate(own, step=STEPS).columns[0]])
        found[dtype] = {
            "value": [sums for _, _, sums in steps],
            "values": columns,
            "masters": {p.dtype for p in model.named_shards().values()},
            "reward": test_preference.train_on_pairs(reward, world, steps=STEPS)["sums"],
        }
        world.cfg = critic
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict]:
    where: Path = tmp_path_factory.mktemp("bfloat16")
    model = small_model(where)
    critic = test_critic.critic_config(model, where, critic={"lr": 8e-3})
    rewarding = test_preference.config(
        test_preference.jsonl(where, test_preference.ragged()),
        model=model,
        out=where / "run",
        objective="reward_model",
        loss="bradley_terry",
    )
    return in_world(critic, _both, rewarding)[0]


def test_a_value_model_learns_in_bfloat16_as_in_float32(found):
    half, full = found["bfloat16"], found["float32"]
    assert half["values"].dtype == torch.float32 and half["masters"] == {torch.float32}
    assert half["values"].isfinite().all() and full["values"].abs().max() > 0.1
    assert not torch.equal(half["values"], full["values"]), "it did compute in bfloat16"
    torch.testing.assert_close(half["values"], full["values"], rtol=0.05, atol=0.03)
    for ours, theirs in zip(half["value"], full["value"]):
        assert ours["value/skipped_updates"][0] == ours["policy/skipped_updates"][0] == 0
        assert ours["value/loss"][0] == pytest.approx(theirs["value/loss"][0], rel=0.05, abs=0.01)
    assert half["value"][-1]["value/loss"][0] < half["value"][0]["value/loss"][0]


def test_a_reward_model_learns_in_bfloat16_as_in_float32(found):
    half, full = found["bfloat16"]["reward"], found["float32"]["reward"]
    for part in (half, full):
        assert not any(sums["policy/skipped_updates"][0] for sums in part)
        assert part[-1]["policy/loss"][0] < 0.5 * part[0]["policy/loss"][0]
        assert part[0]["reward_model/margin"][0] == 0.0  # the head starts at 0
    assert half[1]["reward_model/margin"] != full[1]["reward_model/margin"]
    for ours, theirs in zip(half[:4], full):  # from there on the two drift apart
        assert ours["policy/loss"][0] == pytest.approx(theirs["policy/loss"][0], rel=0.02)
        margins = ours["reward_model/margin"][0], theirs["reward_model/margin"][0]
        assert margins[0] == pytest.approx(margins[1], rel=0.05, abs=0.05)
