"""Part of `make gpu`: benchmarks/stream.py on GPUs, as rows.

python -m benchmarks.gpu.push                                 # one GPU: against a plain copy
python -m benchmarks.gpu.push --ranks 2                       # split: against one all-to-all
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
import tyro

from benchmarks.gpu.rows import Clock, Row, attempt, judged
from benchmarks.start import torchrun
from spmdrl.world.machine.hardware import Gpu, known_gpu

ENGINE_FRAC = 0.4
"""Of the GPU's memory. On one GPU of 80 GB, of which 79 GiB are seen, with 2 GB of weights:

    engine           31.6 GiB   0.4 of 79
    trainer          11.2 GiB   12 bytes a weight: masters and two moments, in float32
    plain copy        3.7 GiB   its two buffers
    two buckets       1.0 GiB   512 MiB each at most; on one GPU none
    CUDA, workspace   3.0 GiB
    all              50.5 GiB

An update, which would need gradients and activations, is never taken.
"""

_AIM_ON_ONE = 0.45
"""Of a plain copy. float32 masters are read and bfloat16 weights written: 6 bytes for the 4 of the
copy, which is 2.2 ms for 1.5 on an H100; and the host takes about 1 ms of a push."""
_AIM_OF_MESSAGES = 0.7
"""Of a plain all-to-all: 6.7 ms over NVLink, beside which the first bucket has to be packed, the
last one unpacked, and the host takes its millisecond."""


@dataclass(frozen=True)
class Options:
    """What to run."""

    ranks: int = 1
    megabytes: int = 2000
    hidden: int = 4096
    """Width of the model: 6 layers are 2 GB. A narrow model of as many bytes has a hundred, and
    pushes many small tensors."""
    limit_s: float = 70.0
    """Seconds of this process; see `rows.Clock`."""


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
    clock = Clock(options.limit_s)
    where = f"{options.ranks} GPUs" if options.ranks > 1 else "one GPU"
    with attempt(f"push on {where}"):
        words = ["--megabytes", str(options.megabytes), "--hidden", str(options.hidden)]
        words += ["--engine-frac", str(ENGINE_FRAC), "--eager"]
        words += ["--placement", "colocated"] if options.ranks == 1 else []
        words += ["--trainer-ranks", str(max(1, options.ranks // 2))]
        printed = torchrun(options.ranks, "benchmarks/stream.py", *words, timeout_s=clock.left_s)
        found = json.loads(next(x for x in printed.splitlines() if x.startswith('{"megabytes')))
        aim = _AIM_ON_ONE if options.ranks == 1 else _AIM_OF_MESSAGES
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
