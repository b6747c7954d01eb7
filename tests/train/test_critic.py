"""The value model beside the policy: any mesh like one process, warm-up, resume, whole runs."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from spmdrl.check.settings import validate
from spmdrl.config import Config
from spmdrl.tools.commands.create_model import create_model
from spmdrl.tools.commands.export import export
from spmdrl.types import Batch, Microbatch
from tests.helpers import runs
from tests.helpers.checkpoint_runs import restore, save
from tests.helpers.comparing import assert_near, assert_same_sums, differing, full_state
from tests.helpers.policy_runs import (
    LENGTHS,
    VALID,
    changed,
    config,
    own_batch,
    small_model,
    step_as_train_does,
)
from tests.helpers.ragged import scalars_of
from tests.helpers.worlds import another_trainer, make_trainer, with_trainer
from tests.program.test_train import assert_same_end, final_weights, reward

REWARDS_OF = torch.linspace(0, 1, len(LENGTHS)).double().cos()


def critic_config(
    folder: Path, out: Path, *, critic: dict | None = None, **options: object
) -> Config:
    cfg = config(folder, out, **{"advantage": "gae"} | options)
    return changed(cfg, critic={"lr": 2e-2} | (critic or {}))


def _by_sequence(own: object, parts: tuple) -> dict[int, torch.Tensor]:
    """Return {sequence: its tokens' numbers} of this rank."""
    found = {}
    for micro, values in zip(sum(own.updates, ()), sum(parts, ())):
        for row, piece in zip(
            micro.sequence_ids.tolist(), values.split(micro.cu_seqlens.diff().tolist())
        ):
            if row >= 0:
                found[row] = piece
    return found


def _train(trainer: Any, steps: int = 3, restored: Path | None = None) -> dict:
    """Take steps; return sums, whole parameters of both models, and the last step's credit.

    Saves at the end, or takes up the checkpoint `restored` and goes on from it twice; and
    takes steps with another policy of the same world, that has a warm-up.
    """
    cfg, world, sums = trainer.cfg, trainer.world, []
    own = own_batch(world, rewards=REWARDS_OF)
    for step in range(steps):
        annotated, advantages, updated = step_as_train_does(trainer, own, step=step)
        sums.append(updated)
    values = tuple(tuple(m["values"] for m in u) for u in annotated.columns)
    result = {
        "sums": sums,
        "state": full_state(trainer),
        "values": _by_sequence(own, values),
        "returns": _by_sequence(own, advantages.returns),
        "advantages": _by_sequence(own, advantages.tokens),
    }
    if restored is None:
        save(trainer, steps)
        return result
    result["resumed"] = []
    for _ in range(2):
        restore(trainer, changed(cfg, checkpoint={"resume": str(restored)}), step=steps)
        before = full_state(trainer)
        updated = step_as_train_does(trainer, own, step=steps)[2]
        result["resumed"].append((before, updated, full_state(trainer)))
    return result | {"warm_up": _warm_up(trainer, own)}


def _warm_up(other: Any, own: object) -> list[tuple[dict, dict]]:
    """Return sums and state after each of three steps, two of them warm-up."""
    trainer = another_trainer(other, changed(other.cfg, critic={"warmup_steps": 2}))
    found = [({}, full_state(trainer))]
    for step in range(3):
        sums = step_as_train_does(trainer, own, step=step)[2]
        found.append((sums, full_state(trainer)))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one(folder, tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("one")
    result = with_trainer(critic_config(folder, out, updates=2), _train)[0]
    return result | {"checkpoint": out / "checkpoints" / "step_3"}


@pytest.fixture(
    scope="module", params=[pytest.param({}, marks=pytest.mark.grid), {"tp": 2}], ids=["dp", "tp"]
)
def two(request, folder, one, tmp_path_factory) -> list[dict]:
    cfg = critic_config(
        folder, tmp_path_factory.mktemp("two"), world_size=2, updates=2, **request.param
    )
    return with_trainer(cfg, _train, 3, one["checkpoint"])


@pytest.mark.grid
@pytest.mark.proves("muon", "critic", "tp")
def test_muon_trains_the_value_models_matrices_alike_on_every_mesh(folder, tmp_path):
    cfg = changed(
        critic_config(folder, tmp_path / "one"),
        optimizer={"kind": "muon", "muon": {"ns_dtype": "float32"}},
    )
    whole = with_trainer(cfg, _train)[0]
    momenta, moments = (
        {n.removeprefix(kept) for n in whole["state"] if n.startswith(kept)}
        for kept in ("critic.optimizer.momentum.", "critic.optimizer.exp_avg.")
    )
    assert len(momenta) == 2 * 7 and all("proj" in name for name in momenta)
    assert "score.weight" in moments and momenta.isdisjoint(moments)
    assert all(whole["state"][f"critic.optimizer.momentum.{name}"].any() for name in momenta)
    checkpoint = tmp_path / "one" / "checkpoints" / "step_3"
    other = changed(cfg, layout={"world_size": 2, "tp": 2}, output_dir=str(tmp_path / "two"))
    for ours in with_trainer(other, _train, 3, checkpoint):
        assert_same_sums(ours["sums"], whole["sums"], "tp 2", rel=1e-4, abs_=1e-4)
        assert_near(ours["state"], whole["state"], "tp 2", rtol=1e-3, atol=2e-4)
        first, again = ours["resumed"]
        assert not differing(first[0], whole["state"])
        assert first[1] == again[1] and not differing(first[2], again[2])


def test_every_mesh_trains_both_models_like_one_process(two, one):
    for rank, ours in enumerate(two):
        assert_same_sums(ours["sums"], one["sums"], f"rank {rank}", rel=1e-4, abs_=2e-5)
        assert_near(ours["state"], one["state"], f"rank {rank}", rtol=1e-4, atol=5e-6)
        for kind in ("values", "advantages", "returns"):  # advantages: whitened over all ranks
            for row, tokens in ours[kind].items():
                torch.testing.assert_close(tokens, one[kind][row], rtol=1e-4, atol=1e-5)


def test_a_checkpoint_of_one_process_goes_on_bit_identical(two, one):
    assert {n.split(".")[0] for n in one["state"]} == {"model", "optimizer", "critic"}
    for ours in two:
        first, again = ours["resumed"]
        for before, _, _ in (first, again):
            assert not differing(before, one["state"])
        assert first[1] == again[1] and not differing(first[2], again[2])
        assert "critic.model.score.weight" in differing(first[0], first[2])


def test_warm_up_trains_the_value_model_alone(two):
    for ours in two:
        start = ours["warm_up"][0][1]
        own = [name for name in start if not name.startswith("critic.")]
        for step, (sums, state) in enumerate(ours["warm_up"][1:]):
            is_warm = step < 2
            assert set(own).isdisjoint(differing(state, start)) == is_warm
            assert ("policy/loss" in sums) != is_warm and sums["value/loss"][0] > 0
            assert state["critic.optimizer.updates"] == 2 * (step + 1)
            assert "critic.model.score.weight" in differing(state, ours["warm_up"][step][1])


def test_values_and_metrics_of_one_process_are_what_they_say(one):
    head = one["state"]["critic.model.score.weight"]
    assert head.shape == (1, 32) and head.any(), "the head started at zero and never moved"
    values, returns = (
        torch.cat([tokens for _, tokens in sorted(one[name].items())]).double()
        for name in ("values", "returns")
    )
    mask = torch.cat([torch.arange(n) >= (n + 2) // 3 for n in LENGTHS])
    rows = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    kept = mask & (rows != 4)  # an invalid sequence
    assert not values[~kept].any() and not returns[~kept].any() and values[kept].all()
    torch.testing.assert_close(returns[kept], REWARDS_OF[rows[kept]], rtol=1e-6, atol=1e-6)
    errors = (returns - values)[kept]
    explained = float(1 - errors.var(correction=0) / returns[kept].var(correction=0))
    last = one["sums"][-1]
    assert last["value/explained_variance"] == (pytest.approx(explained, rel=1e-6), 1.0)
    assert last["value/mean"][1] == int(kept.sum())
    assert one["sums"][0]["value/error_square"][0] > last["value/error_square"][0], "no learning"
    tokens = torch.cat([tokens for _, tokens in sorted(one["advantages"].items())])
    assert not tokens[~kept].any()
    assert abs(float(tokens[kept].mean())) < 1e-6
    assert float(tokens[kept].std(correction=0)) == pytest.approx(1, abs=1e-6)


def _alone(trainer: Any, missing: str) -> dict:
    """Checks that need no second rank, in one start of the world."""
    cfg, world = trainer.cfg, trainer.world
    own = own_batch(world, rewards=REWARDS_OF)
    sums = [step_as_train_does(trainer, own, step=step)[2] for step in range(30)]
    prepared = [one for update in trainer._prepare(own) for one in update]
    critic = trainer.companions["critic"]
    with torch.no_grad():
        after = [critic.model.values(one.row) for one in prepared]
    before = [row["values"] for row in critic.columns(prepared)]
    critic.columns = lambda own: [{"values": one.row.tokens * math.nan} for one in own]
    kept = full_state(trainer)
    spoiled = step_as_train_does(trainer, own, step=30)[2]
    assert not differing(full_state(trainer), kept)
    # The second update of a batch finds values that the first has moved further than the clip.
    clips = {}
    for clip in (0.0, 1e-6):
        two = changed(cfg, batch={"updates_per_step": 2}, critic={"clip": clip})
        world.cfg = two
        share, of = step_as_train_does(
            make_trainer(two, world), own_batch(world, rewards=REWARDS_OF), step=0
        )[2]["value/clip_frac"]
        clips[clip] = share / of
    cfg = changed(cfg, critic={"path": missing})
    with pytest.raises(ValueError, match="^critic.path: .*" + missing):
        make_trainer(cfg, world)
    # Under any other advantage the section is ignored.
    grpo = changed(cfg, algorithm={"advantage": "grpo"})
    assert make_trainer(grpo, world).companions == {}
    return {
        "clips": clips,
        "sums": sums,
        "after": after,
        "before": before,
        "spoiled": spoiled,
        "masks": [one.loss_mask for one in prepared],
    }


@pytest.fixture(scope="module")
def found(folder, tmp_path_factory) -> dict:
    # Whatever the policy's aggregation: each state counts once.
    cfg = critic_config(
        folder,
        tmp_path_factory.mktemp("alone"),
        aggregation="seq_mean_token_sum",
        critic={"lr": 8e-3},
    )
    return with_trainer(cfg, _alone, "./nowhere")[0] | {"folder": Path(cfg.output_dir)}


def test_values_move_no_further_than_the_clip_in_a_batch(found):
    assert found["clips"][0.0] == 0.0 < found["clips"][1e-6] <= 0.5


def test_values_that_are_not_finite_skip_the_updates_of_both_models(found):
    for name in ("policy", "value"):
        assert found["spoiled"][f"{name}/skipped_updates"] == (1.0, 1.0)
        assert f"{name}/loss" not in found["spoiled"]
    for folder in ("skipped", "skipped_value"):
        assert (found["folder"] / folder / "step_30_rank_0.pt").is_file()


def test_value_loss_is_a_mean_over_tokens_and_values_come_before_their_token(found):
    counts = [n - (n + 2) // 3 for n in LENGTHS]
    counts[4] = 0  # not valid
    squares = [0.5 * float(r) ** 2 * n for r, n in zip(REWARDS_OF, counts)]
    assert found["sums"][0]["value/loss"][0] == pytest.approx(sum(squares) / sum(counts), rel=1e-6)
    for after, before, mask in zip(found["after"], found["before"], found["masks"]):
        at = mask.nonzero()[:, 0]
        assert torch.equal(before[at], after[at - 1]) and after[at - 1].any()
    explained = [sums["value/explained_variance"][0] for sums in found["sums"]]
    assert explained[0] == pytest.approx(0, abs=1e-6) and explained[-1] > 0.6, explained


def _fresh(step: int, *, count: int = 64, prompt: int = 2, response: int = 8) -> Batch:
    """Return a batch of new sequences: the reward is 1 if the response begins with a 9."""
    length = prompt + response
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(8, 10, (count, length), generator=generator)
    mask = (torch.arange(length) >= prompt).repeat(count)
    rewards = (tokens[:, prompt] == 9).double()
    one = Microbatch(
        tokens=tokens.flatten(),
        position_ids=torch.arange(length).repeat(count),
        cu_seqlens=torch.arange(0, count * length + 1, length).int(),
        response_mask=mask,
        rollout_logprobs=torch.where(mask, -4.0, 0.0),
        policy_versions=torch.where(mask, 0, -1),
        sequence_ids=torch.arange(count),
    )
    scalars = scalars_of(
        rewards, torch.arange(count), response_lengths=[response] * count, prompt_length=prompt
    )
    return Batch(scalars=scalars, updates=((one,),), update_ids=torch.zeros(count).long())


def _learn(trainer: Any, steps: int) -> list[float]:
    """Return the explained variance of each step, of a batch that was never seen."""
    sums = [step_as_train_does(trainer, _fresh(step), step=step)[2] for step in range(steps)]
    return [found["value/explained_variance"][0] for found in sums]


def test_values_explain_new_batches_as_far_as_can_be_known(tmp_path):
    folder = small_model(tmp_path, initializer_std=0.18)  # learns faster than from 0.02
    cfg = critic_config(
        folder, tmp_path / "out", critic={"lr": 1e-2, "epochs": 2, "warmup_steps": 50}
    )
    optimizer = {"eps": 1e-8, "max_grad_norm": 1.0, "weight_decay": 0.0}
    explained = with_trainer(changed(cfg, steps=51, optimizer=optimizer), _learn, 50)[0]
    # 7 of the 8 states of a response have seen its first token. Values of the states behind each
    # token would explain all.
    last = sum(explained[-5:]) / 5
    assert 0.5 < last < 0.9, str(explained)


def test_bad_values_of_the_section_are_reported():
    good = changed(VALID, algorithm={"advantage": "gae"})
    assert validate(good) == []
    for critic, place, value in (
        ({"lr": -1.0}, "lr", -1.0),
        ({"clip": -1.0}, "clip", -1.0),
        ({"warmup_steps": -1}, "warmup_steps", -1),
        ({"warmup_steps": good.steps}, "warmup_steps", good.steps),
    ):
        (problem,) = validate(changed(good, critic=critic))
        assert problem.startswith(f"critic.{place}: ") and str(value) in problem
    # One prompt, one sample: there is no group whose mean would be the baseline.
    assert validate(changed(good, batch={"group_size": 1})) == []


# --------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def start_model(tmp_path_factory) -> str:
    where = tmp_path_factory.mktemp("model") / "start"
    return str(create_model(where, hidden_size=64, layers=2, heads=2, kv_heads=1))


@pytest.fixture(scope="module")
def rewards(tmp_path_factory) -> str:
    # So that every step moves the weights.
    return reward(tmp_path_factory.mktemp("rewards"), "varied")


@pytest.mark.proves("critic", "lag", "split")
def test_ppo_resumes_bit_identical_and_exports_the_policy_alone(start_model, rewards, tmp_path):
    flags = runs.TINY["rl"] | {
        "model.path": start_model,
        "critic.warmup_steps": "1",
        "rewards.functions": rewards,
    }
    whole, part = tmp_path / "whole", tmp_path / "part"
    flags |= {"steps": 3, "checkpoint.every-steps": 2, "checkpoint.keep.last": "9"}
    runs.run("demo_ppo.yaml", 2, **flags | {"output-dir": whole})
    shutil.copytree(whole, part)
    shutil.rmtree(part / "checkpoints" / "step_3")
    runs.run("demo_ppo.yaml", 2, **flags | {"output-dir": part})
    assert_same_end(whole, part)
    parts = {".".join(name.split(".")[1:3]) for name in final_weights(part)}
    assert {"critic.model", "critic.optimizer"} < parts
    rows = runs.metrics(whole)
    assert [row["step"] for row in rows] == [1, 2]  # the first is warm-up
    assert all(row["value/loss"] > 0 and row["value/explained_variance"] <= 1 for row in rows)
    exported = export(whole, out=tmp_path / "model")
    with safe_open(exported / "model.safetensors", framework="pt") as file:
        assert "score.weight" not in file.keys()  # noqa: SIM118 (not a mapping)
        assert set(file.keys()) == set(
            safe_open(Path(start_model) / "model.safetensors", framework="pt").keys()
        )


@pytest.mark.proves("kl_reference", "colocated")
def test_reinforce_plus_plus_runs_with_the_kl_in_its_reward(start_model, rewards, tmp_path):
    runs.run(
        "demo_grpo.yaml",
        1,
        **runs.TINY["rl"]
        | {
            "layout.placement": "colocated",
            "model.path": start_model,
            "output-dir": tmp_path,
            "steps": 2,
            "lag": 0,
            "rewards.functions": rewards,
            "algorithm.advantage": "reinforce_plus_plus",
            "algorithm.kl": "k1",
            "algorithm.kl-coef": 0.05,
            "algorithm.kl-in": "reward",
            "batch.group-size": 1,
        },
    )
    rows = runs.metrics(tmp_path)
    assert len(rows) == 2 and all(row["policy/grad_norm"] > 0 for row in rows)
    assert rows[0]["policy/kl_ref"] == 0 and rows[1]["policy/kl_ref"] != 0
