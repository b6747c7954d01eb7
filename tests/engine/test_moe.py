"""Mixtures of experts in engines: the trainers' weights bit for bit, and the same logprobs."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from spmdrl.config import LayoutSettings
from spmdrl.sync.tables import FileTable
from tests.helpers.built import changed
from tests.helpers.worlds import with_stream
from tests.model.test_moe import make_moe
from tests.sync.test_engine import assert_pushed, make_config, parameters, push_and_compare

SPLIT = LayoutSettings(world_size=3, trainer_ranks=2)
COLOCATED = LayoutSettings(placement="colocated", world_size=2)
CASES = {  # engine, family, dtype, layout
    "vllm": ("vllm", "qwen3_moe", "float32", replace(SPLIT, tp=2, ep=2)),
    "vllm_tp2": ("vllm", "mixtral", "bfloat16", replace(COLOCATED, inference_tp=2)),
    "vllm_ep2": ("vllm", "qwen3_moe", "float32", replace(COLOCATED, inference_tp=2)),
    "vllm_dp2": ("vllm", "qwen3_moe", "float32", replace(COLOCATED, inference_dp=2)),
    # Of sinks each rank has its heads'; of the experts' last bias one rank has all, others zeros.
    "vllm_sinks": ("vllm", "gpt_oss", "float32", replace(COLOCATED, inference_tp=2)),
    "transformers": ("transformers", "deepseek_v3", "float32", replace(COLOCATED, ep=2)),
}


def push_and_measure(stream: Any, engine: Any, trainer: Any) -> dict[str, Any]:
    """See push_and_compare; and return the shapes of this rank's experts, and the bytes of a push
    that bring it each expert, {expert: bytes}."""
    found = push_and_compare(stream, engine, trainer)
    own = parameters(engine, trainer.world)
    shapes = {tuple(p.shape) for name, p in own.items() if name.endswith("w13_weight")}
    names = FileTable(trainer.weights.parts).names
    arrived: Counter[int] = Counter()
    for plan in stream.plans:
        for number, nbytes in zip(plan.received.file, plan.received.nbytes):
            expert = re.search(r"\.experts\.(\d+)\.", names[number])
            if expert:
                arrived[int(expert[1])] += int(nbytes)
    return found | {"experts": shapes, "arrived": dict(arrived)}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.grid] * (c == "vllm_sinks")) for c in CASES]
)
def test_engines_hold_the_trainers_experts_and_agree_on_logprobs(case, tmp_path):
    kind, family, dtype, layout = CASES[case]
    # vLLM on the CPU wants a hidden size that divides by 32, and head dims that it knows.
    sizes = {"hidden_size": 128, "intermediate": 48} if kind == "vllm" else {}
    if family == "gpt_oss":
        sizes = {"hidden_size": 256, "intermediate": 64, "hf_config": {"sliding_window": 6}}
    folder = make_moe(tmp_path, family, **sizes)
    has_whole_experts = case in ("vllm_ep2", "vllm_dp2")
    options = {"enable_expert_parallel": True} if has_whole_experts else {}
    cfg = make_config(folder, layout=layout, dtype=dtype, kind=kind)
    cfg = changed(cfg, engine=dict(options=cfg.engine.options | options))
    results = with_stream(cfg, push_and_measure)
    limit = 1e-4 if dtype == "float32" else 0.1
    for rank, result in enumerate(results):
        assert_pushed(result, dtype=dtype, where=f"rank {rank}", half_gap=0.1)
        if has_whole_experts:  # four of eight experts, whole
            assert result["experts"] == {(4, 2 * 48, 128)}
            whole = 2 * 3 * 48 * 128 * 4
            assert result["arrived"] == {4 * rank + i: whole for i in range(4)}
        of = result["behaviour"]
        if of:
            assert of["change"] > 0.05, "the test's change of weights is too small to be seen"
            assert of["gap"] < 10 * limit and of["sampled"] == 8, of
