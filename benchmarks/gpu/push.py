"""Part of `make gpu`: benchmarks/stream.py on GPUs, as rows.

python -m benchmarks.gpu.push                                 # one GPU: against a plain copy
python -m benchmarks.gpu.push --ranks 2                       # split: against one all-to-all
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import tyro

from benchmarks.gpu.rows import attempt, judged
from benchmarks.start import torchrun


@dataclass(frozen=True)
class Options:
    """What to run."""

    ranks: int = 1
    megabytes: int = 2000
    timeout_s: float = 150.0


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


if __name__ == "__main__":
    main(tyro.cli(Options))
