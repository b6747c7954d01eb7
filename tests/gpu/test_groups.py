"""Process groups on GPUs: every rank makes the same ones, and splits none behind the others."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from spmdrl.config import Config, LayoutSettings
from spmdrl.world.groups import join_world, make_groups
from tests.gpu.cuda_world import records

LAYOUTS = [
    dict(world_size=2, trainer_ranks=1),
    dict(world_size=8, trainer_ranks=4),
    dict(world_size=8, trainer_ranks=4, tp=2, inference_tp=2),
    dict(world_size=8, trainer_ranks=6, dp_replicate=3, cp=2, inference_tp=2),
    dict(world_size=8, trainer_ranks=4, ep=4),
    dict(world_size=8, placement="colocated", tp=2, inference_tp=4),
    dict(world_size=4, placement="offline", cp=2),
]
TIMEOUT = timedelta(seconds=4321)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_makes_the_same_groups_and_splits_none(layout):
    cfg = Config(layout=LayoutSettings(**layout))

    def start(rank: int) -> None:
        device = torch.device("cuda", rank)
        join_world(
            "nccl",
            SimpleNamespace(rank=rank, world_size=cfg.layout.world_size),
            store=dist.HashStore(),
            device=device,
            timeout=TIMEOUT,
        )
        make_groups(cfg, rank=rank, device=device)

    first, *others = records(cfg.layout.world_size, start)
    assert first.made and all(other == first for other in others)
    assert not first.splits
    assert {group.timeout for group in first.made} == {TIMEOUT}, "the watchdog speaks before Watch"
