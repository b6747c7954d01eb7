"""Heartbeats and announcements: what a job of many ranks asks of its store, whom a rank names."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from spmdrl.world.lost_peers import watch as watch_module
from spmdrl.world.lost_peers.local_ranks import LocalRanks, own_process
from spmdrl.world.lost_peers.silence import Silence
from spmdrl.world.lost_peers.watch import Watch
from spmdrl.world.sealed_store import WatchedKeys


class CountedStore:
    """A store of this process that counts what it is asked."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.asked: list[str] = []

    def __getattr__(self, name: str):
        def ask(*args):
            self.asked.append(name)
            return getattr(self._store, name)(*args)

        return ask

    def take(self) -> Counter:
        """Return how often each request was made since the last call."""
        asked, self.asked = self.asked, []
        return Counter(asked)

    def place(self, ranks, *, phase: str, silent_s: float = 0.0, waits: bool = True) -> None:
        now = time.monotonic() - silent_s
        place = dict(phase=phase, step=7, since=now, waits=waits)
        state = own_process() | {"place": place, "beat": now}
        del state["host"]
        for rank in ranks:
            self._store.set(f"watch/{rank}", json.dumps(state))


def make_watch(store: CountedStore, *, rank: int = 0, world_size: int) -> Watch:
    return Watch(store, rank=rank, world_size=world_size, timeout_s=1000)


def until(is_so: Callable[[], Any]) -> None:
    """Wait for what a thread does, however busy the machine."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_few_ranks_write_each_place_and_many_at_most_once_a_beat() -> None:
    for world_size, least, most in ((64, 200, 260), (1024, 1, 60)):
        store = CountedStore()
        watch = make_watch(store, world_size=world_size)
        for step in range(100):
            with watch.wait("exchange", step), watch.phase("pack", step):
                pass
        assert least <= store.take()["set"] <= most
        watch.close()


def test_the_thread_says_later_what_was_not_said_at_once() -> None:
    store = CountedStore()
    watch = make_watch(store, world_size=1024)
    with watch.phase("first", 7):
        pass
    with watch.phase("second", 7):
        assert b'"first"' in store.get("watch/0")
        until(lambda: b'"second"' in store.get("watch/0"))
    watch.close()


def test_a_report_on_many_ranks_takes_few_requests_and_names_those_that_differ() -> None:
    store = CountedStore()
    watch = make_watch(store, rank=1, world_size=1024)
    with watch.wait("exchange", 7):
        store.place(range(1024), phase="exchange")
        store.place([5, 6, 1023], phase="generate", waits=False)
        store.place([9], phase="exchange", silent_s=30)
        store.take()
        text = re.sub(r"\d s in", "0 s in", watch.report())
        lines = re.sub(r"for 3\d s", "for 30 s", text).splitlines()
        assert sum(store.take().values()) <= 20  # two, and the thread's own
        assert lines == [
            "rank 1 waited 0 s in 'exchange' at step 7",
            "  each of the ranks 0, 2-4, 7-8, 10-1022 waits in 'exchange' at step 7 too",
            "  each of the ranks 5-6, 1023 is missing: 0 s in 'generate' at step 7",
            "  rank 9 is missing: no sign of life for 30 s, last seen in 'exchange' at step 7 "
            "(killed, or its process stopped)",
        ]
        store.delete_key("watch/600")
        store.take()
        assert "\n  rank 600 is missing: it never reported, or the store is gone" in watch.report()
        assert sum(store.take().values()) < 60  # not two per rank
    watch.close()


def test_a_report_names_the_users_line_in_which_each_rank_stands() -> None:
    store = CountedStore()
    watch = make_watch(store, rank=0, world_size=2)
    with watch.phase("update", 3):
        mine = store.get("watch/0").decode()
    assert re.search(r'"line": "[^"]*test_watch.py:\d+, in test_a_report_names', mine), mine
    other = json.loads(mine) | {"line": "/home/me/train.py:80, in train"}
    other["place"] |= {"phase": "after exchange tokens"}
    store.set("watch/1", json.dumps(other))
    with watch.wait("await peers", 3):
        said = watch.report()
    watch.close()
    assert re.search(r"rank 0 waited 0 s in 'await peers' at step 3 \(\S+/test_watch.py:\d+", said)
    assert re.search(
        r"rank 1 is missing: 0 s in 'after exchange tokens' at step 3 on \S+ "
        r"\(/home/me/train.py:80, in train\)",
        said,
    ), said


def test_ranks_that_wait_long_look_for_dead_ones_in_turns(monkeypatch) -> None:
    monkeypatch.setattr(watch_module, "_DEAD_AFTER_S", 3.0)
    left = []
    monkeypatch.setattr(Watch, "leave", lambda self, text, **_: left.append((self.rank, text)))
    store = CountedStore()
    store.place(range(1024), phase="exchange", silent_s=-100)
    watches = [make_watch(store, rank=rank, world_size=1024) for rank in range(64)]
    for watch in watches:
        watch.place = watch.place._replace(waits=True, since=time.monotonic() - 10)
    until(lambda: len(store.asked) > 2 * 2 * 64)  # two requests to a beat, two beats of each
    asked = store.take()
    assert asked["set"] > 64
    assert abs(asked["multi_get"] - asked["set"] / 32) <= 3  # a look to 32 beats of a second
    assert asked["check"] <= asked["set"] + asked["multi_get"] + 3
    for watch in watches:
        watch.close()
    assert not left
    store.place([700], phase="generate", silent_s=20)
    watch = make_watch(store, rank=31, world_size=1024)  # whose turn is at its first beat
    watch.place = watch.place._replace(waits=True, since=time.monotonic() - 10)
    until(lambda: left)
    watch.close()
    rank, text = left[0]
    assert rank == 31 and "rank 700 is missing: no sign of life" in text


def test_ranks_of_hosts_with_other_clocks_are_silent_only_when_they_are(monkeypatch) -> None:
    now = 1000.0
    monkeypatch.setattr(watch_module.time, "monotonic", lambda: now)
    silence = Silence("here")
    fast = {"beat": now + 3600.0, "machine": "there"}
    slow = {"beat": now - 3601.0, "machine": "elsewhere"}
    assert silence.seconds(1, fast) == silence.seconds(2, slow) == 0.0
    assert silence.seconds(3, {"beat": now - 5.0, "machine": "here"}) == 5.0
    now += 20.0
    assert silence.seconds(1, fast) == 20.0  # it has not beaten again
    assert silence.seconds(2, slow | {"beat": now - 3600.0}) == 0.0
    now += 2.0
    assert silence.seconds(2, slow | {"beat": now - 3601.5}) == 1.5


def test_a_host_whose_clock_is_behind_does_not_end_the_others(monkeypatch) -> None:
    monkeypatch.setattr(watch_module, "_DEAD_AFTER_S", 3.0)
    left: list[str] = []
    monkeypatch.setattr(Watch, "leave", lambda self, text, **_: left.append(text))
    store = CountedStore()
    watch = make_watch(store, world_size=2)
    watch.place = watch.place._replace(waits=True, since=time.monotonic() - 10)
    turns = watch.turns
    while watch.turns < turns + 4:
        beat = time.monotonic() - 3600
        place = dict(phase="generate", step=7, since=beat, waits=False)
        state = {"place": place, "beat": beat, "machine": "there", "pid": 1, "born": "1"}
        store.set("watch/1", json.dumps(state))
        time.sleep(0.05)
    assert not left
    until(lambda: left)  # now it is silent
    watch.close()
    assert "rank 1 is missing: no sign of life for" in left[0]


def test_a_store_that_does_not_answer_ends_the_rank(monkeypatch) -> None:
    left, exits, store, never = [], [], CountedStore(), threading.Event()
    monkeypatch.setattr(Watch, "leave", lambda self, text, **_: left.append(text))
    monkeypatch.setattr(watch_module.os, "_exit", exits.append)
    keeper = Watch(store, rank=0, world_size=2, timeout_s=1000)
    keeper._process |= {"host": "node-3", "machine": "another"}
    with keeper.wait("push", 7):
        keeper.close()
    watch = Watch(store, rank=1, world_size=2, timeout_s=2, store_rank=0)
    with watch.phase("update", 7):
        time.sleep(5)
        assert not left  # it answers
        store.check = lambda keys: never.wait() and False
        time.sleep(8)
    never.set()
    watch.close()
    assert "[rank 1] in 'update' at step 7: the job's store has not answered for 4 s: " in left[0]
    assert "rank 0 is missing, and with it the job's store" in left[0]
    assert "on node-3, last seen in 'push' at step 7" in left[0]
    assert set(exits) == {13}


def test_a_rank_that_said_its_error_and_died_is_quoted_with_it(monkeypatch) -> None:
    left: list[str] = []
    monkeypatch.setattr(Watch, "leave", lambda self, text, **_: left.append(text))
    monkeypatch.setattr(LocalRanks, "find_dead", lambda self: [1])  # at every look
    store = CountedStore()
    one = make_watch(store, rank=1, world_size=2)
    with one.phase("build engine", -1):
        one.close()
        one.announce_end("RuntimeError: out of memory")
    zero = make_watch(store, world_size=2)
    zero.report_dead_neighbours()  # it can read what a rank that ended has written last
    assert one.board.claim_cause("RuntimeError: out of memory")
    until(lambda: left)
    zero.close()
    assert (
        left[0]
        == "[rank 0] ends in 'start' at step -1: rank 1 ended with RuntimeError: out of memory"
    )


def test_a_watch_that_fails_ends_its_rank_and_is_not_missed(monkeypatch, capsys) -> None:
    def fail(self):
        raise KeyError("lost")

    left: list[str] = []
    monkeypatch.setattr(Watch, "leave", lambda self, text, **_: left.append(text))
    monkeypatch.setattr(LocalRanks, "find_dead", fail)
    watch = make_watch(CountedStore(), world_size=2)
    until(lambda: left)
    watch.close()
    assert left == ["the watch over the other ranks failed: KeyError: 'lost'"]
    assert "in fail" in capsys.readouterr().err


def test_an_announcement_is_heard_without_asking_twice() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = CountedStore()
    store._store = host.clone()
    cloned = []
    store.clone = lambda: cloned.append(host.clone()) or cloned[-1]
    awaited = WatchedKeys(store)
    for step in range(3):
        assert not any(awaited.is_set(f"updated/{step}") for _ in range(1000))
        time.sleep(0.05)
        assert not awaited.is_set(f"updated/{step}")
        store.set(f"updated/{step}", "1")
        deadline = time.monotonic() + 10
        while not awaited.is_set(f"updated/{step}"):
            assert time.monotonic() < deadline
    assert len(cloned) == 1 and store.take() == {"set": 3}
