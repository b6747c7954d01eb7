"""Engines that join a run in the place of lost ones, and what may go wrong as they do.

By default one is replaced; `pytest -m kill tests/test_survive_joins.py` has more. Runs are held by
a file for which their rewards wait.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace, TracebackType

import psutil
import pytest
from dying_rank import Moment, be_rank
from filelock import FileLock
from ranks import free_port
from runs import ROOT, TINY, arguments
from test_kill import ALL, Runs, diary_of, rows_of, runs  # noqa: F401
from test_survive import BUSY, GOES_ON_S, assert_equal

from spmdrl.checkpoint.save import Saver
from spmdrl.proof.ranks import launch_env, start_rank
from spmdrl.world.start_ranks import await_some

HELD = """
import time
from pathlib import Path

def varied(prompts, completions, **columns):
    while Path({gate!r}).exists():
        time.sleep(0.02)
    return [sum(map(ord, completion)) % 7 / 7 for completion in completions]
"""
WAITS, JOINS = "waits for the job to take it in", "joins as an engine"
GONE = "an engine is gone and its prompts"


class Held:
    """A run of one trainer and some engines; its rewards wait while `gate` is there."""

    def __init__(
        self,
        folder: Path,
        shared: Path,
        *moments: Moment,
        engines: int = 2,
        lag: int = 0,
        engine: str = "transformers",
    ):
        self.out, self.diary, self.gate = folder / "out", folder / "diary", folder / "gate"
        self.diary.mkdir(parents=True, exist_ok=True)
        (folder / "held.py").write_text(HELD.format(gate=str(self.gate)))
        flags = TINY["rl"] | ALL | {"steps": 8, "lag": lag, "engine.kind": engine}
        flags |= {"layout.trainer-ranks": 1, "layout.survive-engines": "true"}
        # With a lag a save is under way at every step.
        flags |= {"checkpoint.every-steps": 1 if lag else 8, "algorithm.correction": "none"}
        flags |= {"model.path": shared / "dense", "rewards.timeout-s": 300.0}
        flags |= {"rewards.functions": f"{folder / 'held.py'}:varied", "output-dir": self.out}
        self._argv = arguments("demo_grpo.yaml", 1 + engines, **flags)
        self._moments, self._size, self._port = moments, 1 + engines, free_port()
        self.all: list[BaseProcess] = []
        self.start()

    def start(self) -> None:
        """Start the ranks."""
        for rank in range(self._size):
            self._begin(rank)

    def join(self, rank: int, *flags: str) -> BaseProcess:
        """Start a process that is to take the place of a rank."""
        return self._begin(rank, *flags, SPMDRL_JOINS="1")

    def _begin(self, rank: int, *flags: str, **more: str) -> BaseProcess:
        environment = os.environ | launch_env(rank, self._size, self._port) | more
        argv = [*self._argv, *flags]
        self.all.append(start_rank(environment, be_rank, argv, self.diary, self._moments))
        return self.all[-1]

    def __enter__(self) -> Held:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.gate.unlink(missing_ok=True)
        for process in self.all:
            process.kill()
            process.join()

    def hold(self, *lost: int) -> None:
        """Hold the run once it has done some steps, and kill engines then."""
        self.until(lambda: len(self._rows()) >= 3)
        self.gate.touch()
        for rank in lost:
            self.kill(rank)

    def kill(self, rank: int) -> None:
        """Kill one of the ranks that the run began with."""
        self.all[rank].kill()

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that the run does."""
        deadline = time.monotonic() + 300
        while not condition():
            assert self.goes_on() and time.monotonic() < deadline, self.everything()
            time.sleep(0.05)

    def goes_on(self) -> bool:
        """Whether rank 0 has not ended."""
        return self.all[0].exitcode is None

    def until_waits(self, rank: int, *, times: int = 1) -> None:
        """Wait until so many processes have come for the place of a rank."""
        self.until(lambda: self.logs(rank).count(WAITS) >= times)

    def end(self) -> None:
        """Let the run go on to its end, which is well."""
        self.gate.unlink(missing_ok=True)
        for process in self.all:
            process.join(timeout=300)
        assert self.all[0].exitcode == 0, self.everything()

    def logs(self, rank: int) -> str:
        """Return what a rank has logged, in all its processes."""
        return "".join(path.read_text() for path in self.out.glob(f"logs/*/rank_{rank}*"))

    def printed(self, rank: int) -> str:
        """Return what a rank has printed, in all its processes."""
        return (self.diary / f"printed_{rank}.log").read_text()

    def everything(self) -> str:
        """Return the end of what each rank has printed."""
        texts = ((path.name, path.read_text()) for path in self.diary.glob("printed_*.log"))
        return "\n".join(f"--- {name}\n{text[-3000:]}" for name, text in texts)

    def check_goes_on(self) -> None:
        """Rank 0 has gone on within seconds of the death at the first moment."""
        died = json.loads((self.diary / "deed.json").read_text())["at"]
        lines = diary_of(self.diary, 0)
        on = [line["at"] for line in lines if line.get("leave") == "go on without an engine"]
        took = [at - died for at in on if at > died]
        print("went on after", took, "s")
        assert took and took[0] < GOES_ON_S * BUSY

    def _rows(self) -> list[str]:
        path = self.out / "metrics.jsonl"
        return path.read_text().splitlines() if path.exists() else []


class Launched(Held):
    """Such a run by `launch`, which replaces one engine."""

    def start(self) -> None:
        command = [sys.executable, "-m", "spmdrl", "launch", "--survive-engines"]
        command += [f"--nproc-per-node={self._size}", "--replace-engines=1", *self._argv]
        self._run = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.said = ""

    def goes_on(self) -> bool:
        return self._run.poll() is None

    def kill(self, rank: int) -> None:
        children = psutil.Process(self._run.pid).children()
        next(child for child in children if child.environ().get("RANK") == str(rank)).kill()

    def end(self) -> None:
        self.gate.unlink(missing_ok=True)
        self.said = self._run.communicate(timeout=300)[1]
        assert self._run.returncode == 0, f"{self.said}\n{self.logs(0)}"

    def __exit__(self, *error: object) -> None:
        self._run.terminate()
        with self._run:
            pass


def whole(runs: Runs, *, lag: int, engine: str = "transformers") -> Path:
    """Return the output of such a run that loses nothing."""
    folder = runs.folder / f"held_{lag}_{engine}"
    with FileLock(f"{folder}.lock"):
        if not (folder / "is_whole").exists():
            with Held(folder, runs.folder, lag=lag, engine=engine) as run:
                run.end()
            (folder / "is_whole").touch()
    return folder / "out"


def check_same(first: Path, second: Path) -> None:
    """Two runs took the same steps to the same weights."""
    assert_equal(first, second)
    (rows, _), (again, _) = rows_of(first), rows_of(second)
    for name in ("step", "policy/loss", "reward/mean"):
        assert [row[name] for row in rows] == [row[name] for row in again]


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.kill)])
def test_a_killed_engine_is_replaced_and_the_run_ends_the_same(engine, runs, tmp_path):
    with Launched(tmp_path / "run", runs.folder, engine=engine) as run:
        run.hold(1)
        run.until_waits(1)
        run.end()
    assert "rank 1 was ended by SIGKILL" in run.said
    first = run.logs(0)
    assert first.count(GONE) == 1 and f"rank 1 {JOINS}" in first
    check_same(whole(runs, lag=0, engine=engine), run.out)


@pytest.mark.kill
def test_an_engine_that_is_replaced_holds_what_is_drawn_ahead_and_saves_under_way(runs, tmp_path):
    """First a process by hand is refused, whose config is another."""
    with Held(tmp_path / "run", runs.folder, lag=1) as run:
        run.hold(1)
        wrong = run.join(1, "--seed", "5")
        wrong.join(timeout=300)
        assert wrong.exitcode == 1
        assert "rank 1 has seed = 5, rank 0 has 0" in run.printed(1)
        right = run.join(1)
        run.until_waits(1)
        run.end()
    assert right.exitcode == 0 and f"rank 1 {JOINS}" in run.logs(0)
    check_same(whole(runs, lag=1), run.out)


@pytest.mark.kill
def test_of_two_lost_engines_one_is_replaced(runs, tmp_path):
    """Who comes sees that the other is gone, which others have known long since."""
    with Held(tmp_path / "run", runs.folder, engines=3, lag=1) as run:
        run.hold(1, 2)
        comes = run.join(1)
        run.until_waits(1)
        run.end()
    assert comes.exitcode == 0 and run.logs(0).count(JOINS) == 1
    check_same(whole(runs, lag=1), run.out)


@pytest.mark.kill
@pytest.mark.parametrize("another", [False, True])
def test_a_process_that_dies_as_it_waits_to_join_is_not_taken_in(another, runs, tmp_path):
    """Its successor, which is starting when the run comes to the next step, is not taken for it."""
    with Held(tmp_path / "run", runs.folder, lag=1) as run:
        run.hold(1)
        waits = run.join(1)
        run.until_waits(1)
        waits.kill()
        waits.join()
        again = run.join(1) if another else None
        run.end()
    assert again is None or again.exitcode == 0  # taken in, or the run has ended without it
    check_same(whole(runs, lag=1), run.out)


@pytest.mark.kill
@pytest.mark.parametrize("phase", ["join groups", "make groups", "push"])
def test_a_process_may_die_as_it_joins(phase, runs, tmp_path):
    dies = Moment(1, phase, None, joins=True)
    with Held(tmp_path / "run", runs.folder, dies, lag=1) as run:
        run.hold(1)
        run.join(1)
        run.until_waits(1)
        run.end()
    run.check_goes_on()
    assert run.logs(0).count(GONE) == 2
    check_same(whole(runs, lag=1), run.out)


@pytest.mark.kill
@pytest.mark.parametrize("phase", ["join groups", "make groups", "push"])
def test_another_engine_may_die_as_one_joins(phase, runs, tmp_path):
    dies = Moment(2, phase, None, behind="" if phase == "join groups" else "join groups")
    with Held(tmp_path / "run", runs.folder, dies, engines=3, lag=1) as run:
        run.hold(1)
        comes = run.join(1)
        run.until_waits(1)
        run.end()
    assert comes.exitcode == 13
    assert "another engine was lost while this one joined" in run.printed(1)
    run.check_goes_on()
    check_same(whole(runs, lag=1), run.out)


@pytest.mark.kill
def test_an_engine_may_die_as_soon_as_another_has_joined(runs, tmp_path):
    dies = Moment(2, "await rollouts", None, behind="join groups")
    with Held(tmp_path / "run", runs.folder, dies, engines=3, lag=1) as run:
        run.hold(1)
        run.join(1)
        run.until_waits(1)
        run.end()
    first = run.logs(0)
    assert f"rank 1 {JOINS}" in first and first.count(GONE) == 2
    check_same(whole(runs, lag=1), run.out)


@pytest.mark.kill
@pytest.mark.parametrize("lag", [0, 1])
def test_a_stopped_run_saves_though_an_engine_dies_meanwhile(lag, runs, tmp_path):
    dies = Moment(2, "write checkpoint", None, behind="go on without an engine")
    with Held(tmp_path / "run", runs.folder, dies, engines=3, lag=lag) as run:
        run.hold(1)
        for process in run.all[:1] + run.all[2:]:
            os.kill(process.pid, signal.SIGUSR1)
        run.end()
    assert run.logs(0).count(GONE) == 2
    with Held(tmp_path / "run", runs.folder, lag=lag) as run:
        run.end()
    check_same(whole(runs, lag=lag), run.out)


class _Ended:
    """What is asked of a process."""

    def __init__(self, status: int | None):
        self.status, self.returncode = status, None

    def poll(self) -> int | None:
        self.returncode = self.status
        return self.status


def test_engines_that_end_at_once_are_all_replaced(capfd):
    ranks = [_Ended(None), _Ended(-9), _Ended(1)]
    assert await_some(ranks) == [1, 2]
    assert capfd.readouterr().err == "rank 1 was ended by SIGKILL\nrank 2 ended with status 1\n"
    ranks[0].status = 0
    assert await_some(ranks) == []


def test_ranks_that_saw_other_numbers_of_ranks_begin_a_save_again_together(tmp_path, monkeypatch):
    """One looked before a loss that this one had met at the end of its last turn."""
    told, given_up = [], []
    others = [[("", False, 3), ("", False, 4)], [("disk full", False, 3), ("", False, 3)]]

    def gather(own: tuple, **_: object) -> list[tuple]:
        told.append(own)
        first, last = others[len(told) - 1]
        return [first, own, last]

    saver = object.__new__(Saver)
    saver.world = SimpleNamespace(rank=1, members=[0, 2, 3], gather=gather)
    monkeypatch.setattr(saver, "_partial", lambda step: tmp_path, raising=False)
    monkeypatch.setattr(saver, "_give_up", lambda *of, **_: given_up.append(of), raising=False)
    source = SimpleNamespace(state_dict=lambda: None)
    saver._begin(2, None, source, evaluated={}, is_last=False)
    assert told == [("", False, 3)] * 2 and given_up == [(2, "disk full")]
