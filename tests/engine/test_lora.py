"""Adapters in real engines: merged into the weights, or as a LoRA of vLLM's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmdrl.check.dry_run import stream_size
from spmdrl.check.fit import fit_problems
from spmdrl.check.settings import validate
from spmdrl.config import LayoutSettings, LoraSettings
from spmdrl.engine.protocol import Request
from spmdrl.model.load import build_meta_model
from spmdrl.model.lora.layers import lora_form
from spmdrl.model.lora.targets import adapter_numel
from spmdrl.model.model_shape import model_shape
from spmdrl.model.tensor_parts import Held, local_part
from spmdrl.tools.plan.run import run_of
from spmdrl.tools.plan.traffic import push_flows
from spmdrl.world.axes import axes_of
from tests.helpers.comparing import differing
from tests.helpers.drawn import finished
from tests.helpers.policy_runs import changed
from tests.helpers.worlds import with_stream
from tests.model.test_lora import merged_by_hand, set_b
from tests.model.test_moe import make_moe
from tests.sync.test_engine import (
    PROMPTS,
    assert_pushed,
    make_config,
    make_folder,
    parameters_loaded,
    whole_state,
)

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


def _push(stream: Any, engine: Any, trainer: Any) -> dict[str, Any]:
    """Push adapters of three versions; hold vLLM's memory against its own loading of them."""
    world = trainer.world
    is_own = world.cfg.model.lora.pushes_adapter
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
        found["differing"] += differing(own, right)
    found["errors"] = _damage(stream, engine, world=world) if is_own else []
    return found


def _damage(stream: Any, engine: Any, *, world: Any) -> list[str]:
    """What verify says when one engine's adapter was changed behind it, and no more after that."""
    name = "model.layers.1.self_attn.q_proj.lora_A.weight"
    if world.rank == world.inference_ranks[-1]:
        next(iter(engine.adapter([name]).parameters())).data[0, 0, 1, 2] += 1.0
    with pytest.raises(RuntimeError) as refused:
        stream.verify(9)
    stream.push(10)
    stream.verify(10)
    return [str(refused.value)]


@pytest.mark.parametrize(
    "case", [pytest.param("split", marks=pytest.mark.grid), "tp2", "tp of both"]
)
def test_engines_compute_with_adapters_of_their_own_bit_for_bit(case, tmp_path):
    dtype, layout = LAYOUTS[case]
    folder = make_folder(tmp_path, "qwen3")
    cfg = make_config(folder, layout=layout, dtype=dtype)
    results = with_stream(changed(cfg, model={"lora": replace(LORA, push="adapter")}), _push)
    item = 4 if dtype == "float32" else 2
    q, kv, out = 128 + 128, 128 + 64, 128 + 96
    once = item * 2 * 3 * (2 * q + 2 * kv + 3 * out)  # layers, rank
    for rank, result in enumerate(results):
        assert_pushed(result, dtype=dtype, where=f"rank {rank}")
        first, *later = result["bytes"]
        # What every rank of inference_tp has whole goes to each.
        assert once <= later[0] == later[1] < 2 * once and first > 10 * later[0]
        assert "model.layers.1.self_attn.q_proj.lora_A.weight" in result["errors"][0]
        if "matrices" in result:
            number, nonzero = result["matrices"]
            assert number == 28 and nonzero > 0


@pytest.mark.parametrize(
    "targets",
    [pytest.param(("q_proj", "down_proj"), marks=pytest.mark.grid), "all-linear"],
    ids=["some", "all"],
)
def test_what_engines_sample_is_what_trainers_score(targets, tmp_path):
    folder = make_folder(tmp_path, "qwen3")
    layout = LayoutSettings(placement="colocated", world_size=1)
    cfg = make_config(folder, layout=layout, dtype="float32")
    cfg = changed(cfg, model={"lora": replace(LORA, push="adapter", targets=targets)})
    of = with_stream(cfg, _sample)[0]
    assert of["gap"] < 1e-3 and of["sampled"] == 8 and of["moved"] > 0.05, of
    assert of["verdicts"] == [of["base"]] * 3 != [of["policy"]] * 3, of


def _verdicts(engine: Any, *, is_of_base: bool) -> list[list[int]]:
    """Draw greedily, beside samples of the policy."""
    for i, prompt in enumerate(PROMPTS):
        engine.add(Request(str(i), tuple(prompt), 4, 1.0, i, ()))
        engine.add(Request(f"j{i}", tuple(prompt), 12, 0.0, i, (), is_of_base=is_of_base))
    done = finished(engine)
    return [[*done[f"j{i}"].tokens] for i in range(len(PROMPTS))]


def _greedy(folder: Any) -> list[list[int]]:
    """Draw by the plain model of a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        for _ in range(12):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
        found.append(ids[0, len(prompt) :].tolist())
    return found


@torch.no_grad()
def _sample(stream: Any, engine: Any, trainer: Any) -> dict[str, Any]:
    """Sample after a push; score what was sampled by the trainer, with and without adapters. Draw
    with the frozen weights alone before and after pushes."""
    verdicts = []
    for step in range(2):
        stream.push(step)
        verdicts.append(_verdicts(engine, is_of_base=True))
        _train(trainer, step)
    stream.push(2)
    verdicts.append(_verdicts(engine, is_of_base=True))
    policy = _verdicts(engine, is_of_base=False)
    for i, prompt in enumerate(PROMPTS):
        engine.add(Request(str(i), tuple(prompt), 4, 1.0, i, ()))
    done = finished(engine)
    rows = [(*prompt, *done[str(i)].tokens) for i, prompt in enumerate(PROMPTS)]
    ours = [s[-4:] for s in trainer.weights.score(rows)]
    with trainer.policy.model.adapters.off():
        base = [s[-4:] for s in trainer.weights.score(rows)]
    theirs = [torch.tensor(done[str(i)].logprobs) for i in range(len(PROMPTS))]
    return {
        "gap": max(float((a - b).abs().max()) for a, b in zip(ours, theirs)),
        "moved": max(float((a - b).abs().max()) for a, b in zip(ours, base)),
        "sampled": sum(len(done[str(i)].tokens) for i in range(len(PROMPTS))),
        "verdicts": verdicts,
        "policy": policy,
        "base": _greedy(trainer.world.cfg.model.path),
    }


def test_engines_get_experts_with_their_adapters_merged_in(tmp_path):
    folder = make_moe(tmp_path, "qwen3_moe", hidden_size=128, intermediate=48)
    layout = LayoutSettings(world_size=3, trainer_ranks=2, ep=2)
    cfg = make_config(folder, layout=layout, dtype="float32")
    for rank, result in enumerate(with_stream(changed(cfg, model={"lora": LORA}), _push)):
        assert_pushed(result, dtype="float32", where=f"rank {rank}")


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
    own = changed(cfg, model={"lora": replace(ADAPTER, **change.pop("lora", {}))})
    cfg = changed(own, **change)
    assert any(says in problem for problem in validate(cfg)), validate(cfg)


def test_the_dry_run_and_the_planner_say_what_travels(tmp_path):
    folder = make_folder(tmp_path, "qwen3")
    cfg = make_config(folder, layout=LayoutSettings(world_size=3, trainer_ranks=1))
    own = changed(cfg, model={"lora": replace(LORA, push="adapter")})
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


@pytest.mark.parametrize(
    "family, device, says",
    [
        ("qwen3_moe", "cpu", None),
        ("qwen3_moe", "cuda", "adapter with a qwen3_moe on CUDA"),
        ("deepseek_v3", "cpu", "the target model.layers.0.self_attn.kv_b_proj: vLLM's latent"),
        ("granitemoe", "cpu", "adapter with a granitemoe, a mixture"),
    ],
)
def test_mixtures_whose_adapters_vllm_cannot_take_are_refused_by_the_dry_run(
    family, device, says, tmp_path
):
    cfg = make_config(
        make_moe(tmp_path, family, hidden_size=128, intermediate=64),  # heads of 32 elements
        layout=LayoutSettings(world_size=2, trainer_ranks=1),
    )
    cfg = changed(cfg, layout={"device": device})
    own = changed(cfg, model={"lora": ADAPTER})
    more = [problem for problem in fit_problems(own) if problem not in fit_problems(cfg)]
    assert [says in problem for problem in more] == ([] if says is None else [True]), more


EXPERTS = {
    "attention, ep 2": (("q_proj", "o_proj"), LayoutSettings(world_size=3, trainer_ranks=2, ep=2)),
    "attention, tp 2": (
        ("q_proj", "o_proj"),
        LayoutSettings(placement="colocated", world_size=2, inference_tp=2),
    ),
    "all, ep 2": ("all-linear", LayoutSettings(world_size=3, trainer_ranks=2, ep=2)),
    "all, tp 2": (
        "all-linear",
        LayoutSettings(placement="colocated", world_size=2, ep=2, inference_tp=2),
    ),
    "all, whole experts": (
        "all-linear",
        LayoutSettings(placement="colocated", world_size=2, inference_tp=2),
    ),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_a_mixture_samples_with_its_adapters_what_trainers_score(case, tmp_path):
    targets, layout = EXPERTS[case]
    folder = make_moe(tmp_path, "qwen3_moe", hidden_size=128, intermediate=64)
    cfg = make_config(folder, layout=layout, dtype="float32")
    cfg = changed(cfg, model={"lora": replace(LORA, push="adapter", targets=targets)})
    if "whole experts" in case:
        cfg = changed(cfg, engine={"options": {"enable_expert_parallel": True}})
    for rank, result in enumerate(with_stream(cfg, _push)):
        assert_pushed(result, dtype="float32", where=f"rank {rank}")
        first, *later = result["bytes"]
        assert later[0] == later[1] < first
