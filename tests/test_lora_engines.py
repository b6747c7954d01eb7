"""Adapters in real engines: merged into the weights, or as a LoRA of vLLM's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from drawn import plain
from ranks import run_ranks
from test_lora import merged_by_hand, set_b
from test_moe import make_moe
from test_sync_engine import PROMPTS, make_config, parameters_loaded, whole_state
from torch import Tensor

from spmdrl.check.dry_run import stream_size
from spmdrl.check.fit import fit_problems
from spmdrl.check.settings import validate
from spmdrl.commands.create_model import create_model
from spmdrl.config import Config, LayoutSettings, LoraSettings
from spmdrl.model.load import build_meta_model
from spmdrl.model.lora.settings import lora_form
from spmdrl.model.lora.targets import adapter_numel
from spmdrl.model.shape import model_shape
from spmdrl.model.shards import Held, local_part
from spmdrl.plan.run import run_of
from spmdrl.plan.traffic import push_flows
from spmdrl.world.axes import axes_of

LORA = LoraSettings(rank=3, alpha=12, use_rslora=True)
SCALE = 12 / 3**0.5
ADAPTER = LoraSettings(rank=16, push="adapter")
LAYOUTS = {  # dtype of the engine, layout
    "split": ("float32", LayoutSettings(world_size=3, trainer_ranks=2)),
    "tp2": ("bfloat16", LayoutSettings(placement="colocated", world_size=2, inference_tp=2)),
    "tp of both": ("float32", LayoutSettings(world_size=4, trainer_ranks=2, tp=2, inference_tp=2)),
}


def _train(trainer: Any, step: int) -> None:
    """Change the adapters alone, by a function of their values."""
    if step == 0:
        set_b(trainer)
    for name, tensor in trainer.weights.shards().items():
        if "lora" in name:
            local = local_part(tensor)
            local.add_(0.02 * step * torch.sin(1000 * local + step))


def _slots(engine: Any, names: list[str]) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in engine.adapter(names).named_parameters()}


def _push(cfg: Config) -> dict[str, Any]:
    """Push adapters of three versions; hold vLLM's memory against its own loading of them."""
    from spmdrl.engine import make_engine
    from spmdrl.roles import make_trainer
    from spmdrl.sync.stream import WeightStream
    from spmdrl.world import World

    world = World.start(cfg)
    engine, trainer = make_engine(cfg, world), make_trainer(cfg, world)
    stream = WeightStream(trainer.weights, engine, world)
    is_own = cfg.model.lora.pushes_adapter
    found: dict[str, Any] = {"mode": stream.mode, "differing": [], "probes": [], "bytes": []}
    for version in range(3):
        if world.is_trainer:
            _train(trainer, version)
        found["bytes"].append(stream.push(version)["sync/bytes"][0])
        state = whole_state(trainer, world)
        found["probes"].append(stream.probe(PROMPTS))
        if not world.is_inference:
            continue
        if is_own:
            matrices = {
                n: t * SCALE if "lora_B" in n else t for n, t in state.items() if "lora" in n
            }
            own = _slots(engine, list(matrices))
            with torch.no_grad():
                for p in engine.adapter(list(matrices)).parameters():
                    p.fill_(7.0)
            engine.load_adapter(iter(matrices.items()))
            right = _slots(engine, list(matrices))
            found["matrices"] = (len(matrices), sum(int((t != 0).sum()) for t in own.values()))
        else:
            own = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
            merged = merged_by_hand({f"live {n}": t for n, t in state.items()} | state, scale=SCALE)
            held = Held(merged, trainer.weights.parts)
            in_files = {n: held.value(n, box).read() for n, (box,) in held.boxes().items()}
            right = dict(zip(own, parameters_loaded(engine, in_files)))
        found["differing"] += [n for n, t in own.items() if not torch.equal(t, right[n])]
    found["errors"] = _damage(stream, engine, world=world) if is_own else []
    engine.close()
    world.close()
    return found


def _damage(stream: Any, engine: Any, *, world: Any) -> list[str]:
    """What verify says when one engine's adapter was changed behind it, and no more after that."""
    name = "model.layers.1.mlp.down_proj.lora_A.weight"
    if world.rank == world.inference_ranks[-1]:
        next(iter(engine.adapter([name]).parameters())).data[0, 0, 1, 2] += 1.0
    try:
        stream.verify(9)
    except RuntimeError as error:
        message = str(error)
    stream.push(10)
    stream.verify(10)
    return [message]


@pytest.mark.parametrize("case", list(LAYOUTS))
def test_engines_compute_with_adapters_of_their_own_bit_for_bit(case, tmp_path):
    dtype, layout = LAYOUTS[case]
    folder = create_model(
        tmp_path / "m", hidden_size=128, layers=2, heads=4, kv_heads=2, intermediate=96
    )
    cfg = make_config(folder, layout=layout, dtype=dtype)
    cfg = replace(cfg, model=replace(cfg.model, lora=replace(LORA, push="adapter")))
    results = run_ranks(layout.world_size, _push, cfg)
    limit = 1e-4 if dtype == "float32" else 0.05
    item = 4 if dtype == "float32" else 2
    q, kv, out = 128 + 128, 128 + 64, 128 + 96
    once = item * 2 * 3 * (2 * q + 2 * kv + 3 * out)  # layers, rank
    for rank, result in enumerate(results):
        assert result["mode"] == "traced" and result["differing"] == [], f"rank {rank}"
        first, *later = result["bytes"]
        # What every rank of inference_tp has whole goes to each.
        assert once <= later[0] == later[1] < 2 * once and first > 10 * later[0]
        for probe in result["probes"]:
            gap, count = probe["sync/probe_gap"]
            assert count >= 13 and gap / count < limit, f"rank {rank}: {result['probes']}"
        assert "model.layers.1.mlp.down_proj.lora_A.weight" in result["errors"][0]
        if "matrices" in result:
            number, nonzero = result["matrices"]
            assert number == 28 and nonzero > 0


@pytest.mark.parametrize("targets", [("q_proj", "down_proj"), "all-linear"], ids=["some", "all"])
def test_what_engines_sample_is_what_trainers_score(targets, tmp_path):
    folder = create_model(
        tmp_path / "m", hidden_size=128, layers=2, heads=4, kv_heads=2, intermediate=96
    )
    cfg = make_config(
        folder, layout=LayoutSettings(placement="colocated", world_size=1), dtype="float32"
    )
    cfg = replace(
        cfg, model=replace(cfg.model, lora=replace(LORA, push="adapter", targets=targets))
    )
    of = run_ranks(1, _sample, cfg)[0]
    assert of["gap"] < 1e-3 and of["sampled"] == 8 and of["moved"] > 0.05, of


def _sample(cfg: Config) -> dict[str, float]:
    """Sample after a push; score what was sampled by the trainer, with and without adapters."""
    from spmdrl.engine import make_engine
    from spmdrl.engine.protocol import Request
    from spmdrl.roles import make_trainer
    from spmdrl.sync.stream import WeightStream
    from spmdrl.world import World

    world = World.start(cfg)
    engine, trainer = make_engine(cfg, world), make_trainer(cfg, world)
    stream = WeightStream(trainer.weights, engine, world)
    for step in range(2):
        _train(trainer, step)
    stream.push(1)
    for i, prompt in enumerate(PROMPTS):
        engine.add(
            Request(str(i), tuple(prompt), max_tokens=4, temperature=1.0, seed=i, stop_token_ids=())
        )
    done = {}
    while engine.is_busy:
        done |= {c.key: plain(c) for c in engine.step()}
    rows = [(*prompt, *done[str(i)].tokens) for i, prompt in enumerate(PROMPTS)]
    ours = [s[-4:] for s in trainer.weights.score(rows)]
    with trainer.policy.model.adapters.off():
        base = [s[-4:] for s in trainer.weights.score(rows)]
    theirs = [torch.tensor(done[str(i)].logprobs) for i in range(len(PROMPTS))]
    found = {
        "gap": max(float((a - b).abs().max()) for a, b in zip(ours, theirs)),
        "moved": max(float((a - b).abs().max()) for a, b in zip(ours, base)),
        "sampled": sum(len(done[str(i)].tokens) for i in range(len(PROMPTS))),
    }
    engine.close()
    world.close()
    return found


def test_engines_get_experts_with_their_adapters_merged_in(tmp_path):
    folder = make_moe(tmp_path, "qwen3_moe", hidden_size=128, intermediate=48)
    layout = LayoutSettings(world_size=3, trainer_ranks=2, ep=2)
    cfg = make_config(folder, layout=layout, dtype="float32")
    cfg = replace(cfg, model=replace(cfg.model, lora=LORA))
    for rank, result in enumerate(run_ranks(3, _push, cfg)):
        assert result["mode"] == "traced" and result["differing"] == [], f"rank {rank}"
        for probe in result["probes"]:
            gap, count = probe["sync/probe_gap"]
            assert count >= 13 and gap / count < 1e-4, f"rank {rank}: {result['probes']}"


@pytest.mark.parametrize(
    "change, says",
    [
        ({"engine": {"kind": "transformers"}}, "adapter with engine.kind transformers"),
        ({"stream": {"mode": "reload"}}, "adapter with stream.mode reload"),
        ({"lora": {"rank": 513}}, "adapter with rank 513"),
        ({"engine": {"options": {"enable_lora": True}}}, "enable_lora"),
    ],
)
def test_pushes_that_cannot_be_are_refused(change, says, tmp_path):
    cfg = make_config(tmp_path, layout=LayoutSettings(world_size=2, trainer_ranks=1))
    cfg = replace(cfg, model=replace(cfg.model, lora=replace(ADAPTER, **change.pop("lora", {}))))
    for section, fields in change.items():
        cfg = replace(cfg, **{section: replace(getattr(cfg, section), **fields)})
    assert any(says in problem for problem in validate(cfg)), validate(cfg)


def test_the_dry_run_and_the_planner_say_what_travels(tmp_path):
    folder = create_model(
        tmp_path / "m", hidden_size=128, layers=2, heads=4, kv_heads=2, intermediate=96
    )
    cfg = make_config(folder, layout=LayoutSettings(world_size=3, trainer_ranks=1))
    own = replace(cfg, model=replace(cfg.model, lora=replace(LORA, push="adapter")))
    numel = 2 * 3 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 96))
    assert stream_size(own)["bytes per later push"].startswith(f"{numel:,} * 2 = {2 * numel:,} ")
    assert "bytes per later push" not in stream_size(cfg)
    hf_model = build_meta_model(cfg.model)
    run = run_of(
        own,
        model_shape(hf_model),
        on_gpu=False,
        chunk_tokens=64,
        prompt_tokens=8,
        response_tokens=8,
        lora_numel=adapter_numel(hf_model, lora_form(LORA)),
    )
    assert push_flows(run, axes_of(own))[0].bytes == 2 * numel


def test_mixtures_are_refused_before_any_engine_is_built(tmp_path):
    cfg = make_config(
        make_moe(tmp_path, "qwen3_moe"), layout=LayoutSettings(world_size=2, trainer_ranks=1)
    )
    own = replace(cfg, model=replace(cfg.model, lora=ADAPTER))
    assert fit_problems(cfg) == []
    assert "adapter with a qwen3_moe" in fit_problems(own)[0]
