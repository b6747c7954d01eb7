"""Small exchanges between ranks: objects and bytes gathered, problems agreed on."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from spmdrl.errors import Refusal
from spmdrl.world.torch_internals import all_gather_single


def gather_objects(value: Any, *, group: dist.ProcessGroup) -> list[Any]:
    """Return every rank's small picklable value, in rank order of `group` (a gloo group)."""
    payload = pickle.dumps(value)
    return list(
        map(pickle.loads, gather_bytes(payload, gather_sizes(payload, group=group), group=group))
    )


def gather_problems(own: Sequence[str], *, group: dist.ProcessGroup) -> list[str]:
    """Return what is wrong on any rank of `group` (gloo), equal on all of them; [] for nothing.

    Each text stands there once, with the first rank that gave it, or by itself when rank 0 has
    given all of them.
    """
    gathered = gather_objects(list(own), group=group)
    first_rank: dict[str, int] = {}
    for rank, texts in enumerate(gathered):
        for text in texts:
            first_rank.setdefault(text, rank)
    if not any(first_rank.values()):
        return list(first_rank)
    return [f"rank {rank}: {text}" for text, rank in first_rank.items()]


@contextlib.contextmanager
def agree(
    *,
    group: dist.ProcessGroup,
    kind: type[Exception] = Refusal,
    waiting: AbstractContextManager = contextlib.nullcontext(),
) -> Iterator[None]:
    """Let a block of each rank's own work succeed on all ranks of `group` (gloo), or on none.

    Args:
        kind: what the block may raise. Anything else ends this rank at once.
        waiting: entered for the exchange after the block, e.g. a named wait of Watch.
    Raises: `kind` on every rank when any block raised it: what the first of them said.
    """
    own = None
    try:
        yield
    except kind as error:
        own = error
    with waiting:
        texts = gather_objects(None if own is None else str(own), group=group)
    for rank, text in enumerate(texts):
        if text is not None:
            raise kind(f"rank {rank}: {text}" if rank else text) from own


def gather_sizes(payload: bytes, *, group: dist.ProcessGroup) -> list[int]:
    """Return the length of every rank's payload: the first half of a gather, which waits."""
    sizes = torch.empty(dist.get_world_size(group), dtype=torch.int64)
    all_gather_single(sizes, torch.tensor([len(payload)]), group=group)
    return sizes.tolist()


def gather_bytes(payload: bytes, sizes: Sequence[int], *, group: dist.ProcessGroup) -> list[bytes]:
    """Return every rank's payload, in rank order of `group`: the second half of a gather."""
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    gathered = torch.empty(len(sizes) * max(sizes), dtype=torch.uint8)
    all_gather_single(gathered, padded, group=group)
    return [row[:size].numpy().tobytes() for row, size in zip(gathered.chunk(len(sizes)), sizes)]


def bytes_from(rank: int, payload: bytes, *, group: dist.ProcessGroup) -> bytes:
    """Return on every rank of `group` (gloo) the bytes, at least one, that one of them has.

    Args:
        rank: in `group`.
        payload: read there alone.
    """
    size = torch.tensor(len(payload))
    dist.broadcast(size, group=group, group_src=rank)
    data = torch.empty(int(size), dtype=torch.uint8)
    if dist.get_rank(group) == rank:
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=rank)
    return data.numpy().tobytes()
