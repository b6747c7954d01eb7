"""Time pushes of what changed against full pushes; count what changes, by learning rate.

    torchrun --nproc-per-node 2 benchmarks/deltas.py link --megabytes 100
    python benchmarks/deltas.py namespaces --gbit 1 -- --megabytes 100      # as root
    python benchmarks/deltas.py shares

`link` makes a random Qwen3, as benchmarks/stream.py does. Between pushes it changes a share of the
elements that engines hold in bfloat16. It pushes by turns everything and what changed, and compares
checksums of what the engine holds after each push of what changed. `namespaces` starts its two
ranks in two network namespaces, with a link of so many 1e9 bits/s between them (`tc tbf`).

`shares` trains two small models on the demo's task by GRPO, with a bfloat16 engine, for a few
steps at each learning rate, and prints `sync/changed_frac` and `sync/bytes` of their pushes. The
reward is the share of digits in a response: a random model gets some, so it learns.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import tyro
from safetensors import safe_open
from start import ROOT, as_flags, header, row, torchrun
from stream import Options, make_config, make_model, seconds_of

from spmdrl.model.tensor_parts import local_part
from spmdrl.world.launch import read_launch
from spmdrl.world.world import World

SHARES = (0.005, 0.01, 0.03, 0.05, 0.1, 0.3)
RATES = (1e-6, 1e-5, 1e-4, 1e-3)
MODELS = {
    "qwen3, 0.7 M": "--hidden-size 128 --layers 4 --intermediate 256",
    "llama, 5 M": "--architecture llama --hidden-size 320 --layers 4 --intermediate 896",
}
STEPS = 8
HEAD = ("da", "va", "10.77.0.1")
TAIL = ("db", "vb", "10.77.0.2")


def change(trainer: object, share: float, *, version: int) -> None:
    """Change a share of the weights by so much that their bfloat16 values change."""
    torch.manual_seed(version)
    for shard in trainer.weights.shards().values():
        local = local_part(shard)
        chosen = torch.rand(local.shape) < share
        local.mul_(torch.where(chosen, 1.02, 1.0))


def link(argv: list[str]) -> None:
    """Measure pushes on the ranks of this launch, and print a table on rank 0."""
    from spmdrl.engine.vllm.engine import VllmEngine
    from spmdrl.roles import make_trainer
    from spmdrl.sync.stream import WeightStream

    options = tyro.cli(Options, args=argv)
    launch = read_launch()
    folder = Path(tempfile.gettempdir()) / f"spmdrl-deltas-{launch.port}"
    cfg = make_config(options, world_size=launch.world_size, folder=folder)
    cfg = replace(cfg, stream=replace(cfg.stream, delta="always", full_every=0))
    world = World.start(cfg)
    if world.rank == 0:
        make_model(folder, options, device=world.device)
    dist.barrier(group=world.control)
    engine = VllmEngine(cfg, world)
    trainer = make_trainer(cfg, world)
    stream = WeightStream(trainer.weights, engine, world)
    version = 0
    stream.push(version)
    [tensors] = stream._later
    rows = []
    for share in SHARES:
        times: dict[bool, list[float]] = {True: [], False: []}
        moved = {}
        for _ in range(options.rounds):
            for is_full in (True, False):
                version += 1
                if world.is_trainer:
                    change(trainer, share, version=version)
                found = []
                push = lambda: found.append(tensors.move(is_full=is_full))  # noqa: E731
                times[is_full].append(seconds_of(push, world))
                moved[is_full] = found[0]
            stream.verify(version)
        full_s = statistics.median(times[True])
        changed_s = statistics.median(times[False])
        changed = moved[False]
        rows.append(
            {
                "share": changed.changed / changed.compared,
                "full_bytes": moved[True].nbytes,
                "bytes": changed.nbytes,
                "full_s": full_s,
                "s": changed_s,
                "of_time": changed_s / full_s,
            }
        )
    if world.rank == 0:
        header("changed", "full push bytes", "s", "what changed bytes", "s", "share of the time")
        for found in rows:
            row(
                f"{found['share']:.4f}",
                found["full_bytes"],
                f"{found['full_s']:.3f}",
                found["bytes"],
                f"{found['s']:.3f}",
                f"{found['of_time']:.3f}",
            )
        print(json.dumps(rows), flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    engine.close()
    world.close()


def namespaces(argv: list[str]) -> None:
    """Run `link` on two ranks, each in a network namespace of its own."""
    gbit = float(argv[argv.index("--gbit") + 1])
    own = argv[argv.index("--") + 1 :]
    try:
        _make_link(gbit)
        ranks = []
        for number, (name, device, _) in enumerate((HEAD, TAIL)):
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": device, "SPMDRL_SECRET": "s" * 32}
            torchrun = Path(sys.executable).with_name("torchrun")
            command = ["ip", "netns", "exec", name, str(torchrun), "--nnodes", "2"]
            command += ["--node-rank", str(number), "--nproc-per-node", "1"]
            command += ["--master-addr", HEAD[2], "--master-port", "29555", __file__, "link", *own]
            ranks.append(subprocess.Popen(command, env=environment))
        codes = [rank.wait() for rank in ranks]
    finally:
        for name, _, _ in (HEAD, TAIL):
            subprocess.run(["ip", "netns", "del", name], check=False)
    sys.exit(max(codes))


def _make_link(gbit: float) -> None:
    """Make two namespaces and a link between them that holds both ways to a rate."""
    for name, _, _ in (HEAD, TAIL):
        _ip("netns", "add", name)
    _ip("link", "add", HEAD[1], "type", "veth", "peer", "name", TAIL[1])
    for name, device, address in (HEAD, TAIL):
        _ip("link", "set", device, "netns", name)
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
        _ip("-n", name, "link", "set", device, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        limit = ["tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{gbit}gbit"]
        limit += ["burst", "256kb", "latency", "50ms"]
        _ip("netns", "exec", name, *limit)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def shares(argv: list[str]) -> None:
    """Train and print the share of elements that changed, for each model and learning rate."""
    assert not argv, f"shares takes no options: {argv}"
    header(
        "model", "learning rate", "changed, mean", "least", "most", "bytes, mean", "of a full push"
    )
    with tempfile.TemporaryDirectory() as base:
        rewards = Path(base) / "digits.py"
        rewards.write_text(
            "def digits(completions, **columns):\n"
            "    return [sum(c.isdigit() for c in text) / 8 for text in completions]\n"
        )
        for number, (name, sizes) in enumerate(MODELS.items()):
            model = Path(base) / f"model{number}"
            command = [sys.executable, "-m", "spmdrl", "create_model", str(model), *sizes.split()]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            for rate in RATES:
                rows = _train(Path(base) / f"run{number}_{rate}", model, rate, rewards)
                _print_shares(name, rate, rows, full=engine_bytes(model))


def _train(folder: Path, model: Path, rate: float, rewards: Path) -> list[dict]:
    """Return the rows of metrics.jsonl of a short run."""
    settings = {
        "config": ROOT / "configs" / "demo_grpo.yaml",
        "output-dir": folder,
        "model.path": model,
        "steps": STEPS,
        "optimizer.lr": rate,
        "optimizer.warmup-steps": 0,
        "rewards.functions": f"{rewards}:digits",
        "engine.dtype": "bfloat16",
        "engine.kind": "transformers",
        "batch.prompts-per-step": 16,
        "stream.delta": "always",
        "data.eval-size": 16,
        "evaluate.every-steps": 1000,
    }
    torchrun(2, ROOT / "train.py", *as_flags(settings), timeout_s=900)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def engine_bytes(model: Path) -> int:
    """Return the bytes of a model's tensors in bfloat16."""
    with safe_open(model / "model.safetensors", "pt") as file:
        sizes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    return sum(2 * math.prod(size) for size in sizes)


def _print_shares(name: str, rate: float, rows: list[dict], *, full: int) -> None:
    # The first push, of everything, is before the first step.
    later = [one for one in rows if "sync/changed_frac" in one]
    changed = [one["sync/changed_frac"] for one in later]
    nbytes = statistics.mean(one["sync/bytes"] for one in later)
    row(
        name,
        f"{rate:g}",
        f"{statistics.mean(changed):.4f}",
        f"{min(changed):.4f}",
        f"{max(changed):.4f}",
        f"{nbytes:.0f}",
        f"{nbytes / full:.3f}",
    )


if __name__ == "__main__":
    {"link": link, "namespaces": namespaces, "shares": shares}[sys.argv[1]](sys.argv[2:])
