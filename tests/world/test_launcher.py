"""What a launcher is for: it starts dead ranks anew, and none of them outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest
import torch.distributed as dist

from spmdrl.world import launch
from spmdrl.world.lost_peers import local_ranks
from spmdrl.world.lost_peers.local_ranks import LocalRanks, own_process
from spmdrl.world.lost_peers.watch import Watch
from tests.helpers.runs import (
    HELD,
    TINY,
    Run,
    finish,
    kill_all,
    run,
    torchrun,
    wait_for,
    wait_for_step,
)
from tests.program.test_train import assert_same_end

REWARDS = (
    HELD
    + """
def varied(prompts, completions, **columns):
    wait_to_be_killed()
    return [sum(map(ord, c)) % 7 / 7 for c in completions]
"""
)


def ranks_of(run: Run) -> dict[str, psutil.Process]:
    """Return {rank: process} of what torchrun has started."""
    found = psutil.Process(run.pids[0]).children()
    return {p.environ()["RANK"]: p for p in found if "train.py" in " ".join(p.cmdline())}


def until(is_so: Callable[[], object], *, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ranks_that_torchrun_starts_anew_go_on_and_end_bit_identical(tiny_model, tmp_path) -> None:
    (tmp_path / "r.py").write_text(REWARDS)
    flags = TINY["rl"] | {
        "model.path": tiny_model,
        "engine.kind": "transformers",
        "steps": 9,  # rewards of the last ones are asked for after step 4 is saved, and are held
        "checkpoint.every-steps": 2,
        "rewards.timeout-s": 600.0,
        "rewards.functions": f"{tmp_path / 'r.py'}:varied",
    }
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run("demo_grpo.yaml", 2, **flags | {"output-dir": whole})
    (tmp_path / "hold").write_text(str(killed / "checkpoints" / "step_4"))
    options = flags | {"output-dir": killed, "checkpoint.keep.last": 9}
    under_way = torchrun("demo_grpo.yaml", 2, restarts=2, **options)
    saved = (killed / "checkpoints" / "step_4").exists
    try:
        wait_for(under_way, saved, "step 4 is not saved", timeout_s=500)
        ranks_of(under_way)["1"].kill()
        (tmp_path / "hold").unlink()
    except BaseException:
        kill_all(under_way)
        raise
    finished = finish(under_way, timeout_s=500)
    assert finished.status == 0, finished.output[-8000:]
    assert (killed / "logs" / "attempt_2").exists() and "resume" in finished.output
    assert_same_end(whole, killed)


def test_ranks_end_with_their_launcher(tiny_model, tmp_path) -> None:
    flags = {"model.path": tiny_model, "output-dir": tmp_path, "steps": 10**6}
    under_way = torchrun("demo_sft.yaml", 2, **TINY["sft"] | flags)
    ranks: list[psutil.Process] = []
    try:
        wait_for_step(under_way, tmp_path, 1, timeout_s=500)
        ranks = list(ranks_of(under_way).values())
        os.kill(under_way.pids[0], signal.SIGKILL)
        until(lambda: not any(map(psutil.Process.is_running, ranks)))
        for rank in range(2):
            (log,) = tmp_path.glob(f"logs/*/rank_{rank}.log")
            assert "launcher" in log.read_text().splitlines()[-1]
    finally:
        for process in ranks:
            if process.is_running():
                process.kill()
        kill_all(under_way)


def test_only_a_launchers_ranks_follow_it(monkeypatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "_OWN_PID", os.getpid())
    monkeypatch.setattr(launch, "_PARENT_PID", -1)
    assert not launch.is_orphaned()  # started by hand: whoever did may leave
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert launch.is_orphaned()
    monkeypatch.setattr(launch, "_PARENT_PID", os.getppid())
    assert not launch.is_orphaned()


# --------------------------------------------------------------------------- who is missing


def test_a_process_beside_this_one_that_dies_is_seen_once() -> None:
    sleeps = [sys.executable, "-c", "import time; time.sleep(1000)"]
    child = subprocess.Popen(sleeps)
    try:
        known = LocalRanks(own_process())
        beside = own_process() | {"pid": child.pid, "born": local_ranks.birth(child.pid)}
        known.update([own_process(), beside, None])
        assert not known.are_known
        elsewhere = beside | {"machine": "another", "pid": 10**9}
        known.update([own_process(), beside, elsewhere])
        assert known.are_known and known.find_dead() == []
        child.kill()
        until(lambda: known.find_dead() == [1])  # nobody has waited for it yet
        known.update([own_process(), beside, elsewhere])
        assert known.find_dead() == []
    finally:
        child.kill()
        child.wait()


def test_a_process_of_a_number_used_again_is_another(monkeypatch) -> None:
    born = {7: "100"}
    monkeypatch.setattr(local_ranks, "birth", lambda pid: born.get(pid, ""))
    known = LocalRanks(own_process())
    known.update([own_process(), own_process() | {"pid": 7, "born": "100"}])
    assert known.find_dead() == []
    born[7] = "200"
    assert known.find_dead() == [1]


def test_a_process_that_died_before_it_was_looked_at_is_dead() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        beside = own_process() | {"pid": child.pid, "born": local_ranks.birth(child.pid)}
    known = LocalRanks(own_process())
    known.update([own_process(), beside])
    assert known.find_dead() == [1]


class Gone:
    """A store whose host is gone after its first requests."""

    def __init__(self, requests: int):
        self.left = requests
        self._store = dist.HashStore()

    def __getattr__(self, name: str):
        def ask(*args):
            self.left -= 1
            if self.left < 0:
                raise dist.DistNetworkError("Connection reset by peer")
            return getattr(self._store, name)(*args)

        return ask


@pytest.mark.parametrize(
    "keeper, says",
    [
        (None, "the job's store is gone with the launcher"),
        (0, "rank 0 is missing, and with it the job's store, which it kept: on node-7, last seen"),
    ],
)
def test_a_rank_ends_when_the_store_is_gone_and_says_who_kept_it(keeper, says, monkeypatch) -> None:
    left: list[str] = []
    monkeypatch.setattr(Watch, "leave", lambda self, text, **_: left.append(text))
    store = Gone(10**9)
    other = Watch(store, rank=0, world_size=2, timeout_s=1000)
    other._process |= {"host": "node-7", "machine": "another"}
    other._beat()
    watch = Watch(store, rank=1, world_size=2, timeout_s=1000, store_rank=keeper)
    until(lambda: keeper is None or watch.board._store_rank_state)
    assert not left
    store.left = 0
    with watch.wait("exchange", 7):
        until(lambda: any("rank 1" in text for text in left))
    assert any(says in text and "ends in 'exchange' at step 7" in text for text in left)
    for one in (watch, other):
        one.close()


def test_a_rank_that_leaves_in_order_is_not_missed(monkeypatch) -> None:
    left: list[str] = []
    monkeypatch.setattr(Watch, "leave", lambda self, text, **_: left.append(text))
    store = dist.HashStore()
    watches = [Watch(store, rank=rank, world_size=3, timeout_s=1000) for rank in range(3)]
    for watch in watches:
        watch._beat()
        watch.close()
    for rank, says in ((1, False), (2, True)):
        if not says:
            watches[rank].announce_leaving()
        monkeypatch.setattr(LocalRanks, "find_dead", lambda self, rank=rank: [rank])
        watches[0].report_dead_neighbours()
        assert bool(watches[0].board.cause()) == says
    said = watches[0].board.cause()
    assert f"rank 2 is missing: its process {os.getpid()} on " in said
    assert "last seen in 'start' at step -1" in said
    assert not left


def test_who_dies_while_all_leave_is_named_when_a_collective_fails(monkeypatch) -> None:
    store = dist.HashStore()
    watches = [Watch(store, rank=rank, world_size=2, timeout_s=1000) for rank in range(2)]
    for watch in watches:
        watch.announce_leaving()
        watch.close()
    monkeypatch.setattr(LocalRanks, "find_dead", lambda self: [1])
    watches[0].report_dead_neighbours()
    assert not watches[0].board.cause()  # it may have been done first
    began = time.monotonic()
    said = str(watches[0].as_peers_missing(RuntimeError("Connection closed by peer")))
    assert time.monotonic() - began < 2.9  # no heartbeat has to grow old
    assert f"rank 1 is missing: its process {os.getpid()} on " in said


def test_a_rank_between_two_places_is_behind_the_first(monkeypatch) -> None:
    watch = Watch(dist.HashStore(), rank=0, world_size=1, timeout_s=1000)
    with watch.wait("update", 7), watch.phase("logprobs", 7):
        pass
    watch._beat()
    place = watch.board.read([0])[0]["place"]
    assert (place["phase"], place["step"], place["waits"]) == ("after update", 7, False)
    with watch.wait("push", 8):
        with watch.phase("cast", 8):
            pass
        assert str(watch.place) == "'push' at step 8"
    watch.close()
