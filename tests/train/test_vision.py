"""Models that see are trained as plain transformers computes them, on every kind of mesh."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spmdrl.config import Config
from spmdrl.model.tensor_parts import like
from spmdrl.train.microbatches import PreparedMicrobatch, prepare
from tests.helpers.comparing import whole
from tests.helpers.meshes import world_under
from tests.helpers.vision_runs import batch, plain, sequences, vision_config, weights
from tests.helpers.vlm import FAMILIES, seeing_model
from tests.helpers.worlds import ON_CPU, in_world, make_trainer

LAYOUTS = {
    "one": {"placement": "split", "trainer_ranks": 1},
    "dp 2": {},
    "tp 2": {"tp": 2},
    "cp 2": {"cp": 2},
    "ep 2": {"ep": 2},
    "frozen, dp 2": {},
    "frozen, tp 2": {"tp": 2},
}
"""Of two ranks, one of which trains under "one"."""
ON_FOUR = {"tp": 2, "cp": 2}
TOWERS = ("model.visual.", "model.vision_tower.", "model.multi_modal_projector.")
_RECOMPUTED = {"memory": {"activation_checkpointing": "full"}}
MODELS: dict[str, dict[str, Any]] = {"qwen3_vl": _RECOMPUTED, "internvl": _RECOMPUTED}
CELLS = [
    (family, layout)
    for family in FAMILIES
    for layout in LAYOUTS
    if layout != "ep 2" or family == "qwen3_vl_moe"
    if not layout.startswith("frozen") or family in ("qwen3_vl", "internvl")
]
DAILY = [
    *((family, "one") for family in FAMILIES),
    *((family, layout) for family in ("gemma3", "qwen3_vl") for layout in ("dp 2", "tp 2", "cp 2")),
    ("qwen3_vl_moe", "ep 2"),
    ("internvl", "frozen, dp 2"),
]


def _rows(world: Any) -> list[list[int]]:
    """Return a dp rank's rows. Of two the first has all pictures but one."""
    if world.dp_size == 1:
        return [[0, 1, 3], [2]]
    return [[0, 2], [3]] if world.dp_index(world.rank) == 0 else [[1], []]


def _watched(trained: Any, kept: dict[str, Tensor]) -> None:
    """Keep the gradients, as whole tensors, that the optimizer gets."""
    step, parameters = trained.optimizer.step, trained.optimizer.parameters

    def take(gradients: dict[str, Tensor], **options: Any) -> None:
        kept.update(whole({n: like(parameters[n], g) for n, g in gradients.items()}))
        step(gradients, **options)

    trained.optimizer.step = take


def _trained(base: Any, cfg: Config) -> dict[str, Any] | None:
    """Score and train on the texts; None on a rank that does not train."""
    world = world_under(base, cfg)
    trainer = make_trainer(cfg, world)
    if not world.is_trainer:
        return None
    folder, model = Path(cfg.model.path), trainer.policy.model
    scored = {
        name: [row[1:] for row in model.score(sequences(folder), row_tokens=most)]
        for name, most in (("packed", 1000), ("single", 1))
    }
    own: dict[str, Tensor] = {}
    _watched(trainer.policy, own)
    updates = prepare(batch(folder, _rows(world)), None, cfg=cfg, model=model)

    def loss_of(one: PreparedMicrobatch) -> tuple[Tensor, dict]:
        logprobs, _ = model.forward(one.row)
        by_token = torch.cat([weights(n) if n > 1 else torch.zeros(1) for n in one.row.lengths])
        return (one.row.spread(logprobs) * by_token).sum(), {}

    trainer.policy.update(updates, loss_of, step=0)
    return {"scored": scored, "gradients": own}


def _run_cells(base: Any, cfgs: dict[tuple, Config]) -> dict[tuple, Any]:
    return {cell: _trained(base, cfg) for cell, cfg in cfgs.items()}


def _results(where: Path, cells: list[tuple[str, str]], *, world_size: int = 2) -> dict[str, Any]:
    folders = {family: seeing_model(family, where / family) for family, _ in cells}
    frozen = {"train": "language"}
    models = {
        (family, layout): MODELS.get(family, {}) | (frozen if "frozen" in layout else {})
        for family, layout in cells
    }
    cfgs = {
        (family, layout): replace(
            vision_config(folders[family], where / "out", model=models[family, layout]),
            layout=replace(ON_CPU, world_size=world_size, **LAYOUTS.get(layout, ON_FOUR)),
        )
        for family, layout in cells
    }
    first = replace(cfgs[cells[0]], layout=replace(ON_CPU, world_size=world_size))
    ranks = in_world(first, _run_cells, cfgs, timeout_s=60 + 30 * len(cells))
    return {"ranks": ranks, "plain": {f: plain(folder) for f, folder in folders.items()}}


@pytest.fixture(scope="module")
def daily(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _results(tmp_path_factory.mktemp("daily"), DAILY)


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _results(tmp_path_factory.mktemp("rest"), [cell for cell in CELLS if cell not in DAILY])


def _check(results: dict[str, Any], cell: tuple[str, str]) -> None:
    expected, seen, is_frozen = results["plain"][cell[0]], 0, "frozen" in cell[1]
    gradients = {
        name: gradient
        for name, gradient in expected.gradients.items()
        if not (is_frozen and name.startswith(TOWERS))
    }
    for found in (rank[cell] for rank in results["ranks"] if rank[cell] is not None):
        seen += 1
        for name, scored in found["scored"].items():
            gaps = [(a - b).abs().mean() for a, b in zip(scored, expected.logprobs, strict=True)]
            assert max(gaps) < 2e-6, (name, gaps)
        own = found["gradients"]
        assert own.keys() == gradients.keys(), own.keys() ^ gradients.keys()
        for name, gradient in gradients.items():
            most, mean = float(gradient.abs().max()), (own[name] - gradient).abs().mean()
            # transformers' gated delta nets subtract sums, which costs these digits (5e-6 from
            # float64; tests/model/test_packed_states.py compares ours, 1e-6).
            rounding = 5.0 if name.endswith(("A_log", "dt_bias")) else 1.0
            assert mean <= rounding * 2e-6 * max(1.0, most), (name, mean, most)
            gap = float((own[name] - gradient).abs().max())
            assert gap <= rounding * 1e-5 * most + 1e-6, (name, gap, most)
        moving = [n for n, g in own.items() if float(g.abs().max()) > 1e-3]
        assert is_frozen or any(name.startswith(TOWERS) for name in moving)
    assert seen == (1 if cell[1] == "one" else len(results["ranks"]))


@pytest.mark.parametrize("cell", DAILY, ids=" on ".join)
def test_a_model_that_sees_is_trained_as_transformers_computes_it(cell, daily):
    _check(daily, cell)


@pytest.mark.grid
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cell", [c for c in CELLS if c not in DAILY], ids=" on ".join)
def test_every_other_one_is_too(cell, rest):
    _check(rest, cell)


@pytest.mark.grid
@pytest.mark.timeout(1800)
def test_tp_and_cp_together_train_it_as_transformers_computes_it(tmp_path):
    cells = [(family, "tp 2 and cp 2") for family in FAMILIES]
    results = _results(tmp_path, cells, world_size=4)
    for cell in cells:
        _check(results, cell)
