"""Pushes of what changed, with real engines and real shards: what engines hold after each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spmdrl.config import LayoutSettings, StreamSettings
from spmdrl.model.tensor_parts import local_part
from tests.helpers.comparing import differing, whole
from tests.helpers.worlds import Said, with_stream
from tests.sync.test_engine import (
    in_files,
    make_config,
    make_folder,
    parameters,
    parameters_loaded,
    whole_state,
)

DELTA = StreamSettings(bucket_bytes=64 * 2**10, delta="always", full_every=4)


def change_some(trainer: Any, step: int) -> None:
    """Change about a twentieth of the weights, by their values, so that all copies stay equal."""
    for p in trainer.weights.shards().values():
        local = local_part(p)
        is_chosen = torch.sin(1e5 * local + step) > 0.99
        local.add_(torch.where(is_chosen, 0.5, 0.0))


def pushes(stream: Any, engine: Any, trainer: Any) -> dict[str, Any]:
    """Push eight times; before the fourth, an element of one engine is changed in place."""
    world = trainer.world
    said = Said()
    found: dict[str, Any] = {"shares": [], "bytes": [], "differing": [], "log": []}
    for version in range(1, 9):
        change_some(trainer, version)
        if version == 4:
            if world.rank == world.inference_ranks[-1]:
                own = parameters(engine, world)
                own["model.norm.weight"].data.mul_(-50.0)
            stream._cfg = replace(stream._cfg, verify_every=1)
        sums = stream.push(version)
        found["log"].append(said.take())
        stream._cfg = replace(stream._cfg, verify_every=0)
        changed, compared = sums.get("sync/changed_frac", (-1.0, 1.0))
        found["shares"].append(changed / compared)
        found["bytes"].append(sums["sync/bytes"][0])
        state = whole_state(trainer, world)
        if world.is_inference:
            own = whole(parameters(engine, world))
            right = dict(zip(own, parameters_loaded(engine, in_files(state, trainer))))
            found["differing"] += [(version, name) for name in differing(own, right)]
    return found


@pytest.mark.parametrize(
    ("layout", "kind", "dtype"),
    [
        pytest.param(
            LayoutSettings(world_size=4, trainer_ranks=2, tp=2),
            "transformers",
            "bfloat16",
            marks=pytest.mark.proves("delta", "tp", "split", "transformers"),
        ),
        pytest.param(
            LayoutSettings(world_size=4, trainer_ranks=2, inference_tp=2),
            "vllm",
            "bfloat16",
            marks=pytest.mark.proves("delta", "inference_tp", "split"),
        ),
    ],
)
def test_engines_hold_the_weights_bit_for_bit_after_pushes_of_what_changed(
    layout: LayoutSettings, kind: str, dtype: str, tmp_path: Path
):
    folder = make_folder(tmp_path, "qwen3")
    cfg = make_config(folder, layout=layout, dtype=dtype, kind=kind, stream=DELTA)
    for rank, found in enumerate(with_stream(cfg, pushes)):
        assert found["differing"] == [], f"rank {rank}"
        # Full are the first push, and the fourth after one that is: a wrong checksum caused it.
        is_full = [share < 0 for share in found["shares"]]
        assert is_full == [True, *[False] * 6, True], found["shares"]
        assert all(0.005 < share < 0.1 for share in found["shares"] if share >= 0)
        whole_push = found["bytes"][0]
        for share, nbytes in zip(found["shares"], found["bytes"]):
            assert nbytes == whole_push if share < 0 else nbytes < whole_push / 4
        assert "everything is sent again" in found["log"][3]
        assert "model.norm.weight has checksum" in found["log"][3]
        assert not any("sent again" in text for text in found["log"][4:])
