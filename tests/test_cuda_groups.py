"""Process groups on GPUs: every rank makes the same ones, and splits none behind the others."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cuda_world import records

from spmdrl.config import Config, LayoutSettings
from spmdrl.world.groups import join_world, make_groups
from spmdrl.world.torch_internals import drop_group, make_group

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


def test_a_group_beside_the_world_is_nccl_s_between_gpus(monkeypatch) -> None:
    """What torch's NCCL is asked to do: no GPU is here to do it."""
    asked: list[tuple] = []

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, store: dist.Store, rank: int, size: int, options: SimpleNamespace):
            asked.append((rank, size, options._timeout))

        def eager_connect_single_device(self, device: torch.device) -> None:
            asked.append(("connect", device))

        def _set_sequence_number_for_group(self) -> None:
            pass

    class Group:
        BackendType = SimpleNamespace(NCCL="nccl")

        def __init__(self, *place: object):
            pass

        def name(self) -> str:
            return "nccl"

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *given: asked.append((name, *given))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(dist, "ProcessGroup", Group)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    device, within = torch.device("cuda", 1), timedelta(seconds=7)
    group = make_group(
        dist.HashStore(),
        members=[0, 3],
        own=3,
        name="x",
        device=device,
        backend="nccl",
        meet_within=within,
    )
    assert asked[:2] == [(1, 2, within), ("connect", device)]
    assert ("_register_backend", device, "nccl") in [one[:3] for one in asked]
    drop_group(group)
    assert asked[-1] == ("abort",)
    assert group not in dist.distributed_c10d._world.pg_map
