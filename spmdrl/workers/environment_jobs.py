"""The jobs of environments, inside a worker: bytes in, one turn, bytes out."""

from __future__ import annotations

import hashlib
import inspect
import json
import pickle
from collections.abc import Mapping
from typing import Any

from spmdrl.environments.protocol import Message, Response, Turn
from spmdrl.imports import construct, import_object, nearest, ran
from spmdrl.rewards.signatures import BadValue, as_finite, not_finite

FIELD = "rollout.environment"
_HERE = "spmdrl.environments."
BUILT_IN = {
    "tools": f"{_HERE}tools:ToolEnvironment",
    "guess_number": f"{_HERE}guess_number:GuessNumber",
    "task": f"{_HERE}adapters:TaskEnvironment",
    "gym": f"{_HERE}adapters:GymEnvironment",
    "verifiers": f"{_HERE}verifiers:VerifiersEnvironment",
}
"""Environments that come with the program, by their short names."""
_RESERVED = ("name", "rewrites")  # `rewrites` is for the conversation
_MAX_BYTES = 16 * 2**20
"""Largest pickled environment. It is sent twice in every turn: beyond this the pipes would be
what a run waits for."""
_ROLES = ("user", "tool", "system")
_DEPTH = 4


class BadTurn(BadValue):
    """An environment returned something that cannot be used."""


def environment_problems(options: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with rollout.environment, as far as it shows without importing.

    Returns: `field: what, value seen` each; none for an empty mapping.
    """
    problems: list[str] = []
    name = options.get("name")
    if not options:
        return problems
    if not isinstance(name, str) or not name:
        problems.append(
            f"{FIELD}.name: expected the name of an environment ({', '.join(BUILT_IN)},"
            f" `module:Class` or `path/file.py:Class`), got {name!r}"
        )
    elif ":" not in name and name not in BUILT_IN:
        problems.append(
            f"{FIELD}.name: unknown name {name!r}{nearest(name, BUILT_IN)}; or give "
            "`module:Class` or `path/file.py:Class`"
        )
    if options.get("rewrites", "refuse") not in ("refuse", "keep"):
        problems.append(f"{FIELD}.rewrites: must be refuse or keep, got {options['rewrites']!r}")
    return problems


def check_environment(options: Mapping[str, Any], row: dict) -> None:
    """Load an environment and open one episode here, as a worker will.

    Raises: ValueError when that fails.
    """
    server = EnvironmentServer(options)
    try:
        server.open(row, seed=0)
    except Exception as error:  # the user's code
        raise ValueError(
            f"{FIELD}: {options['name']} cannot open the first row of data.train: "
            f"{type(error).__name__}: {error}"
        ) from error


class EnvironmentServer:
    """Opens episodes of one environment and plays their turns.

    Args:
        options: rollout.environment: `name`, `rewrites` (see `conversation`), and the keyword
            options of its constructor. The name is one of BUILT_IN, `module:Class` or
            `path/file.py:Class`.
    Raises (on construction): ValueError for an unknown name or option, an environment without
        `reset` and `step`, or one that does not pickle.
    """

    def __init__(self, options: Mapping[str, Any]):
        for problem in environment_problems(options):
            raise ValueError(problem)
        name = options["name"]
        self._make = import_object(name, known=BUILT_IN, kind="Class", field=f"{FIELD}.name")
        self._options = {k: v for k, v in options.items() if k not in _RESERVED}
        first = construct(self._make, self._options, field=FIELD)
        for method in ("reset", "step"):
            if not callable(getattr(first, method, None)):
                raise ValueError(
                    f"{FIELD}.name: {name} makes a {type(first).__name__}, which has "
                    f"no method `{method}`; see spmdrl/environments/protocol.py"
                )
        if problem := _packed(first)[1]:
            raise ValueError(f"{FIELD}.name: {name}: {problem}")
        prepare = getattr(first, "prepare", None)
        if callable(prepare):
            prepare()
        self.tools = _checked_tools(getattr(first, "tools", None), name=name)
        self.tool_parser = str(getattr(first, "tool_parser", "auto" if self.tools else ""))
        self.is_graded = bool(getattr(first, "is_graded", False))
        self._wants_seed = "seed" in inspect.signature(first.reset).parameters

    def open(self, row: dict, *, seed: int) -> tuple[bytes, Turn, int]:
        """Begin an episode.

        Returns: the pickled environment, a turn with the opening messages, and the number of the
            state, the same for equal states everywhere; -1 where the environment names none.
        Raises: BadTurn, or whatever the environment raises.
        """
        environment = self._make(**self._options)
        given = {"seed": seed} if self._wants_seed else {}
        messages = ran(environment.reset(row, **given))
        turn = Turn(messages=_checked_messages(messages, roles=(*_ROLES, "assistant")))
        return pack(environment), turn, _state_of(environment)

    def turn(self, environment: bytes, response: Response) -> tuple[bytes, Turn, int]:
        """Play one turn.

        Returns: the pickled environment, empty when the episode is done, its answer, and the
            number of the state, as `open` gives it.
        Raises: BadTurn, or whatever the environment raises.
        """
        live = pickle.loads(environment)
        turn = checked_turn(ran(live.step(response)))
        if turn.is_done:
            return b"", turn, -1
        return pack(live), turn, _state_of(live)


def _state_of(environment: Any) -> int:
    """Return a number of 48 bits for what `state()` says, which float64 holds exactly."""
    name = getattr(environment, "state", None)
    if not callable(name):
        return -1
    digest = hashlib.blake2b(str(ran(name())).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")


def pack(environment: Any) -> bytes:
    """Pickle an environment.

    Raises: BadTurn naming the attribute that cannot be pickled, or the largest one above 16 MiB.
    """
    data, problem = _packed(environment)
    if problem:
        raise BadTurn(problem)
    return data


def _packed(environment: Any) -> tuple[bytes, str]:
    """Return an environment's bytes, and why it cannot travel as such; empty where it can."""
    data, kind = _pickled(environment), type(environment).__name__
    if isinstance(data, Exception):
        place = _culprit(environment, kind, depth=_DEPTH)
        return b"", (
            f"{place} cannot be pickled ({type(data).__name__}: {data}), and an "
            "environment travels with every turn; keep such things in a module "
            "variable or make them anew when used"
        )
    if len(data) <= _MAX_BYTES:
        return data, ""
    sizes = {name: len(pickle.dumps(value)) for name, value in _parts(environment).items()}
    return b"", (
        f"{kind} pickles to {len(data)} bytes, above {_MAX_BYTES}; most of it is "
        f"{max(sizes, key=sizes.__getitem__, default='')!r}. It travels with every turn: keep "
        "large constant things in a module variable, filled by `prepare`"
    )


def _pickled(value: Any) -> bytes | Exception:
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # __reduce__ and __getstate__ are the user's code
        return error


def _culprit(value: Any, place: str, *, depth: int) -> str:
    """Return the place of the innermost thing that does not pickle, e.g. `Game.client._lock`."""
    for name, part in _parts(value).items() if depth else ():
        if isinstance(_pickled(part), Exception):
            is_attribute = isinstance(name, str) and not isinstance(value, Mapping)
            inner = f"{place}.{name}" if is_attribute else f"{place}[{name!r}]"
            return _culprit(part, inner, depth=depth - 1)
    return f"{place} ({type(value).__name__})"


def _parts(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, type) or inspect.isroutine(value):  # these go by name, or not at all
        return {}
    return dict(getattr(value, "__dict__", {}))


def checked_turn(turn: Any) -> Turn:
    """Return a turn whose fields are what they should be.

    Raises: BadTurn saying which is not.
    """
    if not isinstance(turn, Turn):
        raise BadTurn(f"`step` must return a Turn, got {turn!r:.100} ({type(turn).__name__})")
    numbers = {"reward": turn.reward} | {f"info[{k!r}]": v for k, v in turn.info.items()}
    values = []
    for name, given in numbers.items():
        if (value := as_finite(given)) is None:
            raise BadTurn(f"{name}: {not_finite(given)}")
        values.append(value)
    is_done = bool(turn.is_done)
    return Turn(
        messages=[] if is_done else _checked_messages(turn.messages, roles=_ROLES),
        is_done=is_done,
        reward=values[0],
        info=dict(zip(map(str, turn.info), values[1:])),
    )


def _checked_messages(messages: Any, *, roles: tuple[str, ...]) -> list[Message]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise BadTurn(
            f"messages must be a list of at least one message, got {messages!r:.100}; "
            "without one the policy would answer itself"
        )
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise BadTurn(
                f"messages[{i}]: expected a dict with `role` and `content` (text), got "
                f"{message!r:.100}"
            )
        if message.get("role") not in roles:
            raise BadTurn(
                f"messages[{i}]: role {message.get('role')!r} must be one of "
                f"{', '.join(roles)}; the assistant's turns are the policy's"
            )
    plain, problem = _plain(messages)
    if problem:
        raise BadTurn(f"messages must hold plain values (text, numbers, lists): {problem}")
    return plain


def _checked_tools(tools: Any, *, name: str) -> list[dict[str, Any]]:
    _, problem = _plain(tools := list(tools or []))
    if problem:
        raise ValueError(
            f"{FIELD}.name: {name}: its `tools` must be descriptions for the chat "
            f"template, see environments/tool_schema.py: {problem}"
        )
    return tools


def _plain(value: Any) -> tuple[Any, str]:
    """Return a value without the user's types, which other processes do not import; or why not."""
    try:
        return json.loads(json.dumps(value)), ""
    except (TypeError, ValueError) as error:
        return None, str(error)
