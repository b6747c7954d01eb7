"""Routes that engines record, carried to the trainers and replayed there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spmdrl.config import Config
from spmdrl.engine.protocol import Completion, Request
from tests.helpers.built import changed, generating, made
from tests.helpers.drawn import plain
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import ROOT
from tests.model.test_moe import make_moe

LAYERS, EXPERTS, CHOICES = 2, 8, 2
SIZES = {"hidden_size": 128, "intermediate": 48}  # that vLLM takes on the CPU
SHARED = tuple(range(20, 60))  # longer than a block of the cache
PROMPTS = (SHARED + (5,), (7, 8, 9), SHARED + (6, 4), (11,), SHARED, (7, 8, 9), SHARED + (5,))


def engine_config(
    model: Path, *, kind: str, dtype: str = "float32", tp: int = 1, dp: int = 1, **engine: object
) -> Config:
    limits = dict(cpu_kv_cache_gib=0.01, max_num_seqs=4, max_batched_tokens=128)
    return made(
        layout=dict(
            placement="colocated",
            world_size=tp * dp,
            inference_tp=tp,
            inference_dp=dp,
            device="cpu",
        ),
        model=dict(path=str(model), moe=dict(replay=True)),
        data=dict(max_prompt_tokens=48),
        sampling=dict(max_response_tokens=80),
        engine=dict(kind=kind, dtype=dtype, **limits, **engine),
    )


def own_routes(model: Any, tokens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """What plain transformers chooses for a sequence, [n, L, K] sorted, and by how much the last
    chosen expert is ahead of the next, [n, L] in logits."""
    seen: list[tuple[Tensor, Tensor]] = []
    hooks = [
        m.gate.register_forward_hook(lambda _, __, out: seen.append((out[0], out[2])))
        for m in model.modules()
        if hasattr(m, "gate") and hasattr(m, "experts")
    ]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    top = torch.stack([logits.topk(CHOICES + 1).values for logits, _ in seen], dim=1)
    chosen = torch.stack([index for _, index in seen], dim=1)
    return chosen.sort(dim=-1).values, top[..., -2] - top[..., -1]


def differing(
    folder: Path, rows: dict[str, tuple[tuple[int, ...], Tensor]], *, margin: float
) -> list[str]:
    """Say where routes that were recorded are not those of plain transformers, ties left out."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    found = []
    for name, (tokens, routes) in rows.items():
        want, ahead = own_routes(model, tokens[: len(routes)])
        is_other = (routes.long().sort(dim=-1).values != want).any(-1) & (ahead > margin)
        found += [f"{name} at {at}" for at in is_other.nonzero().tolist()]
    return found


# --------------------------------------------------------------------------- recording


def watch_cache(engine: Any) -> list[int]:
    """Note how many tokens of each finished request vLLM found in its cache."""
    client = engine._llm.engine_core
    step, found = client.get_output, []

    def watched() -> Any:
        outputs = step()
        stats = [output.prefill_stats for output in outputs.outputs]
        found.extend(own.num_cached_tokens for own in stats if own is not None)
        return outputs

    client.get_output = watched
    return found


def drain(engine: Any, found: dict[str, Completion]) -> None:
    while engine.is_busy:
        found |= {c.key: plain(c) for c in engine.step()}


def recorded(cfg: Config) -> dict[str, Any] | None:
    """A crowd that shares prefixes; a second turn; weights told to have changed in the middle."""
    prompts: dict[str, tuple[int, ...]] = {}
    done: dict[str, Completion] = {}
    with generating(cfg) as (world, engine):
        is_leader = world.replica_rank == 0
        cached = watch_cache(engine) if cfg.engine.kind == "vllm" else [SHARED]

        def add(key: str, prompt: tuple[int, ...], max_tokens: int, seed: int) -> None:
            prompts[key] = prompt
            engine.add(Request(key, prompt, max_tokens, 1.0, seed, ()))

        for i, prompt in enumerate(PROMPTS):
            add(str(i), prompt, 6 + i, i)
        drain(engine, done)
        add("turn", PROMPTS[0] + done["0"].tokens + (3, 4, 5), 5, 9)
        drain(engine, done)
        for mode in ("keep", "recompute"):
            engine.cfg = changed(cfg, rollout=dict(schedule=dict(kv_cache=mode)))
            for i in range(3):
                add(f"{mode}-{i}", PROMPTS[i], 12, 20 + i)
            for _ in range(5):
                done |= {c.key: plain(c) for c in engine.step()}
            before = {c.key: plain(c) for c in engine.unfinished()}
            engine.weights_changed(engine.version + 1)
            again = {c.key: plain(c) for c in engine.unfinished()}
            drain(engine, done)
            for key, part in before.items() if is_leader else ():
                count = len(prompts[key]) + len(part.tokens) - 1
                assert len(part.tokens) == 5 and part.routes.shape[0] == count, part
                assert torch.equal(again[key].routes, part.routes)
                assert torch.equal(done[key].routes[:count], part.routes)
        engine.score([PROMPTS[0], PROMPTS[1]])
        add("last", PROMPTS[1], 3, 0)
        drain(engine, done)
    return {
        "rows": {k: (prompts[k] + c.tokens, c.routes) for k, c in done.items()},
        "cached": cached,
    }


ENGINES = {  # kind, family, sizes
    "vllm": ("vllm", "qwen3_moe", {}),
    "vllm tp2": ("vllm", "mixtral", {"tp": 2}),
    "vllm dp2": ("vllm", "qwen3_moe", {"dp": 2}),
    "transformers": ("transformers", "qwen3_moe", {}),
    "transformers, sigmoids": ("transformers", "deepseek_v3", {}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.grid) if c.endswith("2") else c for c in ENGINES]
)
def test_engines_record_the_experts_of_every_token_but_the_last(case, tmp_path):
    kind, family, sizes = ENGINES[case]
    folder = make_moe(tmp_path, family, **(SIZES if kind == "vllm" else {}))
    options: dict[str, Any] = {"block_size": 32} if kind == "vllm" else {}
    if "dp" in sizes:
        options["enable_expert_parallel"] = True
    cfg = engine_config(folder, kind=kind, options=options, **sizes)
    results = run_ranks(cfg.layout.world_size, recorded, cfg)
    layers = 1 if family == "deepseek_v3" else LAYERS
    followers = {
        key: routes for result in results[1:] for key, (_, routes) in result["rows"].items()
    }
    assert all((routes is None) == ("tp" in sizes) for routes in followers.values())
    for result in results[:1]:
        assert len(result["rows"]) == len(PROMPTS) + 8
        assert any(result["cached"]), "no prompt was found in the cache"
        for key, (tokens, routes) in result["rows"].items():
            shape = (len(tokens) - 1, layers, CHOICES)
            assert routes.dtype == torch.int8 and routes.shape == shape, key
            assert bool((routes >= 0).all()) and bool((routes < EXPERTS).all()), key
        assert differing(folder, result["rows"], margin=1e-4) == []
    spread = torch.cat([routes.flatten() for _, routes in results[0]["rows"].values()])
    assert len(spread.unique()) > 2 * CHOICES, "the routes should not all be the same"


def gaps_of(folder: Path) -> dict[str, Any]:
    """The benchmark's figures, of few samples."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from router_replay import Options, measure

    return measure(Options(folder, samples=12, trainer_dtypes=("float32",)))


def test_replay_closes_the_gap_that_other_experts_open(tmp_path):
    sizes = dict(hidden_size=128, intermediate=96, layers=4, moe_experts=32)
    folder = make_moe(tmp_path, "qwen3_moe", **sizes)
    (found,) = run_ranks(1, gaps_of, folder)
    own, replayed = found["float32"]["own choice"], found["float32"]["replayed"]
    assert found["tokens"] > 300 and found["float32"]["disagreement"] > 0.003
    assert replayed["mean"] < 0.5 * own["mean"], found
    assert replayed["largest"] < 0.3 < own["largest"], found


def crowded(cfg: Config) -> dict[str, Any]:
    """More sequences than the KV cache can hold to their end."""
    prompts = {str(i): PROMPTS[1] + (30 + i,) for i in range(4)}
    done: dict[str, Completion] = {}
    preempted = 0
    with generating(cfg) as (_, engine):
        for key, prompt in prompts.items():
            engine.add(Request(key, prompt, 76, 1.0, int(key), ()))
        while engine.is_busy:
            done |= {c.key: plain(c) for c in engine.step()}
            requests = engine._llm.engine_core.engine_core.scheduler.requests.values()
            preempted = max([preempted, *(r.num_preemptions for r in requests)])
    return {
        "preempted": preempted,
        "rows": {k: (prompts[k] + c.tokens, c.routes) for k, c in done.items()},
    }


def test_a_sequence_that_vllm_preempts_keeps_its_routes(tmp_path):
    folder = make_moe(tmp_path, "qwen3_moe", **SIZES)
    options = {"num_gpu_blocks_override": 8, "block_size": 32}
    cfg = engine_config(folder, kind="vllm", options=options)
    (found,) = run_ranks(1, crowded, cfg)
    assert found["preempted"] > 0
    assert differing(folder, found["rows"], margin=1e-4) == []
