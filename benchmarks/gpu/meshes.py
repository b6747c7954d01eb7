"""Part of `make gpu`, for several GPUs: one update on each mesh against one CPU process in float32.

python -m benchmarks.gpu.meshes --ranks 2
python -m benchmarks.gpu.meshes --ranks 2 --device cpu        # a rehearsal
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks.gpu import parity
from benchmarks.gpu.rows import Clock, attempt, read_rows
from benchmarks.start import torchrun
from spmdrl.tools.commands.create_model import create_model
from spmdrl.world.launch import read_launch

_NEEDS_S, _MOST_S = 25.0, 90.0  # of one mesh


@dataclass(frozen=True)
class Options:
    """What to run."""

    ranks: int = 2
    device: str = "cuda"
    mesh: str = ""
    """One mesh alone, in ranks that a launcher started: what the parent runs."""
    folder: Path = Path()
    only: tuple[str, ...] = ()
    """Names of meshes; empty: all."""
    limit_s: float = 300.0
    """Seconds of this process; see `rows.Clock`."""


def meshes(ranks: int) -> dict[str, tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return {name: (architecture, layout, settings of the model)}."""
    cp, tp = {"cp": ranks}, {"tp": ranks}
    own: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "fsdp": ("qwen3", {}, {}),
        "fsdp, bfloat16": ("qwen3", {}, {"compute_dtype": "bfloat16"}),
        "tp": ("qwen3", tp, {}),
        "ep": ("qwen3_moe", {"ep": ranks}, {}),
        "ulysses": ("qwen3", cp, _context("ulysses")),
        "gather": ("qwen3", cp, _context("gather")),
        "ring": ("qwen3", cp, _context("ring")),
        "ring, bfloat16": ("qwen3", cp, _context("ring") | {"compute_dtype": "bfloat16"}),
    }
    if ranks >= 4:
        own |= {
            "cp 2 x tp 2": ("qwen3", {"cp": 2, "tp": 2}, {}),
            "hsdp": ("qwen3", {"dp_replicate": 2}, {}),
            "ep x tp 2": ("qwen3_moe", {"ep": ranks, "tp": 2}, {}),
        }
    return own


def _context(method: str) -> dict[str, Any]:
    return parity._kernels(context=method)


def child(options: Options) -> None:
    """Compute one mesh in this rank; the first rank tells how it compares."""
    architecture, layout, model = meshes(options.ranks)[options.mesh]
    cfg = parity.config_of(
        options.folder / architecture, options.device, {"compute_dtype": "float32"} | model,
        world_size=options.ranks, **layout,
    )  # fmt: skip
    found = parity.update(cfg)
    right = torch.load(options.folder / f"{architecture}.pt", weights_only=False)
    if read_launch().rank == 0:
        parity.tell(
            f"{options.mesh} of {options.ranks} ranks", found, right,
            is_float32=cfg.model.compute_dtype == "float32",
        )  # fmt: skip


def main(options: Options) -> None:
    """Compute the references, then every mesh."""
    if options.mesh:
        return child(options)
    clock = Clock(options.limit_s)
    with tempfile.TemporaryDirectory() as scratch:
        for architecture in ("qwen3", "qwen3_moe"):
            folder = create_model(
                Path(scratch) / architecture, architecture=architecture, hidden_size=256, heads=8,
                kv_heads=8, intermediate=512, initializer_std=256**-0.5,
            )  # fmt: skip
            plain = parity.PLAIN | {"compute_dtype": "float32"}
            torch.save(
                parity.update(parity.config_of(folder, "cpu", plain)), folder.with_suffix(".pt")
            )
        for mesh in options.only or meshes(options.ranks):
            what = f"{mesh} of {options.ranks} ranks"
            if not clock.has(_NEEDS_S, what=what):
                continue
            with attempt(what):
                words = ("-m", "benchmarks.gpu.meshes", "--mesh", mesh, "--folder", scratch)
                words += ("--ranks", str(options.ranks), "--device", options.device)
                printed = torchrun(options.ranks, *words, timeout_s=min(_MOST_S, clock.left_s))
                for row in read_rows(printed):
                    row.tell()


if __name__ == "__main__":
    main(tyro.cli(Options))
