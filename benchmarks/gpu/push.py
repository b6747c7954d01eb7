"""Part of `make gpu`: benchmarks/stream.py on GPUs, as rows.

python -m benchmarks.gpu.push                                 # one GPU: against a plain copy
python -m benchmarks.gpu.push --ranks 2                       # split: against one all-to-all
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
import tyro

from benchmarks.gpu.rows import Row, attempt, judged
from benchmarks.start import torchrun
from spmdrl.world.machine.hardware import Gpu, known_gpu


@dataclass(frozen=True)
class Options:
    """What to run."""

    ranks: int = 1
    megabytes: int = 2000
    timeout_s: float = 150.0


def link_row(plain_gb_per_s: float, *, senders: int, gpu: Gpu) -> Row:
    """Return the share of a link within a node that one plain all-to-all reaches.

    Args:
        plain_gb_per_s: of all senders together, each of which has its own link.
    """
    share = plain_gb_per_s * 1e9 / senders / gpu.node_bytes_per_s
    what = f"link of {gpu.name} within a node"
    numbers = {"kind": "link_frac", "link_frac": share}
    return Row(what, f"{share:.2f} of {gpu.node_bytes_per_s / 1e9:g} GB/s", numbers=numbers)


def main(options: Options) -> None:
    """Run it and tell its figures."""
    where = f"{options.ranks} GPUs" if options.ranks > 1 else "one GPU"
    with attempt(f"push on {where}"):
        words = ["--megabytes", str(options.megabytes)]
        words += ["--placement", "colocated"] if options.ranks == 1 else []
        words += ["--trainer-ranks", str(max(1, options.ranks // 2))]
        printed = torchrun(
            options.ranks, "benchmarks/stream.py", *words, timeout_s=options.timeout_s
        )
        found = json.loads(next(x for x in printed.splitlines() if x.startswith('{"megabytes')))
        # float32 masters are read and bfloat16 written: 6 bytes for the 4 of the copy.
        aim = 0.6 if options.ranks == 1 else 0.8
        judged(
            f"push of {found['gigabytes']:.2f} GB on {where}",
            f"{found['push_gb_per_s']:.1f} GB/s, {found['ratio']:.2f} of plain",
            beside=f"{found['plain_gb_per_s']:.1f} GB/s",
            met=found["ratio"] >= aim,
            aim=f"{aim} of it",
            **found,
        ).tell()
        gpu = known_gpu(torch.cuda.get_device_name()) if found["device"] == "cuda" else None
        if gpu and options.ranks > 1:
            link_row(found["plain_gb_per_s"], senders=options.ranks // 2, gpu=gpu).tell()


if __name__ == "__main__":
    main(tyro.cli(Options))
