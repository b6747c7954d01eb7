"""What model.memory spares changes no value, or is rounded as promised."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_runs import SmallSource, after_two_updates
from policy_runs import batch, config, full_parameters, update
from ranks import run_ranks
from torch import Tensor
from torch.utils.checkpoint import _VersionWrapper

from spmdrl.check.fit import check_fit
from spmdrl.check.model import model_problems
from spmdrl.commands.create_model import create_model
from spmdrl.config import Config, LayoutSettings, MemorySettings, ModelSettings, OptimizerSettings
from spmdrl.model.parallel.recompute import check_offload, has, move_buffers
from spmdrl.model.shards import local_part
from spmdrl.train import optimizer
from spmdrl.train.optimizer import AdamW
from spmdrl.train.rounding import stochastic_round

WAYS = {
    "none": {},
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "host": {"offload": "activations"},
    "full, host": {"activation_checkpointing": "full", "offload": "activations"},
    "selective, host": {"activation_checkpointing": "selective", "offload": "activations"},
}
HALF = {"master_dtype": "bfloat16", "optimizer_dtype": "bfloat16"}


def _model(where: Path) -> Path:
    return create_model(
        where / "model", hidden_size=32, layers=2, heads=4, kv_heads=2, intermediate=48
    )


def _with(cfg: Config, memory: dict) -> Config:
    return replace(cfg, model=replace(cfg.model, memory=MemorySettings(**memory)))


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


def _in_all_ways(cfg: Config) -> dict[str, dict]:
    from spmdrl.roles import make_trainer
    from spmdrl.world import World

    world, found = World.start(cfg), {}
    for way, memory in WAYS.items():
        trainer = make_trainer(_with(cfg, memory), world)
        own = batch(world.dp_index(world.rank), world.dp_size)
        found[way] = {
            "sums": [update(trainer, own, step=step) for step in range(2)],
            "parameters": full_parameters(trainer),
        }
        if world.world_size == 1:
            found[way]["bytes"] = _kept_bytes(trainer)
    world.close()
    return found


def _assert_all_the_same(found: dict[str, dict]) -> None:
    plain = found["none"]
    for way, result in found.items():
        assert result["sums"] == plain["sums"], way
        differing = [
            name
            for name, whole in plain["parameters"].items()
            if not torch.equal(result["parameters"][name], whole)
        ]
        assert not differing, (way, differing)


def test_no_way_to_spare_activations_changes_a_bit(tmp_path):
    found = run_ranks(1, _in_all_ways, config(_model(tmp_path), tmp_path))[0]
    _assert_all_the_same(found)
    assert found["host"]["bytes"] < 0.5 * found["none"]["bytes"]
    assert found["full"]["bytes"] < found["selective"]["bytes"] < 0.7 * found["none"]["bytes"]


def test_nor_does_any_under_tensor_and_context_parallelism(tmp_path):
    cfg = config(_model(tmp_path), tmp_path, world_size=4, cp=2, tp=2)
    for found in run_ranks(4, _in_all_ways, cfg):
        _assert_all_the_same(found)


def test_nor_does_any_where_experts_are_on_other_ranks(tmp_path):
    folder = create_model(
        tmp_path / "moe",
        architecture="qwen3_moe",
        hidden_size=32,
        layers=2,
        heads=4,
        kv_heads=2,
        intermediate=16,
    )
    cfg = config(folder, tmp_path, world_size=2)
    cfg = replace(cfg, layout=replace(cfg.layout, ep=2))
    for found in run_ranks(2, _in_all_ways, cfg):
        _assert_all_the_same(found)


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
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


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


def _sft(cfg: Config) -> dict[str, dict]:
    """Train with all kept in float32 and in bfloat16; and what is refused on the CPU."""
    from spmdrl.roles import make_trainer
    from spmdrl.world import World

    world, found = World.start(cfg), {}
    for name, memory in {"float32": {}, "bfloat16": HALF}.items():
        trainer = make_trainer(_with(cfg, memory), world)
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
        make_trainer(_with(cfg, {"offload": "optimizer"}), world)
    world.close()
    return found


def test_bfloat16_takes_half_the_bytes_and_learns_alike(tmp_path):
    cfg = config(_model(tmp_path), tmp_path, objective="sft")
    found = run_ranks(1, _sft, cfg)[0]
    full, half = found["float32"], found["bfloat16"]
    numel = full["numel"]
    assert set(full["bytes"].values()) == {4 * numel}
    assert set(half["bytes"].values()) == {2 * numel}
    assert half["losses"] != full["losses"] and full["losses"][-1] < 0.7 * full["losses"][0]
    for ours, theirs in zip(half["losses"], full["losses"]):
        assert ours == pytest.approx(theirs, rel=0.02)


def _resumed(cfg: Config, save: bool) -> dict[str, Tensor]:
    """Take three updates, with a checkpoint after two; or the third one from that checkpoint."""
    from spmdrl.checkpoint import Checkpointer
    from spmdrl.roles import make_trainer
    from spmdrl.world import World

    world = World.start(cfg)
    if not save:
        other = _with(cfg, {"master_dtype": "bfloat16"})
        with pytest.raises(ValueError, match="exp_avg.* is torch.bfloat16 there, torch.float32"):
            Checkpointer(other, world).restore(make_trainer(other, world), SmallSource(world))
    trainer, own = after_two_updates(cfg, world, save=save)
    update(trainer, own, step=2)
    local = {name: local_part(p).clone() for name, p in trainer.weights.shards().items()}
    world.close()
    return local


def test_a_resumed_run_rounds_alike_and_copies_stay_equal(tmp_path):
    cfg = config(
        _model(tmp_path), tmp_path / "run", world_size=2, dp_replicate=2, model={"memory": HALF}
    )
    straight, resumed = (run_ranks(2, _resumed, cfg, save) for save in (True, False))
    for local in (straight[1], *resumed):
        assert local.keys() == straight[0].keys()
        assert all(torch.equal(local[name], straight[0][name]) for name in local)
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


def test_bfloat16_masters_are_refused_where_only_adapters_train(tmp_path):
    cfg = config("model", tmp_path, model={"memory": HALF, "lora": {"rank": 2}})
    assert any(
        "model.memory.master_dtype: bfloat16 with model.lora" in problem
        for problem in model_problems(cfg)
    )


def test_parameters_are_not_offloaded_beside_adapters(tmp_path):
    cfg = config(
        "model", tmp_path, model={"memory": {"offload": "parameters"}, "lora": {"rank": 2}}
    )
    assert any(
        "model.memory.offload: parameters with model.lora" in problem
        for problem in model_problems(cfg)
    )


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
