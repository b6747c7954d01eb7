"""Run a user's agent for one episode, in a process of its own."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import inspect
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from spmdrl.agents.containers import SHARED, Container, make_labels
from spmdrl.agents.messages import HOST, no_proxy
from spmdrl.config.generation import ContainerSettings
from spmdrl.errors import Refusal, place_of
from spmdrl.imports import import_object, resolve
from spmdrl.rewards.samples import BadValue, finite

FUNCTION_FIELD = "rollout.agent"
COMMAND_FIELD = "rollout.agent_command"
_IN_CONTAINERS = ("OPENAI_API_KEY", "SPMDRL_SEED", "NO_PROXY", "no_proxy")
_RESULT_BYTES = 2**20
_TAIL_CHARS = 500
_READ_BYTES = 2**16
_FAULT_TIMEOUT_S = 30.0
_MOST_NUMBERS = 100
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*")
_NAME_CHARS = 80


def check_agent(function: str, command: Sequence[str], container: ContainerSettings) -> None:
    """Load an agent in this process, as a worker does. Raises: Refusal as `Agent`, `Container`."""
    own = Container(container, make_labels(".")) if container.image else None
    Agent(function, command, container=own)


class CommandFailed(Exception):
    """An agent's command ended with an error."""


class Agent:
    """The agent of a run.

    Args:
        function: rollout.agent; empty for a command.
        command: rollout.agent_command.
        container: in which the command runs; None for none.
    Raises (on construction): Refusal for a function that cannot be imported or called, or a command
        that is not found.
    """

    def __init__(
        self, function: str, command: Sequence[str], *, container: Container | None = None
    ):
        self._command = list(command)
        self._container = container
        self._removals: list[subprocess.Popen[bytes]] = []
        self._function: Callable[..., Any] | None = None
        if function:
            self._function = _load(function)
        elif container is None and not shutil.which(command[0]):
            raise Refusal(
                f"{COMMAND_FIELD}: no program {command[0]!r} is found on PATH or from {Path.cwd()}"
            )

    @property
    def called(self) -> str:
        """Return what is called, with file and line, for messages."""
        if self._function is None:
            return " ".join(self._command)
        name = getattr(self._function, "__name__", type(self._function).__name__)
        return f"{name}{place_of(self._function)}"

    def run(
        self, row: dict, *, seed: int, base_url: str, api_key: str, folder: str
    ) -> tuple[float | None, dict[str, float]]:
        """Run one episode. This changes the environment and random numbers of the process.

        Args:
            row: of the data.
            seed: of the episode.
            base_url: address of the gateway.
            api_key: of the episode.
            folder: empty, for the files of a command.
        Returns: the reward, None for none; other numbers.
        Raises: BadValue; CommandFailed; any error of the user's code.
        """
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        own = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "SPMDRL_SEED": str(seed)}
        os.environ.update(own | no_proxy())
        if self._function is None:
            value = _run_command(self._command, row, Path(folder), self._container, base_url)
        else:
            value = self._call(self._function, row, seed, base_url=base_url, api_key=api_key)
        return _outcome(value)

    def clean(self, folder: str) -> None:
        """Remove the folder of an episode that has ended, and begin to remove its container."""
        if self._container is not None:
            running = [removal for removal in self._removals if removal.poll() is None]
            self._removals = [*running, self._container.remove(folder)]
        shutil.rmtree(folder, ignore_errors=True)

    def _call(
        self, function: Callable[..., Any], row: dict, seed: int, *, base_url: str, api_key: str
    ) -> Any:
        client = self._client(function, base_url=base_url, api_key=api_key)
        options = {"seed": seed} if _wants_seed(function) else {}
        return resolve(function(row, client, **options))

    def preload(self) -> None:
        """Load what a client loads at its first request. Forks of this process then share it."""
        if self._function is None:
            return
        import openai

        with socket.create_server((HOST, 0)) as server:
            port = server.getsockname()[1]
        client = self._client(_preload, base_url=f"http://{HOST}:{port}/v1", api_key="none")
        with contextlib.suppress(openai.OpenAIError):  # nobody listens there any more
            resolve(_preload({}, client))

    def _client(self, function: Callable[..., Any], *, base_url: str, api_key: str) -> Any:
        """Return a client of the kind that a function takes."""
        import openai

        kind: Any = openai.OpenAI
        transport: Any = openai.DefaultHttpxClient
        if _is_async(function):
            kind = openai.AsyncOpenAI
            transport = openai.DefaultAsyncHttpxClient
        return kind(
            base_url=base_url,
            api_key=api_key,
            # Nothing is lost between two processes of a machine, and a request that is repeated
            # would be another one.
            max_retries=0,
            # The episode has a deadline, which leaves out the time of updates.
            timeout=None,
            # The address is plain HTTP. To prepare for HTTPS would take 20 ms of each episode.
            http_client=transport(verify=False, trust_env=False),
        )


async def _preload(row: dict, client: Any) -> None:
    await client.chat.completions.create(model="policy", messages=[])


def episode_fault(base_url: str, api_key: str) -> str:
    """Return why the gateway says that an episode failed; empty if it does not.

    Raises: OSError or ValueError if it does not answer.
    """
    address = urlsplit(base_url)
    connection = http.client.HTTPConnection(HOST, address.port, timeout=_FAULT_TIMEOUT_S)
    try:
        headers = {"Authorization": f"Bearer {api_key}"}
        connection.request("GET", f"{address.path}/episode", headers=headers)
        return str(json.loads(connection.getresponse().read()).get("fault", ""))
    except http.client.HTTPException as error:
        raise ValueError(str(error)) from error
    finally:
        connection.close()


def _load(spec: str) -> Callable[..., Any]:
    if importlib.util.find_spec("openai") is None:
        raise Refusal(
            f"{FUNCTION_FIELD}: {spec} gets a client of the package openai, which is not "
            "installed; pip install openai"
        )
    function = import_object(spec, kind="function", field=FUNCTION_FIELD)
    options = {"seed": 0} if _wants_seed(function) else {}
    try:
        inspect.signature(function).bind({}, None, **options)
    except (TypeError, ValueError) as error:
        raise Refusal(
            f"{FUNCTION_FIELD}: {spec}{place_of(function)} cannot be called as solve(row, client): "
            f"{error}; define `async def solve(row, client)`, with `seed` if it draws at random"
        ) from error
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise Refusal(
            f"{FUNCTION_FIELD}: {spec}{place_of(function)} is a generator; return the reward in "
            "place of `yield`"
        )
    return function


def _is_async(function: Callable[..., Any]) -> bool:
    method = getattr(function, "__call__", None)  # noqa: B004  (of an object)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


def _wants_seed(function: Callable[..., Any]) -> bool:
    try:
        return "seed" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _run_command(
    command: Sequence[str], row: dict, folder: Path, container: Container | None, base_url: str
) -> Any:
    """Return the object in the file that a command wrote; None without one."""
    files = place = folder
    own = {}
    if container is not None:
        files = container.share(folder)
        place = Path(SHARED)
        own["OPENAI_BASE_URL"] = container.connect(files, base_url)
    row_file = files / "row.json"
    result_file = files / "result.json"
    row_file.write_text(json.dumps(row))
    row_file.chmod(0o644)  # the image of a container may have a user of its own
    own["SPMDRL_ROW"] = str(place / row_file.name)
    own["SPMDRL_RESULT"] = str(place / result_file.name)
    if container is not None:
        command = container.command(command, shared=files, variables=[*_IN_CONTAINERS, *own])
    process = subprocess.Popen(
        command,
        env=os.environ | own,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout
    tail = bytearray()
    reader = threading.Thread(target=_pass_on, args=(process.stdout.fileno(), tail), daemon=True)
    reader.start()
    status = process.wait()
    reader.join(1.0)  # a process that it started may still hold the pipe open
    if status:
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        text = bytes(tail).decode(errors="replace")[-_TAIL_CHARS:].strip()
        raise CommandFailed(f"it ended with {how}; its last output: {text or 'nothing'}")
    try:
        return _read_result(result_file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadValue(f"SPMDRL_RESULT cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BadValue(f"SPMDRL_RESULT is not valid JSON: {error}") from None


def _read_result(path: Path) -> Any:
    # An agent in a container must not have this process read other files, or wait for a pipe.
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(file, "rb") as source:
        data = source.read(_RESULT_BYTES + 1) or b""
    if len(data) > _RESULT_BYTES:
        raise BadValue(f"SPMDRL_RESULT has more than {_RESULT_BYTES} bytes")
    return json.loads(data)


def _pass_on(source: int, tail: bytearray) -> None:
    """Write a command's output to that of this process, and keep its end."""
    while data := os.read(source, _READ_BYTES):
        os.write(2, data)
        tail += data
        del tail[: -4 * _TAIL_CHARS]


def _outcome(value: Any) -> tuple[float | None, dict[str, float]]:
    """Return the reward and the other numbers in what an agent returned. Raises: BadValue."""
    if value is None:
        return None, {}
    if not isinstance(value, dict):
        return finite(value, what="the agent returned no reward: "), {}
    numbers = {
        _checked_name(name): finite(own, what=f"the agent returned {name!r:.80}: ")
        for name, own in value.items()
        if own is not None
    }
    if len(numbers) > _MOST_NUMBERS:
        raise BadValue(f"the agent returned {len(numbers)} numbers; at most {_MOST_NUMBERS}")
    return numbers.pop("reward", None), numbers


def _checked_name(name: object) -> str:
    """Return the name of a number that an agent returned. Raises: BadValue."""
    if not isinstance(name, str) or len(name) > _NAME_CHARS or not _NAME.fullmatch(name):
        raise BadValue(
            f"the agent returned a number named {name!r:.80}; a name has at most {_NAME_CHARS} "
            "letters, digits, `_`, `-` and `.`, with `/` between its parts"
        )
    return name
