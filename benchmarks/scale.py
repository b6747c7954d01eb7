"""Measure what grows with the ranks of a job: plans that every rank makes, and the job's store.

    python benchmarks/scale.py                  # all sections, some minutes on two cores
    python benchmarks/scale.py --sections plan

Plans are functions, timed on one core. The store is a real one in a process of its own; its
clients are what the ranks of a job run, many to a process. How much it bears is counted by its own
processor time, which other load on the machine does not change.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from job_store import PROCESSES, CountedStore, Host, clients, connect, connect_all
from start import header, row

from spmdrl.data.microbatch_plan import Partition, partition
from spmdrl.rollout.balance import deal
from spmdrl.rollout.book import Book, BookRules, Move, SharedBook
from spmdrl.rollout.staleness import make_rules
from spmdrl.world.lost_peers.watch import Watch
from spmdrl.world.sealed_store import WatchedKeys

_BUDGET = 32768
_QUADRATIC_TOKENS = 24576


@dataclass(frozen=True)
class Options:
    """What to run."""

    sections: tuple[str, ...] = ("plan", "stream", "store", "beats", "announcements", "book")
    ranks: int = 1024
    """Of the job whose store it is."""
    replicas: int = 256
    """Of its engine, in the sections on announcements and the book."""
    groups: int = 2048
    """Of a step, in the section on the book."""
    seconds: float = 20.0
    """Of heartbeats."""


def main(options: Options) -> None:
    """Print the table of each section that is asked for."""
    print(f"torch {torch.__version__}, {os.cpu_count()} cores")
    torch.set_num_threads(1)
    for name in options.sections:
        print(f"\n## {name}\n", flush=True)
        SECTIONS[name](options)


# --------------------------------------------------------------------------- micro-batches


def plan(options: Options) -> None:
    """Print time and balance of the plan of micro-batches."""
    figures = ("ms", "micro-batches", "busiest rank", "lockstep", "least possible")
    header("sequences", "dp ranks", "updates", "median tokens", *figures)
    for count, dp_size, updates, median in (
        (8192, 64, 1, 2000),
        (8192, 64, 4, 2000),
        (65536, 512, 1, 2000),
        (8192, 256, 4, 2000),
        (8192, 256, 4, 5000),
        (16384, 256, 4, 3000),
    ):
        lengths = _lognormal(count, median=median)
        group_ids = torch.arange(count) // 8
        began = time.thread_time()
        found = partition(
            lengths,
            group_ids=group_ids,
            dp_size=dp_size,
            tokens_per_microbatch=_BUDGET,
            num_updates=updates,
        )
        ms = 1000 * (time.thread_time() - began)
        balances = [
            _balance(lengths, found, update=update, dp_size=dp_size) for update in range(updates)
        ]
        most = max(found.num_microbatches)
        shares = (f"{max(column):.3f}" for column in zip(*balances))
        row(count, dp_size, updates, median, f"{ms:.0f}", most, *shares)


def _lognormal(count: int, *, median: int) -> torch.Tensor:
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (median * drawn.exp()).long().clamp(16, 30000)


def _balance(
    lengths: torch.Tensor, found: Partition, *, update: int, dp_size: int
) -> tuple[float, float, float]:
    """Return the cost of the busiest rank, of the slowest of each round added up, and the least
    that this can be with so many micro-batches: in shares of the mean rank's."""
    own, count = found.update_ids == update, found.num_microbatches[update]
    costs = (lengths + lengths.double() ** 2 / _QUADRATIC_TOKENS)[own]
    places = found.microbatch_ids[own] * dp_size + found.dp_ids[own]
    tokens = torch.zeros(count * dp_size, dtype=torch.int64).index_add(0, places, lengths[own])
    assert tokens.max() <= _BUDGET and tokens.sum() == lengths[own].sum()
    load = torch.zeros(count * dp_size, dtype=torch.float64).index_add(0, places, costs)
    load = load.view(count, dp_size)
    order = lengths[own].argsort(descending=True)
    least = _least_lockstep(lengths[own][order], costs[order], count=count, dp_size=dp_size)
    found_sums = (load.sum(0).max(), load.max(1).values.sum(), least)
    return tuple(float(value) * dp_size / float(costs.sum()) for value in found_sums)


def _least_lockstep(
    lengths: torch.Tensor, costs: torch.Tensor, *, count: int, dp_size: int
) -> float:
    """Return a bound: the first j rounds cost what the sequences that begin each of them do, and
    hold no more than the longest that fit into them; the others have what is left."""
    ends, sums = lengths.cumsum(0), costs.cumsum(0)
    least, begun = float(max(sums[-1] / dp_size, costs[0])), 0.0
    for j in range(1, count):
        first = (j - 1) * dp_size
        if first >= len(lengths) or (j > 1 and lengths[first] <= _BUDGET / 2):
            break  # two of these share a micro-batch
        begun += float(costs[first])
        held = int(torch.searchsorted(ends, j * dp_size * _BUDGET))  # and a part of this one
        left = float(sums[-1] - sums[held]) if held < len(sums) else 0.0
        least = max(least, begun + left / dp_size)
    return least


# --------------------------------------------------------------------------- the job's store


def store(options: Options) -> None:
    """Print how much a store bears of each request."""
    header("request", "requests a second of the store's processor time")
    with Host() as host:
        connect(host.port).multi_set(_KEYS, ["x" * 150] * len(_KEYS))
        for kind in _REQUESTS:
            before = host.seconds
            with clients(_hammer, host.port, kind) as counts:
                pass
            row(kind, f"{sum(counts) / (host.seconds - before):.0f}")


_KEYS = [f"watch/{rank}" for rank in range(1024)]
_REQUESTS: dict[str, Callable[[dist.Store], Any]] = {
    "check a key": lambda store: store.check(["none"]),
    "set 150 bytes, and look": lambda store: (store.set("own", "x" * 150), store.check(["own"])),
    "get 150 bytes": lambda store: store.get("watch/0"),
    "add to a number": lambda store: store.add("number", 1),
    "get 64 keys of 150 bytes": lambda store: store.multi_get(_KEYS[:64]),
    "check 1024 keys": lambda store: store.check(_KEYS),
    "get 1024 keys of 150 bytes": lambda store: store.multi_get(_KEYS),
}


def _hammer(index: int, port: int, kind: str) -> int:
    own, ask, count = connect(port), _REQUESTS[kind], 0
    end = time.monotonic() + 3
    while time.monotonic() < end:
        ask(own)
        count += 1
    return count


# --------------------------------------------------------------------------- heartbeats


def beats(options: Options) -> None:
    """Print what heartbeats ask of the store while half of the ranks wait for the others.

    Many ranks in a few processes may not keep their pace: a second is one in which each rank has
    made the beats of a second.
    """
    rates = ("phases entered, a second", "requests a second", "share of what the store bears")
    header("ranks", *rates)
    for ranks in (64, 256, options.ranks):
        with Host() as host, clients(_beat, host.port, ranks, options.seconds) as found:
            own = connect(host.port)
            own.wait([f"ready/{index}" for index in range(PROCESSES)])
            spent = -host.seconds
            own.set("go", "")
            own.wait([f"done/{index}" for index in range(PROCESSES)])
            spent += host.seconds
        asked, entered, beaten = (sum(column) for column in zip(*found))
        each = ranks / beaten
        row(ranks, f"{entered * each:.0f}", f"{asked * each:.0f}", f"{spent * each:.1%}")


def _beat(index: int, port: int, ranks: int, seconds: float) -> tuple[int, int, float]:
    """Be every second rank: half of them wait, the others enter two phases a second.

    Returns: requests, phases entered, and seconds for which ranks have made their beats.
    """
    own, store = range(index, ranks, PROCESSES), connect(port)
    watches = [
        Watch(CountedStore(own_store), rank=rank, world_size=ranks, timeout_s=1e6)
        for rank, own_store in zip(own, connect_all(port, len(own)))
    ]
    half = len(watches) // 2
    for watch in watches[:half]:
        long_ago = time.monotonic() - 100  # after a minute a rank that waits looks for dead ones
        watch.place = watch.place._replace(waits=True, since=long_ago)
    time.sleep(3)
    store.set(f"ready/{index}", "")
    store.wait(["go"])
    CountedStore.asked.clear()
    entered, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for watch in watches[half:]:
            with watch.phase("generate", 0):
                entered += 1
        time.sleep(0.5)
    asked = CountedStore.asked
    store.set(f"done/{index}", "")
    num_beats = asked["check"] - asked["multi_get"]  # each beat has a check, each look another
    return asked.total(), entered, num_beats * watches[0].beat_s


# --------------------------------------------------------------------------- announcements


def announcements(options: Options) -> None:
    """Print what it takes until all replicas know that the trainers are done with a step."""
    steps = 10
    with Host() as host, clients(_listen, host.port, options.replicas, steps) as delays:
        own = connect(host.port)
        own.wait([f"listens/{index}" for index in range(PROCESSES)])
        before = host.seconds
        for step in range(steps):
            time.sleep(0.5)
            own.set(f"updated/{step}", json.dumps(time.time()))
            own.wait([f"heard/{step}/{index}" for index in range(PROCESSES)])
        spent = host.seconds - before
    header("replicas", "slowest of 10 steps, ms", "store, ms of processor time a step")
    slowest = 1000 * max(map(max, delays))
    row(options.replicas, f"{slowest:.0f}", f"{1000 * spent / steps:.1f}")


@dataclass(frozen=True)
class _Connected:
    """A store whose connection for waiting is there already."""

    clone_of: dist.TCPStore

    def clone(self) -> dist.TCPStore:
        """Return the connection."""
        return self.clone_of


def _listen(index: int, port: int, replicas: int, steps: int) -> list[float]:
    """Look for each step as replicas do in every step of an engine."""
    store, delays = connect(port), []
    number = len(range(index, replicas, PROCESSES))
    listening = [WatchedKeys(_Connected(own)) for own in connect_all(port, number)]
    store.set(f"listens/{index}", "")
    for step in range(steps):
        deaf = list(listening)
        while deaf := [one for one in deaf if not one.is_set(f"updated/{step}")]:
            time.sleep(0.01)
        delays.append(time.time() - json.loads(store.get(f"updated/{step}")))
        store.set(f"heard/{step}/{index}", "")
    return delays


# --------------------------------------------------------------------------- the replicas' book


def book(options: Options) -> None:
    """Print what a step asks of the store when each group is told of on its own."""
    costs = ("store, s of processor time a step", "a replica's own, s a step")
    header("replicas", "groups", "requests a step", *costs)
    for replicas in (options.replicas // 8, options.replicas):
        with Host() as host:
            with clients(_share, host.port, replicas, options.groups) as found:
                before = host.seconds
            spent = host.seconds - before
        asked, seconds = (sum(column) for column in zip(*found))
        row(replicas, options.groups, asked, f"{spent:.2f}", f"{seconds / replicas:.2f}")


def _share(index: int, port: int, replicas: int, groups: int) -> tuple[int, float]:
    """Be every second replica, and fill a step: one ticket at a time, complete at once."""
    book_rules = BookRules(
        make_rules(groups, over_sample=1, lag=0, max_staleness="auto"),
        lambda step: deal([1.0] * groups, replicas),
        lambda step: range(groups),
    )
    parts = range(index, replicas, PROCESSES)
    own = {
        part: SharedBook(CountedStore(store), Book(), book_rules, replicas=replicas)
        for part, store in zip(parts, connect_all(port, len(parts)))
    }
    under_way: dict[int, tuple[int, ...]] = dict.fromkeys(own, ())
    seconds = time.process_time()
    waiting = set(own)
    while waiting:
        for part in random.Random(index).sample(sorted(waiting), len(waiting)):
            kept = own[part]
            move = Move(part, version=0, last=0, max_tickets=1, complete=under_way[part])
            under_way[part] = tuple(ticket.number for ticket in kept.move(move))
            if not under_way[part]:
                kept.follow()
            if kept.book.next:
                waiting.remove(part)
    return CountedStore.asked.total(), time.process_time() - seconds


def stream(options: Options) -> None:
    """Print what it costs a rank to plan the weight stream of large models."""
    subprocess.run([sys.executable, Path(__file__).with_name("stream_plans.py")], check=True)


SECTIONS = {each.__name__: each for each in (plan, stream, store, beats, announcements, book)}


if __name__ == "__main__":
    main(tyro.cli(Options))
