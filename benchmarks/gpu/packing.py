"""Part of `make gpu`: how far rounding alone moves the logprobs of packed rows.

    python -m benchmarks.gpu.packing --shape 1b            # tiny for a rehearsal on the CPU

A run refuses to start where packed rows and rows of one sequence differ by more than a limit
(spmdrl/train/packing_check.py). In 16 bits, kernels for other shapes round in another way, so that
the two differ where nothing leaks. This measures by how much, beside the same rows packed in other
orders, which are noise too, and beside the same rows once more, which must not differ at all.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor

from benchmarks.gpu import update
from benchmarks.gpu.rows import Row, attempt, judged
from benchmarks.start import quick_folder
from spmdrl import config
from spmdrl.config import Config
from spmdrl.model.load import build_meta_model
from spmdrl.roles import make_trainer
from spmdrl.train.packing_check import drawn, lengths_of, worst
from spmdrl.world.launch import launch_alone
from spmdrl.world.world import World

_LIMIT = 0.05
"""Nats that the check allows in 16 bits."""
_EMBEDDING_STD = 0.08
"""With which the largest of 128 thousand random logits are 10 to 20, as in trained models: their
rounding grows with their size."""


@dataclass(frozen=True)
class Options:
    """What to run."""

    shape: Literal["tiny", "1b", "4b"] = "1b"
    device: Literal["cpu", "cuda"] = "cuda"
    longest: int = 4096
    """Tokens of the longest sequence."""
    orders: int = 4
    """Other orders of the same rows."""
    limit_s: float = 60.0
    """Seconds of this process, which starts no other."""


def config_of(options: Options, path: str) -> Config:
    """Return what train.py would be given."""
    half = options.longest // 2
    return Config(
        output_dir=str(Path(path).parent / "run"),
        layout=config.LayoutSettings(placement="offline", world_size=1, device=options.device),
        model=config.ModelSettings(path=path, compute_dtype="bfloat16"),
        data=config.DataSettings(max_prompt_tokens=half),
        sampling=config.SamplingSettings(max_response_tokens=options.longest - half),
        batch=config.BatchSettings(tokens_per_microbatch=2 * options.longest),
        algorithm=config.AlgorithmSettings(correction="none"),
    )


def gaps_of(model: Any, rows: list[list[int]], *, orders: int) -> dict[str, float]:
    """Return the largest mean gap in nats over the first tokens of a sequence, as the check has it:
    to rows of one sequence, to other orders, and to the same rows."""
    packed = model.score(rows)
    others = []
    for seed in range(orders):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
        scored: dict[int, Tensor] = dict(zip(order, model.score([rows[at] for at in order])))
        others.append(worst(packed, [scored[at] for at in range(len(rows))]))
    return {
        "single": worst(packed, model.score(rows, row_tokens=1)),
        "orders": max(others),
        "again": worst(packed, model.score(rows)),
    }


def main(options: Options) -> None:
    """Measure, and tell."""
    what = f"packed rows at {options.shape} in bfloat16"
    file_bytes = update.FILE_BYTES[options.shape]
    with tempfile.TemporaryDirectory(dir=quick_folder(file_bytes)) as scratch, attempt(what):
        shaped = update.Options(shape=options.shape, device=options.device)
        path = update.write_model(Path(scratch) / "model", shaped, embedding_std=_EMBEDDING_STD)
        cfg = config_of(options, path)
        vocabulary = build_meta_model(cfg.model).get_input_embeddings().weight.shape[0]
        rows = drawn(lengths_of(options.longest), vocabulary=vocabulary)
        launch_alone()
        world = World.start(cfg)
        try:
            found = gaps_of(make_trainer(cfg, world).policy.model, rows, orders=options.orders)
        finally:
            world.close()
        judged(
            f"{what}: noise of the check at a run's start",
            f"{found['single']:.4f} nats to rows of one sequence",
            beside=f"{found['orders']:.4f} in other orders",
            met=found["single"] <= _LIMIT / 2,
            aim=f"half of the limit, {_LIMIT}",
            **found,
        ).tell()
        Row(
            f"{what}: scored twice",
            f"{found['again']:.2g} nats",
            aim="0",
            verdict="met" if found["again"] == 0 else "missed",
        ).tell()


if __name__ == "__main__":
    main(tyro.cli(Options))
