"""A base in 4 or 8 bits under adapters: codes, a run that equals one over the dequantised weights,
what ranks hold and gather, restarts, exports, refusals."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from spmdrl.check.fit import fit_problems
from spmdrl.check.settings import validate
from spmdrl.config import Config
from spmdrl.model.files.file_tensors import file_tensors
from spmdrl.model.lora.quantised_base import BLOCK, NF4, BaseForm, base_weights
from spmdrl.model.tensor_parts import Held, local_part
from spmdrl.tools.commands.export import export
from spmdrl.tools.plan.run import run_of_model
from spmdrl.tools.plan.trainer_memory import trainer_memory
from spmdrl.world.axes import axes_of
from spmdrl.world.machine.live_bytes import LiveBytes
from tests.helpers.checkpoint_runs import restore, save
from tests.helpers.comparing import differing, full_state
from tests.helpers.plan_runs import run_config, scoring, write_model
from tests.helpers.policy_runs import (
    VALID,
    batch,
    changed,
    config,
    meta_model,
    own_batch,
    small_model,
    update,
)
from tests.helpers.torchao import needs_torchao
from tests.helpers.worlds import another_trainer, in_world, make_trainer, with_trainer
from tests.model.test_lora import set_b
from tests.model.test_moe import make_moe

SIZES = {"hidden_size": 96, "intermediate": 160}  # a row ends within a block
KINDS = ("nf4", "int8")


def _form(kind: str, dtype: torch.dtype = torch.float32) -> BaseForm:
    return BaseForm(kind, dtype)


# --------------------------------------------------------------------------- codes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [64, 100, 7])
def test_a_code_is_the_nearest_by_float64(kind, columns):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(40, columns, generator=generator) * torch.logspace(-9, 9, 40)[:, None]
    values[3] = 0
    packed = _form(kind).quantise(values)
    found = _form(kind).dequantise(packed, columns).double()
    assert packed.shape == (40, _form(kind).row_bytes(columns)) and packed.dtype == torch.uint8
    exact = values.double()
    for start in range(0, columns, BLOCK):
        own = exact[:, start : start + BLOCK]
        largest = own.abs().amax(dim=1, keepdim=True)
        levels = torch.tensor(NF4).double() if kind == "nf4" else torch.arange(-127, 128) / 127
        gaps = (own[..., None] - largest[..., None] * levels.double()).abs()
        error = (found[:, start : start + BLOCK] - own).abs()
        # In float32, the nearer of two levels may not be seen where they are equally near.
        assert bool((error <= gaps.amin(dim=-1) + 3e-7 * largest).all())
    assert bool((found[3] == 0).all())
    assert torch.equal(_form(kind).quantise(found.float()), packed)


def test_the_table_is_that_of_normal_quantiles():
    draws = NormalDist()
    positive = [draws.inv_cdf(float(p)) for p in torch.linspace(0.9677083, 0.5, 9).double()[:-1]]
    negative = [-draws.inv_cdf(float(p)) for p in torch.linspace(0.9677083, 0.5, 8).double()[:-1]]
    table = torch.tensor(sorted([*positive, 0.0, *negative]))
    torch.testing.assert_close(torch.tensor(NF4), table / table.max(), rtol=0, atol=2e-7)


@needs_torchao
def test_codes_are_torchaos_but_where_its_scales_are_rounded():
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor

    values = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))
    theirs = NF4Tensor.from_tensor(values, block_size=BLOCK, scaler_block_size=16)
    torch.testing.assert_close(theirs.nf4, torch.tensor(NF4), rtol=0, atol=1e-4)  # its own digits
    stored = _form("nf4").quantise(values).unflatten(1, (-1, 36))
    # It quantises the scales too, to 8 bits, before it chooses codes.
    assert (stored[..., :32].flatten() == theirs.quantized_data).float().mean() > 0.97


def test_the_parameter_is_rounded_once_to_the_compute_dtype():
    values = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))
    packed = _form("nf4").quantise(values)
    half = _form("nf4", torch.bfloat16).dequantise(packed, 128)
    assert torch.equal(half, _form("nf4").dequantise(packed, 128).bfloat16())


# --------------------------------------------------------------------------- runs


def _dequantised(folder: Path, out: Path, kind: str) -> Path:
    """Write the folder's model with the values that layers compute with."""
    shutil.copytree(folder, out)
    weights = load_file(out / "model.safetensors")
    hf_model = meta_model(folder)
    quantised = base_weights(hf_model)
    for name, part in file_tensors(hf_model).items():
        if part.tensor in quantised:
            weight = weights[name]
            weights[name] = _form(kind).rounded(weight.float()).to(weight.dtype).contiguous()
            assert not torch.equal(weights[name], weight)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def _config(folder: Path, out: Path, kind: str = "nf4", **options: Any) -> Config:
    lora = {"rank": 3, "alpha": 12, "base": kind, "targets": ["q_proj", "down_proj"]}
    memory = {"activation_checkpointing": options.pop("recomputes", "none"), "head_chunk_tokens": 7}
    own = {"compute_dtype": options.pop("dtype", "float32"), "lora": lora, "memory": memory}
    return config(folder, out, model=own, kl_coef=0.1, kl_in="reward", kl="k1", **options)


def _steps(trainer: Any) -> dict[str, Any]:
    """Train, and read what engines would get."""
    set_b(trainer)
    own = own_batch(trainer.world)
    sums = [update(trainer, own, step=step) for step in range(2)]
    held = Held(trainer.weights.shards(), trainer.weights.parts, trainer.weights.deltas())
    values = {}
    for name, boxes in held.boxes().items():
        for box in boxes:
            values[f"{name} {box}"] = held.value(name, box).read()
            if len(box.shape) == 2 and box.shape[1] > 70:  # a part of a row, from within a block
                at = type(box)((box.start[0], box.start[1] + 30), (1, 41))
                values[f"{name} {at}"] = held.value(name, at).read()
    return {"sums": sums, "values": values, "state": full_state(trainer)}


def _both(trainer: Any, plain: Config) -> tuple[dict, dict]:
    return _steps(trainer), _steps(another_trainer(trainer, plain))


def _assert_same(own: dict, plain: dict) -> None:
    assert own["sums"] == plain["sums"]
    assert not differing(own["values"], plain["values"])
    numbers = {"lora.base", "lora.base_bits"}
    trained = [{n: t for n, t in f["state"].items() if n not in numbers} for f in (own, plain)]
    assert not differing(*trained)


RUNS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "dense, nf4": ("nf4", small_model, {"recomputes": "full", "world_size": 2}),
    "dense, int8": ("int8", small_model, {"recomputes": "selective"}),
    "dense, tp 2": ("nf4", small_model, {"world_size": 2, "tp": 2}),
    "mixture, int8": ("int8", make_moe, {"recomputes": "full", "world_size": 2}),
    "mixture, ep 2": ("nf4", make_moe, {"recomputes": "selective", "world_size": 2, "ep": 2}),
    "mixture, tp 2": ("nf4", make_moe, {"world_size": 2, "tp": 2, "ep": 2}),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.grid] if case in ("mixture, int8",) else [])
        for case in RUNS
    ],
)
def test_a_run_has_the_bits_of_one_over_the_dequantised_weights(case, tmp_path):
    kind, make, options = RUNS[case]
    sizes = {"hidden_size": 128, "intermediate": 256} if "tp" in options else SIZES
    folder = small_model(tmp_path, **sizes)
    if make is make_moe:
        folder = make_moe(tmp_path, "qwen3_moe", **sizes)
    other = _dequantised(folder, tmp_path / "other", kind)
    cfg = _config(folder, tmp_path / "out", kind, **options)
    plain = _config(other, tmp_path / "plain", "full", **options)
    for own, theirs in with_trainer(cfg, _both, plain):
        _assert_same(own, theirs)
        assert own["sums"][1]["policy/kl_ref_k3"][0] != 0


def _one_and_two(trainer: Any) -> dict[str, Any]:
    found = _steps(trainer)
    save(trainer, 2)
    local = {n: local_part(t).nbytes for n, t in trainer.policy.model.named_shards().items()}
    return found | {"local": local, "gathered": _gathered(trainer)}


def _gathered(trainer: Any) -> list[int]:
    """Return the bytes of each all-gather of a forward pass."""
    model = trainer.policy.model
    row = trainer._prepare(own_batch(trainer.world))[0][0].row
    sizes = []
    plain = dist.all_gather_single

    def counting(output: Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(output.nbytes)
        return plain(output, *args, **options)

    dist.all_gather_single = counting
    with torch.no_grad():
        model.columns([])  # frees what is gathered
        model.forward(row)
    dist.all_gather_single = plain
    return sizes


def _resume(world: Any, cfgs: dict[str, Config]) -> dict[str, Any]:
    found = {}
    for name, cfg in cfgs.items():
        world.cfg = cfg
        trainer = make_trainer(cfg, world)
        try:
            restore(trainer, step=2)
            found[name] = full_state(trainer)
        except ValueError as error:
            found[name] = str(error)
    return found


def test_two_ranks_gather_quantised_bytes_and_train_as_one_does(tmp_path):
    folder = small_model(tmp_path, **SIZES)
    one = _config(folder, tmp_path / "one")
    two = _config(folder, tmp_path / "two", world_size=2)
    full = _config(folder, tmp_path / "full", "full", world_size=2)
    (alone,) = with_trainer(one, _one_and_two)
    ranks = with_trainer(two, _one_and_two)
    theirs = with_trainer(full, _one_and_two)
    for name, tensor in ranks[0]["state"].items():
        torch.testing.assert_close(tensor, alone["state"][name], rtol=1e-4, atol=1e-6)
    # A block's linear layers: q, k, v, o, gate, up of 96 columns, down of 160.
    rows = 96 + 48 + 48 + 96 + 160 + 160
    packed = rows * 2 * 36 + 96 * 3 * 36
    linear = 4 * (96 * rows + 160 * 96)
    saved = [b - a for a, b in zip(ranks[0]["gathered"], theirs[0]["gathered"], strict=True)]
    assert saved == [0, linear - packed, linear - packed]  # embedding, norm and head; two blocks
    name = "model.layers.0.mlp.down_proj.weight"
    assert [found["local"][name] for found in ranks] == [48 * 3 * 36] * 2

    wrong = {"allow_config_change": True}
    cfgs = {
        "same": changed(one, output_dir=two.output_dir),
        "int8": changed(one, output_dir=two.output_dir, checkpoint=wrong),
    }
    cfgs["int8"] = changed(cfgs["int8"], model={"lora": {"base": "int8"}})
    (found,) = in_world(one, _resume, cfgs)
    assert not differing(found["same"], ranks[0]["state"])
    assert "have base_bits 4" in found["int8"] and "has 8" in found["int8"]
    # What engines got is what an export writes.
    merged = load_file(export(tmp_path / "one", out=tmp_path / "merged") / "model.safetensors")
    for place, value in alone["values"].items():
        file = place.split()[0]
        if value.shape == merged[file].shape:
            assert torch.equal(value.float(), merged[file].float()), file


def _saved(trainer: Any) -> dict[str, Any]:
    """Return the shapes that a layer without adapter keeps for its backward pass."""
    layer = trainer.policy.model.hf_model.get_submodule("model.layers.1.mlp.up_proj")
    own = trainer._prepare(batch(0, 1))[0][0]
    shapes = []

    def pack(tensor: Tensor) -> Tensor:
        shapes.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    plain = layer.forward

    def watched(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return plain(x)

    layer.forward = watched
    logprobs, _ = trainer.policy.model.forward(own.row)
    logprobs.sum().backward()
    return {"shapes": shapes}


def test_only_codes_are_kept_for_the_backward_pass(tmp_path):
    cfg = _config(small_model(tmp_path, **SIZES), tmp_path / "out", dtype="bfloat16")
    (found,) = with_trainer(cfg, _saved)
    assert found["shapes"] == [((160, 72), torch.uint8)]


# --------------------------------------------------------------------------- the plan


def _hold(trainer: Any, full: Config) -> list[dict[str, int]]:
    return [_held(own) for own in (trainer, another_trainer(trainer, full))]


def _held(trainer: Any) -> dict[str, int]:
    model = trainer.policy.model
    row = scoring([101, 100, 100, 99], first_scored=20, vocab=1000, make=model.row)
    for _ in range(2):
        model.forward(row)[0].sum().backward()
    weights = sum(local_part(p).nbytes for p in model.named_shards().values())
    with LiveBytes() as live:
        model.forward(row)[0].sum().backward()
    return {"weights": weights, "working": live.peak}


def _planned(cfg: Config) -> dict[str, int]:
    run = run_of_model(cfg, meta_model(cfg.model.path), prompt_tokens=20, response_tokens=80)
    causes = trainer_memory(run, axes_of(cfg)).causes
    resting = ("weights", "gradients", "optimizer")
    working = sum(size for name, size in causes.items() if name not in resting)
    return {"weights": causes["weights"], "working": working}


MIXTURE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=300)


@pytest.mark.parametrize(
    "kind, dtype, family",
    [("nf4", "bfloat16", "qwen3"), ("int8", "float32", "qwen3"), ("nf4", "float32", "qwen3_moe")],
)
def test_ranks_hold_what_the_plan_says(kind, dtype, family, tmp_path):
    sizes = dict(hidden_size=256, intermediate_size=700, num_hidden_layers=3, vocab_size=1000)
    sizes |= MIXTURE if family == "qwen3_moe" else {}
    path = write_model(tmp_path / "model", family, **sizes)
    cfg = run_config(path, str(tmp_path / "out"), world_size=2, dtype=dtype, placement="offline")
    cfg = changed(cfg, layout={"ep": 2 if family == "qwen3_moe" else 1})
    own = changed(cfg, model={"lora": {"rank": 4, "base": kind}})
    full = changed(cfg, model={"lora": {"rank": 4}})
    plans = [_planned(cfg) for cfg in (own, full)]
    for held in with_trainer(own, _hold, full):
        assert [h["weights"] for h in held] == [p["weights"] for p in plans]
        # For adapters the formulas of activations are an upper bound. A dense base adds no error;
        # the dequantised experts are planned for a moment at which less else is held.
        ratio, of_full = (p["working"] / h["working"] for p, h in zip(plans, held))
        most = 0.2 if family == "qwen3_moe" else 0.02
        assert ratio >= 1 and ratio == pytest.approx(of_full, rel=most)


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"engine": {"exact": True}}, ["model.lora.base", "engine.exact"]),
        ({"model": {"lora": {"base": "nf4", "rank": 0}}}, ["model.lora.base", "model.lora.rank"]),
    ],
)
def test_what_is_not_built_is_refused_before_anything_is_loaded(fields, words):
    cfg = changed(VALID, model={"lora": {"rank": 8, "base": "nf4"}})
    problems = "\n".join(validate(changed(cfg, **fields)))
    assert not [word for word in words if word not in problems], problems


def _refusals(folder: Path, **layout: int) -> list[str]:
    cfg = changed(VALID, model={"path": str(folder), "lora": {"rank": 2, "base": "nf4"}})
    problems = fit_problems(changed(cfg, layout=layout))
    return [problem for problem in problems if "model.lora.base: nf4 with" in problem]


def test_what_a_model_cannot_be_stored_as_is_refused(tmp_path):
    assert not _refusals(make_moe(tmp_path, "qwen3_moe"))
    (of_experts,) = _refusals(make_moe(tmp_path, "gpt_oss"))
    assert "a gpt_oss, whose experts are not stored as [experts, out, in]" in of_experts
    two = {"tp": 2, "world_size": 2}
    assert not _refusals(small_model(tmp_path, "even", hidden_size=128, intermediate=256), **two)
    (of_columns,) = _refusals(small_model(tmp_path, "uneven", **SIZES), **two)
    assert "layout.tp 2, which cuts the 96 columns of model.layers.0.self_attn.o_proj" in of_columns
