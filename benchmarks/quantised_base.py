"""Memory, step time and gap of LoRA over a base in 16, 8 and 4 bits, on one CPU rank.

    python benchmarks/quantised_base.py                            # 20 M parameters
    python benchmarks/quantised_base.py --hidden 1024 --layers 8   # 109 M parameters
    python benchmarks/quantised_base.py --model my_model           # the gap of your model

`peak` is weights, adapters, moments and what an update takes beside them (`LiveBytes`, which slows
the work down; seconds are of other updates, the median of three). `gap` is the mean |logprob
difference| of random tokens to the base in the compute dtype, before training; it says little of a
random model. Prints a Markdown table.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.start import begin, header, in_ranks, row

KINDS = ("full", "int8", "nf4")


@dataclass(frozen=True)
class Options:
    """The model and the row."""

    model: str = ""
    """Folder of a model; empty: a random Qwen3 of these sizes."""
    hidden: int = 512
    layers: int = 6
    rows: int = 4
    """Sequences of the micro-batch."""
    length: int = 128
    """Tokens of each; the first quarter is a prompt."""
    recomputes: bool = True
    """Full activation checkpointing."""


def main(options: Options) -> None:
    """Measure each kind and print a table."""
    header("base", "weights MiB", "peak MiB", "seconds per update", "gap, nats")
    for kind, weights, peak, seconds, gap in json.loads(in_ranks(1, __file__, asdict(options))):
        sizes = (f"{n / 2**20:.1f}" for n in (weights, peak))
        row(kind, *sizes, f"{seconds:.2f}", f"{gap:.4f}")


def work(folder: Path, given: dict[str, Any]) -> None:
    """Take updates over each kind of base, and write what they took."""
    import torch

    from benchmarks.trainer import Options as Sizes
    from benchmarks.trainer import config_of, ours, packed_batch, small_model
    from spmdrl.config import LoraSettings, MemorySettings
    from spmdrl.model.tensor_parts import local_part
    from spmdrl.roles import make_trainer
    from spmdrl.world.machine.live_bytes import peak_bytes
    from spmdrl.world.world import World

    options = Options(**given)
    path = options.model or small_model(
        folder / "model", hidden=options.hidden, layers=options.layers, longest=options.length
    )
    sizes = Sizes(compute_dtype="bfloat16", length=options.length)
    cfg = config_of(sizes, path, str(folder / "run"))
    memory = MemorySettings(activation_checkpointing="full" if options.recomputes else "none")
    world = World.start(replace(cfg, model=replace(cfg.model, memory=memory)))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(8, 96, (options.rows, options.length), generator=generator)
    batch = packed_batch(tokens, prompt=options.length // 4)
    advantages = torch.randn(options.rows, generator=generator)
    found = []
    reference = torch.zeros(())
    for kind in KINDS:
        lora = LoraSettings(rank=16, base=kind)
        own = replace(world.cfg, model=replace(world.cfg.model, lora=lora))
        world.cfg = own
        trainer = make_trainer(own, world)
        scores = torch.cat(trainer.weights.score(tokens.tolist()))
        reference = scores if kind == "full" else reference
        gap = float((scores - reference).abs().sum() / (scores != 0).sum())
        step = ours(trainer, batch, advantages)
        step()
        with peak_bytes(world.device) as peak:
            step()
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - began)
        shards = trainer.policy.model.named_shards().values()
        weights = sum(local_part(p).nbytes for p in shards)
        moments = sum(2 * local_part(p).nbytes for p in shards if p.requires_grad)
        total = weights + moments + peak.bytes
        found.append((kind, weights, total, statistics.median(seconds), gap))
    (folder / "found.json").write_text(json.dumps(found))
    world.close()


if __name__ == "__main__":
    begin(main, work, Options)
