"""Every mesh trains like one process: loss, gradients, their norms and the parameters, by cells.

A cell is a row (a model, an objective, options) on a mesh. One start of four ranks runs all of
them: the groups of a mesh are made anew within the same job. The reference of a row is the same
two steps on one rank of that job, in float32. In the second step both sequences of a pair begin
with a prompt, which is computed once, but not by the reference.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.config import BatchSettings, Config
from spmdrl.model.divisibility import misfits
from spmdrl.model.model_shape import ModelCounts
from spmdrl.model.tensor_parts import like
from spmdrl.tools.small_models.families import family_config
from spmdrl.tools.small_models.shrink import shrunk, tiny_model
from spmdrl.types import Batch
from spmdrl.world.axes import Axes
from tests.helpers.comparing import whole
from tests.helpers.meshes import ALONE, EXPERT_MESHES, MESHES, layout_of, world_under
from tests.helpers.policy_runs import (
    LENGTHS,
    changed,
    config,
    microbatch,
    scalars,
    small_model,
    step_as_train_does,
    with_prompts,
)
from tests.helpers.worlds import in_world, make_trainer

PROMPTS = (0, 40)
"""Tokens that both sequences of a pair begin with, at each step."""


@dataclass(frozen=True)
class Row:
    """What is trained, and on which meshes by default: on none what others stand for there."""

    meshes: tuple[str, ...]
    architecture: str = "qwen3"
    sizes: dict[str, Any] = field(default_factory=dict)
    """Arguments of create_model, where they differ."""
    hf_config: dict[str, Any] = field(default_factory=dict)
    """Fields of config.json, where they differ."""
    model: dict[str, Any] = field(default_factory=dict)
    """The model's section of the config."""
    options: dict[str, Any] = field(default_factory=dict)
    """Other arguments of policy_runs.config."""


_UNEVEN = {"hidden_size": 48, "heads": 6, "kv_heads": 3}  # neither cp 4 nor cp 2 * tp 2 divides
_SHRUNK = ("qwen3_5_text", "nemotron_h", "lfm2", "granitemoehybrid", "apertus")
_SHRUNK += ("falcon_mamba", "kimi_linear", "minimax")
_MIXTURES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
_GPT_OSS = {"architecture": "gpt_oss", "hf_config": {"sliding_window": 6}}
_RECOMPUTED = {"memory": {"activation_checkpointing": "full"}}
_RING, _GATHER = ({"kernels": {"context": method}} for method in ("ring", "gather"))
_AUX = {"moe": {"balance": "aux", "coef": 0.5}}
_REWARD_MODEL = {"objective": "reward_model", "loss": "bradley_terry"}
ROWS = {
    "qwen3": Row(("replicate2 shard2", "shard2 cp2")),
    "qwen3, uneven heads": Row(("cp4",), sizes=_UNEVEN),
    "qwen3, gather": Row(("cp2 tp2",), model=_GATHER),
    "qwen3, ring": Row(("cp4",), sizes=_UNEVEN, model=_RING),
    # Values with another head dim than keys.
    "deepseek_v3, ring, checkpointing": Row(
        ("cp2 ep2",), architecture="deepseek_v3", model=_RING | _RECOMPUTED
    ),
    "qwen2, tied, checkpointing": Row(
        ("shard2 tp2",), architecture="qwen2", sizes={"tied": True}, model=_RECOMPUTED
    ),
    "llama": Row(("tp4",), architecture="llama", sizes={"kv_heads": 4}),
    "gemma2": Row(  # caps low enough, and a window short enough, to matter
        ("cp2 tp2",),
        architecture="gemma2",
        hf_config={
            "sliding_window": 6,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 1.0,
        },
    ),
    "gemma2, gather, checkpointing": Row(
        (),
        architecture="gemma2",
        sizes=_UNEVEN,
        hf_config={"sliding_window": 6, "attn_logit_softcapping": 0.5},
        model=_RECOMPUTED,
    ),
    "gemma3, tied": Row((), architecture="gemma3", sizes={"tied": True}),
    "mistral": Row((), architecture="mistral", hf_config={"sliding_window": 6}),
    "dpo": Row(("cp2 tp2",), options={"objective": "preference", "loss": "dpo"}),
    "critic": Row(("shard2 cp2", "cp2 tp2"), options={"advantage": "gae"}),
    "reward model": Row(("cp2 tp2",), options=_REWARD_MODEL),
    "sft": Row(("shard4",), options={"objective": "sft"}),
    "distillation": Row(("cp2 tp2",), options={"objective": "distill", "loss": "divergence"}),
    "prime": Row(("cp4", "shard2 cp2"), options={"advantage": "prime"}),
    "lora": Row(("cp2 tp2",), model={"lora": {"rank": 3, "alpha": 12}}, options={"kl_coef": 0.1}),
    "lora, embedding": Row(
        (), model={"lora": {"rank": 3, "targets": ["embed_tokens", "down_proj"]}}
    ),
    "lora, qwen2, checkpointing": Row(
        (),
        architecture="qwen2",
        model=_RECOMPUTED
        | {"lora": {"rank": 16, "targets": ["q_proj", "o_proj"], "use_rslora": True}},
    ),
    "lora, reward model": Row((), model={"lora": {"rank": 4}}, options=_REWARD_MODEL),
    "lora, deepseek_v3": Row(  # adapters on attention, dense layers and all experts
        ("shard2 tp2 ep2",), architecture="deepseek_v3", model={"lora": {"rank": 3}}
    ),
    "lora, qwen3_moe, experts": Row(
        ("cp2 ep2",),
        architecture="qwen3_moe",
        model=_RECOMPUTED | {"lora": {"rank": 3, "alpha": 12}},
        options={"kl_coef": 0.1},
    ),
    "lora, qwen3_moe, fewer experts than ranks": Row(
        (),
        architecture="qwen3_moe",
        sizes={"moe_experts": 2},
        model={"lora": {"rank": 3, "targets": ["experts"]}},
    ),
    "qwen3_moe": Row(("cp2 tp2 ep4",), architecture="qwen3_moe"),
    "qwen3_moe, fewer experts than ranks": Row(  # each is cut by rows
        ("shard4 ep2",), architecture="qwen3_moe", sizes={"moe_experts": 2}
    ),
    "qwen3_moe, balancing loss": Row((), architecture="qwen3_moe", model=_AUX),
    "mixtral, checkpointing": Row(
        ("replicate2 tp2 ep2",), architecture="mixtral", model=_RECOMPUTED | _AUX
    ),
    # Sinks by heads (tp, ulysses) and by tokens (gather, ring); experts with biases.
    "gpt_oss": Row(("cp2 tp2 ep4",), model=_AUX, **_GPT_OSS),
    "gpt_oss, ring, checkpointing": Row(("cp2 ep2",), model=_RING | _RECOMPUTED, **_GPT_OSS),
    "gpt_oss, gather": Row((), model=_GATHER, **_GPT_OSS),
    "lora, gpt_oss": Row((), model={"lora": {"rank": 3}}, **_GPT_OSS),
    "deepseek_v3, balancing bias": Row(
        ("tp4 ep4",), architecture="deepseek_v3", model={"moe": {"balance": "bias", "rate": 0.02}}
    ),
    # Layers with a state: gated delta nets, Mamba 2 with experts, short convolutions.
    "qwen3_5": Row(("cp2 tp2",), architecture="qwen3_5_text"),
    "nemotron_h, checkpointing": Row(
        ("shard2 tp2 ep2",), architecture="nemotron_h", model=_RECOMPUTED
    ),
    # Without a plan of its own, and with an MLP of one matrix; an activation with parameters.
    "granitemoehybrid": Row(("shard2 tp2 ep2",), architecture="granitemoehybrid"),
    "apertus": Row((), architecture="apertus"),
    "lora, lfm2": Row(("cp2 tp2",), architecture="lfm2", model={"lora": {"rank": 3}}),
    # Without attention; the others are left to the grid.
    "falcon_mamba, checkpointing": Row(
        ("cp2 tp2",), architecture="falcon_mamba", model=_RECOMPUTED
    ),
    "kimi_linear": Row((), architecture="kimi_linear"),
    "minimax": Row((), architecture="minimax"),
}
DEFAULT = [(row, mesh) for row in ROWS for mesh in ROWS[row].meshes]


def _fits(row: Row, axes: tuple[int, ...]) -> bool:
    """Whether heads and experts divide; latent attention has no key/value heads of its own."""
    tp, ep = (*axes, 1)[3:5]
    counts = ModelCounts(
        row.architecture,
        heads=4,
        kv_heads=0 if row.architecture == "deepseek_v3" else row.sizes.get("kv_heads", 2),
        experts=row.sizes.get("moe_experts", 8) if row.architecture in _MIXTURES else 0,
    )
    return not any(misfits(counts, Axes(tp=tp, ep=ep)))


REST = [
    (name, mesh)
    for name, row in ROWS.items()
    for mesh, axes in (MESHES | EXPERT_MESHES).items()
    if mesh not in row.meshes and _fits(row, axes)
]


# --------------------------------------------------------------------------- one cell


def _batch(dp_index: int, dp_size: int, *, prompt: int) -> Batch:
    """Pairs of sequences, dealt out over ranks, in two micro-batches; some are dummies."""
    pairs = list(range(len(LENGTHS) // 2))[dp_index::dp_size]
    half = -(-len(pairs) // 2)
    cuts = [
        [i for pair in part for i in (2 * pair, 2 * pair + 1)]
        for part in (pairs[:half], pairs[half:])
    ]
    rewards = torch.linspace(0, 3, len(LENGTHS)).double().cos() / 2 + 0.5
    known = scalars()
    return Batch(
        scalars=replace(known, rewards=rewards, lengths=known.lengths + prompt),
        updates=(tuple(with_prompts(microbatch(cut), prompt) for cut in cuts),),
        update_ids=torch.zeros(len(LENGTHS), dtype=torch.int64),
    )


def _watch(trained: Any, kept: list[dict[str, Tensor]]) -> None:
    """Keep the gradients, as whole tensors, that the optimizer gets."""
    step, parameters = trained.optimizer.step, trained.optimizer.parameters

    def take(gradients: dict[str, Tensor], *, lr: float) -> None:
        kept.append(whole({n: like(parameters[n], g) for n, g in gradients.items()}))
        step(gradients, lr=lr)

    trained.optimizer.step = take


def _train(cfg: Config, base: Any) -> dict[str, Any] | None:
    """Take the steps; None on a rank that does not train."""
    world = world_under(base, cfg)
    trainer = make_trainer(cfg, world)
    if not world.is_trainer:
        return None
    companions = [one.trained for one in trainer.companions.values() if hasattr(one, "trained")]
    parts = {trained.name: trained for trained in [trainer.policy, *companions]}
    gradients: dict[str, list] = {name: [] for name in parts}
    for name, trained in parts.items():
        _watch(trained, gradients[name])
    sums = []
    for step, prompt in enumerate(PROMPTS):
        own = _batch(world.dp_index(world.rank), world.dp_size, prompt=prompt)
        for row in (one.row for one in trainer._prepare(own)[0] if one.num_tokens):
            is_shared = row.own.row_length < len(row.tokens)
            assert is_shared == (bool(prompt) and world.shares_prefixes)
        sums.append(step_as_train_does(trainer, own, step=step)[2])
    tensors = {
        f"{name}, step {step}, gradient of {n}": g
        for name, found in gradients.items()
        for step, grads in enumerate(found)
        for n, g in grads.items()
    }
    for name, trained in parts.items():
        tensors |= {f"{name}, {n}": p for n, p in whole(trained.model.named_shards()).items()}
    return {"sums": sums, "tensors": tensors}


def _gaps(ours: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """Return what is further from the reference than rounding explains."""
    found = []
    if ours["tensors"].keys() != reference["tensors"].keys():
        return [f"other tensors: {ours['tensors'].keys() ^ reference['tensors'].keys()}"]
    for step, (a, b) in enumerate(zip(ours["sums"], reference["sums"])):
        if (a.keys() ^ b.keys()) - {"perf/computed_frac"}:
            return [f"other metrics: {a.keys() ^ b.keys()}"]
        computed, tokens = a.get("perf/computed_frac", (1, 1))  # none without prefixes to share
        for name, (total, count) in b.items():
            if name == "perf/trainer_flops" and computed < tokens:
                continue
            gap = abs(a[name][0] - total)
            if gap > 1e-5 * max(abs(total), abs(count), 1e-3) or a[name][1] != pytest.approx(
                count, rel=1e-5
            ):
                found.append(f"step {step}: {name} is {a[name]}, not {(total, count)}")
    for name, expected in reference["tensors"].items():
        gap = float((ours["tensors"][name] - expected).abs().max())
        # Some gradients are 0 but for rounding, such as that of a key's bias.
        if not gap <= 1e-5 * float(expected.abs().max()) + 1e-7:
            found.append(f"{name}: off by {gap:.2g} of {float(expected.abs().max()):.2g}")
    return found + _layer_gaps(ours)


def _layer_gaps(ours: dict[str, Any]) -> list[str]:
    """Return what norms of layers are not those of the gradients, which may have been clipped."""
    squares: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, tensor in ours["tensors"].items():
        if match := re.fullmatch(r"(\w+), step (\d), gradient of (.+)", name):
            model, step, parameter = match.groups()
            squares[model, step][_layer(parameter)] += float(tensor.double().square().sum())
    found = []
    for (model, step), by_layer in squares.items():
        sums = ours["sums"][int(step)]
        norm = sums[f"{model}/grad_norm"][0]
        start = f"{model}/grad_norm_layer/"
        norms = {n.removeprefix(start): s[0] for n, s in sums.items() if n.startswith(start)}
        unclipped = norm / math.sqrt(sum(by_layer.values()))
        expected = {layer: math.sqrt(square) * unclipped for layer, square in by_layer.items()}
        if norms != pytest.approx(expected, rel=1e-5, abs=1e-9):
            found.append(f"step {step}: norms of {model}'s layers are {norms}, not {expected}")
        if sum(own**2 for own in norms.values()) != pytest.approx(norm**2, rel=1e-12):
            found.append(f"step {step}: norms of {model}'s layers are not its norm {norm}: {norms}")
    return found


def _layer(parameter: str) -> str:
    if block := re.search(r"\.layers\.(\d+)\.", parameter):
        return f"0{block[1]}"
    return "embedding" if "embed" in parameter else "head"


def _run_cells(
    base: Any, cfgs: dict[str, Config], cells: list[tuple[str, str]]
) -> dict[tuple, list[str]]:
    """Train all cells in one job; return what is wrong with each, on every rank."""
    wrong: dict[tuple, list[str]] = {}
    for row in dict.fromkeys(row for row, _ in cells):
        alone = changed(cfgs[row], layout=ALONE, batch={"share_prefixes": "never"})
        reference = [_train(alone, base)]
        dist.broadcast_object_list(reference, src=0, group=base.control)
        for mesh in (mesh for r, mesh in cells if r == row):
            began = time.monotonic()
            ours = _train(replace(cfgs[row], layout=layout_of(mesh)), base)
            wrong[row, mesh] = _gaps(ours, reference[0])
            if base.rank == 0:
                print(f"{row} on {mesh}: {time.monotonic() - began:.1f} s", flush=True)
    return wrong


def _results(where: Path, cells: list[tuple[str, str]]) -> dict[tuple, list[str]]:
    """Return {cell: what is wrong with it on any rank}."""
    rows = dict.fromkeys(row for row, _ in cells)
    cfgs = {name: _config(where / str(index), ROWS[name]) for index, name in enumerate(rows)}
    first = replace(next(iter(cfgs.values())), layout=layout_of("shard4"))
    ranks = in_world(first, _run_cells, cfgs, cells, timeout_s=120 + 8 * len(cells))
    return {
        cell: [f"rank {rank}: {text}" for rank, found in enumerate(ranks) for text in found[cell]]
        for cell in cells
    }


def _config(where: Path, row: Row) -> Config:
    std = {"initializer_std": 0.1} if row.architecture in _MIXTURES else {}
    sizes = std | row.sizes
    folder = where / "model"
    if row.architecture in _SHRUNK:
        tiny_model(shrunk(family_config(row.architecture)), folder)
    else:
        small_model(where, architecture=row.architecture, hf_config=row.hf_config, **sizes)
    model = row.model
    if row.options.get("objective") == "distill":
        model = model | {"teacher": str(small_model(where, "teacher", seed=1))}
    return changed(
        config(folder, where, model=model, **row.options),
        batch=BatchSettings(group_size=2, tokens_per_microbatch=64),
        report=dict(layer_norms=1),
    )


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple, list[str]]:
    return _results(tmp_path_factory.mktemp("rest"), REST)


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple, list[str]]:
    return _results(tmp_path_factory.mktemp("grid"), DEFAULT)


@pytest.mark.parametrize("cell", DEFAULT, ids=" on ".join)
def test_a_mesh_trains_like_one_process(cell, default):
    assert not default[cell], "\n".join(default[cell][:12])


@pytest.mark.grid
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cell", REST, ids=" on ".join)
def test_every_other_mesh_does_too(cell, rest):
    assert not rest[cell], "\n".join(rest[cell][:12])
