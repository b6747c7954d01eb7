"""Updates on real meshes against one process, and what happens to updates that go wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from spmdrl.config import OptimizerSettings
from spmdrl.train.schedule import learning_rate
from tests.helpers.built import changed
from tests.helpers.comparing import assert_near, assert_same_sums, differing, full_parameters
from tests.helpers.policy_runs import (
    advantages,
    batch,
    config,
    microbatch,
    own_batch,
    scalars,
    small_model,
    train,
    update,
)
from tests.helpers.worlds import with_trainer


def _assert_same_training(ours: dict, reference: dict, what: str) -> None:
    assert_same_sums(ours["sums"], reference["sums"], what, rel=1e-5, abs_=1e-5)
    assert_near(ours["parameters"], reference["parameters"], what, rtol=1e-5, atol=2e-6)


# Every mesh trains like one process in test_parity_grid.py.
def test_several_updates_with_entropy_bonus_do_not_depend_on_the_mesh(tmp_path):
    folder = small_model(tmp_path)
    options = dict(
        updates=2, aggregation="seq_mean_token_mean", entropy_coef=0.01, mask_truncated=True
    )
    reference = train(config(folder, tmp_path, **options))[0]
    ratio, count = reference["sums"][1]["policy/ratio"]
    assert ratio != count, "the second update's ratio should have left 1"
    cfg = config(folder, tmp_path, world_size=2, **options)
    for rank, result in enumerate(train(cfg)):
        _assert_same_training(result, reference, f"rank {rank}")


def _loss_by_hand(trainer: Any) -> dict:
    own = own_batch(trainer.world)
    return {"logprobs": trainer.logprobs(own), "sums": update(trainer, own, step=0)}


def test_loss_of_the_first_update_is_what_a_loop_over_tokens_gives(tmp_path):
    cfg = config(small_model(tmp_path), tmp_path, mask_truncated=True, loss="reinforce")
    result = with_trainer(cfg, _loss_by_hand)[0]
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


def _supervised(trainer: Any) -> dict:
    own = own_batch(trainer.world)
    sums = [update(trainer, own, step=s) for s in range(15)]
    losses = [one["policy/loss"][0] for one in sums]
    of_layers = [any("/grad_norm_layer/" in name for name in one) for one in sums]
    before = _pointers(trainer)
    update(trainer, own, step=0)
    trainer.weights.score([[5, 6, 7]])
    pointers = before == _pointers(trainer)
    return {"losses": losses, "pointers": pointers, "of_layers": of_layers}


def _pointers(trainer: Any) -> list[int]:
    return [p.detach().to_local().data_ptr() for p in trainer.weights.shards().values()]


def test_supervised_loss_falls_storage_stays_and_every_tenth_step_has_norms_of_layers(tmp_path):
    cfg = config(small_model(tmp_path), tmp_path, objective="sft")
    cfg = changed(cfg, report=dict(layer_norms=10))
    result = with_trainer(cfg, _supervised)[0]
    assert [step for step, has_them in enumerate(result["of_layers"]) if has_them] == [0, 10]
    assert result["losses"][-1] < 0.7 * result["losses"][0], result["losses"]
    assert result["pointers"]


def _spoil(trainer: Any) -> dict:
    """Rank 1 alone has a NaN advantage; then a good batch follows."""
    own, before = own_batch(trainer.world), full_parameters(trainer)
    values = advantages()
    values[-1] = math.nan  # the sequence of the last dp rank
    skipped = update(trainer, own, step=3, values=values)
    kept = not differing(before, full_parameters(trainer))
    moments = trainer.state_dict()["optimizer"]
    clean = not any(m.to_local().any() for m in moments["exp_avg"].values())
    good = update(trainer, own, step=4)
    moved = bool(differing(before, full_parameters(trainer)))
    return {"skipped": skipped, "kept": kept and clean, "good": good, "moved": moved}


def test_a_non_finite_loss_is_skipped_on_all_ranks_counted_and_saved(tmp_path):
    cfg = config(small_model(tmp_path), tmp_path / "run", world_size=2, loss="reinforce")
    for result in with_trainer(cfg, _spoil):
        assert result["skipped"]["policy/skipped_updates"] == (1.0, 1.0)
        assert "policy/loss" not in result["skipped"]
        assert result["kept"], "the skipped update changed the policy"
        assert result["good"]["policy/skipped_updates"] == (0.0, 1.0) and result["moved"]
    for rank in range(2):
        saved = torch.load(tmp_path / "run" / "skipped" / f"step_3_rank_{rank}.pt")
        assert len(saved["microbatches"]) == 2 and not math.isfinite(saved["loss"])
        assert torch.equal(saved["microbatches"][0]["tokens"], batch(rank, 2).updates[0][0].tokens)


def _round_trip(trainer: Any) -> bool:
    """Save after one update, take another; restore, take it again."""
    own = own_batch(trainer.world)
    update(trainer, own, step=0)
    saved = tree_map(torch.clone, trainer.state_dict())
    ends = []
    for _ in range(2):
        sums = update(trainer, own, step=1)
        ends.append((sums, full_parameters(trainer)))
        trainer.load_state_dict(saved)
    (first, after), (second, again) = ends
    return first == second and not differing(after, again)


def test_restored_state_repeats_an_update_bit_by_bit(tmp_path):
    cfg = config(small_model(tmp_path), tmp_path, world_size=2, tp=2)
    assert with_trainer(cfg, _round_trip) == [True, True]


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
    assert microbatch([]).sequence_ids.tolist() == [-1]
    assert [m.sequence_ids.tolist() for m in batch(1, 2).updates[0]] == [[7], [-1]]
