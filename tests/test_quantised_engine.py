"""An engine that quantises what it is sent: vLLM's own reload makes of it what a start would."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import save_file
from test_sync_engine import PROMPTS, change, make_config, make_folder, parameters, whole_state
from torch import Tensor

from spmdrl.config import Config, LayoutSettings

OPTIONS = {"quantization": "fp8_per_channel"}


def _config(folder: Path, *, limit: float, inference_tp: int) -> Config:
    layout = LayoutSettings(world_size=2 + inference_tp, trainer_ranks=2, inference_tp=inference_tp)
    cfg = make_config(folder, layout=layout)
    return replace(
        cfg,
        engine=replace(cfg.engine, options=OPTIONS),
        stream=replace(cfg.stream, max_logprob_gap=limit),
    )


def _push(cfg: Config, target: str | None) -> dict[str, Any]:
    """Start an engine; with a target, push changed weights into it, and write them there."""
    from spmdrl.engine import make_engine
    from spmdrl.roles import make_trainer
    from spmdrl.sync.stream import WeightStream
    from spmdrl.world import World

    world = World.start(cfg)
    engine, trainer = make_engine(cfg, world), make_trainer(cfg, world)
    found: dict[str, Any] = {"probes": [], "error": ""}
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
        try:
            stream.probe(PROMPTS, version=2)
        except RuntimeError as error:
            found["error"] = str(error)
    found["parameters"] = {n: _bits(p) for n, p in parameters(engine, world).items()}
    engine.close()
    world.close()
    return found


def _bits(tensor: Tensor) -> tuple[str, bytes]:
    plain = tensor.detach().contiguous()
    return str(plain.dtype), plain.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("inference_tp", [pytest.param(1, marks=pytest.mark.grid), 2])
def test_an_fp8_engine_holds_after_a_push_what_a_fresh_one_makes_of_the_weights(
    inference_tp, tmp_path
):
    folder = make_folder(tmp_path, "qwen3", intermediate=128)
    pushed = tmp_path / "pushed"
    pushed.mkdir()
    for file in folder.iterdir():
        if file.suffix == ".json" and "index" not in file.name:
            (pushed / file.name).write_text(file.read_text())
    assert json.loads((pushed / "config.json").read_text())["model_type"] == "qwen3"
    cfg = _config(folder, limit=0.3, inference_tp=inference_tp)
    after = run_ranks(cfg.layout.world_size, _push, cfg, str(pushed))
    fresh = run_ranks(
        cfg.layout.world_size,
        _push,
        replace(cfg, model=replace(cfg.model, path=str(pushed))),
        None,
        timeout_s=240,
    )
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
