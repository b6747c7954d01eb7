"""Small exchanges between ranks: values and bytes gathered, problems agreed on.

A message is plain data, with a MAC from the job's secret, the group, the number of the message and
the rank. Each exchange first compares the name and step of the wait that the ranks are in. If an
edit of train.py sent ranks to different lines, it names these lines, and no message is mixed up.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from spmdrl.errors import Refusal, users_place
from spmdrl.plain import pack, unpack
from spmdrl.world.launch import SECRET
from spmdrl.world.lost_peers.place import WAIT, names_of
from spmdrl.world.secret import MARK_BYTES, Unauthentic, is_marked, mark
from spmdrl.world.torch_internals import all_gather_single

_MOST_BYTES = 1 << 40
_GREETING = struct.Struct("<qq48s")  # bytes to come, step and name of the wait
_SIZE_BYTES = 8
_PLACE_BYTES = 512
_turns: Counter[str] = Counter()
"""Messages so far in each group, the same number on all its ranks."""


def gather_objects(value: Any, *, group: dist.ProcessGroup) -> list[Any]:
    """Return every rank's small value (see plain.py), in rank order of `group` (gloo)."""
    payload = pack(value)
    sizes = gather_sizes(payload, group=group)
    return list(map(unpack, gather_bytes(payload, sizes, group=group)))


def gather_problems(own: Sequence[str], *, group: dist.ProcessGroup) -> list[str]:
    """Return the problems of all ranks of `group` (gloo), the same list on each; [] for none.

    Equal texts are returned once, with the first rank that has them. If rank 0 has all of them,
    no rank is named.
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
    """Make a block of local work succeed on all ranks of `group` (gloo), or fail on all.

    Args:
        kind: error that is passed to all ranks. Any other error is raised at once on this rank.
        waiting: entered for the exchange after the block, e.g. a named wait of Watch.
    Raises: `kind` on every rank if any block raised it, with the message of the first rank.
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
    """Wait for all ranks of `group`, and return the length of each one's payload.

    This is the first half of a gather; `gather_bytes` is the second.

    Raises: Refusal on all ranks, with the place of each, if they are in different waits or steps.
    """
    name, step = WAIT.get()
    greeting = _GREETING.pack(len(payload), step, name.encode())
    rows = list(_gather_rows(greeting, [_GREETING.size] * group.size(), group=group))
    if len({row[_SIZE_BYTES:] for row in rows}) > 1:
        place = f"{socket.gethostname()}: {users_place()}".encode(errors="replace")
        sizes = [_PLACE_BYTES] * len(rows)
        places = list(_gather_rows(place[:_PLACE_BYTES], sizes, group=group))
        raise Refusal(_apart(rows, places, group=group))
    return [_GREETING.unpack(row)[0] for row in rows]


def await_all(*, group: dist.ProcessGroup) -> None:
    """Wait until every rank of `group` (gloo) is here. Raises: as `gather_sizes`."""
    gather_sizes(b"", group=group)


def any_of(own: bool, *, group: dist.ProcessGroup) -> bool:
    """Return on every rank of `group` (gloo) whether `own` is true on any of them.

    Raises: as `gather_sizes`.
    """
    return any(gather_sizes(b"1" * own, group=group))


def _gather_rows(own: bytes, sizes: Sequence[int], *, group: dist.ProcessGroup) -> Iterator[bytes]:
    """Yield `sizes[rank]` bytes of each rank, in rank order; zeros follow what is shorter."""
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    gathered = torch.empty(len(sizes) * len(padded), dtype=torch.uint8)
    all_gather_single(gathered, padded, group=group)
    for row, size in zip(gathered.chunk(len(sizes)), sizes):
        yield row[:size].numpy().tobytes()


def _apart(rows: Sequence[bytes], places: Sequence[bytes], *, group: dist.ProcessGroup) -> str:
    """Return where each rank is; ranks at the same place share an entry."""
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    for rank, (row, place) in enumerate(zip(rows, places)):
        _, step, name = _GREETING.unpack(row)
        host, _, line = place.rstrip(b"\0").decode(errors="replace").partition(": ")
        at = f"at `{name.rstrip(bytes(1)).decode(errors='replace')}` of step {step}"
        ranks_of.setdefault((host, f"{at} ({line})"), []).append(dist.get_global_rank(group, rank))
    return (
        "ranks wait at different lines: "
        + ", ".join(f"{names_of(ranks)} ({host}) {at}" for (host, at), ranks in ranks_of.items())
        + ". Every rank must execute each line of train.py that is marked `# all` or `# trainers`, "
        "in one order: take it out of the condition, or the loop, that differs between ranks"
    )


def gather_bytes(payload: bytes, sizes: Sequence[int], *, group: dist.ProcessGroup) -> list[bytes]:
    """Return every rank's payload, in rank order of `group`.

    Args:
        sizes: what `gather_sizes` returned.
    Raises: Unauthentic naming a rank whose payload has no valid MAC.
    """
    place = _next_place(group)
    for rank, size in enumerate(sizes):
        if not 0 <= size <= _MOST_BYTES:
            raise Unauthentic(_refusal(rank, f"{size} bytes are announced", group))
    if len(sizes) == 1:
        return [payload]
    own = mark(f"{place} {group.rank()}", payload) + payload
    rows = _gather_rows(own, [MARK_BYTES + size for size in sizes], group=group)
    return [_checked(row, rank, place=place, group=group) for rank, row in enumerate(rows)]


def bytes_from(rank: int, payload: bytes, *, group: dist.ProcessGroup) -> bytes:
    """Send the bytes (at least one) of one rank to every rank of `group` (gloo).

    Args:
        rank: in `group`.
        payload: read on that rank only.
    """
    place = _next_place(group)
    own = b""
    if group.rank() == rank:
        own = mark(f"{place} {rank}", payload) + payload
    size = torch.tensor(len(own))
    dist.broadcast(size, group=group, group_src=rank)
    if not MARK_BYTES < int(size) <= _MOST_BYTES:
        raise Unauthentic(_refusal(rank, f"{int(size)} bytes are announced", group))
    data = torch.empty(int(size), dtype=torch.uint8)
    if own:
        data = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=rank)
    return _checked(data.numpy().tobytes(), rank, place=place, group=group)


def _next_place(group: dist.ProcessGroup) -> str:
    _turns[group.group_name] += 1
    return f"{group.group_name} {_turns[group.group_name]}"


def _checked(marked: bytes, rank: int, *, place: str, group: dist.ProcessGroup) -> bytes:
    mac = marked[:MARK_BYTES]
    payload = marked[MARK_BYTES:]
    if not is_marked(f"{place} {rank}", payload, mac):
        raise Unauthentic(_refusal(rank, "its message bears no mark of the job's secret", group))
    return payload


def _refusal(rank: int, why: str, group: dist.ProcessGroup) -> str:
    return (
        f"a message of rank {dist.get_global_rank(group, rank)} is refused: {why}. Either "
        "a process that is not of this job has taken its place (keep the job's ports to its nodes, "
        f"see docs/security.md), or {SECRET} differs between nodes"
    )
