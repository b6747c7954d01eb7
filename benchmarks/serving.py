"""Measure how much a flood of other programs' requests slows a run that answers them.

    python benchmarks/serving.py
    python benchmarks/serving.py --engine transformers --places 4 32

configs/demo_grpo.yaml on a model of its shape, one rank that trains and generates, exact. Runs
without an endpoint, and with one of so many places and a flood: 32 threads that ask again as soon
as they are answered. Prints the means of the steps from the third on.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.start import ROOT, as_flags, header, row, steps_of, torchrun

CLIENTS = 32
FLAGS = {
    "config": "configs/demo_grpo.yaml",
    "layout.placement": "colocated",
    "layout.world-size": 1,
    "lag": 0,
    "algorithm.correction": "none",
    "engine.exact": "true",
    "engine.max-num-seqs": 64,
    "batch.prompts-per-step": 16,
    "sampling.max-response-tokens": 32,
    "evaluate.every-steps": 0,
    "report.trackers": "[]",
}


@dataclass(frozen=True)
class Options:
    """What to measure."""

    places: tuple[int, ...] = (0, 4, 32, 0, 4, 32)
    """Values of rollout.serve, one run each; 0: no endpoint and no flood."""
    steps: int = 10
    engine: Literal["vllm", "transformers"] = "vllm"


def flood(access_file: Path, has_ended: threading.Event) -> None:
    """Ask again and again until the run has ended."""
    body = {"prompt": "12+34=", "max_tokens": 32}
    while not has_ended.is_set():
        with contextlib.suppress(OSError, ValueError, httpx.HTTPError):
            access = json.loads(access_file.read_text())
            key = {"Authorization": f"Bearer {access['api_key']}"}
            with httpx.Client(headers=key, timeout=60) as client:
                while not has_ended.is_set():
                    client.post(f"{access['base_url']}/completions", json=body)
        time.sleep(0.05)


def measure(folder: Path, out: Path, places: int, options: Options) -> None:
    """Run once and print a row."""
    flags = FLAGS | {
        "model.path": folder,
        "output-dir": out,
        "steps": options.steps,
        "engine.kind": options.engine,
        "rollout.serve": places,
    }
    has_ended = threading.Event()
    of_flood = (out / "serve" / "replica_0.json", has_ended)
    threads = [
        threading.Thread(target=flood, args=of_flood) for _ in range(CLIENTS if places else 0)
    ]
    for thread in threads:
        thread.start()
    try:
        torchrun(1, ROOT / "train.py", *as_flags(flags), timeout_s=600)
    finally:
        has_ended.set()
        for thread in threads:
            thread.join()
    _, means = steps_of((out / "metrics.jsonl").read_text(), first=2)
    names = ("perf/step_s", "time/generate", "serve/engine_s", "serve/requests", "serve/tokens")
    row(places, *(f"{means.get(name, 0):.3g}" for name in names))


def main(options: Options) -> None:
    """Measure each number of places."""
    from spmdrl.tools.commands.create_model import create_model

    header("places", "step s", "generate s", "engine s", "requests a step", "tokens a step")
    with tempfile.TemporaryDirectory() as name:
        model = create_model(Path(name) / "model", initializer_std=0.2)
        for number, places in enumerate(options.places):
            measure(model, Path(name) / f"run_{number}", places, options)


if __name__ == "__main__":
    main(tyro.cli(Options))
