"""A run of the user's own asks for no trust; one that is somebody else's never bears its mark."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from spmdrl.errors import Refusal
from spmdrl.report.provenance import save_environment
from spmdrl.tools.commands.evaluate import parse
from spmdrl.tools.foreign_code import trusted_config
from spmdrl.world import own_runs
from spmdrl.world.own_runs import NAME, is_own, key_file, mark_own
from tests.helpers.built import made


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(folder)
    return folder


def started(folder: Path) -> Path:
    """Write what a run writes at its start; its config names code of the user's."""
    (folder / "logs/attempt_1").mkdir(parents=True)
    (folder / "checkpoints/step_1").mkdir(parents=True)
    cfg = made(
        output_dir=str(folder),
        data=dict(train="task:addition", size=4, eval="task:addition"),
        layout=dict(device="cpu"),
        model=dict(trust_remote_code=True),
        algorithm=dict(loss="mine.py:loss"),
        rewards=dict(functions=("mine.py:score",)),
    )
    save_environment(cfg, folder=folder, attempt_folder=folder / "logs/attempt_1")
    return folder


def asks(run: Path) -> bool:
    """Return whether commands ask for trust."""
    answers = []
    for ask in (
        lambda: parse([str(run)], world_size=1),
        lambda: trusted_config(run, trust_run=False, trust_remote_code=False),
    ):
        try:
            ask()
            answers.append(False)
        except Refusal as error:
            assert "may be somebody else's" in str(error) and "--trust-run" in str(error)
            answers.append(True)
    assert len({*answers}) == 1
    return answers[0]


def test_a_run_of_ones_own_asks_for_nothing(tmp_path) -> None:
    run = started(tmp_path / "run")
    assert not asks(run) and is_own(run / "config.yaml") == (True, "")
    cfg = parse([str(run)], world_size=1).cfg
    assert cfg.model.trust_remote_code and cfg.rewards.functions == ("mine.py:score",)
    assert key_file().stat().st_mode & 0o777 == 0o600
    assert not asks(started(tmp_path / "another")), "one key for all runs"


def test_a_mark_fits_only_the_config_the_place_and_the_folder_it_was_made_for(
    tmp_path, monkeypatch
) -> None:
    run = started(tmp_path / "run")
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    assert asks(copy), "of another place"
    monkeypatch.chdir(tmp_path)
    assert asks(run), "mine.py is another file here"
    monkeypatch.chdir(tmp_path / "home")
    file = run / "config.yaml"
    text = file.read_text()
    file.write_text(text.replace("mine.py:score", "evil.py:score"))
    assert asks(run)
    file.write_text(text)
    assert not asks(run)
    (run / NAME).write_text("0" * 64 + "\n")
    assert asks(run)
    (run / NAME).unlink()
    os.mkfifo(run / NAME)
    assert asks(run)


def test_a_run_of_another_user_bears_another_mark(tmp_path, monkeypatch) -> None:
    run = started(tmp_path / "run")
    monkeypatch.setenv("HOME", str(tmp_path / "other"))
    assert asks(run), "a user without a key"
    (tmp_path / "other").mkdir()
    run_of_theirs = started(tmp_path / "theirs")
    assert asks(run) and not asks(run_of_theirs)


@pytest.mark.parametrize("what", ["readable", "link", "short", "open folder", "pipe"])
def test_a_key_that_is_no_secret_marks_nothing(tmp_path, what, caplog) -> None:
    run, key = started(tmp_path / "run"), key_file()
    if what == "readable":
        key.chmod(0o644)
    elif what == "link":
        key.rename(key.with_name("real"))
        key.symlink_to("real")
    elif what == "short":
        key.write_bytes(b"x")
    elif what == "pipe":
        key.unlink()
        os.mkfifo(key)
    else:
        key.parent.chmod(0o777)
    assert asks(run)
    if what != "pipe":
        with pytest.raises(Refusal, match=f"cannot be told: {key.parent}"):
            parse([str(run)], world_size=1)
    again = started(tmp_path / "again")
    assert not (again / NAME).exists()
    assert ("not marked as your own" in caplog.text) == (what != "pipe")


def test_without_a_home_there_is_no_mark_and_commands_ask(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))  # no user may make a folder there
    run = started(tmp_path / "run")
    assert not (run / NAME).exists() and asks(run)
    monkeypatch.setattr(own_runs.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("none")))
    assert mark_own(run / "config.yaml") == "" and asks(run)
