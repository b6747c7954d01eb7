"""Plans that are kept on disk: a restart plans nothing, and nothing damaged is believed."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import torch.distributed as dist
from ranks import run_ranks

from spmdrl.config import Config
from spmdrl.model.shards import Box, Part
from spmdrl.sync import describe, planning
from spmdrl.sync.live_shards import LiveShards
from spmdrl.sync.plan import StreamPlan
from spmdrl.sync.tables import Want

SHAPES = {"a": (64, 32), "b": (40,)}


def _plan(
    folder: Path, rank: int, *, shapes: dict[str, tuple[int, ...]] = SHAPES, **stream: Any
) -> StreamPlan:
    cfg = replace(Config(), output_dir=str(folder))
    cfg = replace(cfg, stream=replace(cfg.stream, **stream))
    cpu = torch.device("cpu")
    world: Any = SimpleNamespace(
        cfg=cfg, rank=rank, world_size=3, control=dist.group.WORLD, wire=cpu, device=cpu
    )
    shards = {name: torch.zeros(shape) for name, shape in shapes.items()} if rank == 0 else {}
    parts = {name: Part.whole(name, shape) for name, shape in shapes.items()}
    wants = [Want(name, Box.whole(shape), torch.float32) for name, shape in shapes.items()]
    live = LiveShards(lambda: shards, parts)
    (plan,) = planning.make_plans([wants if rank else []], live, world=world, kind="weights")
    return plan


def _starts(folder: Path) -> dict[str, Any]:
    """Plan again and again; return what was computed each time, and what was said."""
    dist.init_process_group("gloo")
    rank, said, computed = dist.get_rank(), [], []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("spmdrl").addHandler(handler)
    compute = describe.Described.routes

    def counted(self: Any, rank: int) -> Any:
        computed.append(rank)
        return compute(self, rank)

    describe.Described.routes = counted
    plans, counts = [], []
    for start in ("first", "again", "damaged", "after", "other"):
        if start == "damaged" and rank == 0:
            (path,) = (folder / "stream_plans/weights").glob("*/taken-0")
            data = bytearray(path.read_bytes())
            data[-5] ^= 1
            path.write_bytes(data)
        dist.barrier()
        before = len(computed)
        plans.append(_plan(folder, rank, bucket_bytes=2048 if start == "other" else 1024))
        counts.append(len(computed) - before)
        dist.barrier()
    alike = [
        plans[0].num_buckets == plan.num_buckets
        and all(
            numpy.array_equal(a, b)
            for side in ("sent", "taken")
            for a, b in zip(getattr(plans[0], side).columns, getattr(plan, side).columns)
        )
        for plan in plans[1:4]
    ]
    folders = [path.name for path in (folder / "stream_plans/weights").iterdir()]
    dist.destroy_process_group()
    return {"counts": counts, "said": said, "alike": alike, "folders": folders}


def test_a_restart_plans_nothing_and_a_damaged_file_is_written_anew(tmp_path):
    found = run_ranks(3, _starts, tmp_path)
    assert [one["counts"] for one in found] == [[1, 0, 0, 0, 1]] + [[1, 0, 1, 0, 1]] * 2
    assert all(one["alike"] == [True] * 3 for one in found)
    assert found[0]["said"] == []
    for one in found[1:]:  # both replicas read it
        assert len(one["said"]) == 1 and "taken-0 is damaged; planning anew" in one["said"][0]
    assert all(len(one["folders"]) == 1 for one in found), "plans of another layout are left over"


def _without_a_folder(folder: Path) -> tuple[bool, list[str]]:
    dist.init_process_group("gloo")
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("spmdrl").addHandler(handler)
    plan = _plan(folder, dist.get_rank())
    dist.destroy_process_group()
    return plan.num_buckets >= 1, said


def test_a_folder_that_cannot_be_written_is_said_and_costs_nothing_else(tmp_path):
    (tmp_path / "file").write_text("")
    for works, said in run_ranks(3, _without_a_folder, tmp_path / "file"):
        assert works and len(said) == 1 and "not kept for the next start" in said[0]


def _differing() -> list[str]:
    dist.init_process_group("gloo")
    rank, sums = dist.get_rank(), planning.sums_sent
    if rank == 0:  # as a rank that runs another version
        planning.sums_sent = lambda routes: sums(routes) + 1
    messages = []
    for shapes in (SHAPES, {"a": (64, 32), "c": (9,)} if rank == 1 else SHAPES):
        try:
            _plan(Path(f"/proc/no/{rank}"), rank, shapes=shapes)
        except (RuntimeError, ValueError) as error:
            messages.append(str(error))
    dist.destroy_process_group()
    return messages


def test_ranks_that_do_not_agree_say_so_on_every_rank():
    for messages in run_ranks(3, _differing):
        assert "rank 0 is to send other pieces than rank 1 awaits" in messages[0]
        assert "rank 1 finds other tensors there than rank 0" in messages[1]
