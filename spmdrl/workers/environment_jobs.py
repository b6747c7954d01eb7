"""Environment jobs, inside a worker: unpack an environment, play one turn, pack it again."""

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
    "openenv": f"{_HERE}openenv:OpenEnvironment",
    "verifiers": f"{_HERE}verifiers:VerifiersEnvironment",
}
"""{short name of a built-in environment: its class}."""
_RESERVED = ("name", "rewrites")  # not options of the environment; the conversation uses `rewrites`
_MAX_BYTES = 16 * 2**20
"""Largest size of a packed environment. It is sent twice in every turn, so larger ones are slow."""
_ROLES = ("user", "tool", "system")
_DEPTH = 4


def check_environment(
    options: Mapping[str, Any], row: dict, *, field: str = FIELD, rows: str = "data.train"
) -> dict[str, Any]:
    """Load an environment and open one episode in this process, as a worker does.

    Args:
        options, field: see `EnvironmentServer`.
        rows: the config field of the rows, for messages.
    Returns: `EnvironmentServer.facts`.
    Raises: Refusal if this fails.
    """
    server = EnvironmentServer(options, field=field)
    what = f"{field}: {options['name']} cannot open the first row of {rows}"
    with refusing(what, *RAISED, names_kind=True):  # the user's code
        server.open(row, seed=0)
    return server.facts


class EnvironmentServer:
    """Opens episodes of one environment and plays their turns.

    Args:
        options: `name`, `rewrites` (see `conversation`), and keyword arguments of the constructor.
            The name is one of BUILT_IN, `module:Class` or `path/file.py:Class`.
        field: the config field of these options.
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
        """What conversations need: the tools, the format of their calls, and the part of the
        environment that is not plain data."""
        return {"tools": self.tools, "tool_parser": self.tool_parser, "not_plain": self.not_plain}

    def called(self, method: str) -> str:
        """Return a method of the environment with file and line, for messages."""
        function = getattr(self._kind, method, None)
        return f"{self._kind.__name__}.{method}{place_of(function) if function else ''}"

    def open(self, row: dict, *, seed: int) -> tuple[bytes, Turn, int]:
        """Begin an episode.

        Returns: the packed environment, a turn with the opening messages, and a hash of its state:
            equal for equal states in any process, -1 if it has no method `state`.
        Raises: BadValue, or any exception of the environment.
        """
        environment = self._make(**self._options)
        options = {"seed": seed} if self._wants_seed else {}
        messages = resolve(environment.reset(row, **options))
        turn = Turn(messages=_checked_messages(messages, roles=(*_ROLES, "assistant")))
        return pack(environment, kind=self._kind), turn, _state_of(environment)

    def turn(self, environment: bytes, response: Response) -> tuple[bytes, Turn, int]:
        """Play one turn.

        Returns: the packed environment, empty if the episode is done; its turn; and a hash of its
            state, as in `open`.
        Raises: BadValue, or any exception of the environment.
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
        return pickle.loads(data)  # from this run or a checkpoint, both of which are trusted


def _state_of(environment: Any) -> int:
    """Return a 48-bit hash of `state()`, which float64 represents exactly."""
    state = getattr(environment, "state", None)
    if not callable(state):
        return -1
    return hashed(str(resolve(state())), num_bytes=6)


def pack(environment: Any, *, kind: type | None = None) -> bytes:
    """Return an environment as bytes: as plain data if possible, otherwise pickled.

    Args:
        kind: the class whose instances may be packed as plain data; None: any class.
    Raises: BadValue with the attribute that cannot be pickled; or above 16 MiB, with the largest
        attribute.
    """
    name = type(environment).__name__
    data = _plain_or_pickled(environment, kind)
    if isinstance(data, Exception):
        place = _culprit(environment, name, depth=_DEPTH)
        raise BadValue(
            f"{place} cannot be pickled ({type(data).__name__}: {data}), but an "
            "environment is sent with every turn; keep such objects in a module "
            "variable, or create them again when they are used"
        )
    if len(data) > _MAX_BYTES:
        sizes = {name: len(pickle.dumps(value)) for name, value in _parts(environment).items()}
        raise BadValue(
            f"{name} takes {len(data)} bytes, above {_MAX_BYTES}; most of it is "
            f"{max(sizes, key=sizes.__getitem__, default='')!r}. It is sent with every turn: keep "
            "large constant objects in a module variable that `prepare` fills"
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
    """Return the path of the innermost attribute that cannot be pickled: `Game.client._lock`."""
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
    """Return a turn with its fields converted to plain types.

    Raises: BadValue for a wrong field.
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
    """Return a value in plain types: other processes do not import the user's types.

    Args:
        what: beginning of the error message.
    Raises: BadValue for a value that cannot be converted.
    """
    with refusing(what, TypeError, ValueError, RecursionError, kind=BadValue):
        plain = json.loads(json.dumps(value))
        if problem := fit_problem(plain):
            raise ValueError(problem)
        return plain
