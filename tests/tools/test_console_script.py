"""The console script `spmdrl`: its usage, `train` and the completion of shells."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from spmdrl.tools.commands import completion, train
from tests.helpers.runs import ROOT

PROGRAM = "import os, sys, spmdrl\nprint(os.environ.get('RANK'), os.getpid(), sys.argv)\n"


@pytest.fixture
def script(tmp_path) -> Path:
    """The script as pip writes it from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["spmdrl"].partition(":")
    path = tmp_path / "bin" / "spmdrl"
    path.parent.mkdir()
    path.write_text(
        f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """The current folder, without a train.py."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_usage_names_the_script_where_it_was_typed(script, here):
    for words in (["--help"], ["exprot"], ["curves", "--help"], ["launch", "--help"]):
        done = subprocess.run([script, *words], capture_output=True, text=True)
        said = done.stdout + done.stderr
        assert "python -m spmdrl" not in said and "spmdrl " in said
    train_help = subprocess.run([script, "train", "--help"], capture_output=True, text=True)
    assert "usage: spmdrl train --config FILE" in train_help.stdout


def test_train_becomes_the_train_py_of_the_current_folder(script, here):
    (here / "train.py").write_text(PROGRAM)
    running = subprocess.Popen(
        [script, "train", "--steps", "3"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out, err = running.communicate(timeout=60)
    assert out == f"None {running.pid} {[str(here / 'train.py'), '--steps', '3']}\n", err
    assert err == ""


def test_train_runs_as_ranks_of_a_launcher(script, here):
    (here / "train.py").write_text(PROGRAM)
    words = ["launch", "--nproc-per-node", "2", "-m", "spmdrl", "train", "--steps", "3"]
    done = subprocess.run(
        [script, *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    ranks = sorted(line.split()[0] for line in done.stdout.splitlines())
    assert ranks == ["0", "1"] and done.stdout.count("'--steps', '3'") == 2


def test_train_takes_the_program_of_the_package_where_there_is_none(here, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(train.os, "execv", lambda program, words: ran.append(words))
    train.main(["--steps", "3"])
    assert ran == [[sys.executable, "-u", str(ROOT / "train.py"), "--steps", "3"]]
    assert f"train: runs {ROOT / 'train.py'}; there is no train.py here" in capsys.readouterr().err


def test_train_refuses_another_program_and_none(here, monkeypatch, capsys):
    monkeypatch.setattr(train.os, "execv", lambda *words: pytest.fail("started"))
    (here / "train.py").write_text("print('a program of somebody')\n")
    assert train.main([]) == 2
    assert f"{here / 'train.py'} is no train.py of spmdrl" in capsys.readouterr().err
    (here / "train.py").unlink()
    monkeypatch.setattr(train, "_PLACES", (here / "nowhere",))
    assert train.main([]) == 2
    assert f"there is no train.py in {here}, nor in {here / 'nowhere'}" in capsys.readouterr().err


def test_a_wheel_has_the_one_train_py_where_train_looks_for_it():
    files = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    assert files == {"share/spmdrl": ["train.py"]}
    assert Path(sys.prefix, "share/spmdrl") in train._PLACES


def test_bash_completes_commands_flags_and_choices(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        completion.main(["bash"])
    assert not ended.value.code
    source = tmp_path / "spmdrl.bash"
    source.write_text(capsys.readouterr().out)
    cases = {
        "tr": "train",
        "train --report.wandb.g": "--report.wandb.group",
        "train --conf": "--config",
        "plan --gpu-mem": "--gpu-memory-gib",
        "evaluate --right": "--right-at",
        "what-if --lim": "--limit",
        "export --which b": "best",
    }
    program = f"source {source}\n"
    for words in cases:
        program += f"COMP_WORDS=(spmdrl {words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))\n"
        program += 'COMPREPLY=(); _tyro_spmdrl; echo "${COMPREPLY[*]}"\n'
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[:-1] == [*cases.values()], done.stderr
