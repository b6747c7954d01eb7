"""Trainers beside engines of vLLM's Transformers backend, in any order, and engines built anew."""

from __future__ import annotations

from typing import Any

import pytest

from spmdrl.config import LayoutSettings
from tests.helpers.tiny import tiny_folder
from tests.helpers.worlds import WeightStream, another_trainer, in_world, make_engine, make_trainer
from tests.sync.test_engine import PROMPTS, assert_pushed, change, make_config


def built_around_engines(world: Any) -> dict[str, Any]:
    """Build a trainer before, between and after two engines, and stream into each."""
    trainers, found = [make_trainer(world.cfg, world)], []
    for _ in range(2):
        engine = make_engine(world.cfg, world)
        name = type(engine.model).__name__ if world.is_inference else ""
        trainers.append(another_trainer(trainers[0]))
        # Each has to be made while the engine holds what it loaded.
        streams = [WeightStream(trainer.weights, engine, world) for trainer in trainers]
        for version, (trainer, stream) in enumerate(zip(trainers, streams)):
            change(trainer, 0.01)
            stream.push(version)
            found.append({"mode": stream.mode, "probes": [stream.probe(PROMPTS)]})
        engine.close()
    return {"streams": found, "name": name}


@pytest.mark.parametrize("placement", [pytest.param("split", marks=pytest.mark.grid), "colocated"])
def test_the_transformers_backend_leaves_classes_to_trainers(placement, tmp_path):
    folder = tiny_folder(tmp_path / "m", "olmo2", num_key_value_heads=2)
    size = {"split": dict(world_size=2, trainer_ranks=1), "colocated": dict(world_size=1)}
    layout = LayoutSettings(placement=placement, **size[placement])
    cfg = make_config(folder, layout=layout, dtype="float32")
    results = in_world(cfg, built_around_engines)
    assert "TransformersForCausalLM" in {found["name"] for found in results}
    for found in results:
        assert len(found["streams"]) == 5
        for stream in found["streams"]:
            assert_pushed(stream | {"differing": []}, dtype="float32", where=placement)
