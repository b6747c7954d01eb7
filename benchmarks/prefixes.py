"""Time an update whose groups share their prompts, with and without `batch.share_prefixes`.

    OMP_NUM_THREADS=2 python benchmarks/prefixes.py
    python benchmarks/prefixes.py --shapes 1024x8x64 64x8x512 --hidden 512 --layers 6

A shape is PROMPTxSAMPLESxRESPONSE, in tokens; one group is one micro-batch. Both trainers begin
with the same weights and take the same steps in turns, in one process. Losses must agree to 1e-6
and gradient norms to 1e-5, which is asserted. Prints a Markdown table; the ratio is the median over
the rounds of one round's.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import trainer as plain
from benchmarks.start import header, row, scalars_of
from spmdrl.credit import per_token
from spmdrl.roles import make_trainer
from spmdrl.tools.commands.create_model import create_model
from spmdrl.train.trainer import Trainer
from spmdrl.types import Batch, Microbatch, Sums
from spmdrl.world.launch import launch_alone
from spmdrl.world.world import World

MODES = ("never", "auto")


@dataclass(frozen=True)
class Options:
    """What to run."""

    shapes: tuple[str, ...] = ("1024x8x64", "256x8x128", "64x8x512")
    hidden: int = 256
    layers: int = 4
    rounds: int = 5
    """Steps of each that count, after one that does not."""


def batch_of(prompt: int, samples: int, response: int) -> Batch:
    """Return a batch of one group of random responses."""
    generator = torch.Generator().manual_seed(0)
    length = prompt + response
    shared = torch.randint(8, 96, (prompt,), generator=generator)
    own = torch.randint(8, 96, (samples, response), generator=generator)
    mask = (torch.arange(length) >= prompt).repeat(samples)
    one = torch.ones(samples, dtype=torch.int64)
    packed = Microbatch(
        tokens=torch.cat([shared.expand(samples, -1), own], dim=1).flatten(),
        position_ids=torch.arange(length).repeat(samples),
        cu_seqlens=torch.arange(0, samples * length + 1, length, dtype=torch.int32),
        response_mask=mask,
        rollout_logprobs=torch.where(mask, -1.0, 0.0),
        policy_versions=torch.where(mask, 0, -1),
        sequence_ids=torch.arange(samples),
    )
    scalars = scalars_of(length * one, response * one)
    return Batch(scalars=scalars, updates=((packed,),), update_ids=0 * one)


def stepping(trainer: Trainer, batch: Batch) -> Callable[[int], Sums]:
    """Return a function that takes an update."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(len(batch.update_ids), generator=generator).double()

    def step(number: int) -> Sums:
        annotated = trainer.annotate(batch, step=number)
        return trainer.update(annotated, per_token(annotated, weights), step=number)

    return step


def main(options: Options) -> None:
    """Time both ways in turns, shape after shape."""
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    longest = max(prompt + response for prompt, _, response in shapes)
    with tempfile.TemporaryDirectory() as scratch:
        path = create_model(
            Path(scratch) / "model",
            hidden_size=options.hidden,
            layers=options.layers,
            heads=options.hidden // 64,
            kv_heads=options.hidden // 64,
            intermediate=3 * options.hidden,
            max_positions=longest,
        )
        launch_alone()
        rows = max(samples for _, samples, _ in shapes)
        cfg = plain.config_of(plain.Options(rows=rows, length=longest), str(path), scratch)
        world = World.start(cfg)
        configs = [replace(cfg, batch=replace(cfg.batch, share_prefixes=mode)) for mode in MODES]
        trainers = [make_trainer(own, world) for own in configs]
        header("prompt, samples, response", "computed", "whole s", "shared s", "times as fast")
        for name, shape in zip(options.shapes, shapes):
            batch = batch_of(*shape)
            steps = [stepping(trainer, batch) for trainer in trainers]
            seconds: list[list[float]] = []
            for number in range(options.rounds + 1):
                found: list[Sums] = []
                seconds.append([])
                for own, step in zip(configs, steps):
                    world.cfg = own
                    took = plain.seconds(lambda: found.append(step(number)), world.device)
                    seconds[-1].append(took)
                check(*found)
            whole, shared = (statistics.median(own) for own in zip(*seconds[1:]))
            times = statistics.median(a / b for a, b in seconds[1:])
            computed, tokens = found[1]["perf/computed_frac"]
            cells = (f"{computed:.0f} of {tokens:.0f}", f"{whole:.3f}", f"{shared:.3f}")
            row(name.replace("x", " x "), *cells, f"{times:.2f}")
        world.close()


def check(whole: Sums, shared: Sums) -> None:
    """Raise AssertionError unless both did the same work."""
    for name, tolerance in (("policy/loss", 1e-6), ("policy/grad_norm", 1e-5)):
        values = whole[name][0], shared[name][0]
        assert math.isclose(*values, rel_tol=tolerance, abs_tol=tolerance), (name, values)


if __name__ == "__main__":
    main(tyro.cli(Options))
