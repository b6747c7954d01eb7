"""One run to an output_dir: who is refused, who takes over."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from spmdrl.check.dry_run import problems
from spmdrl.config import Config
from spmdrl.tools.proof.ranks import start_rank
from spmdrl.world import folder_lock
from spmdrl.world.folder_lock import NAME, folder_problems, own_folder
from tests.helpers.runs import TINY, run


def hold(folder: Path, *, forks: bool) -> None:
    with own_folder(folder):
        if forks and os.fork() == 0:
            os.fork()  # each closes what it has no use for, once
            folder.with_name(f"child {os.getpid()}").touch()
            until(folder.with_name("over").exists)
            os._exit(0)
        folder.with_name("is held").touch()
        signal.pause()


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 100
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _rank_0(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def holder(folder: Path, *, forks: bool = False) -> Iterator[BaseProcess]:
    """Give another process that has the folder."""
    process = start_rank(dict(os.environ), partial(hold, folder, forks=forks))
    try:
        until(folder.with_name("is held").exists)
        until(lambda: len(list(folder.parent.glob("child *"))) == 2 * forks)
        yield process
    finally:
        process.kill()
        process.join()
        folder.with_name("over").touch()


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as refused, own_folder(folder):
        pass
    return str(refused.value)


def test_a_second_run_is_refused_by_name_and_a_dead_one_taken_over(tmp_path) -> None:
    folder = tmp_path / "out"
    assert not folder_problems(folder)
    assert not folder.exists()
    with holder(folder) as process:
        said = refusal(folder)
        assert f"is another run's, process {process.pid} on " in said
        assert folder_problems(folder) == [said] and said in problems(
            Config(output_dir=str(folder))
        )
    assert json.loads((folder / NAME).read_text())["pid"] == process.pid  # killed: nothing tidied
    assert not folder_problems(folder)
    with own_folder(folder):
        assert json.loads((folder / NAME).read_text())["pid"] == os.getpid()
    assert not (folder / NAME).read_text()


def test_what_a_run_forks_does_not_keep_its_folder(tmp_path) -> None:
    folder = tmp_path / "out"
    with holder(folder, forks=True) as process:
        assert refusal(folder)
        process.kill()  # its children live on
        process.join()
        with own_folder(folder):
            pass


def test_ranks_other_than_0_leave_the_folder_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with own_folder(tmp_path):
        assert not list(tmp_path.iterdir())


def held_elsewhere(folder: Path, *, seen_s: float = 5.0, **fields: object) -> None:
    """Leave what a run on another machine would."""
    known = dict(host="node-7", boot="another", pid=1, job="", attempt=0, since="today")
    (folder / NAME).write_text(json.dumps(known | fields))
    os.utime(folder / NAME, (time.time() - seen_s,) * 2)


def test_a_run_on_another_machine_is_alive_while_it_touches_its_file(tmp_path, monkeypatch) -> None:
    held_elsewhere(tmp_path)
    assert "process 1 on node-7, since today, alive 5 s ago" in refusal(tmp_path)
    held_elsewhere(tmp_path, seen_s=100)
    assert not folder_problems(tmp_path)
    monkeypatch.setattr(folder_lock, "_TOUCH_S", 0.01)
    with own_folder(tmp_path):
        os.utime(tmp_path / NAME, (0, 0))
        deadline = time.monotonic() + 60
        while (tmp_path / NAME).stat().st_mtime < 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize(
    "job, is_refused",
    [
        (dict(job="Slurm job 7", attempt=0), False),
        (dict(job="Slurm job 7", attempt=1), True),  # another step of this very attempt
        (dict(job="Slurm job 8", attempt=0), True),
        (dict(job="", attempt=0), True),
    ],
)
def test_a_requeued_job_takes_over_from_its_former_node(tmp_path, monkeypatch, job, is_refused):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    held_elsewhere(tmp_path, **job)
    assert bool(folder_problems(tmp_path)) == is_refused


@pytest.mark.parametrize("lives", [True, False])
def test_without_locks_a_process_of_this_machine_counts_while_it_lives(
    tmp_path, monkeypatch, lives
) -> None:
    monkeypatch.setattr(folder_lock, "_try_lock", lambda file, kind: None)
    folder = tmp_path / "out"
    with holder(folder) as process:
        if not lives:
            process.kill()
            process.join()
        assert bool(folder_problems(folder)) == lives


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "loop"])
def test_a_lock_that_is_no_plain_file_is_refused_and_left_alone(tmp_path, kind) -> None:
    folder, other = tmp_path / "out", tmp_path / "other"
    folder.mkdir()
    other.write_text("not ours")
    lock = folder / NAME
    make = {"link": lambda: lock.symlink_to(other), "pipe": lambda: os.mkfifo(lock)}
    make |= {"folder": lock.mkdir, "loop": lambda: lock.symlink_to(lock)}
    make[kind]()
    for said in (refusal(folder), *folder_problems(folder)):
        assert f"output_dir: {folder} cannot be written to" in said and NAME in said
    assert folder_problems(folder) and other.read_text() == "not ours"


@pytest.mark.parametrize(
    "text", [b"[" * 4096, b"[1]", b"\xff\x00", b'"' + b"a" * 10**6, b"{}", b"null", "pid"]
)
def test_a_lock_that_names_nobody_is_taken_over(tmp_path, text) -> None:
    if text == "pid":
        held_elsewhere(tmp_path, pid="../..", host=["x"])
    else:
        (tmp_path / NAME).write_bytes(text)
    assert not folder_problems(tmp_path)
    with own_folder(tmp_path):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


def test_a_folder_that_is_a_file_is_explained(tmp_path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "out"):
        said = refusal(path)
        assert f"output_dir: {path} cannot be written to" in said and "--output-dir" in said
        assert f"output_dir: {path} cannot be written to" in folder_problems(path)[0]


def test_train_refuses_a_folder_that_is_taken_before_it_loads_anything(
    tmp_path, tiny_model
) -> None:
    folder = tmp_path / "out"
    flags = TINY["sft"] | {"model.path": tiny_model, "output-dir": folder}
    with holder(folder) as process:
        said = run("demo_sft.yaml", 1, status=2, **flags).output
    assert f"is another run's, process {process.pid} on " in said and "Traceback" not in said
    assert os.listdir(folder) == [NAME]
