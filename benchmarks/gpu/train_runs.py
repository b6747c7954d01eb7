"""Part of `make gpu`: train.py itself, with tiny models, from its start to exit status 0.

    python -m benchmarks.gpu.train_runs --case grpo          # or moe, replay, deepseek, shared, ...

Each case makes a random model, runs a few steps with every push checked by checksums, and reads
what the run wrote: the probe's gap, that memory after each wake is flat, how long a step took.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.gpu.rows import Clock, attempt, judged
from benchmarks.start import as_flags, torchrun
from spmdrl.tools.commands.create_model import create_model

_FLAT_GIB = 0.1  # by how much memory after a wake may grow over the steps


@dataclass(frozen=True)
class Case:
    """One run of train.py."""

    flags: dict[str, Any]
    """Over those of all cases; None takes one out."""
    architecture: str = "qwen3"
    ranks: int = 1
    hidden: int = 256
    heads: int = 4
    resumes: bool = False
    """Ends half-way and starts again."""


def _split(trainers: int, world: int, **flags: Any) -> dict[str, Any]:
    own = {"layout.placement": "split", "layout.trainer-ranks": trainers, "lag": 1}
    return own | {"layout.world-size": world} | flags


EAGER = "{enforce_eager: true}"
"""For cases that others show with CUDA graphs: an engine starts half a minute sooner without."""
SHARED = {"layout.backend": "gloo", "engine.gpu-memory-frac": 0.3}
CASES = {
    "grpo": Case({}),
    "moe": Case({}, "qwen3_moe"),
    "replay": Case({"model.moe.replay": "true"}, "qwen3_moe"),
    # Kernels for latent attention have one width of a head, 576: of hidden / 2, and half of 128.
    "deepseek": Case(
        {"stream.mode": "auto", "engine.options": EAGER}, "deepseek_v3", hidden=1024, heads=8
    ),
    "lora": Case({"model.lora.rank": 8, "model.lora.push": "adapter"}),
    "resumed": Case({"batch.tokens-per-microbatch": 0, "engine.options": EAGER}, resumes=True),
    "transformers": Case({"engine.kind": "transformers", "stream.mode": "auto"}),
    "dpo": Case(
        {
            "layout.placement": "offline",
            "algorithm.objective": "preference",
            "algorithm.loss": "dpo",
            "algorithm.correction": None,
            "model.reference.cache": "true",
            "data.train": "task:addition_pairs",
        }
    ),
    # A trainer and an engine on one GPU, which NCCL refuses: messages go through the host.
    "shared": Case(_split(1, 2) | SHARED, ranks=2),
    "split": Case(_split(1, 2), ranks=2),
    "colocated_tp": Case({"layout.world-size": 2, "layout.inference-tp": 2}, ranks=2),
    "split_tp": Case(_split(2, 4, **{"layout.inference-tp": 2}), ranks=4),
    "hsdp": Case({"layout.world-size": 4, "layout.dp-replicate": 2}, ranks=4),
    "split_8": Case(_split(4, 8, **{"layout.tp": 2, "layout.inference-tp": 2}), ranks=8),
    "experts_8": Case({"layout.world-size": 8, "layout.ep": 4}, "qwen3_moe", ranks=8),
}
"""{name: what is run}; several ranks want as many GPUs, `shared` one."""


@dataclass(frozen=True)
class Options:
    """What to run."""

    case: str
    device: str = "cuda"
    steps: int = 5
    limit_s: float = 150.0
    """Seconds of this process; see `rows.Clock`."""


def flags_of(case: Case, options: Options, *, model: Path, out: Path) -> dict[str, Any]:
    """Return the config's fields that a case sets."""
    on_cpu = options.device == "cpu"
    own = {
        "output-dir": out,
        "steps": options.steps,
        "layout.placement": "colocated",
        "layout.world-size": 1,
        "layout.device": options.device,
        "model.path": model,
        "model.compute-dtype": "float32" if on_cpu else "bfloat16",
        "data.train": "task:addition",
        "data.size": 1000,
        "data.max-prompt-tokens": 16,
        "batch.prompts-per-step": 8,
        "batch.group-size": 4,
        "batch.tokens-per-microbatch": 2048,
        "sampling.max-response-tokens": 8,
        "algorithm.correction": "tis",
        "engine.dtype": "float32" if on_cpu else "bfloat16",
        "engine.gpu-memory-frac": 0.4,
        "engine.cpu-kv-cache-gib": 0.1,
        "engine.max-num-seqs": 32,
        "stream.mode": "traced",
        "stream.verify-every": 1,
        "report.trackers": [],
    }
    return {name: value for name, value in (own | case.flags).items() if value is not None}


def steps_of(out: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def tell(name: str, rows: list[dict[str, Any]], *, seconds: float, steps: int) -> None:
    """Print what a run came to."""
    gaps = [row["sync/probe_gap"] for row in rows if "sync/probe_gap" in row]
    trained = [row for row in rows if "policy/loss" in row]
    judged(
        f"{name}: to the end, exit status 0, every push checked",
        f"{len(trained)} steps in {seconds:.0f} s with start-up",
        met=len(trained) == steps,
        aim=f"{steps} steps",
        seconds=seconds,
        step_s=[row.get("perf/step_s") for row in trained],
    ).tell()
    if gaps:
        judged(
            f"{name}: engine against trainer, before the first step",
            f"{gaps[0]:.5f} nats in the mean",
            met=gaps[0] < 0.02,
            aim="0.02",
            gaps=gaps,
        ).tell()
    drift = [row["policy/mismatch_k3"] for row in trained if "policy/mismatch_k3" in row]
    if drift:
        judged(
            f"{name}: engine against trainer, over the steps",
            f"k3 {min(drift):.2e} to {max(drift):.2e}",
            met=max(drift) < 0.01,
            aim="0.01",
            k3=drift,
        ).tell()
    awake = [row["mem/after_wake_gib"] for row in trained if "mem/after_wake_gib" in row]
    if len(awake) > 1:
        judged(
            f"{name}: memory after each wake",
            f"{awake[0]:.2f} to {awake[-1]:.2f} GiB",
            met=abs(awake[-1] - awake[1 if len(awake) > 2 else 0]) < _FLAT_GIB,
            aim="flat",
            gib=awake,
        ).tell()


def main(options: Options) -> None:
    """Run one case and tell what it came to."""
    case = CASES[options.case]
    clock = Clock(options.limit_s)
    with tempfile.TemporaryDirectory() as scratch, attempt(options.case):
        model = create_model(
            Path(scratch) / "model", architecture=case.architecture, hidden_size=case.hidden,
            heads=case.heads, initializer_std=case.hidden**-0.5,
        )  # fmt: skip
        out = Path(scratch) / "run"
        flags = flags_of(case, options, model=model, out=out)
        began = time.monotonic()
        halves = (options.steps // 2, options.steps)
        for steps in halves if case.resumes else halves[1:]:
            asked = as_flags(flags | {"steps": steps})
            torchrun(case.ranks, "train.py", *asked, timeout_s=clock.left_s)
        tell(options.case, steps_of(out), seconds=time.monotonic() - began, steps=options.steps)


if __name__ == "__main__":
    main(tyro.cli(Options))
    sys.stdout.flush()
