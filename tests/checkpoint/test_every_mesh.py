"""Weights and checkpoints of every mesh of four trainer ranks, in one job each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spmdrl.config import CheckpointSettings, Config
from tests.helpers.checkpoint_runs import restore, save
from tests.helpers.comparing import differing, full_state, whole
from tests.helpers.meshes import EXPERT_MESHES, MESHES, TRAINERS, layout_of, world_under
from tests.helpers.policy_runs import config
from tests.helpers.worlds import WeightStream, in_world, make_engine, make_trainer
from tests.model.test_moe import make_moe
from tests.sync.test_engine import (
    change,
    in_files,
    make_config,
    make_folder,
    parameters,
    parameters_loaded,
    whole_state,
)

# --------------------------------------------------------------------------- pushes


def push_from_each(base: Any, cfgs: dict[str, Config]) -> dict[str, dict[str, Any]]:
    """Push changed weights into one engine from each mesh in turn."""
    engine = make_engine(base.cfg, base)
    weights = load_file(Path(base.cfg.model.path) / "model.safetensors")
    found = {}
    for number, (mesh, cfg) in enumerate(cfgs.items()):
        world = world_under(base, cfg)
        started = parameters_loaded(engine, weights) if world.is_inference else []
        trainer = make_trainer(cfg, world)
        stream = WeightStream(trainer.weights, engine, world)
        change(trainer, 0.02 * (number + 1))
        stream.push(number + 1)
        state = whole_state(trainer, world)
        own = whole(parameters(engine, world))
        right = parameters_loaded(engine, in_files(state, trainer)) if world.is_inference else []
        found[mesh] = {
            "mode": stream.mode,
            "checked": len(own),
            "differing": differing(own, dict(zip(own, right))),
            "stale": [n for (n, a), b in zip(own.items(), started) if torch.equal(a, b)],
        }
    engine.close()
    return found


DENSE = ("qwen3", "qwen2", "llama", "gemma2", "gemma3", "mistral")
EXPERTS = ("qwen3_moe", "mixtral")  # vLLM's CPU build has no latent attention for deepseek_v3
DAILY = [("qwen3", 1)]


@pytest.mark.parametrize(
    "family, inference_tp",
    [
        # The others take the same ways as qwen3, and what is their own is pushed elsewhere too.
        pytest.param(family, tp, marks=() if (family, tp) in DAILY else pytest.mark.grid)
        for family in (*DENSE, *EXPERTS)
        for tp in (1, 2)
    ],
)
def test_a_push_from_every_mesh_is_bit_equal(family, inference_tp, tmp_path):
    if family in DENSE:
        folder, meshes = make_folder(tmp_path, family, kv_heads=4), [*MESHES]
    else:
        folder = make_moe(tmp_path, family, hidden_size=128, intermediate=64, kv_heads=4)
        meshes = [*EXPERT_MESHES, "shard2 tp2"]
    dtype = "bfloat16" if inference_tp == 1 else "float32"
    cfgs = {
        mesh: make_config(folder, layout=layout_of(mesh, inference_tp=inference_tp), dtype=dtype)
        for mesh in meshes
    }
    results = in_world(cfgs[meshes[0]], push_from_each, cfgs)
    for rank, of_meshes in enumerate(results):
        for mesh, found in of_meshes.items():
            where = f"rank {rank}, {mesh}"
            assert found["mode"] == "traced", where
            assert found["differing"] == [] and found["stale"] == [], where
            assert (found["checked"] > 10) == (rank >= TRAINERS), where


# --------------------------------------------------------------------------- checkpoints


def relay(base: Any, cfgs: dict[str, Config]) -> list[dict[str, Tensor]]:
    """Save on the first mesh, and on each next what was restored there.

    Returns: the whole state on each mesh, the same on every rank.
    """
    states = []
    for step, cfg in enumerate(cfgs.values(), start=1):
        trainer = make_trainer(cfg, world_under(base, cfg))
        if step == 1:
            _move(trainer)
        else:
            restore(trainer, step=step - 1)
        states.append(full_state(trainer))
        save(trainer, step)
    return states


def _move(trainer: Any) -> None:
    """Take optimizer steps by gradients that do not depend on the layout."""
    companions = [c.trained for c in trainer.companions.values() if hasattr(c, "trained")]
    for trained in (trainer.policy, *companions):
        for times in (1, 2):
            gradients = {
                n: (local + 1).sin() * times for n, local in trained.optimizer.local.items()
            }
            trained.optimizer.step(gradients, lr=1e-2)


STATES = {  # family, options of policy_runs.config
    "a value model": ("dense", {"advantage": "gae"}),
    "adapters": ("dense", {"model": {"lora": {"rank": 4}}}),
    "bfloat16": (
        "dense",
        {"model": {"memory": {"master_dtype": "bfloat16", "optimizer_dtype": "bfloat16"}}},
    ),
    "experts": ("deepseek_v3", {"model": {"moe": {"balance": "bias", "rate": 0.02}}}),
}


@pytest.mark.parametrize(
    "kind",
    [  # with fewer tensors, or others of the same kinds as the policy's
        pytest.param(kind, marks=() if kind == "experts" else pytest.mark.grid) for kind in STATES
    ],
)
def test_a_checkpoint_goes_through_every_mesh_unchanged(kind, tmp_path):
    family, options = STATES[kind]
    folder = (
        make_folder(tmp_path, "qwen3", hidden_size=32, kv_heads=4)
        if family == "dense"
        else make_moe(tmp_path, family)
    )
    meshes = [*MESHES] if family == "dense" else [*EXPERT_MESHES, "shard2 tp2"]
    base = config(folder, tmp_path / "out", **options)
    cfgs = {
        mesh: replace(
            base, steps=100, layout=layout_of(mesh), checkpoint=CheckpointSettings(every_steps=1)
        )
        for mesh in meshes
    }
    for rank, states in enumerate(in_world(cfgs[meshes[0]], relay, cfgs)):
        for mesh, state in zip(meshes, states):
            assert differing(state, states[0]) == [], f"rank {rank}, {mesh}"
        moments = [t for n, t in states[0].items() if "exp_avg" in n]
        assert moments and all(float(t.abs().max()) > 0 for t in moments)
