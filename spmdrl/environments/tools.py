"""Tools that the policy calls between its turns, and the environment that runs them."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Iterable, Mapping
from typing import Any

from spmdrl.environments.base_tool import Tool
from spmdrl.environments.protocol import (
    Message,
    Response,
    ToolCall,
    Turn,
    check_at_least,
    opening_messages,
)
from spmdrl.environments.tool_schema import describe
from spmdrl.errors import Refusal
from spmdrl.imports import construct, import_object

_HERE = "spmdrl.environments."
BUILT_IN = {
    "calculator": f"{_HERE}calculator:calculator",
    "search": f"{_HERE}retrieval:Search",
    "python": f"{_HERE}python_tool:Python",
}
"""Short names of the tools that come with the program."""
MCP = "mcp"
"""Name that stands for all tools of MCP servers."""
_REPLY_ROLES = ("tool", "user")
_COUNTS = ("tool_calls", "malformed_calls", "tool_errors")
_PREFACE = """You may call these tools:
{}
To call one, write <tool_call>{{"name": ..., "arguments": {{...}}}}</tool_call>. The next message \
holds what it returned.

"""


def make_tools(specs: Iterable[str] | Mapping[str, Any]) -> dict[str, Tool]:
    """Make the tools of a config.

    Args:
        specs: names of BUILT_IN, `module:NAME` or `path/file.py:NAME`; as a mapping, with options
            for classes. A class is constructed once per worker process, and its `__call__` is the
            tool. The tool's name is the class attribute `name`, or the class's own name. `mcp`
            stands for all tools of MCP servers, see `mcp_tools`.
    Returns: {name: tool}.
    Raises: Refusal for an unknown name or option, a function without type hints or descriptions,
        an MCP server that cannot be used, or two tools of one name.
    """
    options_of = specs if isinstance(specs, Mapping) else {spec: {} for spec in specs}
    tools: dict[str, Tool] = {}
    for spec, options in options_of.items():
        for tool in _make_tools(spec, options):
            if tool.name in tools:
                raise Refusal(f"tools: {', '.join(options_of)}: two have the name {tool.name!r}")
            tools[tool.name] = tool
    return tools


def _make_tools(spec: str, options: Any) -> list[Tool]:
    if spec == MCP:
        from spmdrl.environments.mcp_tools import mcp_tools  # it imports asyncio, which is slow

        return mcp_tools(options)
    return [_make_tool(spec, dict(options or {}))]


def _make_tool(spec: str, options: dict[str, Any]) -> Tool:
    known = BUILT_IN | {MCP: MCP}
    target = import_object(spec, known=known, kind="function", field="tools")
    if not inspect.isclass(target):
        if options:
            raise Refusal(f"tools.{spec}: is a function and takes no options, got {options}")
        return Tool(target.__name__, target, describe(target), getattr(target, "prepare", None))
    tool = construct(target, options, field=f"tools.{spec}")
    name = getattr(tool, "name", target.__name__)
    return Tool(name, tool, describe(tool.__call__, name=name), getattr(tool, "prepare", None))


@functools.lru_cache(maxsize=8)
def _tools_of(key: str) -> dict[str, Tool]:
    # One set of tools per process: tools may be large (a corpus), so episodes do not hold them.
    return make_tools(json.loads(key))


class ToolEnvironment:
    """Runs the tools that the policy calls, until a response calls none.

    The run's reward functions score that last response. A malformed call, an unknown tool, a wrong
    argument and an error of a tool are counted. The policy gets an error text as the result, so
    that it can correct the call. For tools with a state of their own, override `run` in a subclass.

    Args:
        tools: see `make_tools`; or a text of names, `calculator, my_tools.py:weather`.
        max_turns: responses per episode; calls in the last one are not run.
        max_result_chars: a longer result is cut, with a note at its end.
        parser: format of the calls, see `tool_calls.make_parser`.
        reply_role: `tool`, or `user` for chat templates without tools. With `user`, the first user
            message describes the tools and the format of calls (that of Hermes), and one user
            message holds all results of a turn.
    """

    is_graded = True

    def __init__(
        self,
        *,
        tools: str | Iterable[str] | Mapping[str, Any],
        max_turns: int = 8,
        max_result_chars: int = 2000,
        parser: str = "auto",
        reply_role: str = "tool",
    ):
        if isinstance(tools, str):
            tools = [name.strip() for name in tools.split(",") if name.strip()]
        if not tools:
            raise Refusal(
                "tools: expected names (`a, b` or a list), or a mapping from names "
                f"to options; known: {', '.join([*BUILT_IN, MCP])}"
            )
        check_at_least(1, max_turns=max_turns)
        check_at_least(100, max_result_chars=max_result_chars)
        if reply_role not in _REPLY_ROLES:
            raise Refusal(f"reply_role: must be tool or user, got {reply_role!r}")
        # The options as text: the key of the cache in `_tools_of`, packed with the episode.
        self._key = json.dumps(dict(tools) if isinstance(tools, Mapping) else list(tools))
        self.max_turns = max_turns
        self.max_result_chars = max_result_chars
        self.reply_role = reply_role
        self.turns = 0
        self.calls = 0
        self.tool_parser = parser
        self._preface = ""
        descriptions = [tool.description for tool in self.named_tools().values()]
        if not descriptions:
            self.tool_parser = ""
        elif reply_role == "user":
            self.tool_parser = "hermes" if parser == "auto" else parser
            self._preface = _PREFACE.format("\n".join(map(json.dumps, descriptions)))

    def named_tools(self) -> dict[str, Tool]:
        """Return {name: tool}, the same objects for all episodes of this process."""
        return _tools_of(self._key)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Return the descriptions for the chat template; empty if the first message has them."""
        if self._preface:
            return []
        return [tool.description for tool in self.named_tools().values()]

    def prepare(self) -> None:
        """Call `prepare` of every tool that has it."""
        for tool in self.named_tools().values():
            if tool.prepare is not None:
                tool.prepare()

    def reset(self, row: dict) -> list[Message]:
        """Open with the row's prompt."""
        return self.with_preface(opening_messages(row))

    def with_preface(self, messages: list[Message]) -> list[Message]:
        """Return opening messages of which the first of the user describes the tools, if the chat
        template does not."""
        for i, message in enumerate(messages):
            if message["role"] == "user":
                if self._preface:
                    messages[i] = message | {"content": self._preface + message["content"]}
                break
        return messages

    def step(self, response: Response) -> Turn:
        """Run the calls of a response.

        Returns: a Turn whose info counts this turn's `tool_calls`, the `malformed_calls` and
            `tool_errors` among them, and at the end `out_of_turns`, 1 when the last response
            still called.
        """
        self.turns += 1
        calls = response.tool_calls
        if not calls or response.is_truncated or self.turns >= self.max_turns:
            # The counts of all turns are added up. These zeros count an episode without a call.
            info = dict.fromkeys(_COUNTS, 0.0) | {"out_of_turns": float(bool(calls))}
            return Turn(is_done=True, info=info)
        answers = [self._answer(call) for call in calls]
        num_failed = sum(not is_ok for _, is_ok in answers)
        num_malformed = sum(bool(call.error) for call in calls)
        counts = (len(calls), num_malformed, num_failed - num_malformed)
        messages = self._messages([text for text, _ in answers], calls)
        return Turn(messages=messages, info=dict(zip(_COUNTS, counts)))

    def run(self, call: ToolCall) -> tuple[str, bool]:
        """Run one well-formed call; return its result as text, and whether it succeeded."""
        tools = self.named_tools()
        if call.name not in tools:
            return f"Error: there is no tool {call.name!r}; there are {', '.join(tools)}", False
        return tools[call.name].run(call)

    def _answer(self, call: ToolCall) -> tuple[str, bool]:
        if call.error:
            return f"Error: the tool call cannot be read: {call.error}", False
        text, is_ok = self.run(call)
        # Replace lone surrogates, which no tokenizer takes.
        text = text.encode(errors="replace").decode()
        if len(text) > self.max_result_chars:
            cut = len(text) - self.max_result_chars
            text = f"{text[: self.max_result_chars]}\n[{cut} more characters left out]"
        return text, is_ok

    def _messages(self, texts: list[str], calls: tuple[ToolCall, ...]) -> list[Message]:
        if self.reply_role == "user":
            return [{"role": "user", "content": "\n\n".join(texts)}]
        first = self.calls + 1
        self.calls += len(calls)
        return [
            {
                "role": "tool",
                "name": call.name or "unknown",
                "content": text,
                # Nine characters: Mistral's templates refuse other lengths.
                "tool_call_id": f"call{number % 10**5:05d}",
            }
            for number, (text, call) in enumerate(zip(texts, calls), first)
        ]
