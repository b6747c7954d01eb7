"""A job of GPUs as one process can play it: every rank's group creation, recorded.

The groups are torch's fake ones, which exchange nothing. What is recorded is what would block on a
GPU: each group that is made, and each part that a rank takes in a split of the communicator of all
ranks. NCCL splits in lockstep: the ranks' records must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore


class Made(NamedTuple):
    """A group that was made, its members or not."""

    backend: str
    ranks: tuple[int, ...]
    timeout: timedelta


class Record(NamedTuple):
    """What one rank did, in order."""

    made: list[Made]
    splits: list[str]


class _Nccl:
    """The backend of the group of all ranks, as far as splitting goes."""

    supports_splitting = True

    def __init__(self, splits: list[str]):
        self._splits = splits

    def perform_nocolor_split(self, device: torch.device) -> None:
        self._splits.append("split")


@contextmanager
def _played(rank: int, world_size: int) -> Iterator[Record]:
    record, helper = Record([], []), c10d._new_process_group_helper
    start = dist.init_process_group

    def init(backend: str, *, device_id: torch.device | None = None, **others: Any) -> None:
        start("fake", store=FakeStore(), rank=rank, world_size=world_size)
        c10d._get_default_group().bound_device_id = device_id

    def make(size: int, own: int, ranks: list[int], backend: str, *args: Any, **kwargs: Any) -> Any:
        if not ranks:  # the group of all ranks itself
            return helper(size, own, ranks, backend, *args, **kwargs)
        is_nccl, is_bound = backend != "gloo", c10d._get_default_group().bound_device_id
        record.made.append(Made("nccl" if is_nccl else backend, tuple(ranks), kwargs["timeout"]))
        if rank in ranks and is_nccl and is_bound:
            record.splits.append("split")
        kwargs.pop("device_id", None)  # fake groups have none
        return helper(size, own, ranks, c10d.Backend("fake"), *args, **kwargs)

    with (
        mock.patch.object(dist, "init_process_group", init),
        mock.patch.object(c10d, "_new_process_group_helper", make),
        mock.patch.object(c10d, "_get_split_source", lambda group: _Nccl(record.splits)),
        mock.patch.object(c10d, "default_pg_timeout", c10d.default_pg_timeout),
        mock.patch.object(c10d, "default_pg_nccl_timeout", c10d.default_pg_nccl_timeout),
    ):
        try:
            yield record
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def records(world_size: int, start: Callable[[int], object]) -> list[Record]:
    """Return what each rank of a world did in `start(rank)`."""
    found = []
    for rank in range(world_size):
        with _played(rank, world_size) as record:
            start(rank)
        found.append(record)
    return found
