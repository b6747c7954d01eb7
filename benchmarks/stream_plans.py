"""Measure what it costs a rank to plan the weight stream: `python benchmarks/stream_plans.py`.

The policy is laid out for a rank of the whole world, without storage and without peers; engines'
wants are what vLLM's tensor parallelism takes of each file tensor. Measured are one trainer rank
and one engine rank, each in a process of its own: seconds of a core to plan; bytes gathered from
all ranks; memory at most, beyond what was held before; and what the first push does once, listing
views and messages. Waits for other ranks are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import re
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import torch.distributed as dist
from start import header

from spmdrl.config import Config, LayoutSettings
from spmdrl.model.model_shape import SHAPES
from spmdrl.model.tensor_parts import Box
from spmdrl.plain import unpack
from spmdrl.world.machine.hardware import GPUS, gpu_link


@dataclass(frozen=True)
class World:
    """A world to plan for."""

    name: str
    shape: str  # folder of a config.json, and what of it is changed
    changed: dict[str, Any]
    trainers: int
    engines: int
    inference_tp: int
    ep: int = 1
    before: str = ""  # seconds when every rank planned all from gathered boxes, on one core


LLAMA_70B = dict(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    layer_types=["full_attention"] * 80,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
)
WORLDS = (
    World("70B", "qwen3-32b", LLAMA_70B, 128, 128, 8, before="13.6 s"),
    World(
        "235B-A22B",
        "qwen3-235b-a22b",
        {},
        128,
        128,
        8,
        ep=32,
        before="43 s, 27 s of pickling, 301 MB",
    ),
    World("671B", "deepseek-v3", {}, 512, 512, 16, ep=64, before="never run"),
)


def describe(world: World) -> tuple[Any, list[Any], list[bytes]]:
    """Return the file tensors, what trainers hold, and what each tp rank of an engine wants."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoConfig, AutoModelForCausalLM

    from spmdrl.model.cuts import cut_of
    from spmdrl.model.files.file_tensors import file_tensors, live_tensors
    from spmdrl.model.parallel.layout import lay_out
    from spmdrl.sync.tables import FileTable
    from spmdrl.world.mesh import make_expert_mesh, make_meshes
    from spmdrl.world.torch_internals import plain_name

    size = world.trainers + world.engines
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    layout = LayoutSettings(world_size=size, trainer_ranks=world.trainers, ep=world.ep)
    cfg = replace(Config(), layout=replace(layout, inference_tp=world.inference_tp))
    config = AutoConfig.from_pretrained(SHAPES / world.shape, **world.changed)
    with torch.device("meta"):
        hf_model = AutoModelForCausalLM.from_config(config)
    parts, names = file_tensors(hf_model), list(live_tensors(hf_model))
    mesh, sharding = make_meshes(cfg, torch.device("cpu"))
    fake = SimpleNamespace(
        cfg=cfg,
        mesh=mesh,
        sharding=sharding,
        experts=make_expert_mesh(cfg, torch.device("cpu")),
        device=torch.device("cpu"),
    )
    scorer, _ = lay_out(hf_model, cfg, fake, dtype=torch.bfloat16, temperature=1.0)
    prefix = f"{hf_model.base_model_prefix}."
    cuts = {}
    for name, tensor in live_tensors(scorer).items():
        name = plain_name(name)
        cuts[prefix + name[5:] if name.startswith("base.") else name] = cut_of(name, tensor)
    assert set(cuts) == set(names)
    dist.destroy_process_group()
    table = FileTable(parts)
    wants = [wanted(parts, at, tp=world.inference_tp) for at in range(world.inference_tp)]
    return table, cuts, wants


ROWS = r"(q|k|v|gate|up|q_b|kv_b)_proj\.(weight|bias)$|embed_tokens|lm_head"
COLUMNS = r"(o|down)_proj\.weight$"


def wanted(parts: dict[str, Any], at: int, *, tp: int) -> list[Any]:
    """Return what one tensor-parallel rank of an engine takes of each file tensor."""
    from spmdrl.sync.tables import Want

    found = []
    for name, part in parts.items():
        start, shape = [0] * len(part.shape), list(part.shape)
        dim = 0 if re.search(ROWS, name) else 1 if re.search(COLUMNS, name) else None
        if dim is not None:
            start[dim] = shape[dim] * at // tp
            shape[dim] = shape[dim] * (at + 1) // tp - start[dim]
        dtype = torch.float32 if name.endswith("correction_bias") else torch.bfloat16
        found.append(Want(name, Box(tuple(start), tuple(shape)), dtype))
    return found


HEADS = (
    "model",
    "file tensors",
    "ranks",
    "a rank that",
    "plans in s",
    "gathers MB",
    "takes MB",
    "lists messages in s",
    "and MB",
    "buckets",
    "of MiB",
    "before",
)


def plan_world(world: World) -> None:
    """Print the lines of one world."""
    from spmdrl.sync.negotiation import describe_held, describe_wanted
    from spmdrl.sync.routes import Holders, route_sums, routes_to
    from spmdrl.sync.tables import Wants

    table, cuts, wants = describe(world)
    size, tp = world.trainers + world.engines, world.inference_tp
    held = describe_held(cuts)
    said = [describe_wanted([own], table) for own in wants]
    receivers = [list(range(world.trainers + at, size, tp)) for at in range(tp)]
    heard = [(range(world.trainers), held)], list(zip(receivers, said))
    # The sums of all sources, which they gather from each other.
    holders = Holders([(range(world.trainers), cuts)], table)
    sums = numpy.zeros((size, tp, 2), numpy.int64)
    for at, own in enumerate(said):
        cells = routes_to(Wants.unpack(unpack(own)[0]), receivers[at], holders=holders, receiver=at)
        sums[:, at] = route_sums(cells, cells.source, size)
    greeting = 4 * 32 + 200  # bytes, packed
    gathered = sum(map(len, (held, *said))) + size * (greeting + sums[0].nbytes + 200)
    for rank, mine in ((0, (cuts, [])), (world.trainers, ({}, wants[0]))):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found = pool.apply(plan_rank, (rank, mine, heard, table, sums))
        cells = (
            world.name,
            len(table.names),
            size,
            "generates" if rank else "trains",
            f"{found['seconds']:.2f}",
            f"{gathered / 1e6:.1f}",
            f"{found['bytes'] / 1e6:.0f}",
            f"{found['list_seconds']:.1f}",
            f"{found['list_bytes'] / 1e6:.0f}",
            found["buckets"],
            f"{found['bucket_bytes'] / 2**20:.0f}",
            world.before,
        )
        print("|", " | ".join(map(str, cells)), "|", flush=True)


def plan_rank(rank: int, mine: Any, heard: Any, table: Any, sums: Any) -> dict[str, float]:
    """Plan as one rank does, but for waiting for others."""
    from spmdrl.sync.buckets import Traffic, choose_buckets, cut_routes
    from spmdrl.sync.negotiation import (
        Negotiation,
        describe_held,
        describe_wanted,
        received_sums,
        sent_sums,
    )

    Path("/proc/self/clear_refs").write_text("5")
    before, began = memory("VmRSS"), time.process_time()
    for own in (describe_held(mine[0]), describe_wanted([mine[1]], table)):
        hashlib.sha256(own).digest()
    table.digest()
    described = Negotiation(*heard, table=table)
    (routes,) = described.routes(rank)
    assert numpy.array_equal(sent_sums(routes), sums[rank])
    index = [i for i, ranks in enumerate(described.receivers) if rank in ranks]
    if index:
        assert numpy.array_equal(received_sums(routes, len(sums)), sums[:, index[0]])
    traffic = Traffic(described.receivers, sums[..., 0])
    number = choose_buckets(traffic, gpu_link(GPUS["H100"], is_one_node=False))
    plan = cut_routes(rank, traffic, num_buckets=number, routes=routes)
    seconds, peak = time.process_time() - began, memory("VmHWM")
    list_seconds, list_bytes = list_messages(plan, table, mine[1])
    return {
        "list_seconds": list_seconds,
        "list_bytes": list_bytes,
        "seconds": seconds,
        "bytes": peak - before,
        "buckets": number,
        "bucket_bytes": float(numpy.max(traffic.bucket_bytes(number))),
    }


def list_messages(plan: Any, table: Any, wants: Any) -> tuple[float, int]:
    """Return seconds and bytes of what the first push does once: every view and every message."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from spmdrl.model.tensor_parts import Value
    from spmdrl.sync.transfer import RankSide, Transfer

    size, meta = len(plan.traffic.nbytes), torch.device("meta")
    dist.init_process_group("fake", store=FakeStore(), rank=plan.rank, world_size=size)
    targets = [(w.box, torch.empty(w.box.shape, dtype=w.dtype, device=meta)) for w in wants]
    shard = torch.empty(2**40, dtype=torch.float32, device=meta)
    before, began = memory("VmRSS"), time.process_time()
    held = SimpleNamespace(value=lambda name, box: Value(shard[: box.numel].view(box.shape)))
    live = SimpleNamespace(table=table, held=held)
    gathers = {plan.replicas: dist.group.WORLD} if plan.replicas else {}
    transfer = Transfer(RankSide(plan, live, meta, targets, gathers))
    seconds, used = time.process_time() - began, memory("VmRSS") - before
    del transfer
    dist.destroy_process_group()
    return seconds, used


def memory(field: str) -> int:
    """Return bytes of this process's memory, as the kernel counts them."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", status)[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", choices=[world.name for world in WORLDS])
    options = parser.parse_args()
    if not options.world:
        header(*HEADS)
    for world in WORLDS:
        if options.world == world.name:
            plan_world(world)
        elif not options.world:  # a fresh process, from whose memory ranks are forked
            subprocess.run([sys.executable, __file__, "--world", world.name], check=True)
