"""Time an update whose groups share their prompts, with and without `batch.share_prefixes`.

    OMP_NUM_THREADS=2 python benchmarks/prefixes.py
    python benchmarks/prefixes.py --shapes 1024x8x64 64x8x512 --hidden 512 --layers 6
    python benchmarks/prefixes.py --hybrids --hidden 448 --layers 8    # about 20 M parameters each

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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import trainer as plain
from benchmarks.hybrids import Sizes, configs
from benchmarks.start import header, row
from spmdrl.config import Config
from spmdrl.roles import make_trainer
from spmdrl.tools.small_models.shrink import tiny_model
from spmdrl.types import Batch, Sums
from spmdrl.world.launch import launch_alone
from spmdrl.world.world import World

MODES = ("never", "auto")


@dataclass(frozen=True)
class Options:
    """What to run."""

    shapes: tuple[str, ...] = ("1024x8x64", "256x8x128", "64x8x512")
    hidden: int = 256
    layers: int = 4
    hybrids: bool = False
    """Take the models of hybrids.py instead of a Qwen3."""
    rounds: int = 5
    """Steps of each that count, after one that does not."""


def group_of(prompt: int, samples: int, response: int) -> Batch:
    """Return a batch of one group of random responses."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(8, 96, (prompt,), generator=generator)
    own = torch.randint(8, 96, (samples, response), generator=generator)
    return plain.packed_batch(torch.cat([shared.expand(samples, -1), own], dim=1), prompt=prompt)


def models_of(options: Options, folder: Path, *, longest: int) -> dict[str, str]:
    """Write the models; return {name: folder}."""
    if not options.hybrids:
        sizes = dict(hidden=options.hidden, layers=options.layers, longest=longest)
        return {"Qwen3": str(plain.small_model(folder, **sizes))}
    found = {}
    for name, config in configs(Sizes(options.hidden, options.layers)).items():
        found[name] = str(folder / str(len(found)))
        tiny_model(config, Path(found[name]))
    return found


def main(options: Options) -> None:
    """Time both ways in turns, model after model and shape after shape."""
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    longest = max(prompt + response for prompt, _, response in shapes)
    rows = max(samples for _, samples, _ in shapes)
    launch_alone()
    world = None
    header("model", "prompt, samples, response", "computed", "whole s", "shared s", "times as fast")
    with tempfile.TemporaryDirectory() as scratch:
        for model, path in models_of(options, Path(scratch) / "model", longest=longest).items():
            cfg = plain.config_of(plain.Options(rows=rows, length=longest), path, scratch)
            world = world or World.start(cfg)
            ways = [replace(cfg, batch=replace(cfg.batch, share_prefixes=mode)) for mode in MODES]
            trainers = [(own, make_trainer(own, world)) for own in ways]
            for name, shape in zip(options.shapes, shapes):
                cells = timed(world, trainers, shape, rounds=options.rounds)
                row(model, name.replace("x", " x "), *cells)
        assert world is not None
        world.close()


def timed(
    world: World, trainers: Sequence[tuple[Config, Any]], shape: Sequence[int], *, rounds: int
) -> Sequence[str]:
    """Return a row of the table."""
    batch = group_of(*shape)
    advantages = torch.randn(shape[1], generator=torch.Generator().manual_seed(1))
    steps = [(cfg, plain.ours(trainer, batch, advantages)) for cfg, trainer in trainers]
    seconds: list[list[float]] = []
    for _ in range(rounds + 1):
        found: list[Sums] = []
        seconds.append([])
        for cfg, step in steps:
            world.cfg = cfg
            seconds[-1].append(plain.seconds(lambda: found.append(step()), world.device))
        check(*found)
    whole, shared = (statistics.median(own) for own in zip(*seconds[1:]))
    times = statistics.median(a / b for a, b in seconds[1:])
    computed, tokens = found[1]["perf/computed_frac"]
    return f"{computed:.0f} of {tokens:.0f}", f"{whole:.3f}", f"{shared:.3f}", f"{times:.2f}"


def check(whole: Sums, shared: Sums) -> None:
    """Raise AssertionError unless both did the same work."""
    for name, tolerance in (("policy/loss", 1e-6), ("policy/grad_norm", 1e-5)):
        values = whole[name][0], shared[name][0]
        assert math.isclose(*values, rel_tol=tolerance, abs_tol=tolerance), (name, values)


if __name__ == "__main__":
    main(tyro.cli(Options))
