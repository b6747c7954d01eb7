"""What a program makes of its folder: nothing of it is left, and nothing else is touched."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from spmdrl.sandbox import LaunchError, removal, ways
from spmdrl.sandbox.limits import Limits, Way
from spmdrl.sandbox.supervisor import launch

MAKERS = {
    "nested": """
        for _ in range(1300):
            os.mkdir("d")
            os.chdir("d")
        open("f", "w").close()
    """,
    "closed": """
        os.makedirs("a/b/c")
        open("a/b/c/f", "wb").write(b"x" * 1000)
        for name in ("a/b/c/f", "a/b/c", "a/b", "a", "."):
            os.chmod(name, 0)
    """,
    "sticky": """
        os.makedirs("a/b")
        for name in ("a/b", "a"):
            os.chmod(name, 0o1000)
    """,
    "links": """
        os.makedirs("a")
        for i, target in enumerate(("/", "..", OUTSIDE, "a", ".", "links_0")):
            os.symlink(target, f"a/links_{i}")
        os.symlink(OUTSIDE, "moved_1")
        os.symlink("loop", "loop")
        os.link("a/links_0", "a/hard", follow_symlinks=False)
    """,
    "kinds": """
        os.mkfifo("fifo")
        open("sparse", "wb").truncate(1 << 20)
        open("\\udcff\\n name", "w").close()
        os.mkdir("x" * 255)
        os.mkdir("moved_1")
        os.makedirs("moved_2/moved_1/moved_2")
    """,
    "many": """
        for i in range(300):
            open(f"f{i}", "w").close()
        for i in range(50):
            os.makedirs(f"d{i}/e/f")
    """,
}


def make(folder, code, outside):
    """Run what a program does, as another process; its folder gets deeper than a path is long."""
    program = f"import os\nOUTSIDE = {str(outside)!r}\n" + textwrap.dedent(code)
    (folder / "main.py").write_text(program)
    subprocess.run([sys.executable, "main.py"], cwd=folder, check=True)


@pytest.fixture
def tmp_path():
    """Not pytest's, which cannot remove what these tests may leave where they fail."""
    folder = tempfile.mkdtemp(prefix="folders_")
    os.chmod(folder, 0o777)
    yield Path(folder)
    subprocess.run(["chmod", "-R", "u+rwx", folder], check=False, capture_output=True)
    subprocess.run(["rm", "-rf", folder], check=True)


@pytest.fixture
def outside(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").write_text("kept")
    return tmp_path / "outside"


@pytest.mark.parametrize("kind", MAKERS)
def test_a_folder_is_removed_whatever_was_made_of_it(kind, tmp_path, outside):
    folder = tmp_path / "own"
    folder.mkdir()
    make(folder, MAKERS[kind], outside)
    removal.remove_folder(str(folder))
    assert not folder.exists()
    assert (outside / "kept").read_text() == "kept"


def test_sockets_are_removed(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "s"))
    removal.remove_folder(str(folder))
    assert not folder.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which takes root")
@pytest.mark.parametrize("kind", MAKERS)
def test_a_user_without_rights_over_closed_folders_removes_them_too(kind, tmp_path, outside):
    folder = tmp_path / "own"
    child = os.fork()
    if child == 0:
        try:
            os.setresuid(12345, 12345, 12345)
            folder.mkdir()
            os.chdir(folder)
            exec(textwrap.dedent(MAKERS[kind]), {"os": os, "OUTSIDE": str(outside)})
            removal.remove_folder(str(folder))
        finally:
            os._exit(1 if folder.exists() else 0)
    assert os.waitpid(child, 0)[1] == 0
    assert (outside / "kept").read_text() == "kept"


def test_folders_of_processes_that_were_killed_are_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(removal.tempfile, "tempdir", str(tmp_path))
    names = ("spmdrl_sandbox_dead", "spmdrl_sandbox_used", "spmdrl_sandbox_young", "others")
    for name in names:
        (tmp_path / name / "deep").mkdir(parents=True)
        if "young" not in name:
            os.utime(tmp_path / name, (time.time() - 1000,) * 2)
    used = os.open(tmp_path / "spmdrl_sandbox_used", os.O_RDONLY)
    try:
        fcntl.flock(used, fcntl.LOCK_EX)
        removal._sweep.__wrapped__(str(tmp_path), "spmdrl_sandbox_")
    finally:
        os.close(used)
    assert sorted(os.listdir(tmp_path)) == sorted(names[1:])


def test_the_folder_of_a_process_that_was_killed_goes_with_the_next_of_its_kind(tmp_path):
    base, (ready, told) = str(tmp_path), os.pipe()
    child = os.fork()
    if child == 0:
        with removal.own_folder("sockets", base=base):
            os.write(told, b"x")
            signal.pause()
    os.read(ready, 1)
    (left,) = tmp_path.iterdir()
    os.utime(left, (time.time() - 1000,) * 2)
    removal._sweep.cache_clear()
    with removal.own_folder("sockets", base=base) as folder:
        assert left.is_dir(), "its owner lives"
    assert not os.path.exists(folder)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    (tmp_path / "spmdrl_sockets_link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    others = tmp_path / "spmdrl_sockets_others"
    others.mkdir()
    os.utime(others, (time.time() - 1000,) * 2)
    if os.geteuid() == 0:
        os.chown(others, 12345, 12345)
    removal._sweep.cache_clear()
    with removal.own_folder("sockets", base=base) as folder:
        assert not left.exists() and (tmp_path / "spmdrl_sockets_link").is_symlink()
        assert others.exists() == (os.geteuid() == 0) and (tmp_path / "elsewhere").is_dir()
    assert not os.path.exists(folder)


def _found(**given: bool) -> ways.Protection:
    held = dict.fromkeys(("no_network", "no_files", "no_signals"), True)
    return ways.Protection(**held, **given, text="user namespaces")


@pytest.mark.parametrize("has_other", [True, False])
def test_a_way_without_a_limit_of_processes_comes_last_and_is_named(has_other, monkeypatch, caplog):
    ways_of_here = [("user namespaces", Way(new_user=True)), ("another", Way(landlock=True))]
    monkeypatch.setattr(ways, "ways", lambda: ways_of_here)
    limited = {"user namespaces": False, "another": has_other}
    monkeypatch.setattr(ways, "probe_way", lambda way, *, name: _found(process_limit=limited[name]))
    way, found = ways.choose_way.__wrapped__()
    assert way.landlock == has_other and found.process_limit == has_other
    assert ("the sandbox cannot limit how many processes" in caplog.text) == (not has_other)


def test_what_cannot_be_removed_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(removal.tempfile, "tempdir", str(tmp_path))

    def busy(path):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(removal, "remove_folder", busy)
    with removal.own_folder() as folder:
        pass
    assert f"{folder}: files of a program there cannot be removed" in caplog.text


@pytest.mark.parametrize("kind", MAKERS)
def test_programs_without_namespaces_leave_no_folder(kind, tmp_path, outside, monkeypatch):
    """In the weakest way that works here, since namespaces take their files along."""
    monkeypatch.setattr(removal.tempfile, "tempdir", str(tmp_path))
    landlock = [way for _, way in ways.ways() if way.landlock]
    plain = Way(drop_uid=os.geteuid() == 0)
    code = f"import os\nOUTSIDE = {str(outside)!r}\n" + textwrap.dedent(MAKERS[kind])
    for way in (*landlock, Way()):
        try:
            got = launch(code, way=way, limits=Limits(60.0))
        except LaunchError:  # another user may have no right to read this Python
            assert way in (*landlock, plain)
            continue
        assert got.status == "ok", got
    assert os.listdir(tmp_path) == ["outside"] and Path(outside, "kept").exists()
