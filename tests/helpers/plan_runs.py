"""Measurements on real ranks that the planner's tests compare with its figures."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from spmdrl.engine import make_engine
from spmdrl.model.parallel.row_slices import Slicing
from spmdrl.model.scorer import make_row
from spmdrl.model.sharded_model import ShardedModel
from spmdrl.model.tensor_parts import local_part
from spmdrl.train.adamw import AdamW
from spmdrl.world.machine.live_bytes import LiveBytes
from spmdrl.world.world import World
from tests.helpers import policy_runs
from tests.helpers.policy_runs import changed

_WINDOWS: dict[str, Any] = {
    "sliding_window": 32,
    "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 32},
    "gemma2": _WINDOWS,
    "gemma3_text": _WINDOWS,
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
}
WITH_STATE: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 96,
    },
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 32,
    },
}


def tiny_config(family: str, **sizes: Any) -> Any:
    """Return the transformers config of a model of some ten thousand parameters."""
    return AutoConfig.for_model(
        family,
        **dict(
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=104,
            max_position_embeddings=512,
            tie_word_embeddings="gemma" in family,
        )
        | (FAMILIES | WITH_STATE)[family]
        | sizes,
    )


def tiny_model(family: str, **sizes: Any) -> Any:
    """Return a random float32 model of transformers, of the given shape."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(family, **sizes), dtype=torch.float32)


def write_model(folder: Path, family: str, **sizes: Any) -> str:
    """Write a random float32 model of the given shape."""
    tiny_model(family, **sizes).save_pretrained(folder)
    return str(folder)


def scoring(
    lengths: list[int],
    *,
    first_scored: int,
    vocab: int,
    make: Callable[..., Any] = make_row,
    shared: int = 0,
) -> Any:
    """Return a packed row of sequences whose first tokens are prompts, as a model makes it.

    Args:
        shared: tokens that all of them begin with.
    """
    positions = torch.cat([torch.arange(n) for n in lengths])
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab, (sum(lengths),), generator=generator)
    tokens = torch.where(positions < shared, positions % vocab, tokens)
    return make(tokens, lengths, mask=positions >= first_scored)


def saved_bytes(model: Any, work: Any) -> int:
    """Return the bytes of distinct storages, parameters apart, that a forward pass keeps for its
    backward pass, what activation checkpointing keeps besides included."""
    model.forward(work)[0].sum().backward()  # FSDP sets itself up
    for parameter in model.scorer.parameters():
        parameter.grad = None
    gathered = _gathered_storages(model)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)
        return tensor

    held: list[Tensor] = []

    def keep_inputs(module: Any, args: tuple, kwargs: dict) -> None:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and value.is_floating_point():
                pack(value)  # checkpointing holds on to them, which no hook sees

    hooks = [
        m.register_forward_pre_hook(keep_inputs, with_kwargs=True)
        for m in model.scorer.modules()
        if type(m).__name__ == "FSDPCheckpointWrapper"
    ]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs, _ = model.forward(work)
    for hook in hooks:
        hook.remove()
    gathered |= _gathered_storages(model)
    total = sum(n for pointer, n in kept.items() if pointer not in gathered)
    logprobs.sum().backward()
    for parameter in model.scorer.parameters():
        parameter.grad = None
    return total


def _gathered_storages(model: Any) -> set[int]:
    found = set()
    for module in model.scorer.modules():
        if isinstance(module, FSDPModule):
            for parameter in module._get_fsdp_state()._fsdp_param_group.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)
                if whole is not None:
                    found.add(whole.untyped_storage().data_ptr())
    return found


def run_config(
    path: str,
    out: str,
    *,
    recomputes: bool = False,
    dtype: str = "float32",
    context: str = "auto",
    placement: str = "colocated",
    memory: Mapping[str, Any] = MappingProxyType({}),
    **layout: int,
) -> Any:
    """Return the config of a run on the CPU with the transformers engine."""
    return changed(
        policy_runs.config(path, out),
        model={
            "compute_dtype": dtype,
            "kernels": {"context": context},
            "memory": {
                "head_chunk_tokens": 64,
                "activation_checkpointing": "full" if recomputes else "none",
                **memory,
            },
        },
        layout={"placement": placement, **layout},
        data={"max_prompt_tokens": 20},
        sampling={"max_response_tokens": 80},
        batch={"tokens_per_microbatch": 400},
        engine=dict(kind="transformers", dtype="bfloat16", max_num_seqs=7, cpu_kv_cache_gib=0.01),
    )


def hold(world: World) -> dict[str, int]:
    """Build a trainer and an engine, take a backward pass, and return this rank's bytes."""
    cfg = world.cfg
    engine = make_engine(cfg, world)
    model = ShardedModel(cfg, world, path=cfg.model.path, is_trained=True)
    # Not the buffers of routers, which are sent too.
    shards = {n: p for n, p in model.named_shards().items() if isinstance(p, DTensor)}
    optimizer = AdamW(shards, no_decay=set(), options=cfg.optimizer)
    vocab = model.hf_model.config.vocab_size
    # Not of one length: padded attention would copy no rows.
    lengths = [101, 100, 100, 99]
    work = scoring(lengths, first_scored=20, vocab=vocab, make=model.row)
    for _ in range(2):  # the first pass sets FSDP up
        model.forward(work)[0].sum().backward()
    gradients = optimizer.gradients()
    state = optimizer.state_dict()
    moments = [local_part(t) for key in ("exp_avg", "exp_avg_sq") for t in state[key].values()]
    found = {
        "weights": sum(local_part(p).nbytes for p in shards.values()),
        "gradients": sum(g.nbytes for g in gradients.values()),
        "optimizer": sum(t.nbytes for t in moments),
        "engine weights": sum(p.nbytes for p in engine.model.parameters()),
        "KV cache": engine._runner.cache.nbytes,
        "slots": engine._runner.cache.num_slots,
    }
    gc.collect()
    with LiveBytes() as live:
        model.forward(work)[0].sum().backward()
    found["working"] = live.peak  # besides weights, gradients and optimizer state
    engine.close()
    return found


def saved_by_family(world: World, folders: dict[str, str], cases: list[tuple]) -> list[int]:
    """Return what a forward pass keeps, bytes, for (family, dtype, recomputes, lengths, tokens of a
    shared prompt)."""
    found, out = [], world.cfg.output_dir
    make = partial(make_row, slicing=Slicing(shares_prefixes=True))
    for family, dtype, recomputes, lengths, shared in cases:
        path, how = folders[family], {"dtype": dtype, "recomputes": recomputes}
        cfg = run_config(path, out, placement="offline", **how)
        model = ShardedModel(cfg, world, path=path, is_trained=True)
        row = scoring(lengths, first_scored=3 + shared, vocab=104, make=make, shared=shared)
        found.append(saved_bytes(model, row))
    return found


def vllm_holds(world: World) -> dict[str, int]:
    """Return the bytes of a vLLM engine's rank."""
    engine = make_engine(world.cfg, world)
    cache = engine._runner.kv_caches
    found = {
        "engine weights": sum(p.nbytes for p in engine.model.parameters()),
        "KV cache": sum(t.nbytes for t in cache),
    }
    engine.close()
    return found
