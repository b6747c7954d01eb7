"""W&B, TensorBoard and Trackio: a run of two attempts, read back by their own libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from spmdrl.check.settings import validate
from spmdrl.config import Config, ReportSettings
from spmdrl.report import trackers
from spmdrl.run_folder import link_problems

ROOT = Path(__file__).parents[2]
LIBRARIES = Path(sys.prefix) / "trackers"
SECRET = "5ec2e70123456789abcdef0123456789abcdef01"
FIRST = [[step, 0.5] for step in range(6)]
SECOND = [[step, 0.75] for step in range(4, 9)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[Path, Mapping[str, Any]]:
    """The folder of the run, and what was read back."""
    if not LIBRARIES.exists():
        pytest.skip("the trackers are not there: make .venv/trackers")
    home = tmp_path_factory.mktemp("home")
    folder = tmp_path_factory.mktemp("runs") / "my_run"
    keys = {"WANDB_API_KEY": SECRET, "HF_TOKEN": f"hf_{SECRET}"}
    printed = with_libraries("-m", "tests.helpers.tracker_run", folder, home=home, **keys)
    assert "fails" not in printed and "did not take" not in printed
    return folder, json.loads(printed.splitlines()[-1])


def with_libraries(*words: object, home: Path, **variables: str) -> str:
    """Return what a Python process prints that has the trackers, an empty home and no server."""
    nobody = "http://127.0.0.1:9"
    own = {
        "PYTHONPATH": f"{ROOT}:{LIBRARIES}",
        "HOME": str(home),
        "HF_HOME": str(home),
        "WANDB_BASE_URL": nobody,
        "HF_ENDPOINT": nobody,
    }
    inherited = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env=inherited | own | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wandb_has_both_attempts_as_one_run_with_right_steps(recorded):
    folder, found = recorded
    first, second = found["wandb"]
    for attempt in (first, second):
        assert attempt["id"] == json.loads((folder / "wandb_run.json").read_text())["run_id"]
        assert (attempt["name"], attempt["project"]) == ("my_run", "sums")
        assert (attempt["group"], attempt["tags"]) == ("tests", ["one", "two"])
        assert attempt["over"] == "step"  # the axis of all metrics
        assert {"run/curves.png", "run/config.yaml"} <= {*attempt["files"]}
    assert first["points"] == FIRST and second["points"] == SECOND
    assert (first["exit"], second["exit"]) == (255, 0)  # killed, finished
    assert (first["config"]["steps"], second["config"]["steps"]) == (8, 9)
    assert second["config"]["source.name"] == "tracker_run.py"
    (table,) = second["tables"]
    assert table["columns"] == ["step", "prompt", "response", "reward"]
    assert table["data"] == [[0, "1+2=", "3", 1.0], [5, "1+2=", "3", 1.0]]


def test_tensorboard_has_each_step_once(recorded):
    _, found = recorded
    own = found["tensorboard"]
    assert own["reward/mean"] == FIRST[:4] + SECOND
    # The evaluation at the step of the resume was done by the first attempt.
    assert own["eval/reward"] == [[4, 0.5], [9, 0.75]]
    assert "| steps | 9 |" in own["config/text_summary"]
    assert "| 5 | 1+2= | 3 | 1.0 |" in own["samples/text_summary"]
    assert "    steps: 9\n" in own["config.yaml/text_summary"]
    assert own["status/text_summary"] == "finished" and own["images"] == ["curves"]


def test_trackio_has_both_attempts_as_one_run(recorded):
    folder, found = recorded
    own = found["trackio"]
    assert own["id"] == json.loads((folder / "trackio_run.json").read_text())["run_id"]
    assert own["name"] == "my_run" and own["points"] == FIRST + SECOND
    assert own["config"]["steps"] == 9 and own["config"]["_Group"] == "tests"
    assert own["tables"][-1][-1] == {"step": 5, "prompt": "1+2=", "response": "3", "reward": 1.0}
    assert sorted(own["alerts"]) == ["finished", "stopped"]


def test_no_file_of_the_run_has_a_key_and_the_run_may_be_resumed(recorded):
    folder, _ = recorded
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 20
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert not link_problems(folder)


def test_a_key_is_missed_without_asking_a_server(tmp_path):
    if not LIBRARIES.exists():
        pytest.skip("the trackers are not there: make .venv/trackers")
    code = (
        "import os, sys\n"
        "from spmdrl.report.trackers.wandb_tracker import key_problem\n"
        "print(key_problem())\n"
        "for key in sys.argv[1:]:\n"
        "    os.environ['WANDB_API_KEY'] = key\n"
        "    print(key_problem())\n"
    )
    printed = with_libraries("-c", code, "too-short", SECRET, home=tmp_path)
    without, too_short, right = printed.split("\n")[:3]
    assert right == "" and "WANDB_API_KEY invalid" in too_short and "too-short" not in too_short
    assert "report.wandb.mode: online, and there is no key for http://127.0.0.1:9" in without
    assert "WANDB_API_KEY" in without and "take offline" in without


def with_trackers(*names: str) -> list[str]:
    """Return the problems of a config with these trackers that name trackers."""
    cfg = Config(report=ReportSettings(trackers=names))
    return [problem for problem in validate(cfg) if "report.trackers" in problem]


def test_a_tracker_that_is_not_installed_is_refused_by_name_with_the_command(monkeypatch):
    monkeypatch.setattr(trackers, "installed_versions", lambda: {"mlflow": "3.17.2"})
    assert with_trackers("mlflow") == with_trackers() == []
    (problem,) = with_trackers("mlflow", "wandb")
    assert problem == (
        "report.trackers: wandb is not installed: pip install 'wandb==0.31.0', or take it out of "
        "[mlflow, wandb]"
    )
    (twice,) = with_trackers("mlflow", "mlflow")
    assert "mlflow stands there 2 times" in twice


def test_the_commands_of_messages_are_those_of_the_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    packages = dict(trackers._PACKAGES)
    assert packages.pop("mlflow") in project["dependencies"]
    assert {name: extras[name] for name in packages} == {n: [p] for n, p in packages.items()}
    assert extras["trackers"] == [f"spmdrl[{','.join(packages)}]"]
