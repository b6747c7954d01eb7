"""A world of one rank in this process, with what a Report needs of it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spmdrl.config import Config
from spmdrl.report.report import Report
from spmdrl.types import Sums
from spmdrl.world.spans import Spans
from spmdrl.world.world import World


class FreeWatch:
    """Waits that need no watching: there is one rank."""

    def __init__(self) -> None:
        self.before_exit: list[Any] = []
        self.spans = Spans()

    @contextlib.contextmanager
    def wait(self, name: str, step: int, *, timeout_s: float | None = None) -> Iterator[None]:
        """Do nothing around the block."""
        yield

    @contextlib.contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """Keep the span of the block."""
        began = time.monotonic()
        yield
        self.spans.add(name, began, time.monotonic())

    def take_seconds(self) -> dict[str, float]:
        """Return what a start-up may have taken."""
        return {"build engine": 12.34, "create groups": 0.1}


@dataclasses.dataclass
class SmallWorld:
    """What a Report asks of a World."""

    cfg: Config
    control: Any
    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")
    tokens_per_microbatch: int = 1024
    watch: FreeWatch = dataclasses.field(default_factory=FreeWatch)
    replica: int = -1
    from_rank_0 = World.from_rank_0
    gather = World.gather


@contextlib.contextmanager
def one_rank() -> Iterator[Any]:
    """Yield a gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.fixture
def group() -> Iterator[Any]:
    """A gloo group of this process alone."""
    with one_rank() as made:
        yield made


@contextlib.contextmanager
def reporting(
    cfg: Config,
    *,
    step: int = 0,
    ending: str = "finished",
    sums: Sums | None = None,
    watch: FreeWatch | None = None,
) -> Iterator[Report]:
    """Yield a Report that was started at `step`, and close it."""
    with one_rank() as group:
        report = Report(cfg, SmallWorld(cfg, group, watch=watch or FreeWatch()))
        report.start(sums or {}, step=step)
        yield report
        report.close(ending)


def config(folder: Path, *, steps: int = 10, **report: Any) -> Config:
    """Return a Config whose output_dir is `folder`, with fields of `report` replaced."""
    cfg = Config(output_dir=str(folder), steps=steps)
    changed = dataclasses.replace(cfg.report, **({"trackers": ()} | report))
    return dataclasses.replace(cfg, report=changed)


def record_steps(report: Report, first: int, last: int, *, reward: float = 0.5) -> None:
    """Record steps [first, last) with plausible numbers."""
    for step in range(first, last):
        report.record(
            step,
            {
                "reward/mean": (reward * 512, 512),
                "rollout/response_length": (2200, 512),
                "policy/mismatch_k3": (0.9, 2200),
                "policy/entropy": (1800.0, 2200),
                "policy/clip_frac": (3, 2200),
                "perf/generated_tokens": (2200, 1),
                "policy/loss": (0.01, 1),
                "policy/skipped_updates": (0, 1),
            },
            seconds={"generate": 0.31, "update": 0.28, "push": 0.02, "await peers": 0.001},
            samples=({"prompt": "1+2=", "response": "3", "reward": 1.0},),
        )
