"""Tools of MCP servers (Model Context Protocol), called by the `mcp` package.

Each worker process starts a server once and calls it for all its episodes, so a server must not
keep the state of an episode. A call that takes too long, or during which the server ends, fails
alone: the policy gets an error message, and the next call starts the server again. If it cannot be
started again, the episode fails.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import functools
import json
import math
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from spmdrl.environments import background
from spmdrl.environments.base_tool import BrokenTool, Tool
from spmdrl.environments.protocol import ToolCall
from spmdrl.environments.server_output import ServerOutput
from spmdrl.errors import Refusal, message_of
from spmdrl.imports import construct, nearest, refusing

_FIELD = "tools.mcp"
_END_S = 10.0
"""How long to wait for the end of a server. The package kills one that is slow after 4 s."""
_MOST_PAGES = 100


def mcp_tools(servers: Any) -> list[Tool]:
    """Start MCP servers, or find those that this process has started, and list their tools.

    Args:
        servers: the command or address of a server, options of `McpServer`, or a list of these.
    Raises: Refusal for a wrong option, a server that cannot be started, or one without tools.
    """
    if not servers:
        raise Refusal(f"{_FIELD}: name the command that starts the server, or its http address")
    found: list[Tool] = []
    for server in servers if isinstance(servers, (list, tuple)) else [servers]:
        options = server if isinstance(server, Mapping) else {"server": server}
        found += _server(json.dumps(options, sort_keys=True)).tools
    return found


@functools.cache
def _server(options: str) -> McpServer:
    return construct(McpServer, json.loads(options), field=_FIELD)


def close_servers() -> None:
    """End all servers that this process has started. The next use of one starts it again."""
    for server in _STARTED:
        server.close()


_STARTED: list[McpServer] = []


@dataclass(frozen=True)
class McpTool(Tool):
    """A tool of an MCP server, which checks the arguments itself."""

    def run(self, call: ToolCall) -> tuple[str, bool]:
        """Return the result as text, and whether the call succeeded. Raises: BrokenTool."""
        text, is_ok = self.call(call.arguments)
        return (text, True) if is_ok else (f"Error: {self.name}: {text}", False)


def mcp_tool(
    listed: Any, call: Callable[[str, dict[str, Any]], tuple[str, bool]], *, prefix: str = ""
) -> McpTool:
    """Return a tool that a server has listed.

    Args:
        listed: `mcp.Tool`.
        call: calls a tool of the server by its name with arguments, see `McpServer.call`.
        prefix: of the name that the policy sees.
    """
    name = prefix + listed.name
    parameters = {"type": "object", "properties": {}} | listed.input_schema
    function = {
        "name": name,
        "description": listed.description or listed.title or "",
        "parameters": parameters,
    }
    description = {"type": "function", "function": function}
    return McpTool(name, functools.partial(call, listed.name), description)


class McpServer:
    """An MCP server: a process that is called over its pipes (stdio), or an address.

    Args:
        server: command that starts it, as text or as a list; or `http://...` or `https://...`,
            where it is called over streamable HTTP.
        env: environment variables of the process, in addition to HOME, PATH, USER, LOGNAME, SHELL
            and TERM of this one.
        pass_env: names of environment variables of this process that it gets too, such as keys.
        cwd: folder in which it runs.
        only: names of the tools to offer; all by default.
        timeout_s: deadline of a call. It must be below rewards.timeout_s, the deadline of the turn.
        start_timeout_s: deadline for its start.
    Raises (on construction): Refusal for a wrong option, a command that is not found, a server
        that does not start, or one without tools.
    """

    def __init__(
        self,
        *,
        server: str | Sequence[str],
        env: Mapping[str, str] | None = None,
        pass_env: Sequence[str] = (),
        cwd: str = "",
        only: Sequence[str] = (),
        timeout_s: float = 5.0,
        start_timeout_s: float = 30.0,
    ):
        for name, value in (("timeout_s", timeout_s), ("start_timeout_s", start_timeout_s)):
            if not 0 < value < math.inf:
                raise Refusal(f"{name}: must be above 0, got {value!r}")
        self.name = server if isinstance(server, str) else shlex.join(map(str, server))
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._address = ""
        self._command: list[str] = []
        self._env = {str(name): str(value) for name, value in (env or {}).items()}
        self._cwd = cwd
        if self.name.startswith(("http://", "https://")):
            if env or pass_env or cwd:
                raise Refusal(f"env, pass_env and cwd are of a command, and {self.name} is none")
            self._address = self.name
        else:
            self._command = _found(shlex.split(server) if isinstance(server, str) else [*server])
            self._env |= _passed(pass_env)
            if cwd and not os.path.isdir(cwd):
                raise Refusal(f"cwd: {cwd!r} is not a folder")
        self._output = ServerOutput(self.name)
        self._connection: Connection | None = None
        self._ending: set[concurrent.futures.Future[None]] = set()
        with refusing("", ImportError, hint="; tools of MCP servers need `pip install 'mcp>=2'`"):
            self._connect()
        assert self._connection
        self.tools: list[Tool] = self._tools(self._connection.listed, only)

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """Call a tool; return the result or the error as text, and whether it succeeded.

        Raises: BrokenTool if the server has ended and cannot be started again.
        """
        if self._connection is None:
            try:
                self._connect()
            except Refusal as error:
                raise BrokenTool(str(error)) from error
        assert self._connection
        try:
            return self._connection.call(name, arguments, timeout_s=self._timeout_s)
        except Ended as error:
            self._end()  # takes seconds if the process hangs: do not wait
            return str(error), False

    def close(self) -> None:
        """End the server's process, and wait for its end. The next call starts it again."""
        self._end()
        concurrent.futures.wait(self._ending, timeout=_END_S)

    def _end(self) -> None:
        if self._connection is not None:
            running = {task for task in self._ending if not task.done()}
            self._ending = running | {self._connection.end()}
            self._connection = None

    def _connect(self) -> None:
        # The process gets a copy of the sink. With ours closed, its output ends when it ends.
        with self._output.open() as sink:
            connection = Connection(self._target(sink), timeout_s=self._start_timeout_s)
            try:
                connection.open()
            except ImportError:
                raise
            except Exception as error:  # of the package, and of what it builds on
                why = " and ".join(_reasons(error))
                raise Refusal(f"the MCP server {self.name!r} does not start: {why}") from error
        self._connection = connection
        if self not in _STARTED:
            _STARTED.append(self)

    def _target(self, sink: TextIO) -> Any:
        """Return what the client connects to.

        Args:
            sink: for the standard error of a process.
        """
        if self._address:
            return self._address
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        server = StdioServerParameters(
            command=self._command[0], args=self._command[1:], env=self._env, cwd=self._cwd or None
        )
        return stdio_client(server, errlog=sink)

    def _tools(self, listed: Sequence[Any], only: Sequence[str]) -> list[Tool]:
        names = [tool.name for tool in listed]
        if not names:
            raise Refusal(f"the MCP server {self.name!r} has no tools")
        for name in only:
            if name not in names:
                raise Refusal(
                    f"only: the MCP server {self.name!r} has no tool {name!r}{nearest(name, names)}"
                )
        return [mcp_tool(tool, self.call) for tool in listed if not only or tool.name in only]


def _found(command: list[str]) -> list[str]:
    """Return a command with the path of its program. Raises: Refusal if there is none."""
    path = shutil.which(command[0]) if command else None
    if path is None:
        missing = repr(command[0]) if command else "an empty command"
        raise Refusal(f"server: {missing} is not a program (looked in {os.getcwd()} and PATH)")
    return [os.path.abspath(path), *map(str, command[1:])]


def _passed(names: Sequence[str]) -> dict[str, str]:
    """Return the values of environment variables. Raises: Refusal for one that is not set."""
    for name in names:
        if name not in os.environ:
            raise Refusal(f"pass_env: the environment variable {name} is not set")
    return {name: os.environ[name] for name in names}


class Ended(Exception):
    """A call after which the server must be started again; the message is for the policy."""


class Connection:
    """A connection to a server, held open by a task of this process's event loop.

    Args:
        target: what `mcp.Client` takes: an address, a server, or a transport.
        timeout_s: deadline for the start and the list of tools.
    """

    def __init__(self, target: Any, *, timeout_s: float):
        self._target = target
        self._timeout_s = timeout_s
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._client: Any = None
        self._scope: Any = None
        self._task: concurrent.futures.Future[None] | None = None
        self.listed: list[Any] = []
        """The server's tools, as the package describes them."""

    def open(self) -> None:
        """Start the server and list its tools. Raises: TimeoutError, or an error of the package."""
        self._task = background.start(self._hold())
        self._ready.result()

    def call(self, name: str, arguments: dict[str, Any], *, timeout_s: float) -> tuple[str, bool]:
        """Call a tool; return the result as text, and whether it succeeded. Raises: Ended."""
        return background.run(self._call(name, arguments, timeout_s))

    def end(self) -> concurrent.futures.Future[None]:
        """Begin to end the process, which gets a few seconds to end by itself.

        Returns: a future that is done when it has ended.
        """
        assert self._task is not None, "it was opened"
        background.loop().call_soon_threadsafe(self._scope.cancel)
        return self._task

    async def _hold(self) -> None:
        """Open the connection and keep it until it is closed: one task must do both."""
        try:
            import anyio
            from mcp import Client

            deadline = anyio.current_time() + self._timeout_s
            with anyio.CancelScope(deadline=deadline) as self._scope:
                async with Client(self._target) as self._client:
                    await self._list()
                    self._scope.deadline = math.inf
                    self._ready.set_result(None)
                    await anyio.sleep_forever()
            if not self._ready.done():
                raise TimeoutError(f"it takes longer than start_timeout_s = {self._timeout_s:g}")
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)

    async def _list(self) -> None:
        cursor = None
        for _ in range(_MOST_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            self.listed += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return
        raise RuntimeError(f"its list of tools has over {_MOST_PAGES} pages")

    async def _call(
        self, name: str, arguments: dict[str, Any], timeout_s: float
    ) -> tuple[str, bool]:
        import anyio
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            with anyio.fail_after(timeout_s):
                result = await self._client.call_tool(name, arguments)
        except TimeoutError:
            raise Ended(f"no result within {timeout_s:g} s") from None
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise Ended("the server has ended") from None
            return message_of(error), False
        except Exception as error:  # of the connection, or of a result that is none
            raise Ended(" and ".join(_reasons(error))) from error
        return _text_of(result), not result.is_error


def _text_of(result: Any) -> str:
    """Return a result as text. Images and other data are only named."""
    texts = []
    for block in result.content:
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "resource" and hasattr(block.resource, "text"):
            texts.append(block.resource.text)
        elif block.type == "resource_link":
            texts.append(f"[{block.name}: {block.uri}]")
        else:
            texts.append(f"[{block.type}, which is not shown]")
    if not texts and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(texts)


def _reasons(error: BaseException) -> list[str]:
    """Return what was raised, for an exception group each of its errors."""
    if isinstance(error, BaseExceptionGroup):
        return [reason for inner in error.exceptions for reason in _reasons(inner)]
    return [f"{type(error).__name__}: {message_of(error)}"]


atexit.register(close_servers)
