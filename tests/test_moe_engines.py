"""Mixtures of experts in engines: the trainers' weights bit for bit, and the same logprobs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from test_moe import make_moe
from test_sync_engine import (
    PROMPTS,
    behaviour,
    change,
    make_config,
    parameters,
    parameters_loaded,
    whole_state,
)
from torch import Tensor

from spmdrl.config import Config, LayoutSettings
from spmdrl.model.shards import Held

CASES = {  # engine, family, dtype, layout
    "vllm": (
        "vllm",
        "qwen3_moe",
        "float32",
        LayoutSettings(world_size=3, trainer_ranks=2, tp=2, ep=2),
    ),
    "vllm_tp2": (
        "vllm",
        "mixtral",
        "bfloat16",
        LayoutSettings(placement="colocated", world_size=2, inference_tp=2),
    ),
    "transformers": (
        "transformers",
        "deepseek_v3",
        "float32",
        LayoutSettings(placement="colocated", world_size=2, ep=2),
    ),
}


def in_files(state: dict[str, Tensor], trainer: Any) -> dict[str, Tensor]:
    """The tensors of the files, cut from whole live ones."""
    held = Held(state, trainer.weights.parts)
    return {name: held.value(name, box).read() for name, (box,) in held.boxes().items()}


def push_and_compare(cfg: Config) -> dict[str, Any]:
    """Push changed weights twice; hold the engine against its own loading of them."""
    from spmdrl.engine import make_engine
    from spmdrl.roles import make_trainer
    from spmdrl.sync.stream import WeightStream
    from spmdrl.world import World

    world = World.start(cfg)
    engine, trainer = make_engine(cfg, world), make_trainer(cfg, world)
    stream = WeightStream(trainer.weights, engine, world)
    found: dict[str, Any] = {"mode": stream.mode, "differing": []}
    found["probes"] = [stream.probe(PROMPTS)]
    for version in (1, 2):
        change(trainer, 0.02 * version)
        stream.push(version)
        state = whole_state(trainer, world)
        found["probes"].append(stream.probe(PROMPTS))
        if world.is_inference:
            own = {n: p.detach().clone() for n, p in parameters(engine, world).items()}
            right = parameters_loaded(engine, in_files(state, trainer))
            found["differing"] += [
                n for (n, a), b in zip(own.items(), right) if not torch.equal(a, b)
            ]
    found["behaviour"] = behaviour(engine, world, state=state, cfg=cfg)
    engine.close()
    world.close()
    return found


@pytest.mark.parametrize("case", list(CASES))
def test_engines_hold_the_trainers_experts_and_agree_on_logprobs(case, tmp_path):
    kind, family, dtype, layout = CASES[case]
    # vLLM on the CPU wants a hidden size that divides by 32, and head dims that it knows.
    sizes = {"hidden_size": 128, "intermediate": 48} if kind == "vllm" else {}
    folder = make_moe(tmp_path, family, **sizes)
    cfg = make_config(folder, layout=layout, dtype=dtype, kind=kind)
    results = run_ranks(layout.world_size, push_and_compare, cfg)
    limit = 1e-4 if dtype == "float32" else 0.1
    for rank, result in enumerate(results):
        assert result["mode"] == "traced" and result["differing"] == [], f"rank {rank}"
        for probe in result["probes"]:
            gap, count = probe["sync/probe_gap"]
            assert count >= 13 and gap / count < limit, f"rank {rank}: {result['probes']}"
        of = result["behaviour"]
        if of:
            assert of["change"] > 0.05, "the test's change of weights is too small to be seen"
            assert of["gap"] < 10 * limit and of["sampled"] == 8, of
