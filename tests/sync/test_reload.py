"""Reloads are proved: what does not arrive, is not written, or is written wrongly, is found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn

from spmdrl.config import LayoutSettings, StreamSettings
from spmdrl.sync import reload as reload_module
from spmdrl.sync.verify import flip_bits
from tests.helpers.worlds import WeightStream, with_engine
from tests.sync.test_engine import (
    PROMPTS,
    change,
    differing,
    in_files,
    make_config,
    make_folder,
    parameters,
    parameters_loaded,
    whole,
    whole_state,
)

DAMAGED = "model.layers.1.mlp.down_proj.weight"


def test_memory_that_has_several_names_is_flipped_once() -> None:
    # As in MLA: a part of a weight, transposed, is a buffer.
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(6, 4))
    model.tied = nn.Parameter(model.weight.data)
    model.register_buffer("part", model.weight.data[2:].T)
    model.register_buffer("own", torch.tensor([True, False]))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = ["weight", "tied", "part", "own"]
    flip_bits(model, names)
    for name, tensor in model.state_dict().items():
        bits = tensor if name == "own" else tensor.view(torch.int32)
        kept = before[name] if name == "own" else before[name].view(torch.int32)
        assert torch.equal(bits, ~kept), name
    flip_bits(model, names)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def _damaged(act: Callable[[], object], kind: type[Exception] = RuntimeError) -> str:
    try:
        act()
    except kind as error:
        return str(error)
    return ""


def push_with_faults(engine: Any, trainer: Any) -> dict[str, str]:
    """Return what is said of each fault of a reload, and of none."""
    world, said = trainer.world, {}
    reload = engine.reload_weights

    def leaving_out(weights: Any) -> None:
        live = dict(engine.model.named_parameters())[DAMAGED]
        kept = live.detach().clone()
        reload(weights)
        live.data.copy_(kept)

    engine.reload_weights = leaving_out
    said["not written"] = _damaged(lambda: WeightStream(trainer.weights, engine, world), ValueError)
    engine.reload_weights = reload
    stream = WeightStream(trainer.weights, engine, world)
    change(trainer, 0.02)
    said["none"] = _damaged(lambda: (stream.push(1), stream.probe(PROMPTS), stream.verify(1)))

    def once(weights: Any) -> None:
        engine.reload_weights = reload
        reload((n, w + 1 if n == DAMAGED else w) for n, w in weights)

    engine.reload_weights = once
    change(trainer, 0.02)
    said["once"] = _damaged(lambda: stream.push(2))

    def always(weights: Any) -> None:
        reload((n, w + 1 if n == DAMAGED else w) for n, w in weights)

    engine.reload_weights = always
    said["always"] = _damaged(lambda: stream.push(3))
    engine.reload_weights = reload

    class Losing(reload_module.Transfer):
        def run(self) -> None:
            super().run()
            for _, tensor in self._targets[:1]:
                tensor.zero_()

    with mock.patch.object(reload_module, "Transfer", Losing):
        said["on the way"] = _damaged(lambda: stream.push(4))
    return said


def test_a_reload_is_verified_and_each_fault_of_it_found(tmp_path):
    cfg = make_config(
        make_folder(tmp_path, "qwen3"),
        layout=LayoutSettings(world_size=2, trainer_ranks=1),
        dtype="float32",
        stream=StreamSettings(bucket_bytes=64 * 2**10, verify_every=1, mode="reload"),
    )
    for said in with_engine(cfg, push_with_faults):
        assert said["none"] == ""
        assert f"rank 1: {DAMAGED}: the reload does not write it" in said["not written"]
        assert "qkv_proj" not in said["not written"]
        assert f"engine of rank 1: {DAMAGED} has checksum" in said["once"]
        assert "are loaded again" in said["once"] and "embed" not in said["once"]
        # Loaded the same twice, but not what the trainers compute with.
        assert "probe at version 3" in said["always"]
        assert "engine of rank 1" in said["on the way"]
        assert "arrived with checksum" in said["on the way"]


def push_experts(engine: Any, trainer: Any) -> dict[str, Any]:
    """Return what a reload of changed weights wrote otherwise than vLLM's loader does with float32
    tensors, and the bytes that it sent to this rank."""
    world = trainer.world
    stream = WeightStream(trainer.weights, engine, world)
    change(trainer, 0.02)
    stream.push(1)
    sizes = {
        name: math.prod(shape) * (2 if ".experts." in name else 4)
        for name, (shape, _) in trainer.weights.names.items()
    }
    found = {
        "mode": stream.mode,
        "planned": sum(sizes.values()),
        "sent": sum(plan.nbytes for plan in stream._weights.plans),
    }
    state = whole_state(trainer, world)
    if not world.is_inference:
        return found
    own = parameters(engine, world)
    held = whole(own)
    right = dict(zip(own, parameters_loaded(engine, in_files(state, trainer))))
    return found | {"differing": differing(held, right), "names": list(own)}


def test_a_reload_sends_experts_in_the_dtype_in_which_vllm_creates_them(tmp_path):
    cfg = make_config(
        make_folder(tmp_path, "qwen3_moe"),
        layout=LayoutSettings(world_size=2, trainer_ranks=1),
        stream=StreamSettings(bucket_bytes=64 * 2**10, verify_every=1, mode="reload"),
    )
    trainer, engine = with_engine(cfg, push_experts)
    assert engine["mode"] == "reload" and engine["differing"] == []
    assert any("experts" in name for name in engine["names"])
    assert engine["sent"] == engine["planned"] == trainer["planned"]
