"""Tasksets of verifiers, by a module with the part of its interface that is used.

tests/program/test_outside.py plays a taskset with the package itself.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pydantic
import pytest

from spmdrl.environments import verifiers
from spmdrl.environments.plain_state import PLAIN
from spmdrl.environments.protocol import ToolCall
from spmdrl.environments.verifiers import VerifiersEnvironment
from spmdrl.errors import Refusal
from tests.environments.environment_runs import play, served

ROW = {"prompt": "2+3=", "answer": "5", "data_source": "sums.jsonl"}


class TaskData(pydantic.BaseModel):
    prompt: str | list[dict[str, str]] | None = None
    system_prompt: str | None = None
    image: str | None = None
    answer: str = ""


class Task:
    """A task as the package has them: rewards are methods that `hooks` finds."""

    NEEDS_CONTAINER = False
    rewards: tuple[str, ...] = ()

    def __init__(self, data: TaskData, config: Any):
        self.data = data
        self.key = "key"
        self.hash = "hash"

    @classmethod
    def data_type(cls) -> type[TaskData]:
        return TaskData

    @classmethod
    def toolsets(cls, config: Any) -> list:
        return []

    async def setup(self, trace: Any, runtime: Any) -> None: ...
    async def finalize(self, trace: Any, runtime: Any) -> None: ...

    def hooks(self, kind: str) -> list:
        return [getattr(self, name) for name in self.rewards] if kind == "reward" else []

    def plugged_judges(self) -> list:
        return []

    async def score(self, trace: Any) -> None:
        for function in self.hooks("reward"):
            value = await function(trace)
            trace.rewards[function.__name__] = SimpleNamespace(score=value, weight=0.5)
        trace.metrics["length"] = float(len(trace.nodes))


@dataclass
class Trace:
    task: Any
    agent: Any
    tools: list
    nodes: list
    calls: list
    is_completed: bool
    ok: bool
    stop_condition: str
    rewards: dict = field(default_factory=dict)
    metrics: dict = field(default_factory=dict)


class Taskset:
    task: type[Task] = Task
    system_prompt = None

    def __init__(self, config: Any):
        self.config = config

    @classmethod
    def task_type(cls) -> type[Task]:
        return cls.task

    @classmethod
    def toolsets(cls, config: Any) -> list:
        return []


class SingleAgentEnv: ...


class Config(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    id: str
    task: dict = {}


class Right(Task):
    rewards = ("right", "short")

    async def right(self, trace: Any) -> float:
        await asyncio.sleep(0)
        return float(trace.nodes[-1].message["content"] == trace.task.data.answer)

    async def short(self, trace: Any) -> float:
        return float(trace.calls[-1].finish_reason == "stop")


@pytest.fixture
def taskset(monkeypatch, tmp_path):
    """Return a function that makes a taskset of a class of tasks, and returns its file."""
    module = ModuleType("verifiers.v1")
    for kind in (Taskset, Task, Trace, SingleAgentEnv):
        setattr(module, kind.__name__, kind)
    for name in ("MessageNode", "ModelCall", "Tool", "TraceTask", "AgentInfo", "AgentConfig"):
        setattr(module, name, SimpleNamespace)
    monkeypatch.setitem(sys.modules, "verifiers", ModuleType("verifiers"))
    monkeypatch.setitem(sys.modules, "verifiers.v1", module)
    state = ModuleType("verifiers.v1.state")
    state.state_cls = lambda kind: dict
    monkeypatch.setitem(sys.modules, "verifiers.v1.state", state)
    module.taskset_config_type = lambda name: Config
    module.environment_class = lambda name: SingleAgentEnv
    file = tmp_path / "sums.py"
    file.write_text("")

    def make(task: type[Task], **changed: Any) -> str:
        vars(module).update(changed)
        kind = type("Sums", (Taskset,), {"task": task})
        module.load_taskset = lambda config: kind(config)
        verifiers._loaded.cache_clear()
        return str(file)

    yield make
    verifiers._loaded.cache_clear()


def test_a_conversation_is_scored_by_its_task(taskset):
    server = served("verifiers", taskset=taskset(Right))
    assert server.tools == [] and server.tool_parser == "" and not server.is_graded
    packed, turn, _ = server.open(ROW | {"system_prompt": "Add."}, seed=0)
    assert packed[:1] == PLAIN
    assert turn.messages == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "2+3="},
    ]
    (turn,) = play(server, ROW, ["5"])
    assert turn.is_done and turn.reward == 1.0
    wanted = {"right": 1.0, "short": 1.0, "length": 2.0, "turns": 1.0, "tool_calls": 0}
    assert turn.info.items() >= wanted.items()
    assert play(server, ROW, ["6"])[0].reward == 0.5


def test_calls_of_tools_are_part_of_the_conversation(taskset, monkeypatch):
    seen = {}

    class Used(Right):
        rewards = ("used",)

        async def used(self, trace: Any) -> float:
            seen["messages"] = [node.message for node in trace.nodes]
            seen["sampled"] = [node.sampled for node in trace.nodes]
            return 1.0

    file = taskset(Used)
    monkeypatch.setattr(VerifiersEnvironment, "run", lambda self, call: ("5", True))

    def read(text: str) -> tuple[ToolCall, ...]:
        return (ToolCall("add", {"a": 2}),) if text == "call" else ()

    turns = play(served("verifiers", taskset=file), ROW, ["call", "5"], read=read)
    assert [message["content"] for message in turns[0].messages] == ["5"]
    assert turns[1].reward == 0.5
    _, call, result, answer = seen["messages"]
    assert call["tool_calls"] == [{"id": "call00001", "name": "add", "arguments": '{"a": 2}'}]
    assert result["tool_call_id"] == "call00001" and answer["content"] == "5"
    assert seen["sampled"] == [False, True, False, True]


def test_tasksets_that_need_more_are_refused(taskset):
    class Container(Right):
        NEEDS_CONTAINER = True

    class Tools(Right):
        @classmethod
        def toolsets(cls, config):
            return [object()]

    class Setup(Right):
        async def setup(self, trace, runtime): ...

    class Files(Right):
        rewards = ("file",)

        async def file(self, runtime): ...

    class Changes(Right):
        def change(self, request): ...

        change.intercept = True

    class Leads: ...

    for task, changed, words in [
        (Container, {}, "need a container"),
        (Tools, {}, "start tool servers of their own"),
        (Setup, {}, "setup asks for a runtime"),
        (Right, {"environment_class": lambda name: Leads}, "Leads, which leads"),
    ]:
        file = taskset(task, **changed)
        with pytest.raises(Refusal, match=words):
            served("verifiers", taskset=file)
    leads_alone = {"environment_class": lambda name: SingleAgentEnv}
    for task, row, words in [
        (Files, ROW, "file asks for a runtime"),
        (Changes, ROW, "stop or change requests"),
        (Task, ROW, "have no rewards"),
        (Right, {"answer": "5"}, "no prompt"),
        (Right, ROW | {"image": "ubuntu"}, "runs in the image"),
        (Right, ROW | {"answer": 5}, "is no task"),
    ]:
        with pytest.raises(Refusal, match=words):
            served("verifiers", taskset=taskset(task, **leads_alone)).open(row, seed=0)
    with pytest.raises(Refusal, match="split"):
        served("verifiers", taskset=taskset(Right), options={"split": "x"})


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(Refusal, match="pip install 'verifiers>=0.4'"):
        served("verifiers", taskset="sums")
