"""Part of `make gpu`: where the bits of a model first depend on the batch.

    python -m benchmarks.gpu.exact --shape 1b              # tiny for a rehearsal on the CPU

`engine.exact` is refused on GPUs, where none of it has run (docs/exact.md). This computes sequences
in one packed row and token by token, by the functions that it has on CPUs, and says that no bit
differs, or names the first module whose bits do.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
import tyro

from benchmarks.gpu import update
from benchmarks.gpu.rows import attempt, judged
from benchmarks.start import quick_folder
from spmdrl.config import ModelSettings
from spmdrl.tools.proof.exact_search import Dtype, first_difference, make_runner


@dataclass(frozen=True)
class Options:
    """What to run."""

    shape: Literal["tiny", "1b", "4b"] = "1b"
    device: Literal["cpu", "cuda"] = "cuda"
    limit_s: float = 60.0
    """Seconds of this process, which starts no other."""


def main(options: Options) -> None:
    """Search, and tell."""
    file_bytes = update.FILE_BYTES[options.shape]
    with tempfile.TemporaryDirectory(dir=quick_folder(file_bytes)) as scratch:
        shaped = update.Options(shape=options.shape, device=options.device)
        path = update.write_model(Path(scratch) / "model", shaped)
        for dtype in get_args(Dtype):
            what = f"bits of {options.shape} in {dtype}, alone and in a packed row"
            with attempt(what):
                settings = ModelSettings(path=str(path))
                runner = make_runner(settings, dtype=dtype, device=torch.device(options.device))
                found = first_difference(runner, runner)
                judged(what, found or "no difference", met=not found, aim="no difference").tell()


if __name__ == "__main__":
    main(tyro.cli(Options))
