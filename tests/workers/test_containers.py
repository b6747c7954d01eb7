"""Agents in containers, by docker or podman where one answers on this machine."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from spmdrl.agents.containers import Labels, Sweeper, found_program
from spmdrl.agents.solve import check_agent
from spmdrl.check.settings import validate
from spmdrl.config.generation import ContainerSettings
from spmdrl.errors import Refusal
from spmdrl.workers.pool import RewardPool
from tests.helpers.built import made, refused
from tests.workers.test_agents import ended, running, solved, start

AGENT = """\
import json, os, socket, time, urllib.request

row = json.load(open(os.environ["SPMDRL_ROW"]))
if row.get("do") == "hang":
    open("/spmdrl/begun", "w")
    time.sleep(600)
if row.get("do") == "exit":
    raise SystemExit("no luck")
if row.get("do") == "link":
    os.symlink("/etc/passwd", os.environ["SPMDRL_RESULT"])
    raise SystemExit
body = {"messages": [{"role": "user", "content": "2+2?"}]}
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
asked = urllib.request.Request(address, json.dumps(body).encode(), key)
answer = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"]
status = open("/proc/self/status").read()
limit = "/sys/fs/cgroup/memory/memory.limit_in_bytes"
limit = limit if os.path.exists(limit) else "/sys/fs/cgroup/memory.max"
result = {
    "reward": float(answer == row["answer"]),
    "interfaces": len(socket.if_nameindex()),
    "capabilities": int(status.split("CapEff:")[1].split()[0], 16),
    "is_bound": int(status.split("NoNewPrivs:")[1].split()[0]),
    "memory": int(open(limit).read()),
}
json.dump(result, open(os.environ["SPMDRL_RESULT"], "w"))
"""
NAME = "localhost/spmdrl-test:1"


@pytest.fixture(scope="module", params=["docker", "podman"])
def container(request) -> Iterator[ContainerSettings]:
    """Return settings of an image that has this machine's programs."""
    program = request.param
    try:
        found_program(ContainerSettings(NAME, program))
    except Refusal as error:
        pytest.skip(str(error))
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name in ("bin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type = tarfile.SYMTYPE
            link.linkname = f"usr/{name}"
            archive.addfile(link)
    subprocess.run([program, "import", "-", NAME], input=data.getvalue(), check=True)
    python = Path(sys.base_prefix)
    folders = {"/usr", *([] if python.is_relative_to("/usr") else [str(python)])}
    options = [f"--volume={folder}:{folder}:ro" for folder in sorted(folders)]
    yield ContainerSettings(NAME, program, options=(*options, f"--env=PATH={python}/bin:/usr/bin"))
    subprocess.run([program, "rmi", "--force", NAME], check=True)


def running_in(tmp_path, container, **rollout):
    command = ("python3", "-c", AGENT)
    return running(tmp_path, "", agent_command=command, agent_container=vars(container), **rollout)


def left(container: ContainerSettings, label: str) -> list[str]:
    """Return the containers with a label."""
    words = [container.program, "ps", "--all", "--quiet", "--filter", f"label={label}"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()


def wait_for(condition, *, within_s: float = 60.0) -> None:
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_container_reaches_the_policy_and_nothing_else(tmp_path, container):
    with running_in(tmp_path, container) as (pool, leader):
        rows = ({"answer": "4"}, {"do": "exit"}, {"do": "link"})
        found = solved(pool, leader, *rows)
        assert (found[0].failure, found[0].value) == (None, 1.0), found[0].message
        assert found[0].metrics == {
            "interfaces": 1.0,
            "capabilities": 0.0,
            "is_bound": 1.0,
            "memory": 4.0 * 2**30,
        }
        assert found[1].failure == "error" and "no luck" in found[1].message
        assert found[2].failure == "bad_value"
        assert "SPMDRL_RESULT cannot be read: Too many levels" in found[2].message
        label = pool._labels.process
    assert left(container, label) == []


def test_a_container_ends_at_the_deadline(tmp_path, container):
    with running_in(tmp_path, container, agent_timeout_s=4.0) as (pool, leader):
        start(pool, leader, "0", {"do": "hang"})
        assert ended(pool, 1)[0].failure == "timeout"
        wait_for(lambda: left(container, pool._labels.process) == [])


def test_what_a_killed_run_leaves_is_removed(tmp_path, container):
    script = f"""
        import time
        from pathlib import Path
        from spmdrl.config.generation import ContainerSettings
        from tests.workers.test_containers import running_in, start

        with running_in(Path({str(tmp_path)!r}), {container!r}) as (pool, leader):
            pool.start()
            start(pool, leader, "0", {{"do": "hang"}})
            print(pool._labels.process, flush=True)
            while True:
                pool.poll()
                pool.wait()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    ) as run:
        label = run.stdout.readline().strip()
        wait_for(lambda: len(left(container, label)) == 1)
        run.kill()
    wait_for(lambda: left(container, label) == [])


def test_a_start_removes_what_an_earlier_attempt_left(container):
    name = f"spmdrl-test-{os.getpid()}"
    label = f"spmdrl.run={name}"
    words = [container.program, "create", "--name", name, "--label", label, NAME, "true"]
    subprocess.run(words, check=True, capture_output=True)
    assert len(left(container, label)) == 1
    sweeper = Sweeper(container, Labels(label, f"spmdrl.process={name}"))
    assert left(container, label) == []
    sweeper.close()


def test_an_image_that_cannot_run_is_refused_by_name(container):
    for own, says in [
        (replace(container, image="localhost/none:1"), "has no image 'localhost/none:1'"),
        (replace(container, options=()), "cannot call back"),  # without the machine's python3
    ]:
        with pytest.raises(Refusal, match=says):
            check_agent("", ("true",), own)


def test_a_machine_without_containers_is_refused_by_name(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    says = "rollout.agent_container.image: some:1 needs docker or podman, and none answers"
    with refused(says):
        check_agent("", ("true",), ContainerSettings("some:1"))
    cfg = made(
        data=dict(train="rows.jsonl"),
        rollout=dict(agent_command=("true",), agent_container=dict(image="some:1")),
    )
    with RewardPool(cfg) as pool, refused(says):
        pool.start()


def test_a_container_is_of_a_command():
    cfg = made(
        data=dict(train="rows.jsonl"),
        rollout=dict(agent="a.py:solve", agent_container=dict(image="some:1")),
    )
    assert any("rollout.agent_container.image: some:1" in problem for problem in validate(cfg))
