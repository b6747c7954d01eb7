"""Environments and tools of other packages, trained in with the packages: `make outside`.

A small model learns to answer with digits from players who choose at random, and to call a tool
from one who calls it every other time. Then each environment trains it for twenty steps of GRPO,
and the reward must rise.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.demonstrations import as_message
from spmdrl.environments.protocol import Message, Response, ToolCall
from spmdrl.environments.tool_calls import hermes
from spmdrl.workers.environment_jobs import EnvironmentServer
from tests.environments.environment_runs import play
from tests.helpers.ranks import free_port
from tests.helpers.runs import ROOT, metrics

pytestmark = pytest.mark.outside
PACKAGES = Path(sys.prefix) / "outside"
OPENENV = Path(sys.prefix) / "openenv"
HERE = Path(__file__).parent
STEPS = 20

GYMNASIUM = {
    "name": "gym",
    "env": "gymnasium:make",
    # Three by three: four steps lead around the hole to the goal.
    "env_options": {"id": "FrozenLake-v1", "desc": ["SFF", "FHF", "FFG"], "is_slippery": False},
    "action": "int",
    "max_turns": 10,
}
MCP = {
    "name": "tools",
    "tools": {
        "mcp": {
            "server": [sys.executable, str(HERE.parent / "environments" / "mcp_server.py")],
            "only": ["power"],
        }
    },
    "parser": "hermes",
    "max_turns": 2,
}
EXACT = """
def exact(completions, answer, **columns):
    return [float(own == wanted) for own, wanted in zip(completions, answer)]
"""
VERIFIERS = {"name": "verifiers", "taskset": str(HERE / "sums_taskset.py")}


@pytest.fixture(scope="module", autouse=True)
def packages() -> Iterator[None]:
    """Have this process find the packages."""
    for folder in (PACKAGES, OPENENV):
        if not folder.is_dir():
            pytest.fail(f"{folder} is missing: run make outside")
    sys.path.append(str(PACKAGES))
    yield
    sys.path.remove(str(PACKAGES))


@pytest.fixture(scope="module")
def openenv() -> Iterator[dict[str, Any]]:
    """Return the options of an environment whose server runs."""
    port = free_port()
    path = os.pathsep.join([str(OPENENV), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, str(HERE / "openenv_server.py"), str(port)],
        env=os.environ | {"PYTHONPATH": path},
    )
    try:
        until = time.monotonic() + 120
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        address = f"http://127.0.0.1:{port}"
        options = {"name": "openenv", "address": address, "sessions": 256}
        yield options | {"action": "int", "field": "digit", "show": "text"}
    finally:
        process.kill()
        process.wait()


def program(*words: Any, ranks: int = 0) -> None:
    """Run a command of the program, or train.py on some ranks, to its end."""
    path = os.pathsep.join([str(ROOT), str(PACKAGES)])
    start = ["-m", "spmdrl"]
    if ranks:
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *start, *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]


def train(folder: Path, config: dict[str, Any], *, ranks: int = 2) -> list[dict[str, Any]]:
    """Train by a config; return the rows of the steps."""
    common = {
        "output_dir": str(folder / "run"),
        "seed": 0,
        "optimizer": {"lr": 1.0e-3, "warmup_steps": 2},
        "report": {"trackers": []},
    }
    folder.mkdir(exist_ok=True)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(common | config))
    program(ROOT / "train.py", "--config", file, ranks=ranks)
    return metrics(folder / "run")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def digit_games(count: int) -> list[dict[str, Any]]:
    return [{"prompt": "?", "seed": seed} for seed in range(count)]


def squares(count: int) -> list[dict[str, Any]]:
    """Return rows that ask for the squares of digits."""
    digits = [2 + i % 8 for i in range(count)]
    return [{"prompt": f"{digit}^2=", "answer": str(digit**2)} for digit in digits]


@pytest.fixture(scope="module")
def sums(tmp_path_factory) -> Path:
    """Return the tasks of the taskset as a file of rows."""
    file = tmp_path_factory.mktemp("sums") / "sums.jsonl"
    program("fetch_taskset", VERIFIERS["taskset"], file)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 25 and rows[7] == {"idx": 7, "prompt": "1+2=", "answer": 3}
    return write_rows(file, rows * 40)


@pytest.fixture(scope="module")
def model(tmp_path_factory, openenv, sums) -> Path:
    """Return a model that answers with digits chosen at random."""
    folder = tmp_path_factory.mktemp("warm")
    draw = random.Random(0)
    tasks = [json.loads(line) for line in sums.read_text().splitlines()][:400]
    players = [
        (GYMNASIUM, digit_games(400), lambda *_: Response(str(draw.randrange(4)))),
        (openenv, digit_games(400), lambda *_: Response(str(draw.randrange(10)))),
        (VERIFIERS, tasks, lambda *_: Response(str(draw.randrange(10)))),
        (MCP, squares(800), functools.partial(half_a_caller, draw)),
    ]
    rows: list[dict[str, Any]] = []
    for options, own, player in players:
        server = EnvironmentServer(options)
        tools = {"tools": server.tools} if server.tools else {}
        rows += [{"messages": conversation(server, row, player)} | tools for row in own]
    draw.shuffle(rows)
    program(
        "create_model",
        folder / "init",
        "--chat-template",
        "--layers",
        2,
        "--initializer-std",
        0.088,
    )
    config = {
        "steps": 150,
        "layout": {"placement": "offline", "world_size": 2},
        "model": {"path": str(folder / "init"), "compute_dtype": "float32"},
        "data": {"train": str(write_rows(folder / "played.jsonl", rows)), "max_prompt_tokens": 64},
        "batch": {"prompts_per_step": 64, "tokens_per_microbatch": 4096},
        "sampling": {"max_response_tokens": 320},
        "algorithm": {"objective": "sft"},
        "optimizer": {"lr": 2.0e-3, "beta2": 0.98, "schedule": "cosine", "warmup_steps": 10},
    }
    train(folder / "sft", config)
    program("export", folder / "sft" / "run", "--out", folder / "model")
    return folder / "model"


def half_a_caller(draw: random.Random, messages: list[Message], row: dict) -> Response:
    """Repeat what the tool returned; else call it, or answer at random."""
    if messages[-1]["role"] == "tool":
        return Response(messages[-1]["content"])
    if draw.random() < 0.5:
        call = ToolCall("power", {"base": int(row["prompt"].partition("^")[0])})
        return Response("", (call,))
    return Response(str(draw.randrange(2, 10) ** 2))


def conversation(
    server: EnvironmentServer, row: dict, player: Callable[[list[Message], dict], Response]
) -> list[Message]:
    """Play one episode; return its messages."""
    packed, turn, _ = server.open(row, seed=0)
    messages: list[Message] = []
    while not turn.is_done:
        messages += turn.messages
        answer = player(messages, row)
        messages.append(as_message(answer))
        packed, turn, _ = server.turn(packed, answer)
    return messages


def rise(rows: list[dict[str, Any]], name: str) -> float:
    """Print the curve of the reward; return by how much its end is above its beginning."""
    curve = [row["reward/mean"] for row in rows]
    assert len(curve) == STEPS
    print(f"\n{name}: " + " ".join(f"{reward:.3f}" for reward in curve))
    return (sum(curve[-5:]) - sum(curve[:5])) / 5


def grpo(model: Path, environment: dict[str, Any], train_file: Path) -> dict[str, Any]:
    return {
        "steps": STEPS,
        "lag": 1,
        "layout": {"placement": "split", "world_size": 2, "trainer_ranks": 1},
        "model": {"path": str(model), "compute_dtype": "float32"},
        "data": {"train": str(train_file), "max_prompt_tokens": 64},
        "batch": {"prompts_per_step": 32, "group_size": 8, "tokens_per_microbatch": 8192},
        "rollout": {"environment": environment},
        "sampling": {"max_response_tokens": 320},
        "engine": {"dtype": "float32", "cpu_kv_cache_gib": 0.5, "max_num_seqs": 256},
    }


def test_gymnasium(model, tmp_path):
    games = write_rows(tmp_path / "games.jsonl", digit_games(2000))
    assert rise(train(tmp_path / "gym", grpo(model, GYMNASIUM, games)), "gymnasium") > 0.05


def test_openenv(model, openenv, tmp_path):
    games = write_rows(tmp_path / "games.jsonl", digit_games(2000))
    assert rise(train(tmp_path / "openenv", grpo(model, openenv, games)), "openenv") > 0.03


def test_verifiers(model, sums, tmp_path):
    rows = train(tmp_path / "verifiers", grpo(model, VERIFIERS, sums))
    assert rise(rows, "verifiers") > 0.03
    assert 0 < rows[-1]["environment/right"] <= 1


def test_tools_of_an_mcp_server(model, tmp_path):
    (tmp_path / "exact.py").write_text(EXACT)
    rows = write_rows(tmp_path / "squares.jsonl", squares(2000))
    config = grpo(model, MCP, rows) | {
        "rewards": {"functions": [f"{tmp_path}/exact.py:exact"]},
        "optimizer": {"lr": 3.0e-4, "warmup_steps": 2},
        # A response with a call is ten times as long as one without.
        "algorithm": {"aggregation": "seq_mean_token_mean"},
    }
    steps = train(tmp_path / "mcp", config)
    assert rise(steps, "mcp") > 0.1
    calls = [row["environment/tool_calls"] for row in steps]
    assert calls[-1] > calls[0]


def test_an_episode_of_openenv_goes_on_in_another_session(openenv):
    server = EnvironmentServer(openenv | {"sessions": 1})
    row = {"prompt": "?", "seed": 4}
    packed = [server.open(row, seed=0)[0] for _ in range(3)]
    shown = []
    for _ in range(2):
        for i, one in enumerate(packed):
            packed[i], turn, _ = server.turn(one, Response("5"))
            shown.append(turn.messages[0]["content"])
    assert shown == ["1"] * 3 + ["4"] * 3
    assert server.turn(packed[0], Response("99"))[1].info["bad_actions"] == 1


def test_tools_of_a_taskset_are_called():
    server = EnvironmentServer(VERIFIERS | {"options": {"has_tool": True}})
    (tool,) = server.tools
    assert tool["function"]["name"] == "shared_add"
    row = {"prompt": "1+2=", "answer": 3}
    call = '<tool_call>{"name": "shared_add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    turns = play(server, row, [call, "3"], read=hermes)
    assert turns[0].messages[0]["content"] == "3"
    assert turns[1].reward == 1.0 and turns[1].info["right"] == 1.0


def test_environments_that_lead_the_conversation_are_refused():
    options = {"name": "verifiers", "taskset": "openenv", "options": {"base_url": "http://a"}}
    with pytest.raises(ValueError, match=re.escape("OpenEnvEnv, which leads the conversation")):
        EnvironmentServer(options)
