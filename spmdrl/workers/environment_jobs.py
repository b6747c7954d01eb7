"""Jobs of environments, inside a worker: unpack an environment, play one turn, pack it again."""

from __future__ import annotations

import inspect
import json
import pickle
from collections.abc import Mapping
from typing import Any

from spmdrl.data.hashed import hashed
from spmdrl.environments.fit_values import fit_problem
from spmdrl.environments.plain_state import PICKLED, PLAIN, NotPlain, environment_of, text_of
from spmdrl.environments.protocol import Message, Response, Turn
from spmdrl.errors import RAISED, Refusal, place_of
from spmdrl.imports import attempt, construct, import_object, refusing, resolve
from spmdrl.rewards.samples import BadValue, finite

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
"""Largest packed environment. It is sent twice in every turn: a run would wait for the pipes."""
_ROLES = ("user", "tool", "system")
_DEPTH = 4


def check_environment(
    options: Mapping[str, Any], row: dict, *, field: str = FIELD, rows: str = "data.train"
) -> dict[str, Any]:
    """Load an environment and open one episode here, as a worker will.

    Args:
        options, field: see `EnvironmentServer`.
        rows: the config field of the rows, for messages.
    Returns: `EnvironmentServer.facts`.
    Raises: Refusal when that fails.
    """
    server = EnvironmentServer(options, field=field)
    what = f"{field}: {options['name']} cannot open the first row of {rows}"
    with refusing(what, *RAISED, names_kind=True):  # the user's code
        server.open(row, seed=0)
    return server.facts


class EnvironmentServer:
    """Opens episodes of one environment and plays their turns.

    Args:
        options: `name`, `rewrites` (see `conversation`), and the keyword options of its
            constructor. The name is one of BUILT_IN, `module:Class` or `path/file.py:Class`.
        field: of the config, in which these options are.
    Raises (on construction): Refusal for an unknown name or option, an environment without
        `reset` and `step`, or one that cannot be pickled.
    """

    def __init__(self, options: Mapping[str, Any], *, field: str = FIELD):
        rewrites = options.get("rewrites", "auto")
        if rewrites not in ("auto", "refuse", "keep"):
            raise Refusal(f"{field}.rewrites: must be auto, refuse or keep, got {rewrites!r}")
        if not options.get("name"):
            raise Refusal(
                f"{field}.name: is missing; name one of {', '.join(BUILT_IN)}, module:Class or "
                "path/file.py:Class"
            )
        name = str(options["name"])
        self._make = import_object(name, known=BUILT_IN, kind="Class", field=f"{field}.name")
        self._options = {k: v for k, v in options.items() if k not in _RESERVED}
        first = construct(self._make, self._options, field=field)
        for method in ("reset", "step"):
            if not callable(getattr(first, method, None)):
                raise Refusal(
                    f"{field}.name: {name} makes a {type(first).__name__}, which has "
                    f"no method `{method}`; see spmdrl/environments/protocol.py"
                )
        self._kind = type(first)
        with refusing(f"{field}.name: {name}", BadValue):
            pack(first)
        _, error = attempt(lambda: text_of(first), (NotPlain, RecursionError))
        self.not_plain = str(error or "")
        prepare = getattr(first, "prepare", None)
        if callable(prepare):
            prepare()
        self.tools = list(getattr(first, "tools", None) or [])
        with refusing(f"{field}.name: {name}", BadValue):
            _plain(
                self.tools,
                what="its `tools` must be descriptions for the chat template, see "
                "environments/tool_schema.py",
            )
        self.tool_parser = str(getattr(first, "tool_parser", "auto" if self.tools else ""))
        self.is_graded = bool(getattr(first, "is_graded", False))
        self._wants_seed = "seed" in inspect.signature(first.reset).parameters

    @property
    def facts(self) -> dict[str, Any]:
        """What conversations need: the tools, the format of their calls, and which part of the
        environment is not plain data."""
        return {"tools": self.tools, "tool_parser": self.tool_parser, "not_plain": self.not_plain}

    def called(self, method: str) -> str:
        """Return a method of the environment with file and line, for messages."""
        function = getattr(self._kind, method, None)
        return f"{self._kind.__name__}.{method}{place_of(function) if function else ''}"

    def open(self, row: dict, *, seed: int) -> tuple[bytes, Turn, int]:
        """Begin an episode.

        Returns: the packed environment, a turn with the opening messages, and the number of its
            state: the same for equal states in any process, -1 where it has no `state`.
        Raises: BadValue, or whatever the environment raises.
        """
        environment = self._make(**self._options)
        options = {"seed": seed} if self._wants_seed else {}
        messages = resolve(environment.reset(row, **options))
        turn = Turn(messages=_checked_messages(messages, roles=(*_ROLES, "assistant")))
        return pack(environment, kind=self._kind), turn, _state_of(environment)

    def turn(self, environment: bytes, response: Response) -> tuple[bytes, Turn, int]:
        """Play one turn.

        Returns: the packed environment, empty when the episode is done; its turn; and the number
            of its state, as in `open`.
        Raises: BadValue, or whatever the environment raises.
        """
        live = self._unpack(environment)
        turn = checked_turn(resolve(live.step(response)))
        if turn.is_done:
            return b"", turn, -1
        return pack(live, kind=self._kind), turn, _state_of(live)

    def _unpack(self, environment: bytes) -> Any:
        form = environment[:1]
        data = environment[1:]
        if form == PLAIN:
            return environment_of(data.decode(), self._kind, lambda: self._make(**self._options))
        return pickle.loads(data)  # made by this run, or from a checkpoint, which is trusted


def _state_of(environment: Any) -> int:
    """Return a hash of `state()` of 48 bits, which float64 holds exactly."""
    state = getattr(environment, "state", None)
    if not callable(state):
        return -1
    return hashed(str(resolve(state())), num_bytes=6)


def pack(environment: Any, *, kind: type | None = None) -> bytes:
    """Return an environment as bytes: as plain data if possible, otherwise pickled.

    Args:
        kind: the class of environments that may be packed as plain data; None: any.
    Raises: BadValue naming the attribute that cannot be pickled, or the largest one above 16 MiB.
    """
    name = type(environment).__name__
    data = _plain_or_pickled(environment, kind)
    if isinstance(data, Exception):
        place = _culprit(environment, name, depth=_DEPTH)
        raise BadValue(
            f"{place} cannot be pickled ({type(data).__name__}: {data}), and an "
            "environment travels with every turn; keep such things in a module "
            "variable or make them again when used"
        )
    if len(data) > _MAX_BYTES:
        sizes = {name: len(pickle.dumps(value)) for name, value in _parts(environment).items()}
        raise BadValue(
            f"{name} takes {len(data)} bytes, above {_MAX_BYTES}; most of it is "
            f"{max(sizes, key=sizes.__getitem__, default='')!r}. It travels with every turn: keep "
            "large constant things in a module variable, filled by `prepare`"
        )
    return data


def _plain_or_pickled(environment: Any, kind: type | None) -> bytes | Exception:
    if kind is None or type(environment) is kind:
        text, _ = attempt(lambda: text_of(environment), (NotPlain, RecursionError))
        if text is not None:
            return PLAIN + text.encode()
    data = _pickled(environment)
    return data if isinstance(data, Exception) else PICKLED + data


def _pickled(value: Any) -> bytes | Exception:
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # __reduce__ and __getstate__ are the user's code
        return error


def _culprit(value: Any, place: str, *, depth: int) -> str:
    """Return the innermost attribute that cannot be pickled, e.g. `Game.client._lock`."""
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
    if isinstance(value, type) or inspect.isroutine(value):  # pickled by name
        return {}
    return dict(getattr(value, "__dict__", {}))


def checked_turn(turn: Any) -> Turn:
    """Return a turn with its fields checked and converted.

    Raises: BadValue naming a wrong one.
    """
    if not isinstance(turn, Turn):
        raise BadValue(f"`step` must return a Turn, got {turn!r:.100} ({type(turn).__name__})")
    is_done = bool(turn.is_done)
    return Turn(
        reward=finite(turn.reward, what="reward: "),
        info={str(k): finite(v, what=f"info[{k!r}]: ") for k, v in turn.info.items()},
        messages=[] if is_done else _checked_messages(turn.messages, roles=_ROLES),
        is_done=is_done,
    )


def _checked_messages(messages: Any, *, roles: tuple[str, ...]) -> list[Message]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise BadValue(
            f"messages must be a list of at least one message, got {messages!r:.100}; "
            "without one the policy would answer itself"
        )
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("content"), (str, list)):
            raise BadValue(
                f"messages[{i}]: expected a dict with `role` and `content` (text, or a list of "
                f"parts), got {message!r:.100}"
            )
        if message.get("role") not in roles:
            raise BadValue(
                f"messages[{i}]: role {message.get('role')!r} must be one of "
                f"{', '.join(roles)}; the assistant's turns are the policy's"
            )
    return _plain(messages, what="messages must hold plain values (text, numbers, lists)")


def _plain(value: Any, *, what: str) -> Any:
    """Return a value without the user's types, which other processes do not import.

    Args:
        what: the message of the error.
    Raises: BadValue.
    """
    with refusing(what, TypeError, ValueError, RecursionError, kind=BadValue):
        plain = json.loads(json.dumps(value))
        if problem := fit_problem(plain):
            raise ValueError(problem)
        return plain
