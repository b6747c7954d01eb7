"""Updates on real meshes against one process, and what happens to updates that go wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import policy_runs
import pytest
import torch
from policy_runs import advantages, batch, config, full_parameters, scalars, train, update
from ranks import run_ranks

from spmdrl.commands.create_model import create_model
from spmdrl.config import Config, MemorySettings, OptimizerSettings
from spmdrl.train.optimizer import learning_rate


def _model(where: Path, architecture: str = "qwen3", **options: object) -> Path:
    return create_model(
        where / architecture,
        architecture=architecture,
        hidden_size=32,
        layers=2,
        heads=4,
        kv_heads=2,
        intermediate=48,
        **options,
    )


def _assert_same_training(ours: dict, reference: dict, what: str) -> None:
    for step, (a, b) in enumerate(zip(ours["sums"], reference["sums"])):
        assert a.keys() == b.keys()
        for name in b:
            (x, m), (y, n) = a[name], b[name]
            assert math.isclose(
                x, y, rel_tol=1e-5, abs_tol=1e-5 * max(1.0, abs(n))
            ) and m == pytest.approx(n, rel=1e-5), (
                f"{what}, step {step}: {name} {(x, m)} != {(y, n)}"
            )
    for name, expected in reference["parameters"].items():
        torch.testing.assert_close(
            ours["parameters"][name],
            expected,
            rtol=1e-5,
            atol=2e-6,
            msg=lambda m, n=name: f"{what}: {n}: {m}",
        )


# (world_size, dp_replicate, tp): dp_shard takes what is left
LAYOUTS = {
    "qwen3": [(2, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 2)],
    "gemma3": [(2, 1, 2)],  # tied, q_norm and k_norm
    "qwen2": [(2, 1, 2)],
}  # biases


@pytest.mark.parametrize("architecture", LAYOUTS)
def test_every_mesh_trains_like_one_process(architecture, tmp_path):
    tied = {"qwen2": True}.get(architecture)
    folder = _model(tmp_path, architecture, tied=tied)
    reference = run_ranks(1, train, config(folder, tmp_path))[0]
    assert reference["sums"][0]["policy/grad_norm"][0] > 0.2, "the test wants clipping to act"
    for world_size, dp_replicate, tp in LAYOUTS[architecture]:
        cfg = config(folder, tmp_path, world_size=world_size, dp_replicate=dp_replicate, tp=tp)
        for rank, result in enumerate(run_ranks(world_size, train, cfg)):
            _assert_same_training(result, reference, f"{architecture} {cfg.layout} rank {rank}")


def test_several_updates_with_entropy_bonus_do_not_depend_on_the_mesh(tmp_path):
    folder = _model(tmp_path)
    options = dict(
        updates=2, aggregation="seq_mean_token_mean", entropy_coef=0.01, mask_truncated=True
    )
    reference = run_ranks(1, train, config(folder, tmp_path, **options))[0]
    ratio, count = reference["sums"][1]["policy/ratio"]
    assert ratio != count, "the second update's ratio should have left 1"
    cfg = config(folder, tmp_path, world_size=2, **options)
    for rank, result in enumerate(run_ranks(2, train, cfg)):
        _assert_same_training(result, reference, f"rank {rank}")


def _one_process(cfg: Config, which: str) -> object:
    """Checks that need no second rank, in one start of the world."""
    from spmdrl.roles import make_trainer
    from spmdrl.world import World

    world = World.start(cfg)
    result = globals()[which](cfg, world, make_trainer)
    world.close()
    return result


def _loss_by_hand(cfg: Config, world: object, trainer_class: type) -> dict:
    trainer = trainer_class(cfg, world)
    own = batch(0, 1)
    logprobs = trainer.logprobs(own)
    sums = update(trainer, own, step=0)
    return {"logprobs": logprobs, "sums": sums}


def test_loss_of_the_first_update_is_what_a_loop_over_tokens_gives(tmp_path):
    cfg = config(_model(tmp_path), tmp_path, mask_truncated=True, loss="reinforce")
    result = run_ranks(1, _one_process, cfg, "_loss_by_hand")[0]
    rows, total, count, nats = scalars(), 0.0, 0, advantages()
    for logprobs, micro in zip(result["logprobs"], batch(0, 1).updates[0]):
        for at, sequence in enumerate(micro.sequence_ids.tolist()):
            if not rows.is_valid[sequence] or rows.is_truncated[sequence]:
                continue
            for t in range(int(micro.cu_seqlens[at]), int(micro.cu_seqlens[at + 1])):
                if micro.response_mask[t]:
                    gap = float(logprobs[t]) - float(micro.rollout_logprobs[t])
                    weight = min(math.exp(gap), 2.0)  # tis
                    total -= weight * float(nats[sequence]) * float(logprobs[t])
                    count += 1
    loss = result["sums"]["policy/loss"][0]
    assert loss == pytest.approx(total / count, rel=1e-5), (loss, total / count)


def _twice(cfg: Config, world: object, trainer_class: type) -> list[dict]:
    """Train without and with activation checkpointing, in one world."""
    results = []
    for is_on in (False, True):
        model = replace(
            cfg.model, memory=MemorySettings(activation_checkpointing="full" if is_on else "none")
        )
        trainer = trainer_class(replace(cfg, model=model), world)
        sums = [update(trainer, batch(0, 1), step=s) for s in range(2)]
        results.append({"sums": sums, "parameters": full_parameters(trainer)})
    return results


def test_activation_checkpointing_changes_no_value(tmp_path):
    plain, wrapped = run_ranks(1, _one_process, config(_model(tmp_path), tmp_path), "_twice")[0]
    _assert_same_training(wrapped, plain, "activation checkpointing")


def _supervised(cfg: Config, world: object, trainer_class: type) -> dict:
    trainer = trainer_class(cfg, world)
    losses = [update(trainer, batch(0, 1), step=s)["policy/loss"][0] for s in range(15)]
    return {"losses": losses, "pointers": _same_storage(trainer)}


def _same_storage(trainer: object) -> bool:
    before = [p.detach().to_local().data_ptr() for p in trainer.weights.shards().values()]
    update(trainer, batch(0, 1), step=0)
    trainer.weights.score([[5, 6, 7]])
    return before == [p.detach().to_local().data_ptr() for p in trainer.weights.shards().values()]


def test_supervised_loss_falls_and_storage_stays(tmp_path):
    cfg = config(_model(tmp_path), tmp_path, objective="sft")
    result = run_ranks(1, _one_process, cfg, "_supervised")[0]
    assert result["losses"][-1] < 0.7 * result["losses"][0], result["losses"]
    assert result["pointers"]


def _spoil(cfg: Config) -> dict:
    """Rank 1 alone has a NaN advantage; then a good batch follows."""
    from spmdrl.roles import make_trainer
    from spmdrl.world import World

    world = World.start(cfg)
    trainer = make_trainer(cfg, world)
    own, before = batch(world.dp_index(world.rank), world.dp_size), full_parameters(trainer)
    values = advantages()
    values[-1] = math.nan  # the sequence of the last dp rank
    skipped = update(trainer, own, step=3, values=values)
    kept = all(torch.equal(before[n], p) for n, p in full_parameters(trainer).items())
    moments = trainer.state_dict()["optimizer"]
    clean = not any(m.to_local().any() for m in moments["exp_avg"].values())
    good = update(trainer, own, step=4)
    moved = any(not torch.equal(before[n], p) for n, p in full_parameters(trainer).items())
    world.close()
    return {"skipped": skipped, "kept": kept and clean, "good": good, "moved": moved}


def test_a_non_finite_loss_is_skipped_on_all_ranks_counted_and_saved(tmp_path):
    cfg = config(_model(tmp_path), tmp_path / "run", world_size=2, loss="reinforce")
    for result in run_ranks(2, _spoil, cfg):
        assert result["skipped"]["policy/skipped_updates"] == (1.0, 1.0)
        assert "policy/loss" not in result["skipped"]
        assert result["kept"], "the skipped update changed the policy"
        assert result["good"]["policy/skipped_updates"] == (0.0, 1.0) and result["moved"]
    for rank in range(2):
        saved = torch.load(tmp_path / "run" / "skipped" / f"step_3_rank_{rank}.pt")
        assert len(saved["microbatches"]) == 2 and not math.isfinite(saved["loss"])
        assert torch.equal(saved["microbatches"][0]["tokens"], batch(rank, 2).updates[0][0].tokens)


def _round_trip(cfg: Config) -> bool:
    """Save after one update, take another; restore, take it again."""
    from spmdrl.roles import make_trainer
    from spmdrl.world import World

    world = World.start(cfg)
    trainer = make_trainer(cfg, world)
    own = batch(world.dp_index(world.rank), world.dp_size)
    update(trainer, own, step=0)
    state = trainer.state_dict()
    saved = {
        key: {n: t.clone() for n, t in part.items()}
        for key, part in (
            ("model", state["model"]),
            ("exp_avg", state["optimizer"]["exp_avg"]),
            ("exp_avg_sq", state["optimizer"]["exp_avg_sq"]),
        )
    }
    updates = state["optimizer"]["updates"].clone()
    first = update(trainer, own, step=1)
    after = full_parameters(trainer)
    trainer.load_state_dict(
        {"model": saved.pop("model"), "optimizer": saved | {"updates": updates}}
    )
    second = update(trainer, own, step=1)
    again = full_parameters(trainer)
    world.close()
    return first == second and all(torch.equal(after[n], again[n]) for n in after)


def test_restored_state_repeats_an_update_bit_by_bit(tmp_path):
    cfg = config(_model(tmp_path), tmp_path, world_size=2, tp=2)
    assert run_ranks(2, _round_trip, cfg) == [True, True]


def test_learning_rate_is_a_pure_function_of_the_step():
    options = OptimizerSettings(lr=1.0, schedule="linear", warmup_steps=4, min_lr_frac=0.5)
    rates = [learning_rate(options, step, steps=14) for step in range(14)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4] == 1.0
    assert rates[9] == pytest.approx(0.75) and rates[-1] == pytest.approx(0.55)
    cosine = OptimizerSettings(lr=2.0, schedule="cosine", min_lr_frac=0)
    assert learning_rate(cosine, 5, steps=10) == pytest.approx(1.0)
    assert learning_rate(cosine, 99, steps=10) == 0.0
    assert learning_rate(OptimizerSettings(lr=3.0), 7, steps=10) == 3.0


def test_dummy_microbatches_carry_no_sequence():
    assert policy_runs.microbatch([]).sequence_ids.tolist() == [-1]
    assert [m.sequence_ids.tolist() for m in batch(1, 2).updates[0]] == [[7], [-1]]
