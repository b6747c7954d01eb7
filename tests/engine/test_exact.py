"""engine.exact: what the engine sampled with is what the trainer computes, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from spmdrl import config
from spmdrl.columns import RouterRoutes
from spmdrl.config import Config
from spmdrl.engine import make_engine
from spmdrl.engine.protocol import Request, Truncation
from spmdrl.model.lora.layers import lora_form
from spmdrl.model.lora.merge import deltas
from spmdrl.model.sharded_model import ShardedModel
from spmdrl.model.tensor_parts import Box, to_local
from spmdrl.sampling_masks import SamplingMasks
from spmdrl.train.trained_model import TrainedModel
from spmdrl.world.world import World
from tests.helpers.built import changed
from tests.helpers.tiny import tiny_folder
from tests.helpers.worlds import in_world

LONGEST_PROMPT = 400
MAX_TOKENS = 12


def exact_config(model: Path | str, *, dtype: str = "float32", **fields: Any) -> Config:
    """Return a config of one rank that trains and generates."""
    own = Config(
        layout=config.LayoutSettings(placement="colocated", world_size=1, device="cpu"),
        model=config.ModelSettings(path=str(model), compute_dtype=dtype),
        data=config.DataSettings(max_prompt_tokens=LONGEST_PROMPT),
        batch=config.BatchSettings(tokens_per_microbatch=4096),
        sampling=config.SamplingSettings(max_response_tokens=MAX_TOKENS, temperature=0.7),
        engine=config.EngineSettings(
            kind="transformers", dtype=dtype, exact=True, max_num_seqs=7, max_batched_tokens=500
        ),
    )
    return changed(own, **fields)


def counts(world: World, cases: dict[str, Config]) -> dict[str, tuple[int, int]]:
    """Return what `compared` finds for each config; by two threads where the name says so."""
    found = {}
    for seed, (name, cfg) in enumerate(cases.items()):
        form = lora_form(cfg.model.lora) if cfg.model.lora.is_on else None
        model = ShardedModel(cfg, world, path=cfg.model.path, is_trained=True, lora=form)
        TrainedModel(model, cfg.optimizer)  # has routers choose recorded experts
        threads = 2 if "threads" in name else 1
        found[name] = compared(cfg, world, model, seed=seed, threads=threads)
    return found


@torch.no_grad()
def _merged(model: ShardedModel) -> list[tuple[str, torch.Tensor]]:
    """Give adapters that are not zero to a model, and return the weights that a push sends."""
    assert model.adapters is not None
    shards = model.named_shards()
    generator = torch.Generator().manual_seed(3)
    for name in model.adapters.names:
        to_local(shards[name]).normal_(std=0.1, generator=generator)
    found = []
    for name, added in deltas(model.adapters, shards).items():
        weight = to_local(shards[name])
        found.append((name, weight + added(Box((0, 0), tuple(weight.shape)))))
    return found


@torch.no_grad()
def _moved(model: ShardedModel) -> list[tuple[str, torch.Tensor]]:
    """Change a model's weights, and return them."""
    found = []
    for name, tensor in model.named_shards().items():
        if "experts" in name:  # files have them one by one
            continue
        own = to_local(tensor)
        wave = torch.sin(torch.arange(own.numel())).view(own.shape)
        found.append((name, own.mul_(1 + 0.3 * wave)))
    return found


def compared(
    cfg: Config, world: World, model: ShardedModel, *, seed: int, count: int = 12, threads: int = 1
) -> tuple[int, int]:
    """Return how many tokens the trainer scores otherwise than they were drawn, and of how many.

    Prompts of odd lengths, some alike, come and go in a crowd; the trainer packs them otherwise.
    With `in_flight` weights change after four steps, and only tokens of the new ones count.
    """
    engine = make_engine(cfg, world)
    torch.set_num_threads(threads)  # vLLM sets it
    engine.weights_changed(0)
    if model.adapters:
        engine.load_weights(_merged(model))
    draw = random.Random(seed)
    some = (3, 17, 60, 128, 129, 257, 301, 385)
    lengths = [1, LONGEST_PROMPT, *(draw.choice(some) for _ in range(count))]
    prompts = [tuple(draw.randrange(3, 100) for _ in range(length)) for length in lengths]
    prompts += [prompts[-1]] * 6
    for index, prompt in enumerate(prompts):
        truncation = Truncation(
            top_k=cfg.sampling.top_k, top_p=cfg.sampling.top_p, min_p=cfg.sampling.min_p
        )
        request = Request(
            str(index),
            prompt,
            draw.randrange(1, MAX_TOKENS + 1),
            0.7,
            index,
            (),
            truncation,
            cfg.sampling.penalties,
        )
        engine.add(request)
    done = {}
    is_in_flight = cfg.rollout.schedule.in_flight
    if is_in_flight:
        for _ in range(4):
            done |= {one.key: one for one in engine.step()}
        engine.load_weights(_moved(model))
        engine.weights_changed(1)
    while engine.is_busy:
        done |= {one.key: one for one in engine.step()}
    engine.close()
    order = list(range(len(prompts)))
    draw.shuffle(order)
    wrong = 0
    total = 0
    while order:
        own = [order.pop() for _ in range(min(len(order), draw.randrange(1, 6)))]
        drawn = [done[str(index)] for index in own]
        rows = [[*prompts[index], *one.tokens.tolist()] for index, one in zip(own, drawn)]
        masks = [torch.arange(len(row)) >= len(prompts[index]) for index, row in zip(own, rows)]
        columns: dict[str, Any] = {}
        for kind in (RouterRoutes, SamplingMasks):
            if any(kind.key in one.extra_columns for one in drawn):
                parts = []
                for index, one in zip(own, drawn):
                    column = one.extra_columns[kind.key]
                    missing = len(rows[own.index(index)]) - len(column)
                    unknown = column.unknown(missing)
                    is_route = kind is RouterRoutes
                    parts += [column, unknown] if is_route else [unknown, column]
                columns[kind.key] = parts[0].cat(parts)
        row = model.row(
            torch.tensor([token for one in rows for token in one]),
            [len(one) for one in rows],
            mask=torch.cat(masks),
            columns=columns,
            drawn=torch.cat(masks) if cfg.sampling.penalties.is_on else None,
        )
        logprobs = model.forward(row)[0].detach()
        sampled = torch.cat([one.logprobs for one in drawn])
        is_own = torch.cat([one.versions == is_in_flight for one in drawn])
        gaps = (logprobs - sampled)[is_own].abs()
        wrong += int((gaps != 0).sum())
        total += len(gaps)
        assert not len(gaps) or float(gaps.max()) < 0.3
    return wrong, total


PENALTIES = dict(
    repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.2, logit_bias={"7": -2.5}
)
IN_FLIGHT: dict[str, Any] = dict(lag=1, rollout=dict(schedule=dict(in_flight=True)))
_GROUPED = dict(num_key_value_heads=2, head_dim=32)
_MOE = dict(num_key_value_heads=2, num_experts_per_tok=2, vocab_size=128)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": _GROUPED,
    "qwen2": dict(num_key_value_heads=4, tie_word_embeddings=True),
    "gpt2": {},
    "mistral": dict(sliding_window=40, num_key_value_heads=2),
    "gemma2": dict(sliding_window=40, attn_logit_softcapping=5.0, **_GROUPED),
    "qwen3_moe": dict(num_experts=8, moe_intermediate_size=48, head_dim=32, **_MOE),
    "mixtral": dict(num_local_experts=4, **_MOE),
    "gpt_oss": dict(num_local_experts=4, head_dim=32, sliding_window=40, **_MOE),
}


def test_a_trainer_finds_the_bits_that_an_engine_sampled_with(tmp_path: Path):
    cases = {}
    for family, fields in FAMILIES.items():
        folder = tiny_folder(tmp_path / family, family, **fields)
        for dtype in ("float32", "bfloat16"):
            cases[f"{family} {dtype}"] = exact_config(folder, dtype=dtype)
    dense = cases["qwen3 float32"]
    cases["truncated"] = changed(dense, sampling=dict(top_k=9, top_p=0.9))
    cases["penalised"] = changed(dense, sampling=PENALTIES)
    cases["unshared"] = changed(dense, batch=dict(share_prefixes="never"))
    lora = dict(rank=4, targets=["q_proj", "down_proj", "o_proj", "embed_tokens"])
    cases["lora"] = changed(dense, model=dict(lora=lora))
    mixture = cases["qwen3_moe bfloat16"]
    cases["replayed"] = changed(mixture, model=dict(moe=dict(replay=True)))
    cases["lora of a mixture"] = changed(
        cases["qwen3_moe float32"], model=dict(lora=dict(rank=4, targets=["q_proj", "o_proj"]))
    )
    cases["two threads"] = dense
    cases["in flight"] = changed(dense, **IN_FLIGHT)
    cases["in flight, mixture"] = changed(mixture, **IN_FLIGHT)
    plain = changed(dense, engine=dict(exact=False))
    (found,) = in_world(dense, counts, cases | {"plain": plain})
    assert found.pop("plain")[0] > 0
    assert min(total for _, total in found.values()) > 60
    assert {name: wrong for name, (wrong, _) in found.items() if wrong} == {}


def test_shards_and_slices_of_a_row_have_the_same_bits(tmp_path: Path):
    folder = tiny_folder(tmp_path / "model", "qwen3", **_GROUPED)
    sliced = dict(layout=dict(world_size=2, cp=2))
    gathered = dict(model=dict(kernels=dict(context="gather"))) | sliced
    for fields in (dict(layout=dict(world_size=2)), sliced, gathered):
        for dtype in ("float32", "bfloat16"):
            cfg = changed(exact_config(folder, dtype=dtype), **fields)
            for found in in_world(cfg, counts, {"own": cfg}):
                assert found["own"][0] == 0 < found["own"][1]
