"""Folders of strangers: none of their modules is imported, and none of their code runs unasked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from spmdrl.config import Config
from spmdrl.imports import import_object, in_child
from spmdrl.tools.foreign_code import named_code
from spmdrl.workers.messages import Setup
from spmdrl.workers.worker_process import WorkerProcess

ROOT = Path(__file__).parents[2]
NAMES = ("yaml", "json", "tyro", "torch", "numpy", "ast", "signal", "multiprocessing", "pickle")


@pytest.fixture
def strange(tmp_path, monkeypatch) -> Path:
    """The current folder, with modules that leave a file `ran` when they are imported."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')"
        )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def started(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | more
    program = [sys.executable, "-m", "spmdrl", *words]
    return subprocess.run(program, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("python_path", ["", f":{ROOT}"])
def test_commands_import_nothing_from_the_current_folder(strange, python_path) -> None:
    more = {"PYTHONPATH": python_path} if python_path else {}
    for words in (["help"], ["curves", "."], ["evaluate", "--help"]):
        done = started(*words, **more)
        assert "Traceback" not in done.stderr and done.stdout + done.stderr
        assert not (strange / "ran").exists(), (words, (strange / "ran").read_text())


def calls(name: str) -> list[str]:
    """Return what is wrong with a function of the current folder, in a child."""
    return import_object(f"{name}:grade", kind="function")()


def test_children_import_nothing_from_the_current_folder(strange) -> None:
    (strange / "own_grader.py").write_text("def grade(*of, **named):\n    return ['found']\n")
    found, problem = in_child(calls, "own_grader", what="it", timeout_s=60)
    assert (found, problem) == (["found"], "")
    setup = Setup(functions={"task": "task:addition"}, timeout_s=5.0, weights=(1.0,))
    worker, deadline = WorkerProcess(setup), time.monotonic() + 60
    try:
        while not worker.is_ready and time.monotonic() < deadline:
            worker.flush()
            worker.receive()
            time.sleep(0.01)
        assert worker.is_ready, worker.refusal
    finally:
        worker.kill()
    assert not (strange / "ran").exists()


def test_a_module_of_the_current_folder_is_found_where_a_config_names_it(strange) -> None:
    (strange / "own_rewards.py").write_text("import own_neighbour\ngrade = own_neighbour.grade\n")
    (strange / "own_neighbour.py").write_text("def grade():\n    return 7\n")
    path = [*sys.path]
    try:
        assert import_object("own_rewards:grade", kind="function")() == 7
        assert import_object("own_rewards.py:grade", kind="function")() == 7
        import_object("json:dumps", kind="function")
        assert sys.path[: len(path)] == path, "the current folder comes last"
    finally:
        sys.path[:] = path
    assert not (strange / "ran").exists()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"name": "gym", "env": "task:E"}, ["env: task:E"]),
        ({"name": "gym", "env": "reasoning_gym:E"}, ["env: reasoning_gym:E"]),
        ({"name": "gym", "env": "g:f", "show": "task:f"}, ["env: g:f", "show: task:f"]),
        ({"name": "tools", "tools": {"task:f": {}}}, ["tools: task:f"]),
        ({"name": "tools", "tools": "calculator,task:f"}, ["tools: calculator,task:f"]),
        ({"name": "tools", "tools": {"mcp": "serve"}}, ["tools.mcp: serve"]),
        (
            {"name": "tools", "tools": {"mcp": [{"server": ["a", "b"], "env": {"X": "y"}}]}},
            ["tools.mcp.server: a", "tools.mcp.server: b", "tools.mcp.env.X: y"],
        ),
        ({"name": "verifiers", "taskset": "evil.py"}, ["taskset: evil.py"]),
        ({"name": "task", "task": " task:f"}, ["task:  task:f"]),
        ({"name": "task", "task": "task:x/../evil.py:f"}, ["task: task:x/../evil.py:f"]),
        ({"name": "task:f", "task": "task:addition"}, ["name: task:f", "task: task:addition"]),
        ({"name": "task", "task": {"task": "task:f"}}, ["task.task: task:f"]),
        ({"name": "task", "task": "task:addition"}, []),
        ({"name": "task", "task": "reasoning_gym:chain_sum"}, []),
        ({"name": "tools", "tools": "calculator"}, []),
    ],
)
def test_prefixes_of_tasks_are_known_only_where_a_task_is_asked_for(environment, expected) -> None:
    cfg = Config()
    cfg = replace(cfg, rollout=replace(cfg.rollout, environment=environment))
    own = [text for text in named_code(cfg) if text.startswith("rollout.environment")]
    assert own == [f"rollout.environment.{text}" for text in expected]


@pytest.mark.parametrize("spec", [" task:f", "task:f ", "task:x/../evil.py:f", "task", "tasks:f"])
def test_a_reward_that_only_looks_like_a_task_is_code(spec) -> None:
    cfg = Config()
    cfg = replace(cfg, rewards=replace(cfg.rewards, functions=(spec,)))
    assert named_code(cfg) == [f"rewards.functions: {spec}"]


def test_an_agent_is_code() -> None:
    cfg = Config()
    own = replace(cfg.rollout, agent="a.py:solve", agent_command=("./agent", "-v"))
    assert named_code(replace(cfg, rollout=own)) == [
        "rollout.agent: a.py:solve",
        "rollout.agent_command: ./agent -v",
    ]
