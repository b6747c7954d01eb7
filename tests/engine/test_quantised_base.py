"""A quantised base in real engines: they get the dequantised weights, merged or under adapters."""

from __future__ import annotations

from typing import Any

import pytest

from spmdrl.config import LayoutSettings, LoraSettings, StreamSettings
from tests.helpers.policy_runs import changed
from tests.helpers.worlds import with_stream
from tests.model.test_lora import set_b
from tests.model.test_moe import make_moe
from tests.sync.test_engine import PROMPTS, make_config, make_folder

CASES: dict[str, tuple[str, str, LayoutSettings]] = {  # family, push, layout
    "merged": (
        "qwen3",
        "merged",
        LayoutSettings(placement="colocated", world_size=2, inference_tp=2),
    ),
    "adapter": ("qwen3", "adapter", LayoutSettings(world_size=2, trainer_ranks=1)),
    "experts": ("qwen3_moe", "adapter", LayoutSettings(world_size=3, trainer_ranks=2, ep=2)),
}


def _probe(stream: Any, engine: Any, trainer: Any) -> dict[str, Any]:
    """Return the mean |logprob difference| before any push, and after pushes of B = 0 and B."""
    means = [stream.probe(PROMPTS)]
    nbytes = []
    for version in range(2):
        if version and trainer.world.is_trainer:
            set_b(trainer)
        nbytes.append(stream.push(version)["sync/bytes"][0])
        stream.verify(version)
        means.append(stream.probe(PROMPTS))
    gaps = [total / count for total, count in (own["sync/probe_gap"] for own in means)]
    return {"mode": stream.mode, "gaps": gaps, "bytes": nbytes}


@pytest.mark.proves("lora_base", "lora_push", "split")
@pytest.mark.proves("lora_base", "inference_tp", "colocated")
@pytest.mark.proves("lora_base", "lora_push", "moe", "ep", "split")
@pytest.mark.parametrize("case", CASES)
def test_an_engine_computes_what_trains_and_not_the_weights_of_the_files(case, tmp_path):
    family, push, layout = CASES[case]
    stream = StreamSettings(bucket_bytes=64 * 2**10, verify_every=1, max_logprob_gap=1.0)
    folder = make_folder(tmp_path, "qwen3")
    if family == "qwen3_moe":
        folder = make_moe(tmp_path, family, hidden_size=128, intermediate=64)
    cfg = make_config(folder, layout=layout, dtype="float32", stream=stream)
    cfg = changed(cfg, model={"lora": LoraSettings(rank=3, alpha=12, push=push, base="nf4")})
    for found in with_stream(cfg, _probe):
        of_files, first, later = found["gaps"]
        assert found["mode"] == "traced" and of_files > 1e-3  # the gap of the quantisation
        assert max(first, later) < 1e-5, found
        if push == "adapter":
            assert found["bytes"][1] < found["bytes"][0] / 5
