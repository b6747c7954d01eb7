"""What model.memory spares changes no value, or is rounded as promised."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import _VersionWrapper

from spmdrl.check.fit import check_fit
from spmdrl.check.rules import rule_problems
from spmdrl.config import Config, LayoutSettings, MemorySettings, ModelSettings, OptimizerSettings
from spmdrl.model.parallel.recompute import check_offload, has, move_buffers
from spmdrl.model.tensor_parts import local_part
from spmdrl.tools.small_models.families import family_config
from spmdrl.tools.small_models.shrink import shrunk, tiny_model
from spmdrl.train import adamw as optimizer
from spmdrl.train.adamw import AdamW, stochastic_round
from tests.helpers.checkpoint_runs import after_two_updates, restore
from tests.helpers.comparing import differing
from tests.helpers.policy_runs import batch, changed, config, small_model, update, updated
from tests.helpers.worlds import another_trainer, with_trainer

WAYS = {
    "none": {},
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "host": {"offload": "activations"},
    "full, host": {"activation_checkpointing": "full", "offload": "activations"},
    "selective, host": {"activation_checkpointing": "selective", "offload": "activations"},
}
HALF = {"master_dtype": "bfloat16", "optimizer_dtype": "bfloat16"}


def _with(trainer: Any, memory: dict) -> Any:
    """A trainer of the same world, with other settings of memory."""
    cfg = changed(trainer.world.cfg, model={"memory": MemorySettings(**memory)})
    return another_trainer(trainer, cfg)


# ------------------------------------------------------------------ activations


def _kept_bytes(trainer: object) -> dict[str, int]:
    """Bytes that one forward pass leaves for the backward pass, by where they are; each storage
    once, and none of weights. What selective checkpointing keeps passes no hook of autograd."""
    model, micro = trainer.policy.model, batch(0, 1).updates[0][0]
    row = model.row(micro.tokens, micro.cu_seqlens.diff().tolist(), mask=micro.response_mask)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    gc.collect()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs, _ = model.forward(row)
    saved += [o.val for o in gc.get_objects() if type(o) is _VersionWrapper]
    weights = {local_part(p).untyped_storage().data_ptr() for p in model.scorer.parameters()}
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    logprobs.sum().backward()
    trainer.policy.optimizer.zero_grad()
    return sum(size for place, size in found.items() if place not in weights)


def _in_all_ways(first: Any) -> dict[str, dict]:
    found = {}
    for way, memory in WAYS.items():
        trainer = _with(first, memory)
        found[way] = updated(trainer)
        if trainer.world.world_size == 1:
            found[way]["bytes"] = _kept_bytes(trainer)
    return found


def _assert_all_the_same(found: dict[str, dict]) -> None:
    plain = found["none"]
    for way, result in found.items():
        assert result["sums"] == plain["sums"], way
        assert not differing(result["parameters"], plain["parameters"]), way


def test_no_way_to_spare_activations_changes_a_bit(tmp_path):
    found = with_trainer(config(small_model(tmp_path), tmp_path), _in_all_ways)[0]
    _assert_all_the_same(found)
    assert found["host"]["bytes"] < 0.5 * found["none"]["bytes"]
    assert found["full"]["bytes"] < found["selective"]["bytes"] < 0.7 * found["none"]["bytes"]


@pytest.mark.parametrize(
    "model, layout",
    [
        ({}, {"world_size": 4, "cp": 2, "tp": 2}),
        ({"architecture": "qwen3_moe", "intermediate": 16}, {"world_size": 2, "ep": 2}),
    ],
    ids=["tensor and context parallelism", "experts on other ranks"],
)
def test_nor_does_any_under(model, layout, tmp_path):
    cfg = config(small_model(tmp_path, **model), tmp_path, **layout)
    for found in with_trainer(cfg, _in_all_ways):
        _assert_all_the_same(found)


@pytest.mark.parametrize(
    "family, adapters",
    [
        ("qwen3_5_text", {}),
        ("bamba", {"rank": 3}),
        pytest.param("bamba", {}, marks=pytest.mark.grid),
        pytest.param("qwen3_5_text", {"rank": 3}, marks=pytest.mark.grid),
    ],
)
def test_nor_does_any_of_layers_with_a_state(family, adapters, tmp_path):
    tiny_model(shrunk(family_config(family)), tmp_path / "model")
    cfg = config(tmp_path / "model", tmp_path, model={"lora": adapters})
    found = with_trainer(cfg, _in_all_ways)[0]
    _assert_all_the_same(found)
    in_projection = "linear_attn.in_proj_qkv" if family == "qwen3_5_text" else "mamba.in_proj"
    assert any(in_projection in name for name in found["none"]["parameters"])
    assert found["host"]["bytes"] < 0.5 * found["none"]["bytes"]
    assert found["full"]["bytes"] < found["selective"]["bytes"] < 0.7 * found["none"]["bytes"]


# ------------------------------------------------------------------ rounding


def test_rounding_takes_a_neighbour_with_the_right_mean_and_repeats_by_key():
    values = torch.tensor([1.0, 1 + 2**-9, -3.3, 1e-30, 0.0]).repeat(20000, 1)
    rounded = stochastic_round(values, key="a")
    assert rounded.dtype == torch.bfloat16
    gap = 2.0 ** (torch.frexp(values)[1] - 8)  # between bfloat16 neighbours at this exponent
    assert ((rounded.float() - values).abs() < gap).all()
    assert torch.equal(rounded[:, [0, 4]].float(), values[:, [0, 4]]), "exact ones stay"
    error = (rounded.double() - values).mean(0) / gap[0]
    assert (error.abs() < 4 * 0.5 / 20000**0.5).all(), error
    assert torch.equal(rounded, stochastic_round(values, key="a"))
    assert not torch.equal(rounded, stochastic_round(values, key="b"))
    special = torch.tensor([float("inf"), -float("inf"), float("nan")])
    assert str(stochastic_round(special, key="a").tolist()) == "[inf, -inf, nan]"


# ------------------------------------------------------------------ AdamW


OPTIONS = OptimizerSettings(beta2=0.999, weight_decay=0.1)


def _tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in {"w": (5, 7), "embedding": (4, 3), "norm": (7,)}.items()
    }


def _ours(parameters: dict[str, Tensor], **options: object) -> AdamW:
    return AdamW(parameters, no_decay={"embedding"}, options=OPTIONS, key="0/policy", **options)


def _torchs(parameters: dict[str, Tensor]) -> torch.optim.AdamW:
    groups = [
        {"params": [parameters["w"]], "weight_decay": 0.1},
        {"params": [parameters["embedding"], parameters["norm"]], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, fused=True)


def _gradients(parameters: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    return {name: (p.float() * (step + 1)).sin().to(p.dtype) for name, p in parameters.items()}


def test_float32_is_torchs_adamw_bit_by_bit():
    mine, theirs = _tensors(torch.float32), _tensors(torch.float32)
    ours, torchs = _ours(mine), _torchs(theirs)
    for step in range(3):
        gradients = _gradients(mine, step)
        ours.step(gradients, lr=1e-2)
        for name, p in theirs.items():
            p.grad = gradients[name]
        torchs.step()
        assert not differing(mine, theirs)


@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("most", [8, 2**24])
def test_an_update_is_torchs_in_float32_rounded_to_what_is_kept(master, moments, most, monkeypatch):
    monkeypatch.setattr(optimizer, "_CHUNK", most)
    mine = _tensors(master)
    ours = _ours(mine, dtype=moments)
    for step in range(3):
        theirs = {name: p.float().clone() for name, p in mine.items()}
        torchs, before = _torchs(theirs), ours.state_dict()
        for name, p in theirs.items():
            torchs.state[p] = {"step": torch.tensor(float(step))} | {
                key: before[key][name].float().clone() for key in optimizer.MOMENTS
            }
            p.grad = _gradients(mine, step)[name].float()
        torchs.step()
        ours.step(_gradients(mine, step), lr=1e-2)
        after = ours.state_dict()
        assert float(after["updates"]) == step + 1
        for name, p in theirs.items():
            _assert_rounded(mine[name], p)
            for key in optimizer.MOMENTS:
                assert after[key][name].dtype == moments
                _assert_rounded(after[key][name], torchs.state[p][key])


def _assert_rounded(kept: Tensor, exact: Tensor) -> None:
    if kept.dtype == exact.dtype:
        assert torch.equal(kept, exact)
        return
    gap = 2.0 ** (torch.frexp(exact)[1] - 8)
    assert ((kept.float() - exact).abs() < gap).all()


def test_small_updates_of_bfloat16_weights_add_up():
    weights = {"w": torch.ones(64, 64, dtype=torch.bfloat16)}
    moved = AdamW(weights, no_decay=set(), options=OptimizerSettings(), dtype=torch.bfloat16)
    gradients = {"w": torch.full((64, 64), 0.5, dtype=torch.bfloat16)}
    step = 1e-4  # Adam's, where all gradients are equal; to nearest, all below 1/512 are lost
    assert (weights["w"] - step == weights["w"]).all()
    for _ in range(100):
        moved.step(gradients, lr=step)
    assert float(weights["w"].double().mean()) == pytest.approx(1 - 100 * step, abs=5e-4)


# ------------------------------------------------------------------ bfloat16 in training


def _sft(first: Any) -> dict[str, dict]:
    """Train with all kept in float32 and in bfloat16; and what is refused on the CPU."""
    found = {}
    for name, memory in {"float32": {}, "bfloat16": HALF}.items():
        trainer = _with(first, memory)
        losses = [update(trainer, batch(0, 1), step=s)["policy/loss"][0] for s in range(15)]
        seen: list[dict[str, Tensor]] = []
        trainer.policy.optimizer.step = lambda gradients, lr, seen=seen: seen.append(
            dict(gradients)
        )
        update(trainer, batch(0, 1), step=15)
        state = trainer.state_dict()
        kept = {
            "weights": state["model"],
            "gradients": seen[0],
            **{key: state["optimizer"][key] for key in optimizer.MOMENTS},
        }
        found[name] = {
            "losses": losses,
            "bytes": {
                part: sum(local_part(t).nbytes for t in tensors.values())
                for part, tensors in kept.items()
            },
            "numel": sum(p.numel() for p in state["model"].values()),
        }
    with pytest.raises(ValueError, match="model.memory.offload: optimizer on device cpu"):
        _with(first, {"offload": "optimizer"})
    return found


def test_bfloat16_takes_half_the_bytes_and_learns_alike(tmp_path):
    found = with_trainer(config(small_model(tmp_path), tmp_path, objective="sft"), _sft)[0]
    full, half = found["float32"], found["bfloat16"]
    numel = full["numel"]
    assert set(full["bytes"].values()) == {4 * numel}
    assert set(half["bytes"].values()) == {2 * numel}
    assert half["losses"] != full["losses"] and full["losses"][-1] < 0.7 * full["losses"][0]
    for ours, theirs in zip(half["losses"], full["losses"]):
        assert ours == pytest.approx(theirs, rel=0.02)


def _resumed(trainer: Any, is_new: bool) -> dict[str, Tensor]:
    """Take three updates, with a checkpoint after two; or the third one from that checkpoint."""
    if not is_new:
        other = _with(trainer, {"master_dtype": "bfloat16"})
        with pytest.raises(ValueError, match="exp_avg.* is torch.bfloat16 there, torch.float32"):
            restore(other, other.cfg, step=2)
    update(trainer, after_two_updates(trainer, is_new=is_new), step=2)
    return {name: local_part(p).clone() for name, p in trainer.weights.shards().items()}


def test_a_resumed_run_rounds_alike_and_copies_stay_equal(tmp_path):
    layout = dict(world_size=2, dp_replicate=2)
    cfg = config(small_model(tmp_path), tmp_path / "run", model={"memory": HALF}, **layout)
    straight, resumed = (with_trainer(cfg, _resumed, is_new) for is_new in (True, False))
    for local in (straight[1], *resumed):
        assert not differing(local, straight[0])
    assert {p.dtype for p in straight[0].values()} == {torch.bfloat16}


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "memory, expected",
    [
        (
            {"offload": "weights"},
            "model.memory.offload: 'weights' is not one of none, activations, optimizer",
        ),
        ({"activation_checkpointing": "some"}, "'some' is not one of none, selective, full"),
        ({"master_dtype": "float16"}, "'float16' is not one of float32, bfloat16"),
        ({"optimiser_dtype": "bfloat16"}, "unknown key; did you mean optimizer_dtype"),
    ],
)
def test_unknown_ways_to_spare_memory_are_refused(memory, expected, tmp_path):
    with pytest.raises(ValueError, match=expected):
        config("model", tmp_path, model={"memory": memory})


@pytest.mark.parametrize(
    "memory, says",
    [
        (HALF, "model.memory.master_dtype: bfloat16 with model.lora"),
        ({"offload": "parameters"}, "model.memory.offload: parameters with model.lora"),
    ],
)
def test_ways_that_do_not_go_with_adapters_are_refused(memory, says, tmp_path):
    cfg = config("model", tmp_path, model={"memory": memory, "lora": {"rank": 2}})
    assert any(says in problem for problem in rule_problems(cfg))


def test_what_is_named_goes_to_the_host():
    named = {
        offload: {what for what in ("activations", "optimizer", "parameters") if has(offload, what)}
        for offload in ("none", "activations", "optimizer", "all", "parameters")
    }
    assert named == {
        "none": set(),
        "activations": {"activations"},
        "optimizer": {"optimizer"},
        "all": {"activations", "optimizer"},
        "parameters": {"parameters", "optimizer"},
    }


def test_buffers_get_another_device_and_keep_what_they_are():
    root = torch.nn.Sequential(torch.nn.Linear(2, 2))
    root[0].register_buffer("kept", torch.ones(3))
    root[0].register_buffer("computed", torch.ones(4), persistent=False)
    move_buffers(root, torch.device("meta"))
    assert {n: (b.device.type, b.shape[0]) for n, b in root.named_buffers()} == {
        "0.kept": ("meta", 3),
        "0.computed": ("meta", 4),
    }
    assert "0.kept" in root.state_dict() and "0.computed" not in root.state_dict()
    assert {p.device.type for p in root.parameters()} == {"cpu"}


def test_an_optimizer_is_offloaded_from_cuda_alone(tiny_model):
    check_offload("activations", torch.device("cpu"))
    check_offload("all", torch.device("cuda"))
    check_offload("parameters", torch.device("cuda"))
    with pytest.raises(ValueError, match="offload: all on device cpu: nothing to offload"):
        check_offload("all", torch.device("cpu"))
    with pytest.raises(ValueError, match="parameters on device cpu: nothing to offload, the param"):
        check_offload("parameters", torch.device("cpu"))
    cfg = Config(
        layout=LayoutSettings(device="cpu"),
        model=ModelSettings(path=str(tiny_model), memory=MemorySettings(offload="optimizer")),
    )
    with pytest.raises(ValueError, match="offload: optimizer on device cpu: nothing to offload"):
        check_fit(cfg)  # before anything is started
