"""Plans of pushes are made together: ranks that do not agree say so, and nothing is kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from spmdrl.config import Config
from spmdrl.model.tensor_parts import Box, Part
from spmdrl.sync import negotiation
from spmdrl.sync.buckets import StreamPlan
from spmdrl.sync.tables import LiveShards, Want
from tests.helpers.ranks import run_ranks

SHAPES = {"a": (64, 32), "b": (40,)}


def _plan(rank: int, *, shapes: dict[str, tuple[int, ...]] = SHAPES) -> StreamPlan:
    cpu = torch.device("cpu")
    world: Any = SimpleNamespace(
        cfg=Config(), rank=rank, world_size=3, control=dist.group.WORLD, wire=cpu, device=cpu
    )
    shards = {name: torch.zeros(shape) for name, shape in shapes.items()} if rank == 0 else {}
    parts = {name: Part.whole(name, shape) for name, shape in shapes.items()}
    wants = [Want(name, Box.whole(shape), torch.float32) for name, shape in shapes.items()]
    live = LiveShards(lambda: shards, parts)
    (plan,) = negotiation.make_plans([wants if rank else []], live, world=world, kind="weights")
    return plan


def _differing(folder: Path) -> tuple[int, list[str], list[str]]:
    dist.init_process_group("gloo")
    rank, sums = dist.get_rank(), negotiation.sent_sums
    nbytes, messages = _plan(rank).nbytes, []
    if rank == 0:  # as a rank that runs another version
        negotiation.sent_sums = lambda routes: sums(routes) + 1
    for shapes in (SHAPES, {"a": (64, 32), "c": (9,)} if rank == 1 else SHAPES):
        try:
            _plan(rank, shapes=shapes)
        except (RuntimeError, ValueError) as error:
            messages.append(str(error))
    dist.destroy_process_group()
    return nbytes, messages, [path.name for path in folder.rglob("*")]


def test_ranks_that_do_not_agree_say_so_on_every_rank_and_leave_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the default output_dir is below it
    for nbytes, messages, left in run_ranks(3, _differing, tmp_path):
        assert nbytes == 4 * (64 * 32 + 40)
        assert "rank 0 is to send other pieces than rank 1 awaits" in messages[0]
        assert "rank 1 finds other tensors there than rank 0" in messages[1]
        assert left == []
