"""Muon: against torch's own on whole matrices, bit for bit, and on meshes that share them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import distribute_tensor

from spmdrl.check.settings import validate
from spmdrl.config import MuonSettings, OptimizerSettings
from spmdrl.train.muon import Muon, block_matrices, orthogonalised
from tests.helpers.checkpoint_runs import restore, save
from tests.helpers.comparing import (
    assert_near,
    assert_same_sums,
    differing,
    full_parameters,
    full_state,
)
from tests.helpers.policy_runs import (
    VALID,
    changed,
    config,
    meta_model,
    own_batch,
    small_model,
    update,
)
from tests.helpers.tiny import tiny_folder
from tests.helpers.worlds import with_trainer

SHAPES = {"wide": (12, 40), "tall": (48, 16), "square": (24, 24)}


def _plain(options: OptimizerSettings) -> tuple[Muon, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    parameters = {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}
    given = parameters | {"norm": torch.ones(16)}
    return Muon(given, matrices=set(SHAPES), no_decay=set(), options=options), parameters


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_whole_matrices_have_the_bits_of_torchs_muon(adjust, nesterov):
    options = OptimizerSettings(
        kind="muon",
        weight_decay=0.1,
        muon=MuonSettings(adjust_lr_fn=adjust, nesterov=nesterov, momentum=0.9, ns_steps=4),
    )
    ours, parameters = _plain(options)
    theirs = [torch.nn.Parameter(p.clone()) for p in parameters.values()]
    reference = torch.optim.Muon(
        theirs,
        lr=0.02,
        weight_decay=0.1,
        momentum=0.9,
        nesterov=nesterov,
        ns_steps=4,
        adjust_lr_fn=adjust,
    )
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        gradients = {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}
        for parameter, gradient in zip(theirs, gradients.values()):
            parameter.grad = gradient.clone()
        reference.step()
        ours.step(gradients, lr=0.02)
        for name, parameter in zip(SHAPES, theirs):
            assert torch.equal(parameters[name], parameter.detach()), name


@pytest.mark.parametrize("shape", SHAPES.values())
def test_the_iteration_is_the_papers_polynomial_of_the_singular_values(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.square().sum().sqrt()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    expected = u @ torch.diag(values) @ v
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        own = orthogonalised(matrix, steps=5, dtype=dtype)
        assert own.dtype == dtype
        torch.testing.assert_close(own.double(), expected, rtol=0, atol=tolerance)
    assert float(values.median()) > 0.6 and float(values.max()) < 1.3  # near 0 they come slowly
    assert not orthogonalised(torch.zeros(shape), steps=5, dtype=torch.float32).any()


# ---------------------------------------------------------------- meshes


def _muon(cfg: Any, **muon: Any) -> Any:
    return changed(cfg, optimizer={"kind": "muon", "muon": {"ns_dtype": "float32"} | muon})


def _gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * step)
    return torch.randn(shape, generator=generator)


def _given_gradients(trainer: Any) -> dict:
    """Three steps of the optimizer by gradients that are drawn, whatever the mesh."""
    optimizer = trainer.policy.optimizer
    assert isinstance(optimizer, Muon)
    start = full_parameters(trainer)
    for step in range(3):
        for name, parameter in trainer.weights.shards().items():
            whole = _gradient(name, parameter.shape, step)
            placed = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            parameter.grad = placed
        optimizer.step(optimizer.gradients(), lr=1e-2)
        optimizer.zero_grad()
    return {
        "start": start,
        "end": full_parameters(trainer),
        "matrices": sorted(optimizer.matrices),
        "moments": full_state(trainer),
    }


def test_a_matrix_that_ranks_share_is_stepped_as_a_whole(tmp_path):
    """In bfloat16 too, where a step by parts would differ at once."""
    folder = small_model(tmp_path)
    cfg = _muon(config(folder, tmp_path), ns_dtype="bfloat16")
    one = with_trainer(cfg, _given_gradients)[0]
    assert len(one["matrices"]) == 2 * 7 and all("proj" in name for name in one["matrices"])
    theirs = {n: torch.nn.Parameter(one["start"][n].clone()) for n in one["matrices"]}
    reference = torch.optim.Muon(
        theirs.values(), lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(3):
        for name, parameter in theirs.items():
            parameter.grad = _gradient(name, parameter.shape, step)
        reference.step()
    for name, parameter in theirs.items():
        assert torch.equal(one["end"][name], parameter.detach()), name
    for layout in ({"world_size": 2}, {"world_size": 4, "dp_replicate": 2, "tp": 2}):
        for ours in with_trainer(changed(cfg, layout=layout), _given_gradients):
            for name in one["matrices"]:  # AdamW's small vectors may round apart: other kernels
                kept = f"optimizer.momentum.{name}"
                assert torch.equal(ours["end"][name], one["end"][name]), name
                assert torch.equal(ours["moments"][kept], one["moments"][kept]), name


def _steps(trainer: Any, restored: Path | None = None) -> dict:
    """Two steps and a third; from a checkpoint of the first two, if there is one."""
    own = own_batch(trainer.world)
    if restored is None:
        sums = [update(trainer, own, step=step) for step in range(2)]
        save(trainer, 2)
    else:
        restore(trainer, changed(trainer.cfg, checkpoint={"resume": str(restored)}), step=2)
        sums = []
    before = full_state(trainer)
    last = update(trainer, own, step=2)
    return {"sums": [*sums, last], "before": before, "parameters": full_parameters(trainer)}


@pytest.mark.proves("muon", "tp")
def test_training_and_a_checkpoint_go_from_mesh_to_mesh(tmp_path):
    folder = small_model(tmp_path)
    cfg = _muon(config(folder, tmp_path / "one"))
    one = with_trainer(cfg, _steps)[0]
    assert any(name.startswith("optimizer.momentum.") for name in one["before"])
    checkpoint = tmp_path / "one" / "checkpoints" / "step_2"
    for layout in ({"world_size": 2}, {"world_size": 2, "tp": 2}):
        other = changed(cfg, layout=layout, output_dir=str(tmp_path / f"tp{layout.get('tp')}"))
        for ours in with_trainer(other, _steps):
            assert_same_sums(ours["sums"], one["sums"], str(layout), rel=1e-4, abs_=1e-4)
            assert_near(ours["parameters"], one["parameters"], str(layout), rtol=1e-3, atol=2e-4)
        for ours in with_trainer(other, _steps, checkpoint):
            assert not differing(ours["before"], one["before"])
            assert_near(ours["parameters"], one["parameters"], str(layout), rtol=1e-3, atol=2e-4)


# ---------------------------------------------------------------- what is refused


def test_muon_refuses_what_would_be_wrong():
    def found(**fields: Any) -> list[str]:
        return validate(changed(VALID, **fields))

    muon = {"optimizer": {"kind": "muon"}}
    assert not found(**muon)
    for fields, text in (
        ({"model": {"lora": {"rank": 4}}}, "optimizer.kind: muon with model.lora"),
        ({"model": {"memory": {"master_dtype": "bfloat16"}}}, "model.memory.master_dtype: bfl"),
        ({"model": {"memory": {"optimizer_dtype": "bfloat16"}}}, "model.memory.optimizer_dty"),
        ({"model": {"memory": {"offload": "optimizer"}}}, "model.memory.offload: optimizer"),
    ):
        assert any(one.startswith(text) for one in found(**muon, **fields)), text
    own = found(optimizer={"muon": {"momentum": 0.5}})
    assert own == [
        "optimizer.muon.momentum: 0.5 with optimizer.kind adamw; it has no effect there; set kind "
        "to muon, or leave it out"
    ]


@pytest.mark.parametrize("family", ["jamba", "qwen3_moe"])
def test_routers_and_experts_are_none_of_its_matrices(family, tmp_path):
    model = meta_model(tiny_folder(tmp_path, family))
    shards = dict(model.named_parameters())
    found = block_matrices(model, shards)
    assert [name for name in shards if name.endswith(("router.weight", "gate.weight"))]
    assert any("proj" in name for name in found)
    assert all(shards[name].dim() == 2 for name in found)
    strange = ("router", "gate.weight", "experts", "embed", "lm_head", "A_log", "norm")
    assert not [name for name in found for word in strange if word in name]


def test_a_model_without_matrices_in_its_blocks_is_refused():
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(4, 4))

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([Block(), Block()])
    with pytest.raises(ValueError, match="optimizer.kind: muon trains the matrices of linear"):
        block_matrices(model, dict(model.named_parameters()))
