"""float16 with a scaled loss: the factor, updates that overflow, checkpoints, engines."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from spmdrl.check.fit import check_fit, fit_problems
from spmdrl.check.settings import validate
from spmdrl.config import LayoutSettings, LossScaleSettings
from spmdrl.train.loss_scale import LossScale
from tests.helpers.checkpoint_runs import restore, save
from tests.helpers.comparing import assert_near, differing, full_parameters
from tests.helpers.policy_runs import VALID, changed, config, own_batch, small_model, train, update
from tests.helpers.tiny import tiny_folder
from tests.helpers.worlds import with_stream, with_trainer
from tests.sync.test_engine import PROMPTS, make_config

ONE = LayoutSettings(placement="colocated", world_size=1)


def test_the_factor_moves_as_gradscalers():
    ours = LossScale(LossScaleSettings(initial=2.0**12, growth_interval=3), is_on=True)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    drawn = torch.rand(80, generator=torch.Generator().manual_seed(0)) < 0.15
    for is_over in drawn.tolist():
        theirs.scale(parameter.sum() * (math.inf if is_over else 1.0)).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        assert ours.overflowed(is_finite=not is_over) == is_over
        assert ours.value == theirs.get_scale() > 1
    again = LossScale(LossScaleSettings(growth_interval=3), is_on=True)
    again.load_state_dict(ours.state_dict())
    for _ in range(4):
        assert ours.overflowed(is_finite=True) == again.overflowed(is_finite=True)
        assert ours.value == again.value


def test_a_gradient_that_is_not_finite_without_a_factor_is_no_overflow():
    own = LossScale(LossScaleSettings(initial=2.0), is_on=True)
    assert own.overflowed(is_finite=False) and own.value == 1.0
    assert not own.overflowed(is_finite=False) and own.value == 1.0
    off = LossScale(LossScaleSettings(), is_on=False)
    assert off.value == 1.0 and not off.overflowed(is_finite=False) and off.state_dict() == {}


# ---------------------------------------------------------------- training


def _half(cfg: Any, initial: float = 65536.0, **scale: Any) -> Any:
    return changed(
        cfg,
        model={"compute_dtype": "float16"},
        optimizer={"loss_scale": {"initial": initial, **scale}},
    )


@pytest.mark.proves("float16", "tp")
def test_every_factor_and_mesh_trains_as_float32_does(tmp_path):
    folder = small_model(tmp_path)
    cfg = config(folder, tmp_path)
    whole = train(cfg)[0]
    one = train(_half(cfg))[0]
    assert [s["policy/loss_scale"] for s in one["sums"]] == [(65536.0, 1.0)] * 2
    assert_near(one["parameters"], whole["parameters"], "float32", rtol=0.02, atol=2e-3)
    for initial in (1024.0, 2.0**18):
        other = train(_half(cfg, initial))[0]
        assert_near(other["parameters"], one["parameters"], str(initial), rtol=5e-3, atol=5e-4)
    for ours in train(changed(_half(cfg), layout={"world_size": 2, "tp": 2})):
        assert_near(ours["parameters"], one["parameters"], "tp 2", rtol=5e-3, atol=5e-4)


def _overflowing(trainer: Any, restored: Path | None = None) -> dict:
    """Steps from a factor that overflows until some are taken; or go on from their checkpoint."""
    own, found = own_batch(trainer.world), []
    if restored is not None:
        restore(trainer, changed(trainer.cfg, checkpoint={"resume": str(restored)}), step=40)
        kept = trainer.policy.loss_scale.state_dict()["state"].tolist()
        return {"kept": kept, "sums": update(trainer, own, step=9)}
    for step in range(40):
        before = full_parameters(trainer)
        sums = update(trainer, own, step=step % 10)
        found.append((sums, bool(differing(before, full_parameters(trainer)))))
    save(trainer, 40)
    kept = trainer.policy.loss_scale.state_dict()["state"].tolist()
    return {"found": found, "kept": kept, "sums": update(trainer, own, step=9)}


def test_an_overflow_skips_the_update_on_all_ranks_and_halves_the_factor(tmp_path):
    cfg = _half(config(small_model(tmp_path), tmp_path / "run"), 2.0**36, growth_interval=5)
    two = with_trainer(changed(cfg, layout={"world_size": 2}), _overflowing)
    for ours in two:
        first, moved = ours["found"][0]
        assert first["policy/overflowed_updates"] == first["policy/skipped_updates"] == (1.0, 1.0)
        assert "policy/loss" not in first and not moved
        scale = 2.0**36
        num_good, taken = 0, 0
        for sums, moved in ours["found"]:
            assert sums["policy/loss_scale"] == (scale, 1.0)
            is_over = sums["policy/overflowed_updates"][0] == 1
            assert moved != is_over and sums["policy/skipped_updates"][0] == is_over
            num_good = 0 if is_over else num_good + 1
            scale = scale / 2 if is_over else scale
            if num_good == 5:
                scale, num_good = 2 * scale, 0
            taken += not is_over
        assert taken > 10 and ours["kept"] == [scale, num_good] == two[0]["kept"]
    assert not (tmp_path / "run" / "skipped").exists(), "an overflow is no fault to look into"
    checkpoint = tmp_path / "run" / "checkpoints" / "step_40"
    other = changed(cfg, output_dir=str(tmp_path / "other"))
    resumed = with_trainer(other, _overflowing, checkpoint)[0]
    assert resumed["kept"] == two[0]["kept"]
    assert resumed["sums"]["policy/loss_scale"] == two[0]["sums"]["policy/loss_scale"]


def _spoiled(trainer: Any) -> dict:
    values = torch.full((8,), math.nan).double()
    return update(trainer, own_batch(trainer.world), step=3, values=values)


def test_a_loss_that_is_not_finite_is_saved_as_ever(tmp_path):
    cfg = _half(config(small_model(tmp_path), tmp_path / "run", loss="reinforce"))
    sums = with_trainer(cfg, _spoiled)[0]
    assert sums["policy/skipped_updates"] == (1.0, 1.0)
    assert sums["policy/overflowed_updates"] == (0.0, 1.0)
    assert (tmp_path / "run" / "skipped" / "step_3_rank_0.pt").is_file()


# ---------------------------------------------------------------- engines


def _gap(stream: Any, engine: Any, trainer: Any) -> float:
    stream.push(0)
    total, count = stream.probe(PROMPTS)["sync/probe_gap"]
    return total / count


def _gap_in(dtype: str, folder: Path, *, kind: str) -> float:
    cfg = make_config(folder, layout=ONE, dtype=dtype, kind=kind)
    return with_stream(changed(cfg, model={"compute_dtype": dtype}), _gap)[0]


def test_an_engine_in_float16_is_nearer_to_the_trainer_than_in_bfloat16(tmp_path):
    folder = small_model(tmp_path, hidden_size=64, heads=2, kv_heads=1)
    gaps = {dtype: _gap_in(dtype, folder, kind="vllm") for dtype in ("bfloat16", "float16")}
    assert 0 < 4 * gaps["float16"] < gaps["bfloat16"], gaps
    assert _gap_in("float16", folder, kind="transformers") <= gaps["float16"]


def test_what_float16_does_not_go_with_is_refused():
    def found(**fields: Any) -> list[str]:
        return validate(changed(VALID, **fields))

    half = {"compute_dtype": "float16"}
    assert not found(model=half)
    (text,) = found(model=half, optimizer={"loss_scale": {"initial": 1000.0}})
    assert text.startswith("optimizer.loss_scale.initial: must be a power of 2")
    assert text.endswith("got 1000; take 1024")
    (text,) = found(model=half | {"memory": {"master_dtype": "bfloat16"}})
    assert text.startswith("model.memory.master_dtype: bfloat16 with model.compute_dtype float16")
    (text,) = found(optimizer={"loss_scale": {"initial": 1024.0}})
    assert text.startswith("optimizer.loss_scale.initial: 1024.0 with model.compute_dtype bfloat16")


def test_mixtures_of_experts_are_refused_in_float16_before_a_group_exists(tmp_path):
    experts = config(tiny_folder(tmp_path / "experts", "qwen3_moe"), tmp_path)
    for dtype in ("float32", "bfloat16"):
        assert fit_problems(changed(experts, model={"compute_dtype": dtype})) == []
    half = changed(experts, model={"compute_dtype": "float16"})
    (problem,) = fit_problems(half)  # which is what the dry run shows
    assert problem.startswith(f"model.path {half.model.path}: has experts, and torch's grouped")
    assert problem.endswith("set model.compute_dtype to one of them, not float16")
    with pytest.raises(ValueError, match="not float16"):
        check_fit(half)
    dense = config(tiny_folder(tmp_path / "dense", "qwen3"), tmp_path)
    assert fit_problems(changed(dense, model={"compute_dtype": "float16"})) == []
    value_model = changed(dense, model={"compute_dtype": "float16"}, algorithm={"advantage": "gae"})
    (problem,) = fit_problems(changed(value_model, critic={"path": experts.model.path}))
    assert problem.startswith("critic.path") and problem.endswith("not float16")
