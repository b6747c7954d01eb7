"""Time the weight stream against one plain all-to-all of the same bytes on the same ranks.

    torchrun --nproc-per-node 2 benchmarks/stream.py --megabytes 100
    torchrun --nproc-per-node 4 benchmarks/stream.py --trainer-ranks 2 --inference-tp 2
    torchrun --nproc-per-node 1 benchmarks/stream.py --placement colocated

A random Qwen3 is made in a temporary folder, loaded by real trainers and real vLLM engines,
pushed a few times, and removed. Each round times one push (pack, cast, all-to-all, gather,
write into live engine parameters) and one bare `all_to_all_single` whose pairs of ranks
exchange the bytes of that push, from and into warm buffers; with one rank, one copy of as many
bytes on its device. The slowest rank's clock counts.
Prints a table, what the planner says of the push, and one line of JSON on rank 0.
"""

from __future__ import annotations

import atexit
import json
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import tyro
from start import quick_folder, say_commit

from spmdrl import config
from spmdrl.config import Config, StreamSettings
from spmdrl.tools.plan.run import Rates, run_of
from spmdrl.tools.plan.traffic import push_flows
from spmdrl.world.axes import axes_of
from spmdrl.world.comm import gather_objects
from spmdrl.world.launch import read_launch
from spmdrl.world.machine.hardware import CPU_LINK, Gpu
from spmdrl.world.world import World


@dataclass(frozen=True)
class Options:
    """What to measure."""

    megabytes: int = 100
    """Size of the weights as the engine holds them, 1e6 bytes, about."""
    placement: Literal["split", "colocated"] = "split"
    """colocated: every rank does both."""
    trainer_ranks: int = 1
    """Ranks that train; the others hold engines."""
    tp: int = 1
    """Tensor-parallel ranks of the policy."""
    inference_tp: int = 1
    """Tensor-parallel ranks of one engine."""
    bucket_bytes: int = StreamSettings.bucket_bytes
    """Bytes of one bucket; 0 has it chosen."""
    dtype: str = "bfloat16"
    """Dtype of the engine; masters are float32."""
    hidden: int = 768
    """Width of the model; its layers follow from the size."""
    engine_frac: float = config.EngineSettings.gpu_memory_frac
    """Share of a GPU's memory for the engine."""
    eager: bool = False
    """Start the engine without compilation and CUDA graphs, which a push does not need."""
    rounds: int = 9
    """Timed rounds; the median counts."""


def make_config(options: Options, *, world_size: int, folder: Path) -> Config:
    """Return the config of the measured world."""
    return Config(
        output_dir=str(folder),
        layout=config.LayoutSettings(
            placement=options.placement,
            world_size=world_size,
            trainer_ranks=options.trainer_ranks,
            tp=options.tp,
            inference_tp=options.inference_tp,
        ),
        model=config.ModelSettings(path=str(folder)),
        data=config.DataSettings(train="task:addition", size=1, max_prompt_tokens=64),
        sampling=config.SamplingSettings(max_response_tokens=64),
        engine=config.EngineSettings(
            dtype=options.dtype,
            cpu_kv_cache_gib=0.1,
            gpu_memory_frac=options.engine_frac,
            max_num_seqs=4,
            max_batched_tokens=128,
            options={"enforce_eager": True} if options.eager else {},
        ),
        stream=StreamSettings(bucket_bytes=options.bucket_bytes, mode="traced"),
    )


def layers_of(options: Options) -> int:
    """Return the number of layers that make about the asked size."""
    hidden = options.hidden
    block = 2.5 * hidden**2 + 3 * hidden * _intermediate(hidden)  # a quarter as many kv heads
    itemsize = getattr(torch, options.dtype).itemsize
    return max(1, round(options.megabytes * 1e6 / itemsize / block))


def _intermediate(hidden: int) -> int:
    return hidden * 8 // 3 // 64 * 64


def make_model(folder: Path, options: Options, *, device: torch.device) -> None:
    """Write a Qwen3 of about the asked size, made on the device: for a CPU it takes long."""
    from spmdrl.tools.commands.create_model import create_model

    heads = options.hidden // (128 if options.hidden >= 2048 else 64)
    with device:
        create_model(
            folder,
            architecture="qwen3",
            hidden_size=options.hidden,
            layers=layers_of(options),
            heads=heads,
            kv_heads=heads // 4,
            intermediate=_intermediate(options.hidden),
        )


def seconds_of(run: object, world: World) -> float:
    """Return the time of `run()` on the slowest rank, from a common start."""
    dist.barrier(group=world.control)
    began = time.perf_counter()
    run()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    took = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(took, op=dist.ReduceOp.MAX, group=world.control)
    return float(took)


def sent_bytes(stream: object, world: World) -> list[list[int]]:
    """Return [ranks][ranks]: the bytes that each sends to each in one push."""
    plan, sent = stream.plans[0], [0] * world.world_size
    for target, nbytes in zip(plan.sent.target.tolist(), plan.sent.nbytes.tolist()):
        sent[target] += nbytes
    return gather_objects(sent, group=world.control)


def plain_exchange(stream: object, world: World) -> object:
    """Return a function that runs one all-to-all of the bytes of one push, or one copy of them."""
    if world.world_size == 1:
        own = torch.ones(stream.nbytes, dtype=torch.uint8, device=world.device)
        other = torch.zeros_like(own)
        return lambda: other.copy_(own)
    rows = sent_bytes(stream, world)
    sent, taken = rows[world.rank], [row[world.rank] for row in rows]
    send = torch.ones(sum(sent), dtype=torch.uint8, device=world.device)
    receive = torch.zeros(sum(taken), dtype=torch.uint8, device=world.device)
    return lambda: dist.all_to_all_single(receive, send, taken, sent)


def planned_seconds(cfg: Config) -> float:
    """Return what the planner says of a push over the links of a CPU."""
    from spmdrl.model.load import build_meta_model
    from spmdrl.model.model_shape import model_shape

    run = run_of(
        cfg,
        model_shape(build_meta_model(cfg.model)),
        on_gpu=False,
        chunk_tokens=1,
        prompt_tokens=0,
        response_tokens=0,
    )
    link = CPU_LINK.bytes_per_s
    rates = Rates(Gpu("CPU", 0.0, 0.0, 0.0, link, link, link), link_frac=1.0)
    return sum(flow.seconds(rates) for flow in push_flows(run, axes_of(cfg)))


def measure(options: Options, cfg: Config, *, folder: Path) -> dict:
    """Run all rounds and return what was found."""
    from spmdrl.engine.vllm.engine import VllmEngine
    from spmdrl.roles import make_trainer
    from spmdrl.sync.stream import WeightStream

    world = World.start(cfg)
    if world.rank == 0:
        make_model(folder, options, device=world.device)
    dist.barrier(group=world.control)
    engine, trainer = VllmEngine(cfg, world), make_trainer(cfg, world)
    stream = WeightStream(trainer.weights, engine, world)
    plain = plain_exchange(stream, world)
    stream.push(0)
    plain()
    push_s, plain_s = [], []
    for version in range(1, options.rounds + 1):
        push_s.append(seconds_of(lambda: stream.push(version), world))
        plain_s.append(seconds_of(plain, world))
    gigabytes, traffic = stream.nbytes / 1e9, stream.plans[0].traffic
    moved = sum(map(sum, sent_bytes(stream, world))) + int(traffic.nbytes[traffic.is_local].sum())
    assert moved == stream.nbytes, f"plain moves {moved} bytes, the push {stream.nbytes}"
    planned_s = planned_seconds(cfg)
    found = {
        **asdict(options),
        "world_size": world.world_size,
        "device": world.device.type,
        "gigabytes": gigabytes,
        "buckets": stream.plans[0].num_buckets,
        "push_s": statistics.median(push_s),
        "plain_s": statistics.median(plain_s),
        "push_gb_per_s": gigabytes / statistics.median(push_s),
        "plain_gb_per_s": gigabytes / statistics.median(plain_s),
        "ratio": statistics.median(plain_s) / statistics.median(push_s),
        "bucket_mib": max(stream.plans[0].bucket_bytes) / 2**20,
        "planned_s": planned_s,
        "planned_ratio": planned_s / statistics.median(push_s),
        "push_best_s": min(push_s),
        "plain_best_s": min(plain_s),
        "ratio_of_bests": min(plain_s) / min(push_s),
    }
    engine.close()
    world.close()
    return found


def main() -> None:
    """Measure and print."""
    options = tyro.cli(Options)
    launch = read_launch()
    float32_bytes = 4 * options.megabytes * 1e6 / getattr(torch, options.dtype).itemsize
    base = quick_folder(float32_bytes) or tempfile.gettempdir()
    folder = Path(base) / f"spmdrl-stream-{launch.port}"
    if launch.rank == 0:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    cfg = make_config(options, world_size=launch.world_size, folder=folder)
    found = measure(options, cfg, folder=folder)
    if launch.rank == 0:
        say_commit()
        print(f"{'':16}{'seconds':>10}{'GB/s':>10}")
        for name in ("push", "plain"):
            print(f"{name:16}{found[name + '_s']:10.4f}{found[name + '_gb_per_s']:10.3f}")
        print(
            f"ratio {found['ratio']:.2f} (push / plain throughput, medians; of the best rounds "
            f"{found['ratio_of_bests']:.2f}); the planner says {found['planned_s']:.4f} s, "
            f"{found['planned_ratio']:.2f} of the push; {found['buckets']} buckets"
        )
        print(json.dumps(found))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
