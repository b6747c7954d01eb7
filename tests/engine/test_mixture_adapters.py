"""Adapters of each kind of layer of mixtures in vLLM, pushed by themselves: none is left out."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spmdrl.check.fit import fit_problems
from spmdrl.config import Config, LayoutSettings, LoraSettings
from spmdrl.engine.vllm.expert_adapters import ADAPTED_MIXTURES
from spmdrl.model.tensor_parts import local_part
from spmdrl.tools.small_models.random_vision import make_vision_model
from tests.engine.test_families import FAMILIES, folder_of
from tests.helpers.policy_runs import changed
from tests.helpers.vlm import TEXT
from tests.helpers.worlds import with_stream
from tests.sync.test_engine import PROMPTS, make_config

IN_SUITE = "qwen2_moe"
"""Its shared expert has a gate, which vLLM calls by another name."""
LATENT = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite"}
BUT_ABSORBED = r"model\.layers\.(?!.*kv_b_proj).*"
"""All layers and experts but those of which vLLM would leave an adapter out."""
HEADS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 48}
"""No choice to flip in bfloat16."""
SEEING: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe": EXPERTS,
    "qwen3_5_moe": EXPERTS | HEADS | {"shared_expert_intermediate_size": 48},
}
FIELDS = {"qwen3_next": FAMILIES["qwen3_next"][0]}
ROUNDED = {"qwen3_next": 0.1, "qwen3_5_moe": 0.1}
"""Of families that vLLM computes in bfloat16 alone: the largest mean gap in nats."""


def _config(where: Path, family: str, **lora: Any) -> Config:
    if family in SEEING:
        folder = where / family
        text = TEXT | SEEING[family] | {"tie_word_embeddings": False}
        make_vision_model(family, folder, text=text)
    else:
        folder = folder_of(where, family, FIELDS.get(family, {}))
    layout = LayoutSettings(placement="colocated", world_size=1)
    cfg = make_config(folder, layout=layout, dtype="bfloat16" if family in ROUNDED else "float32")
    own = LoraSettings(rank=3, alpha=12, push="adapter")
    return changed(cfg, model={"lora": replace(own, **lora)}, stream={"max_logprob_gap": 1.0})


def _kind(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", re.sub(r"[._]lora_B(\.weight)?$", "", name))


@torch.no_grad()
def _each_kind(stream: Any, engine: Any, trainer: Any) -> dict[str, tuple[float, float]]:
    """Return {kind of layer: the gap, and how far the engine's scores moved}, where the adapters of
    that kind alone are not zero."""
    matrices = {n: local_part(t) for n, t in trainer.weights.shards().items() if "lora_B" in n}
    stream.push(0)
    before = engine.score(PROMPTS)
    found = {}
    for version, kind in enumerate(dict.fromkeys(map(_kind, matrices)), start=1):
        for name, matrix in matrices.items():
            draws = torch.Generator().manual_seed(version)
            is_own = _kind(name) == kind
            matrix.copy_(0.3 * is_own * torch.randn(matrix.shape, generator=draws))
        stream.push(version)
        total, count = stream.probe(PROMPTS)["sync/probe_gap"]
        moved = max(float((a - b).abs().max()) for a, b in zip(before, engine.score(PROMPTS)))
        found[kind] = (total / count, moved)
    return found


@pytest.mark.parametrize(
    "family",
    [
        name if name == IN_SUITE else pytest.param(name, marks=pytest.mark.models)
        for name in sorted(ADAPTED_MIXTURES)
    ],
)
def test_vllm_computes_with_each_kind_of_adapter_what_trainers_do(family, tmp_path, request):
    if family in SEEING:
        request.getfixturevalue("torchvision")
    lora = {"targets": BUT_ABSORBED} if family in LATENT else {}
    cfg = _config(tmp_path, family, **lora)
    assert not [p for p in fit_problems(cfg) if "model.lora" in p], fit_problems(cfg)
    (found,) = with_stream(cfg, _each_kind)
    assert len(found) > 3
    for kind, (gap, moved) in found.items():
        assert gap < ROUNDED.get(family, 1e-4) and moved > 0.05, (kind, found)
