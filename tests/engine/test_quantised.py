"""An engine that quantises what it is sent: vLLM's own reload makes of it what a start would."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from spmdrl.config import Config, LayoutSettings
from tests.helpers.policy_runs import changed
from tests.helpers.worlds import WeightStream, with_engine
from tests.sync.test_engine import (
    PROMPTS,
    change,
    make_config,
    make_folder,
    parameters,
    whole_state,
)

OPTIONS = {"quantization": "fp8_per_channel"}


def _config(folder: Path, *, limit: float, inference_tp: int) -> Config:
    layout = LayoutSettings(world_size=2 + inference_tp, trainer_ranks=2, inference_tp=inference_tp)
    return changed(
        make_config(folder, layout=layout),
        engine={"options": OPTIONS},
        stream={"max_logprob_gap": limit},
    )


def _push(engine: Any, trainer: Any, target: str | None) -> dict[str, Any]:
    """Start an engine; with a target, push changed weights into it, and write them there."""
    world = trainer.world
    found: dict[str, Any] = {"probes": []}
    if target:
        stream = WeightStream(trainer.weights, engine, world)
        found["mode"] = stream.mode
        for version in (1, 2):
            change(trainer, 0.02)
            stream.push(version)
            found["probes"].append(stream.probe(PROMPTS)["sync/probe_gap"])
        state = whole_state(trainer, world)
        if world.rank == 0:
            save_file(
                {n: t.contiguous() for n, t in state.items()},
                Path(target) / "model.safetensors",
                metadata={"format": "pt"},
            )
        stream._cfg = replace(stream._cfg, max_logprob_gap=1e-3)
        with pytest.raises(RuntimeError) as refused:
            stream.probe(PROMPTS, version=2)
        found["error"] = str(refused.value)
    return found | {"parameters": {n: _bits(p) for n, p in parameters(engine, world).items()}}


def _bits(tensor: Tensor) -> tuple[str, bytes]:
    plain = tensor.detach().contiguous()
    return str(plain.dtype), plain.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("inference_tp", [1, pytest.param(2, marks=pytest.mark.grid)])
def test_an_fp8_engine_holds_after_a_push_what_a_fresh_one_makes_of_the_weights(
    inference_tp, tmp_path
):
    folder = make_folder(tmp_path, "qwen3", intermediate=128)
    pushed = tmp_path / "pushed"
    shutil.copytree(folder, pushed, ignore=shutil.ignore_patterns("*.safetensors", "*index*"))
    assert json.loads((pushed / "config.json").read_text())["model_type"] == "qwen3"
    cfg = _config(folder, limit=0.3, inference_tp=inference_tp)
    after = with_engine(cfg, _push, str(pushed))
    fresh = with_engine(changed(cfg, model={"path": str(pushed)}), _push, None, timeout_s=240)
    for rank, (own, right) in enumerate(zip(after, fresh)):
        assert own["mode"] == "reload"
        for gap, count in own["probes"]:
            assert 1e-3 < gap / count < 0.3  # it is another model, a little
        assert "engine.options quantization" in own["error"]
        assert own["parameters"].keys() == right["parameters"].keys()
        differing = [n for n, p in own["parameters"].items() if p != right["parameters"][n]]
        assert differing == [], f"rank {rank}"
        kinds = {dtype for dtype, _ in own["parameters"].values()}
        assert ("torch.float8_e4m3fn" in kinds) == (rank >= 2)
