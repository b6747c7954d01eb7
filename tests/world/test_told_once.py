"""What ranks come to alike before they have met: one of each machine says it."""

from __future__ import annotations

import os
import time

import pytest

from spmdrl.check.settings import parse
from spmdrl.world import launch

SAME = "ends for the same reason"


@pytest.fixture
def say(monkeypatch, tmp_path, capsys):
    """Return what a rank prints that began 20 seconds ago, of one launcher."""
    monkeypatch.setattr(launch.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(launch, "_WAIT_FOR_FIRST_S", 0.0)
    for name in ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "SLURM_LOCALID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)

    def said(rank: int, *, text: str = "no such file", **env: str) -> str:
        env = {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)} | env
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        began = int((now - 20.0) * os.sysconf("SC_CLK_TCK"))
        birth = {os.getpid(): str(began), os.getppid(): "7"}
        monkeypatch.setattr(launch, "birth", lambda pid: birth[pid])
        launch.say_once(text)
        return capsys.readouterr().err.removesuffix("\n")

    return said


def test_one_rank_says_it_and_again_in_the_next_attempt_of_a_shell(say, tmp_path):
    for _ in range(2):
        assert say(0) == "no such file"
        assert say(1) == f"[rank 1] {SAME}" and say(0) == f"[rank 0] {SAME}"
        (mark,) = (tmp_path / f"spmdrl-{os.getuid()}").iterdir()
        os.utime(mark, (time.time() - 40,) * 2)  # before those of the next attempt began
    assert say(1, text="no GPU") == "no GPU"


def test_the_first_rank_says_it_where_another_comes_before_it(say, monkeypatch):
    said = []
    monkeypatch.setattr(launch, "_WAIT_FOR_FIRST_S", 1000.0)
    monkeypatch.setattr(launch.time, "sleep", lambda _: said.append(say(0)))
    assert say(1) == f"[rank 0] {SAME}" and said == ["no such file"]


@pytest.mark.parametrize("how", ["open", "link", "file"])
def test_each_rank_says_it_where_others_may_write_what_was_said(say, how, tmp_path):
    folder = tmp_path / f"spmdrl-{os.getuid()}"
    if how == "file":
        folder.touch()
    elif how == "link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    assert [say(0), say(1)] == ["no such file"] * 2
    assert how == "file" or not any(folder.iterdir())


def test_each_rank_says_it_of_which_no_launcher_is_seen(say, monkeypatch, capsys):
    assert say(0) == "no such file"
    monkeypatch.setattr(launch, "birth", lambda pid: "")
    launch.say_once("no such file")
    assert capsys.readouterr().err == "no such file\n"


def test_old_marks_are_swept_and_a_world_of_one_leaves_none(say, tmp_path):
    folder = tmp_path / f"spmdrl-{os.getuid()}"
    assert say(0, WORLD_SIZE="1") == "no such file" and not folder.exists()
    assert say(0, WORLD_SIZE="two") == "no such file"
    (old,) = folder.iterdir()
    os.utime(old, (time.time() - 1000,) * 2)
    assert say(0, text="no GPU") == "no GPU"
    assert old not in (left := list(folder.iterdir())) and len(left) == 1


def test_a_config_that_is_refused_is_not_queued_again(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("SPMDRL_REFUSED", str(tmp_path / "refused"))
    with pytest.raises(SystemExit) as ended:
        parse(["--config", "no_such.yaml"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "no_such.yaml does not exist" in said
    assert (tmp_path / "refused").read_text() == said
