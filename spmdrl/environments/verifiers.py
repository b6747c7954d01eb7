"""Tasksets of the `verifiers` package (0.4, its interface `verifiers.v1`).

A taskset has tasks: a prompt, tools that all tasks share, and methods that score the conversation.
Here the policy is asked turn by turn, so the conversation is that of the package's plain chat loop:
the prompt, then answers and results of tools until an answer calls none. What needs more is
refused: an `Env` class that leads the conversation itself, a container or another runtime, and tool
servers that live as long as one rollout.

A row of data.train is the data of one task: its columns are the fields of the taskset's TaskData.
`python -m spmdrl fetch_taskset` writes such rows.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Iterator
from typing import Any

from spmdrl.environments import background
from spmdrl.environments.base_tool import Tool
from spmdrl.environments.protocol import Message, Response, Turn
from spmdrl.environments.tools import ToolEnvironment
from spmdrl.errors import RAISED, Refusal
from spmdrl.imports import import_file, refusing

_AGENT = "rollout.agent can run it, since it lets the package lead the conversation"
_HOOKS = ("setup", "finalize")


class VerifiersEnvironment(ToolEnvironment):
    """An episode of a task, scored by the task's rewards and judges.

    Args:
        taskset: name of an installed taskset, or a file `path/file.py` with one; either names its
            `Taskset` class in `__all__`.
        options: fields of its config, such as `{task: {judges: [...]}}`.
        call_timeout_s: deadline of a call of a tool.
        max_turns, max_result_chars, parser, reply_role: see `ToolEnvironment`.
    """

    is_graded = False

    def __init__(
        self,
        *,
        taskset: str,
        options: dict[str, Any] | None = None,
        call_timeout_s: float = 5.0,
        max_turns: int = 16,
        max_result_chars: int = 2000,
        parser: str = "auto",
        reply_role: str = "tool",
    ):
        self._taskset = [taskset, json.dumps(options or {}, sort_keys=True), call_timeout_s]
        super().__init__(
            tools=[taskset],
            max_turns=max_turns,
            max_result_chars=max_result_chars,
            parser=parser,
            reply_role=reply_role,
        )
        self.data: dict[str, Any] = {}
        """The task's data, as JSON."""
        self.messages: list[Message] = []
        """The conversation; each answer of the policy has `sampled`."""

    def named_tools(self) -> dict[str, Tool]:
        """Return {name: tool} of the taskset."""
        return _loaded(*self._taskset).tools

    def reset(self, row: dict) -> list[Message]:
        """Open with the prompt of the task, and its system prompt before it."""
        loaded = _loaded(*self._taskset)
        task = loaded.task(row)
        loaded.check(task)
        self.data = task.data.model_dump(mode="json", exclude_unset=True)
        messages = _opening(task.data)
        self.messages = [dict(message) for message in messages]
        return self.with_preface(messages)

    def step(self, response: Response) -> Turn:
        """Run the tools that the response calls, or score the conversation at its end."""
        turn = super().step(response)
        self.messages += [_answer(response, turn.messages), *turn.messages]
        if not turn.is_done:
            return turn
        rewards, metrics = _loaded(*self._taskset).scores(self.data, self.messages)
        info = turn.info | metrics | {name: score for name, (score, _) in rewards.items()}
        reward = sum(score * weight for score, weight in rewards.values())
        return Turn(is_done=True, reward=reward, info=info | {"turns": float(self.turns)})


@functools.lru_cache(maxsize=4)
def _loaded(taskset: str, options: str, call_timeout_s: float) -> _Taskset:
    # One per process: tools hold connections and corpora, which cannot be packed.
    return _Taskset(taskset, json.loads(options), call_timeout_s)


class _Taskset:
    """A taskset, and its tools. Raises (on construction): Refusal for one that cannot be used."""

    def __init__(self, name: str, options: dict[str, Any], call_timeout_s: float):
        self.name = name
        self.taskset = open_taskset(name, options)
        self._task = type(self.taskset).task_type()
        if self._task.NEEDS_CONTAINER:
            raise Refusal(f"taskset: tasks of {name} need a container; {_AGENT}")
        if self._task.toolsets(self.taskset.config.task):
            raise Refusal(
                f"taskset: tasks of {name} start tool servers of their own, and the turns of an "
                f"episode go to several processes; {_AGENT}"
            )
        for hook in _HOOKS:
            self._check_hook(getattr(self._task, hook), getattr(_base_task(), hook))
        self.tools: dict[str, Tool] = {}
        for toolset in type(self.taskset).toolsets(self.taskset.config):
            for tool in _tools_of(toolset, call_timeout_s=call_timeout_s):
                if tool.name in self.tools:
                    raise Refusal(f"taskset: {name} has two tools of the name {tool.name!r}")
                self.tools[tool.name] = tool

    def task(self, row: dict) -> Any:
        """Return the task of a row. Raises: Refusal for a row that is not data of a task."""
        kind = self._task.data_type()
        fields = {n: row[n] for n in kind.model_fields if row.get(n) is not None}
        with refusing(f"the row is no task of {self.name}", ValueError):
            data = kind.model_validate(fields)
        if self.taskset.system_prompt is not None:
            data = data.model_copy(update={"system_prompt": self.taskset.system_prompt})
        return self._task(data, self.taskset.config.task)

    def check(self, task: Any) -> None:
        """Refuse a task that this adapter cannot play or score."""
        if not task.data.prompt:
            raise Refusal(f"the row has no prompt: another agent opens the conversation; {_AGENT}")
        if task.data.image:
            raise Refusal(f"the task runs in the image {task.data.image!r}; {_AGENT}")
        kinds = [getattr(type(task), name, None) for name in dir(type(task))]
        if task.hooks("stop") or any(hasattr(function, "intercept") for function in kinds):
            raise Refusal(f"tasks of {self.name} stop or change requests; {_AGENT}")
        for kind in ("reward", "metric"):
            for function in task.hooks(kind):
                self._check_hook(function, None)
        if not task.hooks("reward") and not task.plugged_judges():
            raise Refusal(f"tasks of {self.name} have no rewards: nothing scores an episode")

    def scores(
        self, data: dict[str, Any], messages: list[Message]
    ) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
        """Return {reward: (score, weight)} and {metric: value} of a conversation.

        Args:
            data: the task's, as JSON.
        Raises: TaskError of the package.
        """
        task = self.task(data)
        trace = self._trace(task, messages)
        background.run(_score(task, trace))
        rewards = {n: (r.score, r.weight) for n, r in trace.rewards.items() if r is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return rewards, metrics

    def _trace(self, task: Any, messages: list[Message]) -> Any:
        import verifiers.v1 as vf

        nodes = []
        calls = []
        for i, message in enumerate(messages):
            own = {k: v for k, v in message.items() if k not in ("sampled", "finish_reason")}
            sampled = bool(message.get("sampled"))
            parent = i - 1 if i else None
            nodes.append(vf.MessageNode(parent=parent, message=own, sampled=sampled))
            if sampled:
                calls.append(vf.ModelCall(node=i, finish_reason=message["finish_reason"]))
        seen = [vf.Tool(**tool.description["function"]) for tool in self.tools.values()]
        of_task = vf.TraceTask(
            type=type(task).__name__, data=task.data, key=task.key, hash=task.hash
        )
        return vf.Trace(
            task=of_task,
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            tools=seen,
            nodes=nodes,
            calls=calls,
            is_completed=True,
            ok=True,
            stop_condition="agent_completed",
        )

    def _check_hook(self, function: Any, original: Any) -> None:
        parameter = inspect.signature(function).parameters.get("runtime")
        if function is not original and parameter and parameter.default is parameter.empty:
            raise Refusal(
                f"taskset: {self.name}'s {function.__name__} asks for a runtime, the place where "
                f"an agent's programs run; {_AGENT}"
            )


async def _score(task: Any, trace: Any) -> None:
    from verifiers.v1.state import state_cls

    trace.state = state_cls(type(task))()
    for hook in _HOOKS:
        if getattr(type(task), hook) is not getattr(_base_task(), hook):
            method = getattr(task, hook)
            takes_trace = "trace" in inspect.signature(method).parameters
            await (method(trace=trace) if takes_trace else method())
    await task.score(trace)


def open_taskset(name: str, options: dict[str, Any]) -> Any:
    """Return a taskset of the package.

    Args:
        name, options: see `VerifiersEnvironment`.
    Raises: Refusal if the package is missing or another version, or for a taskset that cannot be
        loaded or leads its conversations itself.
    """
    hint = "; it needs `pip install 'verifiers>=0.4'`"
    with refusing("environment verifiers", ImportError, hint=hint):
        import verifiers.v1 as vf
    with refusing(f"taskset: {name}", *RAISED, names_kind=True):  # of the user's code
        own = import_file(name).__name__ if name.endswith(".py") else name
        config = vf.taskset_config_type(own).model_validate({**options, "id": own})
        leads = vf.environment_class(own)
        taskset = vf.load_taskset(config)
    if leads is not vf.SingleAgentEnv:
        raise Refusal(
            f"taskset: {name} has {leads.__name__}, which leads the conversation itself; {_AGENT}"
        )
    return taskset


def rows_of(name: str, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the tasks of a taskset as rows. Raises: Refusal as `open_taskset`."""
    for task in open_taskset(name, options):
        yield task.data.model_dump(mode="json", exclude_defaults=True)


def _base_task() -> Any:
    import verifiers.v1 as vf

    return vf.Task


def _tools_of(toolset: Any, *, call_timeout_s: float) -> list[Tool]:
    """Return the tools of a server that all rollouts share, which runs in this process.

    Raises: Refusal for a server that keeps a state of each rollout, or does not start.
    """
    import verifiers.v1 as vf
    from mcp.server import MCPServer

    from spmdrl.environments.mcp_tools import Connection, Ended, mcp_tool

    kind = type(toolset).__name__
    if type(toolset.state) is not vf.State:
        raise Refusal(f"taskset: the tools of {kind} keep a state of each rollout; {_AGENT}")
    server = MCPServer(toolset.server_name or kind)
    toolset.register(server)
    connection = Connection(getattr(toolset.config, "url", None) or server, timeout_s=60.0)
    with refusing(f"taskset: the tools of {kind} do not start", Exception, names_kind=True):
        background.run(toolset.setup())
        connection.open()

    def call(name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        try:
            return connection.call(name, arguments, timeout_s=call_timeout_s)
        except Ended as error:
            return str(error), False

    prefix = f"{toolset.server_name}_" if toolset.server_name else ""
    return [mcp_tool(listed, call, prefix=prefix) for listed in connection.listed]


def _answer(response: Response, results: list[Message]) -> Message:
    """Return an answer of the policy as a message of the package.

    Args:
        results: of the calls in it, which have their ids.
    """
    ids = [result.get("tool_call_id", "") for result in results]
    calls = []
    for i, call in enumerate(response.tool_calls):
        called = {"name": call.name, "arguments": json.dumps(call.arguments)}
        calls.append(called | {"id": ids[i] if i < len(ids) else f"call{i}"})
    message: Message = {"role": "assistant", "content": response.text, "sampled": True}
    message["finish_reason"] = "length" if response.is_truncated else "stop"
    return message | ({"tool_calls": calls} if calls else {})


def _opening(data: Any) -> list[Message]:
    """Return the prompt of a task as messages."""
    messages: list[Message] = []
    if data.system_prompt:
        messages.append({"role": "system", "content": data.system_prompt})
    if isinstance(data.prompt, str):
        return [*messages, {"role": "user", "content": data.prompt}]
    return [*messages, *(m.model_dump(mode="json", exclude_none=True) for m in data.prompt)]
