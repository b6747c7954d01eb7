"""The weight stream with real engines, real DTensor shards and real processes."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmdrl.config import (
    Config,
    DataSettings,
    EngineSettings,
    LayoutSettings,
    ModelSettings,
    SamplingSettings,
    StreamSettings,
)
from spmdrl.engine.protocol import Request
from spmdrl.model.tensor_parts import Delta, Held, Part, local_part
from spmdrl.world.comm import gather_objects
from tests.helpers.comparing import differing, full_parameters, plain_scores, whole
from tests.helpers.drawn import finished
from tests.helpers.policy_runs import small_model
from tests.helpers.worlds import WeightStream, in_world, with_stream

PROMPTS = [[5, 9, 12, 7, 30, 21], [1, 8, 40, 41, 42, 8, 9, 3, 17]]


def make_config(
    folder: Path,
    *,
    layout: LayoutSettings,
    dtype: str = "bfloat16",
    kind: str = "vllm",
    stream: StreamSettings | None = None,
) -> Config:
    """Return a config of a small world on this machine."""
    return Config(
        layout=replace(layout, device="cpu", wait_timeout_s=200, startup_timeout_s=300),
        model=ModelSettings(path=str(folder), compute_dtype="float32"),
        data=DataSettings(train="task:addition", size=8, max_prompt_tokens=32),
        sampling=SamplingSettings(max_response_tokens=32),
        engine=EngineSettings(
            kind=kind, dtype=dtype, cpu_kv_cache_gib=0.05, max_num_seqs=8, max_batched_tokens=256
        ),
        stream=stream or StreamSettings(bucket_bytes=64 * 2**10, verify_every=1),
    )


def change(trainer: Any, scale: float, *, but: Collection[str] = ()) -> None:
    """Change every weight, by a function of its value, so that all copies stay equal.

    Args:
        but: names in the files of those that stay.
    """
    kept = {trainer.weights.parts[name].tensor for name in but}
    for name, p in trainer.weights.shards().items():
        if name in kept:
            continue
        local = local_part(p)
        local.add_(scale * torch.sin(1000 * local + scale))


def whole_state(trainer: Any, world: Any) -> dict[str, Tensor]:
    """Return the policy's full float32 state on every rank, assembled by torch."""
    mine = {n: p.numpy() for n, p in full_parameters(trainer).items()}
    first = gather_objects(mine if world.rank == 0 else None, group=world.control)[0]
    return {n: torch.from_numpy(a) for n, a in first.items()}


def in_files(state: dict[str, Tensor], trainer: Any) -> dict[str, Tensor]:
    """Return the tensors of the files, cut from whole live ones."""
    held = Held(state, trainer.weights.parts)
    return {name: held.value(name, box).read() for name, (box,) in held.boxes().items()}


def parameters_loaded(engine: Any, state: dict[str, Tensor]) -> list[Tensor]:
    """Return the engine's parameters after its own loader wrote `state` over rubbish."""
    with torch.no_grad():
        for p in engine.model.parameters():
            p.fill_(7.0)
        # Copies: vLLM's loader of GPT-OSS writes zeros into what it is given.
        engine.load_weights((name, tensor.clone()) for name, tensor in state.items())
    return [p.detach().clone() for p in engine.model.parameters()]


def push_and_compare(
    stream: Any, engine: Any, trainer: Any, also_reload: bool = False
) -> dict[str, Any]:
    """Push changed weights and hold every engine parameter against its own loading of them."""
    world = trainer.world
    if also_reload:
        reloading = WeightStream(trainer.weights, engine, with_mode(world, "reload"))
    found = {"mode": stream.mode, "sums": [], "differing": [], "moved": 0, "checked": 0}
    found["probes"] = [stream.probe(PROMPTS)]
    seen: list[dict[str, Tensor]] = []
    for version in (1, 2, 3) if also_reload else (1, 2):
        change(trainer, 0.02 * version)
        stream = reloading if version == 3 else stream
        pointers = [p.data_ptr() for p in parameters(engine, world).values()]
        found["sums"].append(stream.push(version))
        state = whole_state(trainer, world)
        own = parameters(engine, world)
        found["moved"] += pointers != [p.data_ptr() for p in own.values()]
        seen.append(whole(own))
        if world.is_inference:
            assert engine.version == version
            right = dict(zip(own, parameters_loaded(engine, in_files(state, trainer))))
            found["differing"] += [(version, n) for n in differing(seen[-1], right)]
            found["checked"] += len(own)
        found["probes"].append(stream.probe(PROMPTS))
    found["stale"] = seen[0].keys() - differing(*seen[:2])
    found["behaviour"] = behaviour(engine, world, state=state)
    if "model.layers.1.mlp.down_proj.weight" in trainer.weights.names:
        found["errors"] = errors_after_damage(stream, engine, world=world)
    return found


def assert_pushed(found: dict[str, Any], *, dtype: str, where: str, half_gap: float = 0.05) -> None:
    """Check that engines hold the trainers' weights, as the trace wrote them, and score alike."""
    assert found["mode"] == "traced" and found["differing"] == [], where
    for probe in found["probes"]:
        gap, count = probe["sync/probe_gap"]
        limit = 1e-4 if dtype == "float32" else half_gap
        assert count >= 13 and gap / count < limit, (where, found["probes"])


def with_mode(world: Any, mode: str) -> Any:
    """Return the same world with another stream.mode."""
    other = copy.copy(world)
    other.cfg = replace(world.cfg, stream=replace(world.cfg.stream, mode=mode))
    return other


def parameters(engine: Any, world: Any) -> dict[str, Tensor]:
    """Return the engine's live parameters; nothing where there is no engine."""
    return dict(engine.model.named_parameters()) if world.is_inference else {}


def errors_after_damage(stream: Any, engine: Any, *, world: Any) -> list[str]:
    """Return what verify and probe say when one engine's weights were changed behind them."""
    if world.rank == world.inference_ranks[-1]:
        with torch.no_grad():
            parameters(engine, world)["model.layers.1.mlp.down_proj.weight"][3, 5] += 1.0
            parameters(engine, world)["model.norm.weight"].mul_(-50.0)
    messages = []
    for check in (lambda: stream.verify(9), lambda: stream.probe(PROMPTS, version=9)):
        try:
            check()
            messages.append("")
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def behaviour(engine: Any, world: Any, *, state: dict[str, Tensor]) -> dict[str, float]:
    """Compare the engine's prefill logprobs and greedy tokens with transformers on `state`."""
    if not world.is_inference:
        return {}
    scores = engine.score(PROMPTS)
    engine.add(Request("a", tuple(PROMPTS[0]), 8, 0.0, None, ()))
    tokens = list(finished(engine)["a"].tokens)
    model = AutoModelForCausalLM.from_pretrained(world.cfg.model.path, dtype=torch.float32)
    started = plain_scores(model, PROMPTS)
    model.load_state_dict(state, strict=False)
    right = plain_scores(model, PROMPTS)
    sampled = torch.tensor([PROMPTS[0] + tokens])
    with torch.no_grad():
        greedy = model(sampled).logits[0].argmax(-1)[len(PROMPTS[0]) - 1 : -1].tolist()
    return {
        "gap": max(float((a - b).abs().max()) for a, b in zip(scores, right)),
        "change": max(float((a - b).abs().max()) for a, b in zip(started, right)),
        "greedy_wrong": sum(a != b for a, b in zip(tokens, greedy)),
        "sampled": len(tokens),
    }


def make_folder(tmp_path: Path, architecture: str, **fields: Any) -> Path:
    """Write a tiny model with several shards of weights."""
    sizes = dict(hidden_size=128, intermediate=96, seed=1)
    return small_model(tmp_path, architecture, architecture=architecture, **sizes | fields)


TIED = {"tied": True}
COLOCATED = LayoutSettings(placement="colocated")
LAYOUTS = {  # layout, architecture, the engine's dtype, fields of the model
    "split_1_1": (LayoutSettings(world_size=2, trainer_ranks=1), "qwen3", "float32", {}),
    "split_2_2_tp2": (
        LayoutSettings(world_size=4, trainer_ranks=2, inference_tp=2),
        *("qwen2", "bfloat16", TIED),
    ),
    "split_3_1": (LayoutSettings(world_size=4, trainer_ranks=3), "llama", "bfloat16", {}),
    "split_tp2_and_2_replicas": (
        LayoutSettings(world_size=4, trainer_ranks=2, tp=2),
        *("gemma2", "float32", TIED),
    ),
    "colocated_2": (replace(COLOCATED, world_size=2), "gemma3", "float32", TIED),
    "transformers_split_2_2": (
        LayoutSettings(world_size=4, trainer_ranks=2),
        *("qwen2", "bfloat16", TIED),
    ),
    "transformers_colocated_4_cp2_tp2": (
        replace(COLOCATED, world_size=4, cp=2, tp=2),
        *("qwen3", "bfloat16", {}),
    ),
    "colocated_4_tp2_tp2": (
        replace(COLOCATED, world_size=4, tp=2, inference_tp=2),
        *("qwen3", "bfloat16", {}),
    ),
}


# What the others join is there apart in the rest.
_IN_GRID = {"split_1_1", "split_3_1", "split_tp2_and_2_replicas", "colocated_4_tp2_tp2"}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.grid) if c in _IN_GRID else c for c in LAYOUTS]
)
def test_engines_hold_the_trainers_weights_bit_for_bit_after_each_push(case, tmp_path):
    layout, architecture, dtype, fields = LAYOUTS[case]
    folder = make_folder(tmp_path, architecture, **fields)
    also_reload = case == "split_2_2_tp2"
    kind = "transformers" if case.startswith("transformers") else "vllm"
    cfg = make_config(folder, layout=layout, dtype=dtype, kind=kind)
    results = with_stream(cfg, push_and_compare, also_reload)
    is_colocated = layout.placement == "colocated"
    engines = results[0 if is_colocated else layout.trainer_ranks :]
    for rank, result in enumerate(results):
        replicas = len(engines) // layout.inference_tp
        assert_pushed(result, dtype=dtype, where=f"rank {rank}")
        assert result["moved"] == 0, f"rank {rank}: engine parameters moved"
        numerator, denominator = result["sums"][0]["sync/gb_per_s"]
        assert numerator > 0 and denominator > 0
        for probe in result["probes"]:
            count = sum(len(p) - 1 for p in PROMPTS) * replicas * layout.inference_tp
            assert probe["sync/probe_gap"][1] == count
        verify_error, probe_error = result["errors"]
        assert "model.norm.weight has checksum" in verify_error
        assert "model.layers.1.mlp.down_proj.weight has" in verify_error
        assert f"rank {layout.world_size - 1}:" in verify_error
        # To verify a reload is to load once more.
        expected = "" if also_reload else "of stream.max_logprob_gap 0, where each of them rounds"
        assert expected in probe_error and bool(expected) == bool(probe_error)
    for result in engines:
        assert result["checked"] > 10
        assert not result["stale"], "a parameter did not change with the policy"
        of = result["behaviour"]
        assert of["change"] > 0.1, "the test's change of weights is too small to be seen"
        assert of["gap"] < (1e-3 if dtype == "float32" else 0.1), of
        assert of["sampled"] == 8
        assert of["greedy_wrong"] == 0 or dtype == "bfloat16", of


class FileShards:
    """Trainer ranks that hold every tensor of a folder whole: names and weights, no model."""

    adapter = None
    frozen: frozenset[str] = frozenset()

    def __init__(self, folder: str, is_trainer: bool):
        from safetensors.torch import load_file

        weights = load_file(Path(folder) / "model.safetensors")
        self.names = {n: (tuple(w.shape), w.dtype) for n, w in weights.items()}
        self.parts = {name: Part.whole(name, tuple(w.shape)) for name, w in weights.items()}
        self._shards = weights if is_trainer else {}

    def reloaded_names(self, dtype: torch.dtype) -> dict[str, tuple]:
        return self.names

    def shards(self) -> dict[str, Tensor]:
        return self._shards

    def deltas(self) -> dict[str, Delta]:
        return {}


def _raise(weights: object) -> None:
    raise RuntimeError("the sizes differ")


def stream_refusals(world: Any) -> dict[str, str]:
    """Return per mode why a stream into this engine is refused."""
    from spmdrl.engine.vllm import patches
    from spmdrl.engine.vllm.engine import VllmEngine

    cfg = world.cfg
    patches.keep_expert_weights_live = lambda: None  # a version it does not serve
    engine, weights = VllmEngine(cfg, world), FileShards(cfg.model.path, world.is_trainer)
    refusals = {}
    reload = engine.reload_weights
    for mode in ("traced", "failing", "auto"):
        # It raises for DeepSeek-V3 on the CPU. Last comes its own, which changes the engine.
        engine.reload_weights = reload if mode == "auto" else _raise
        with pytest.raises(ValueError) as refused:
            WeightStream(weights, engine, with_mode(world, mode.replace("failing", "auto")))
        refusals[mode] = str(refused.value)
    engine.close()
    return refusals


def test_weights_that_vllm_repacks_are_refused_by_name_and_never_written_in_place(tmp_path):
    sizes = dict(hidden_size=64, heads=2, intermediate=32, moe_experts=4)
    folder = make_folder(tmp_path, "qwen3_moe", **sizes)
    layout = LayoutSettings(world_size=2, trainer_ranks=1)
    for refusals in in_world(make_config(folder, layout=layout, dtype="float32"), stream_refusals):
        assert "stream.mode is traced" in refusals["traced"]
        failing = refusals.pop("failing")
        assert "reload of the weights that it already holds fails" in failing
        assert "rank 1: RuntimeError: the sizes differ" in failing
        for text in refusals.values():
            assert "rank 1: model.layers.0.mlp.experts.routed_experts.w2_weight" in text
            assert "qkv_proj" not in text
        assert "vLLM's own reload of the weights that it already holds" in refusals["auto"]
