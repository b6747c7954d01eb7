"""Tools of MCP servers: real servers, in processes of their own."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmdrl.environments import mcp_tools
from spmdrl.environments.base_tool import BrokenTool
from spmdrl.environments.protocol import Response, ToolCall, Turn
from spmdrl.errors import Refusal
from spmdrl.workers.environment_jobs import EnvironmentServer
from spmdrl.workers.messages import Setup
from spmdrl.workers.worker_process import WorkerProcess
from tests.environments.environment_runs import ROW, served

SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]


@pytest.fixture(autouse=True)
def no_server_stays():
    yield
    mcp_tools.close_servers()
    mcp_tools._server.cache_clear()


def answers(server: EnvironmentServer, *calls: tuple[str, dict]) -> Turn:
    environment, _, _ = server.open(ROW, seed=0)
    made = tuple(ToolCall(name, arguments) for name, arguments in calls)
    return server.turn(environment, Response("", made))[1]


def texts(turn: Turn) -> list[str]:
    return [message["content"] for message in turn.messages]


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for(condition, *, timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_tools_are_listed_and_called_and_their_errors_are_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "secret")
    monkeypatch.setenv("OTHER_KEY", "secret")
    options = {
        "server": SERVER,
        "env": {"COLOUR": "blue"},
        "pass_env": ["SOME_KEY"],
        "cwd": str(tmp_path),
        "only": ["power", "fail", "look", "process"],
    }
    server = served("tools", tools={"calculator": {}, "mcp": options})
    described = [tool["function"] for tool in server.tools]
    names = [function["name"] for function in described]
    assert names == ["calculator", "power", "fail", "look", "process"]
    power = described[1]
    assert power["description"] == "Raise a number to a power."
    assert power["parameters"]["required"] == ["base"]
    assert power["parameters"]["properties"]["kind"]["enum"] == ["int", "text"]
    turn = answers(
        server,
        ("calculator", {"expression": "2+3"}),
        ("power", {"base": 2, "exponent": 5}),
        ("power", {"base": "two"}),
        ("hang", {}),
        ("fail", {"reason": "no"}),
        *[("look", {"name": name}) for name in ("COLOUR", "SOME_KEY", "OTHER_KEY", "folder")],
    )
    assert texts(turn)[:2] == ["5", "32"]
    assert texts(turn)[2].startswith("Error: power: ") and "base" in texts(turn)[2]
    assert texts(turn)[3].startswith("Error: there is no tool 'hang'")
    assert texts(turn)[4].startswith("Error: fail: ")
    assert texts(turn)[5:] == ["blue", "secret", "not set", str(tmp_path)]
    assert turn.info == {"tool_calls": 9, "malformed_calls": 0, "tool_errors": 3}
    # One server for all episodes of a process.
    processes = {texts(answers(server, ("process", {})))[0] for _ in range(3)}
    again = served("tools", tools={"mcp": options})
    assert processes == set(texts(answers(again, ("process", {}))))


def test_a_server_that_ends_or_hangs_costs_one_call(tmp_path):
    starts = tmp_path / "starts"
    script = f'if [ -e {starts}.broken ]; then exit 1; fi; exec "$@"'
    command = ["sh", "-c", script, "sh", *SERVER]
    server = served("tools", tools={"mcp": {"server": command, "timeout_s": 1.0}})
    first = texts(answers(server, ("process", {})))
    turn = answers(server, ("end", {}), ("process", {}))
    assert texts(turn)[0] == "Error: end: the server has ended"
    assert turn.info["tool_errors"] == 1
    assert texts(turn)[1:] != first
    turn = answers(server, ("hang", {}), ("process", {}))
    assert texts(turn)[0] == "Error: hang: no result within 1 s"
    assert turn.info["tool_errors"] == 1
    Path(f"{starts}.broken").touch()
    assert texts(answers(server, ("end", {}))) == ["Error: end: the server has ended"]
    with pytest.raises(BrokenTool, match="does not start"):
        answers(server, ("process", {}))  # fails the episode
    Path(f"{starts}.broken").unlink()
    assert answers(server, ("process", {})).info["tool_errors"] == 0
    mcp_tools.close_servers()
    for process in (first[0], texts(turn)[1]):
        assert not is_alive(int(process))


def test_the_output_of_a_server_is_bounded(capfd):
    script = 'echo "here I am" >&2; head -c 3000000 /dev/zero | tr "\\0" x >&2; exec "$@"'
    command = ["sh", "-c", script, "sh", *SERVER]
    server = served("tools", tools={"mcp": {"server": command, "only": ["power"]}})
    assert texts(answers(server, ("power", {"base": 3}))) == ["9"]
    mcp_tools.close_servers()
    shown = ""

    def is_complete() -> bool:
        nonlocal shown
        shown += capfd.readouterr().err
        return "were dropped" in shown

    wait_for(is_complete)
    assert shown.startswith("here I am\nxxx")
    assert shown.count("x" * 1000) == 16 and "over 16384 bytes of output in 600 s" in shown
    dropped = re.search(r"the MCP server 'sh .*': (\d+) bytes of output were dropped", shown)
    assert int(dropped.group(1)) == 3_000_000 + len("here I am\n") - 2**14


def test_what_cannot_work_is_refused_at_start(tmp_path):
    silent = [sys.executable, "-c", "import time; time.sleep(60)"]
    for options, words in [
        ("", "name the command"),
        ("no-such-program --x", "'no-such-program' is not a program"),
        ({"server": "true", "timeout": 1}, "timeout: unknown option"),
        ({"server": "true", "timeout_s": 0}, "timeout_s: must be above 0, got 0"),
        ({"server": "true", "pass_env": ["NOT_SET_ANYWHERE"]}, "NOT_SET_ANYWHERE is not set"),
        ({"server": "true", "cwd": str(tmp_path / "none")}, "is not a folder"),
        ({"server": "http://127.0.0.1:9/mcp", "cwd": "/"}, "are of a command"),
        ("true", "the MCP server 'true' does not start: "),
        ("http://127.0.0.1:9/mcp", "does not start: "),
        ({"server": silent, "start_timeout_s": 0.5}, "longer than start_timeout_s = 0.5"),
        ({"server": [*SERVER, "--none"]}, "has no tools"),
        ({"server": SERVER, "only": ["powr"]}, "has no tool 'powr'; did you mean power?"),
        ([{"server": SERVER}, {"server": SERVER}], "two have the name 'power'"),
    ]:
        with pytest.raises(Refusal, match=re.escape(words)):
            served("tools", tools={"mcp": options})
    with pytest.raises(Refusal, match="name the command"):
        served("tools", tools="calculator, mcp")


def test_a_server_at_an_address_is_called_too():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*SERVER, "--http", str(port)], stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        server = served("tools", tools={"mcp": f"http://127.0.0.1:{port}/mcp"})
        assert texts(answers(server, ("power", {"base": 3}))) == ["9"]
        process.kill()
        process.wait()
        turn = answers(server, ("power", {"base": 3}))
        assert turn.info["tool_errors"] == 1
    finally:
        process.kill()
        process.wait()


def test_results_of_other_kinds_are_named():
    types = pytest.importorskip("mcp.types")
    text = types.TextContent(text="a")
    image = types.ImageContent(data="AA==", mime_type="image/png")
    inner = types.TextResourceContents(uri="file:///a", text="b")
    link = types.ResourceLink(name="c", uri="file:///c")
    content = [text, image, types.EmbeddedResource(resource=inner), link]
    result = types.CallToolResult(content=content)
    wanted = "a\n[image, which is not shown]\nb\n[c: file:///c]"
    assert mcp_tools._text_of(result) == wanted
    result = types.CallToolResult(content=[], structured_content={"a": 1})
    assert json.loads(mcp_tools._text_of(result)) == {"a": 1}


def test_the_server_ends_with_the_worker(tmp_path):
    note = tmp_path / "process"
    command = ["sh", "-c", f'echo $$ > {note}; exec "$@"', "sh", *SERVER]
    environment = {"name": "tools", "tools": {"mcp": {"server": command}}}
    worker = WorkerProcess(Setup({}, (), environments={"rollout.environment": environment}))
    try:

        def is_ready() -> bool:
            worker.flush()
            worker.receive()
            assert not worker.refusal
            return worker.is_ready

        wait_for(is_ready, timeout_s=60)
        facts = worker.facts["environments"]["rollout.environment"]
        assert "power" in [tool["function"]["name"] for tool in facts["tools"]]
        process = int(note.read_text())
        assert is_alive(process)
    finally:
        worker.kill()
    wait_for(lambda: not is_alive(process))
