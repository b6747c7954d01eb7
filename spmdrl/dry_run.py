"""What a config amounts to, before anything is started: `train.py --config X --dry-run`."""

from __future__ import annotations

import sys

from spmdrl import config
from spmdrl.config import Config, inference_ranks, trainer_ranks

_DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


def show(cfg: Config) -> int:
    """Print resolved config, derived sizes, mesh map and stream size; return the exit status.

    Needs the model's config.json, no weights, no launcher and no second process.
    """
    print(config.dump(cfg))
    for title, pairs in (("derived", derived(cfg)), ("mesh", mesh_map(cfg))):
        print(f"{title}:")
        for name, value in pairs.items():
            print(f"  {name:<28} {value}")
    try:
        sizes = stream_size(cfg)
    except ValueError as error:
        print(f"stream: cannot tell: {error}", file=sys.stderr)
        return 2
    print("stream:")
    for name, value in sizes.items():
        print(f"  {name:<28} {value}")
    return 0


def derived(cfg: Config) -> dict[str, str]:
    """Return the arithmetic that follows from a config, as {name: text with its formula}."""
    batch, trainers, engines = cfg.batch, trainer_ranks(cfg), inference_ranks(cfg)
    dp = len(trainers) // cfg.layout.tp
    group = batch.group_size if cfg.algorithm.objective == "rl" else 1
    sequences = batch.prompts_per_step * group
    longest = cfg.data.max_prompt_tokens + cfg.sampling.max_response_tokens
    pairs = {
        "sequences per step": f"{batch.prompts_per_step} prompts * {group} = {sequences}",
        "optimizer steps per step": f"{batch.updates_per_step}, of about "
                                    f"{sequences / batch.updates_per_step:g} sequences",
        "tokens per step": f"at most {sequences} * {longest} = {sequences * longest:,}",
        "sequences per dp rank": f"{sequences} / {dp} = {sequences / dp:g}",
        "micro-batches per dp rank": _microbatches(sequences, longest, dp=dp, cfg=cfg),
        "steps of generation ahead": f"{cfg.lag}",
    }
    if engines:
        replicas = len(engines) // cfg.layout.inference_tp
        pairs["prompts per engine replica"] = (
            f"{batch.prompts_per_step} / {replicas} = {batch.prompts_per_step / replicas:g}")
        pairs["engine rounds per step"] = (
            f"{sequences / replicas:g} sequences / {cfg.engine.max_num_seqs} at a time")
    return pairs


def _microbatches(sequences: int, longest: int, *, dp: int, cfg: Config) -> str:
    tokens = sequences * longest / dp / cfg.batch.updates_per_step
    most = max(1, -(-int(tokens) // cfg.batch.tokens_per_microbatch))
    return (f"at most about {most} of {cfg.batch.tokens_per_microbatch} tokens"
            + (f", for each of {cfg.batch.updates_per_step} updates"
               if cfg.batch.updates_per_step > 1 else ""))


def mesh_map(cfg: Config) -> dict[str, str]:
    """Return {rank: its coordinates in each role}."""
    from spmdrl.world import MESH_AXES, mesh_shape

    replicate, shard, tp = mesh_shape(cfg)
    engines, pairs = inference_ranks(cfg), {}
    pairs["trainer mesh"] = " x ".join(
        f"{axis} {size}" for axis, size in zip(MESH_AXES, (replicate, shard, tp)))
    itp = cfg.layout.inference_tp
    pairs["inference mesh"] = (f"replica {len(engines) // itp} x tp {itp}" if engines else "none")
    for rank in range(cfg.layout.world_size):
        roles = []
        if rank in trainer_ranks(cfg):
            at = (rank // (shard * tp), rank // tp % shard, rank % tp)
            roles.append("trains    " + " ".join(f"{a}={i}" for a, i in zip(MESH_AXES, at)))
        if rank in engines:
            i = engines.index(rank)
            roles.append(f"generates replica={i // itp} tp={i % itp}")
        pairs[f"rank {rank}"] = "; ".join(roles)
    return pairs


def stream_size(cfg: Config) -> dict[str, str]:
    """Return what one push of the weights amounts to.

    Raises: ValueError when the model folder cannot be read.
    """
    from spmdrl.policy.load import checkpoint_shapes

    shapes = checkpoint_shapes(cfg)
    count = sum(shape.numel() for shape in shapes.values())
    pairs = {"parameters": f"{count:,} in {len(shapes)} tensors"}
    engines = inference_ranks(cfg)
    if engines:
        item = _DTYPE_BYTES[cfg.engine.dtype]
        tp = cfg.layout.inference_tp
        buckets = max(1, -(-count * item // tp // cfg.stream.bucket_bytes))
        pairs["bytes per push"] = (f"{count:,} * {item} = {count * item:,} out of the trainers, "
                                   f"about {count * item // tp:,} into each engine rank")
        pairs["buckets"] = f"about {buckets} of {cfg.stream.bucket_bytes:,} bytes"
    return pairs
