"""What a process without the job's secret can do: be named, and nothing else."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spmdrl.config import Config, LayoutSettings
from spmdrl.engine.protocol import Request
from spmdrl.rollout.book import Book, BookRules, Move, SharedBook
from spmdrl.rollout.link import Link
from spmdrl.rollout.staleness import make_rules
from spmdrl.world import comm, groups, secret
from spmdrl.world.comm import agree, bytes_from, gather_objects
from spmdrl.world.launch import SECRET, Launch
from spmdrl.world.lost_peers.watch import Watch
from spmdrl.world.ports import listen
from spmdrl.world.sealed_store import SealedStore, WatchedKeys
from spmdrl.world.secret import Unauthentic
from spmdrl.world.world import World
from tests.helpers.ranks import free_port, run_ranks

LAYOUT = LayoutSettings(world_size=2, trainer_ranks=1, device="cpu", startup_timeout_s=200)
CFG = Config(layout=LAYOUT)


class Bomb:
    """Pickled by a stranger; whoever unpickles it leaves a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def error_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# --------------------------------------------------------------------------- messages


def _stranger(folder: Path) -> str:
    """Be rank 1 of a job without its secret, after a look at its store."""
    if os.environ["RANK"] == "0":
        return error_of(lambda: World.start(CFG))
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    deadline, keys = time.monotonic() + 100, list[str]()
    while not keys:
        assert time.monotonic() < deadline, store.list_keys()
        keys = [key for key in store.list_keys() if "default_pg" in key]
    (prefix,) = {re.search(r"\w{32}", key).group() for key in keys}
    os.environ[SECRET] = "guessed" * 4
    groups.mark = lambda place, data: bytes.fromhex(prefix)
    comm.pack = lambda value: pickle.dumps(Bomb(folder / "went off"))
    return error_of(lambda: World.start(CFG))


def test_a_process_that_joins_in_a_ranks_place_is_refused_and_runs_nothing(tmp_path) -> None:
    said, _ = run_ranks(2, _stranger, tmp_path)
    assert said.startswith("Unauthentic: a message of rank 1 is refused"), said
    assert "docs/security.md" in said
    assert not list(tmp_path.iterdir())


class _Engine:
    def __init__(self) -> None:
        self.added: list[Any] = []

    def add(self, request: Request) -> None:
        self.added.append(request)

    def step(self) -> None:
        self.added.append("step")


A, B = Request("a", tuple(range(9)), 4, 0.7, 2**40, (1, 2)), Request("b", (), 1, 0.0, None, ())


def _messages() -> dict[str, Any]:
    world = World.start(CFG)
    group, found = world.control, {}
    tp = SimpleNamespace(layout=LayoutSettings(inference_tp=2))
    link = Link(SimpleNamespace(cfg=tp, replica_control=group, rank=world.rank, watch=world.watch))
    engine = _Engine()
    if world.rank == 0:
        for requests in ([A, B], [], [B]):
            link.step(requests)
        link.end()
    else:
        link.follow(engine)
    found["followed"] = engine.added
    found["gathered"] = gather_objects({"rank": world.rank}, group=group)
    found["sent"] = bytes_from(1, b"of rank 1", group=group)
    if world.rank == 1:
        secret.adopt("another")
    found["gather"] = error_of(lambda: gather_objects(0, group=group))
    found["from 1"] = error_of(lambda: bytes_from(1, b"said", group=group))
    with pytest.raises(RuntimeError, match="is refused"), agree(group=group):
        pass
    link._count = 0  # as if the first word were said again, which no secret makes new
    found["link"] = error_of(lambda: link.end() if world.rank == 0 else link.follow(engine))
    return found


def test_words_without_the_mark_of_the_job_are_not_believed() -> None:
    zero, one = run_ranks(2, _messages)
    assert one["followed"] == [A, B, "step", "step", B, "step"]
    for found, other in ((zero, 1), (one, 0)):
        assert found["gathered"] == [{"rank": 0}, {"rank": 1}] and found["sent"] == b"of rank 1"
        assert f"rank {other} is refused" in found["gather"]
    assert "rank 1 is refused" in zero["from 1"] and not one["from 1"]
    assert "Unauthentic: rank 1: a message of the replica's leader" in one["link"]


def test_a_mark_is_of_one_place_one_attempt_and_one_secret(monkeypatch) -> None:
    monkeypatch.setattr(secret, "_key", b"")
    monkeypatch.setenv(SECRET, "s" * 32)
    marks = {secret.mark("place", b"data")}
    marks |= {secret.mark("place", b"date"), secret.mark("plac", b"edata")}
    for words, attempt in (("s" * 32, 1), ("t", 0)):
        secret.adopt(words, attempt=attempt)
        marks.add(secret.mark("place", b"data"))
    assert len(marks) == 5
    monkeypatch.delenv(SECRET)
    monkeypatch.setattr(secret, "_key", b"")
    with pytest.raises(ValueError, match=f"set {SECRET} in the launcher's environment"):
        secret.mark("place", b"data")


# --------------------------------------------------------------------------- where it comes from


def _without_environment(tmp: str, told: tuple[int, ...] = ()) -> dict[str, Any]:
    tempfile.tempdir = tmp
    if int(os.environ["RANK"]) not in told:
        del os.environ[SECRET]
    error = error_of(lambda: World.start(CFG))
    folder = Path(tmp) / f"spmdrl-{os.getuid()}"
    return {
        "error": error,
        "mode": stat.S_IMODE(folder.stat().st_mode) if folder.exists() else None,
        "left": [path.name for path in folder.glob("*")],
        "key": secret._key,
    }


def test_rank_0_makes_a_secret_that_only_this_user_reads(tmp_path) -> None:
    zero, one = run_ranks(2, _without_environment, str(tmp_path))
    assert zero["key"] == one["key"] != b""
    assert not zero["error"] and zero["mode"] == 0o700 and zero["left"] == []


@pytest.mark.parametrize("told", [0, 1])
def test_a_secret_that_some_ranks_have_is_refused(tmp_path, told, monkeypatch) -> None:
    store, tried = dist.HashStore(), Launch(1, 2, 1, "127.0.0.1", 1, "torchrun")
    store.set("secret", json.dumps("" if told == 0 else "0" * 32))
    monkeypatch.delenv(SECRET, raising=False)
    if told:
        monkeypatch.setenv(SECRET, "of rank 1, which is long")
    with pytest.raises(ValueError, match=f"rank {told} has {SECRET} in its environment and rank"):
        secret.agree_on_secret(store, tried, shared=None)


@pytest.mark.parametrize("told", ["\n", " " * 40, "a", "changeme\n"])
def test_a_secret_that_can_be_guessed_is_refused(told, monkeypatch) -> None:
    monkeypatch.setenv(SECRET, told)
    with pytest.raises(ValueError, match=f"{SECRET} has . characters besides white space"):
        secret.agree_on_secret(
            dist.HashStore(), Launch(0, 2, 0, "127.0.0.1", 1, "torchrun"), shared=None
        )


def test_a_secret_may_be_any_bytes(monkeypatch) -> None:
    monkeypatch.setenv(SECRET, os.fsdecode(bytes(range(128, 256)) * 100))
    monkeypatch.setattr(secret, "_key", b"")
    assert len(secret.mark("place", b"data")) == secret.MARK_BYTES


def test_nobody_is_led_to_another_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(SECRET, raising=False)
    store, launch = dist.HashStore(), Launch(1, 2, 1, "127.0.0.1", 1, "torchrun")
    store.set("secret", json.dumps("../../etc/passwd"))
    with pytest.raises(ValueError, match="somebody else writes into it"):
        secret.agree_on_secret(store, launch, shared=None)
    store.set("secret", json.dumps("0" * 32))
    (tmp_path / f"spmdrl-{os.getuid()}").mkdir()
    (tmp_path / f"spmdrl-{os.getuid()}").chmod(0o777)
    with pytest.raises(ValueError, match="others may enter it"):
        secret.agree_on_secret(store, launch, shared=None)
    monkeypatch.setattr(secret, "_SEEN_AFTER_S", 0.1)
    two_nodes = Launch(1, 2, 1, "127.0.0.1", 1, "srun", nodes=2)
    with pytest.raises(ValueError, match="the folder must be one that all ranks share"):
        secret.agree_on_secret(store, two_nodes, shared=tmp_path / "out")


# --------------------------------------------------------------------------- the store


@pytest.fixture
def store(monkeypatch) -> dist.Store:
    monkeypatch.setattr(secret, "_key", b"")
    secret.adopt("of the job")
    return dist.HashStore()


def test_what_a_stranger_writes_is_named_once_and_replaced(store, caplog) -> None:
    sealed = SealedStore(store)
    sealed.set("a", "1")
    assert sealed.get("a") == b"1" and sealed.check(["a"])
    store.set("b", store.get("a"))  # what is true of another key
    store.set("c", "x" * 64 + "2")
    with caplog.at_level(logging.WARNING):
        assert sealed.multi_get(["a", "b", "c"]) == [b"1", b"", b""]
        assert sealed.get("b") == b""
    assert len(caplog.records) == 2 and "wrote b into the job's store" in caplog.text
    assert sealed.compare_set("c", "", "own") == b"own" == sealed.get("c")
    assert sealed.compare_set("c", "", "later") == b"own"
    assert sealed.compare_set("d", "", "first") == b"first"
    store.set("e", b"\xff\xfe")
    with pytest.raises(RuntimeError, match="wrote e into"):
        sealed.compare_set("e", "", "own")


def test_strangers_end_no_run_and_announce_no_update(store, monkeypatch) -> None:
    monkeypatch.setattr(Watch, "leave", lambda self, text, **_: None)
    sealed = SealedStore(store)
    for key in ("watch/cause", "watch/ended", "watch/1", "updated/3"):
        store.set(key, json.dumps({"rank": 1, "error": "nothing"}))
    watch = Watch(sealed, rank=0, world_size=2, timeout_s=1000)
    assert watch.board.cause() == ""
    assert "rank 1 is missing: it never reported" in watch.report()
    assert watch.board.claim_cause("the true one")
    watch.announce_end("the true one")
    assert watch.board.cause() == "rank 0 ended with the true one"
    watch.close()
    awaited = WatchedKeys(SimpleNamespace(clone=lambda: sealed))
    assert not awaited.is_set("updated/3")
    seen = threading.Event()
    sealed.set("updated/3", "1")
    deadline = time.monotonic() + 60
    while not awaited.is_set("updated/3"):
        assert time.monotonic() < deadline and not seen.wait(0.01)


def test_a_strangers_move_is_not_played(store) -> None:
    rules = make_rules(6, over_sample=1, lag=0, max_staleness="auto")
    book_rules = BookRules(rules, lambda step: [[0, 2, 4], [1, 3, 5]], lambda step: range(6))
    one, two = (SharedBook(SealedStore(store), Book(), book_rules, replicas=2) for _ in range(2))
    store.set("rollout/move/1", json.dumps(Move(part=1, version=0, last=0, max_tickets=6)))
    assert not one.follow()
    assert [t.slot for t in one.move(Move(part=0, version=0, last=0, max_tickets=9))][:3] == [
        0,
        2,
        4,
    ]
    assert two.follow() and two.book == one.book


def _addresses(port: int) -> set[str]:
    """Return the local addresses, as /proc has them, at which a port is listened to."""
    lines = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    rows = [line.split() for line in lines.splitlines()]
    return {r[1] for r in rows if r[3:4] == ["0A"] and r[1].endswith(f":{port:04X}")}


def _listening() -> set[str]:
    world = World.start(CFG)
    with world.watch.wait("look", 0):
        dist.barrier(group=world.control)
    found = _addresses(int(os.environ["MASTER_PORT"]))
    world.close()
    return found


def test_the_store_listens_at_the_one_address() -> None:
    for found in run_ranks(2, _listening):
        (address,) = found
        assert address.startswith("0100007F:")


def test_a_port_in_use_is_explained() -> None:
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(ValueError) as refused:
            listen(Launch(0, 2, 0, "127.0.0.1", port, "torchrun"))
    said = str(refused.value)
    assert f"port {port} of 127.0.0.1" in said and f"is taken, by process {os.getpid()}" in said
    assert "set MASTER_PORT to another" in said
    with listen(Launch(0, 2, 0, "127.0.0.1", port, "torchrun")) as free:
        assert free.getsockname() == ("127.0.0.1", port)
    with pytest.raises(ValueError, match="is the name of no host"):
        listen(Launch(0, 2, 0, "no.such.host.invalid", port, "torchrun"))


def test_a_store_that_never_comes_is_named() -> None:
    launch = Launch(1, 2, 1, "127.0.0.1", free_port(), "srun")
    with pytest.raises(RuntimeError) as missing:
        groups.meet(launch, shared=None, within=timedelta(seconds=1))
    assert f"rank 1 on {socket.gethostname()} waited 1 s in 'meet'" in str(missing.value)
    assert "rank 0 is missing" in str(missing.value)
    assert torch.distributed.is_available() and issubclass(Unauthentic, RuntimeError)


def test_two_jobs_at_one_port_share_no_memory_of_engines(monkeypatch):
    from spmdrl.engine.vllm.internals import shared_memory_name

    monkeypatch.setattr(secret, "_key", b"")
    monkeypatch.setenv("MASTER_PORT", "29500")
    names = []
    for words, attempt in (("one", 0), ("another", 0), ("one", 1), ("one", 0)):
        secret.adopt(words, attempt=attempt)
        names.append(shared_memory_name())
    assert len(set(names)) == 3 and names[0] == names[3]
