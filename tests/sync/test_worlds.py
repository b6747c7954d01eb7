"""Plans of whole worlds: real models, laid out as on every rank of a world without its peers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from spmdrl.config import Config, LayoutSettings, LoraSettings
from spmdrl.model.cuts import TensorCut, cut_of
from spmdrl.model.files.file_tensors import file_tensors, live_tensors
from spmdrl.model.lora.layers import Adapters, lora_form
from spmdrl.model.parallel.layout import lay_out
from spmdrl.model.tensor_parts import Box, Part
from spmdrl.sync.tables import FileTable, Want
from spmdrl.world.mesh import make_expert_mesh, make_meshes
from spmdrl.world.torch_internals import plain_name
from tests.helpers.ranks import run_ranks
from tests.sync.planned import boxes_in_files, check_both_sides, plan_all, sources_of

COMMON = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=128,
)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
LATENT = dict(
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    n_group=2,
    topk_group=1,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=16,
    num_key_value_heads=4,
)


def split(trainers: int, engines: int, **fields: int) -> LayoutSettings:
    return LayoutSettings(
        world_size=trainers + engines, trainer_ranks=trainers, device="cpu", **fields
    )


def colocated(world_size: int, **fields: int) -> LayoutSettings:
    return LayoutSettings(placement="colocated", world_size=world_size, device="cpu", **fields)


WORLDS = {
    "tied, replicated": ("qwen3", dict(tie_word_embeddings=True), split(4, 4, dp_replicate=2)),
    "cp2 tp2 to 2 x tp2": ("qwen3", {}, split(4, 4, cp=2, tp=2, inference_tp=2)),
    "replicate2 tp2, tp2": ("qwen3", {}, colocated(8, dp_replicate=2, tp=2, inference_tp=2)),
    "odd ranks, biases": ("qwen2", dict(tie_word_embeddings=False), split(3, 2)),
    "lora merged": ("qwen3", {}, split(4, 2, tp=2, inference_tp=2)),
    "ep4": ("qwen3_moe", EXPERTS, split(4, 4, ep=4, inference_tp=2)),
    "ep2 over shards": ("qwen3_moe", EXPERTS, split(8, 2, ep=2, inference_tp=2)),
    "replicate2 tp2 ep2": ("qwen3_moe", EXPERTS, colocated(8, dp_replicate=2, tp=2, ep=2)),
    "router bias, latent": ("deepseek_v3", LATENT, split(4, 4, tp=2, ep=2, inference_tp=2)),
}


def meta_model(name: str) -> torch.nn.Module:
    """Return the model of a world, without storage."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, fields, _ = WORLDS[name]
    with torch.device("meta"):
        hf_model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **(COMMON | fields)), attn_implementation="eager"
        )
    if name == "lora merged":
        Adapters(hf_model, lora_form(LoraSettings(rank=2, alpha=4.0, targets="all-linear")))
    return hf_model


def cuts_on(rank: int, name: str) -> dict[str, TensorCut]:
    """Return how a trainer rank of a world holds its model."""
    layout = WORLDS[name][2]
    store, device = FakeStore(), torch.device("cpu")
    dist.init_process_group("fake", store=store, rank=rank, world_size=layout.world_size)
    try:
        cfg = replace(Config(), layout=layout)
        mesh, sharding = make_meshes(cfg, device)
        experts = make_expert_mesh(cfg, device)
        world: Any = SimpleNamespace(
            cfg=cfg, mesh=mesh, sharding=sharding, experts=experts, device=device
        )
        hf_model = meta_model(name)
        scorer, _ = lay_out(hf_model, cfg, world, dtype=torch.bfloat16, temperature=1.0)
        prefix = f"{hf_model.base_model_prefix}."
        cuts = {}
        for live, tensor in live_tensors(scorer).items():
            live = plain_name(live)
            cuts[prefix + live[5:] if live.startswith("base.") else live] = cut_of(live, tensor)
        return cuts
    finally:
        dist.destroy_process_group()


def wants_of(parts: dict[str, Part], at: int, *, tp: int) -> list[Want]:
    """Return what one rank of an engine takes: rows, columns, or all of a tensor."""
    found = []
    for index, (name, part) in enumerate(parts.items()):
        start, shape = [0] * len(part.shape), list(part.shape)
        dim = index % 3
        if dim < len(shape) and "norm" not in name and shape[dim] >= tp:
            start[dim] = shape[dim] * at // tp
            shape[dim] = shape[dim] * (at + 1) // tp - start[dim]
        dtype = torch.float32 if "bias" in name else torch.bfloat16
        found.append(Want(name, Box(tuple(start), tuple(shape)), dtype))
    return found


def describe(name: str) -> tuple[list, dict[str, Part]]:
    """Return each rank's cuts, and the file tensors."""
    layout = WORLDS[name][2]
    trainers = layout.trainer_ranks if layout.placement == "split" else layout.world_size
    parts = file_tensors(meta_model("tied, replicated" if name == "lora merged" else name))
    held = [cuts_on(rank, name) for rank in range(trainers)]
    return held + [{}] * (layout.world_size - trainers), parts


def describe_all() -> dict[str, tuple[list, dict[str, Part]]]:
    """Return every world, described in one process."""
    return {name: describe(name) for name in WORLDS}


@pytest.fixture(scope="module")
def described() -> dict[str, tuple[list, dict[str, Part]]]:
    """Every world's description."""
    return run_ranks(1, describe_all)[0]


@pytest.mark.parametrize("name", list(WORLDS))
def test_all_ranks_plans_together_move_every_element_once(name, described):
    held, parts = described[name]
    layout, table = WORLDS[name][2], FileTable(parts)
    first = layout.trainer_ranks if layout.placement == "split" else 0
    tp = layout.inference_tp
    wants: list[list[Want]] = [[] for _ in held]
    for rank in range(first, layout.world_size):
        wants[rank] = wants_of(parts, (rank - first) % tp, tp=tp)
    plans = plan_all(held, wants, parts, bucket_bytes=16 * 2**10)
    assert plans[0].num_buckets > 3
    check_both_sides(plans, table)
    holders = [boxes_in_files(own, parts, rank) for rank, own in enumerate(held)]
    sent = numpy.zeros(len(held))
    for rank in range(first, layout.world_size):
        for want, sources in zip(wants[rank], sources_of(plans[rank], wants[rank], table)):
            assert sources.min() >= 0, want.name
            for source in numpy.unique(sources):
                mine = numpy.zeros(want.box.shape, bool)
                for box in holders[source][want.name]:
                    if common := want.box.intersect(box):
                        mine[_at(common, want.box)] = True
                assert mine[sources == source].all(), (want.name, source)
                sent[source] += 1
    assert (sent > 0).sum() == (first or layout.world_size), "some trainer sends nothing"


def _at(box: Box, inside: Box) -> tuple[slice, ...]:
    return tuple(slice(a - b, a - b + n) for a, b, n in zip(box.start, inside.start, box.shape))


def test_worlds_have_what_makes_plans_hard(described):
    names = {name: set(parts) for name, (_, parts) in described.items()}
    assert "lm_head.weight" not in names["tied, replicated"]
    assert any("e_score_correction_bias" in n for n in names["router bias, latent"])
    assert any("lora_A" in n for n in described["lora merged"][0][0])
    bias = next(n for n in names["router bias, latent"] if "e_score_correction_bias" in n)
    assert described["router bias, latent"][0][0][bias] == TensorCut((8,))
    factors = [
        axis.factor for cut in described["cp2 tp2 to 2 x tp2"][0][0].values() for axis in cut.axes
    ]
    assert max(factors) == 2
