"""The weight stream into engines that see: bit-equal, and probed with images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spmdrl.config import LayoutSettings
from tests.engine.test_vision import message
from tests.helpers.built import changed
from tests.helpers.comparing import differing, whole
from tests.helpers.vlm import seeing_model
from tests.helpers.worlds import with_stream
from tests.sync.test_engine import (
    change,
    in_files,
    make_config,
    parameters,
    parameters_loaded,
    whole_state,
)

COLOCATED = LayoutSettings(placement="colocated", world_size=1)


def pushed(stream: Any, engine: Any, trainer: Any, rows: Any) -> dict[str, Any]:
    """Push twice, after all weights that are trained have changed; compare and probe each time."""
    world = trainer.world
    found: dict[str, Any] = {"mode": stream.mode, "differing": [], "probes": []}
    found["towers"] = sum("visual" in name or "tower" in name for name in trainer.weights.names)
    found["frozen"] = len(trainer.weights.frozen)
    found["bytes"] = [stream.push(0)["sync/bytes"][0]]
    probes = [stream.probe(rows)]
    for version in (1, 2):
        change(trainer, 0.02 * version, but=trainer.weights.frozen)
        found["bytes"].append(stream.push(version)["sync/bytes"][0])
        stream.verify(version)
        state = whole_state(trainer, world)
        held = whole(parameters(engine, world))
        if world.is_inference:
            right = dict(zip(held, parameters_loaded(engine, in_files(state, trainer))))
            found["differing"] += differing(held, right)
            found["checked"] = len(held)
        probes.append(stream.probe(rows))
    found["probes"] = [probe["sync/probe_gap"] for probe in probes]
    return found


def assert_pushed(folder: Path, *, kind: str, layout: LayoutSettings, train: str = "all") -> None:
    """Push a model's weights into an engine, and check that they arrive and compute the same."""
    cfg = make_config(folder, layout=layout, dtype="float32", kind=kind)
    cfg = changed(cfg, data={"max_prompt_tokens": 192}, model={"train": train})
    cfg = changed(cfg, output_dir=str(folder.with_name("run")))
    rows = [message(folder, images) for images in ([0, 1], [2], [])]
    for of in with_stream(cfg, pushed, rows):
        assert of["mode"] == "traced" and of["differing"] == [] and of["towers"] > 10, of
        assert of.get("checked", 20) > 10
        assert all(total / count < 1e-5 for total, count in of["probes"]), of
        assert (of["frozen"] > 10) == (train == "language")
        first, *later = of["bytes"]
        assert all(sent < first if of["frozen"] else sent == first for sent in later), of


def test_towers_are_pushed_bit_equal(tmp_path):
    folder = seeing_model("gemma3", tmp_path / "model")  # tied
    assert_pushed(folder, kind="transformers", layout=COLOCATED)
