"""Environments of OpenEnv, which run in servers of their own; called over its WebSocket protocol.

A server holds an episode as long as its connection. Here any worker may play the next turn, and a
checkpoint holds unfinished episodes, so an episode is its seed and its actions. A worker keeps the
connections of its last episodes. Where it has none with the same history, it opens one and repeats
the actions, and the episode fails if the environment then shows something else.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from spmdrl.environments.adapters import action_parser, seed_of, with_observation
from spmdrl.environments.protocol import Message, Response, Turn, check_at_least, opening_messages
from spmdrl.errors import Refusal
from spmdrl.imports import import_object, refusing

_SCHEMES = {"http://": "ws://", "https://": "wss://", "ws://": "ws://", "wss://": "wss://"}
_JSON = "json"
_OF_ACTIONS = ("EXECUTION_ERROR", "VALIDATION_ERROR")
"""Codes of errors that an action may cause."""
_MAX_BYTES = 2**24
"""Largest answer."""
_CLOSE_S = 1.0
_PAUSE_S = 0.05


class OpenEnvironment:
    """An episode of an environment that an OpenEnv server serves.

    All samples of a group have one seed, as with `GymEnvironment`.

    Args:
        address: of the server, such as http://127.0.0.1:8000.
        action: the action that a response stands for: `json` (a JSON object), or with `field`
            `text`, `int` or `float` (the last number in it), or `module:function` that computes it
            from the text. A response without an action gets an error text and costs a turn, as does
            an action for which the server reports an error.
        field: field of the action that gets the text or number.
        show: what the policy sees of an observation: `module:function` of its dictionary, the name
            of a field, or by default all of it as JSON.
        reset: arguments of the server's `reset`, which also gets the seed and the row's `reset`.
        max_turns: responses per episode.
        sessions: connections that a worker process keeps. The server's `max_concurrent_envs` should
            be at least three times sessions * rewards.workers * engine replicas: so many processes
            may be alive, with those that stand in for stuck ones and the spare ones (`JobQueue`).
        timeout_s: deadline of a message. It must be below rewards.timeout_s.
    """

    def __init__(
        self,
        *,
        address: str,
        action: str = _JSON,
        field: str = "",
        show: str = "",
        reset: Mapping[str, Any] | None = None,
        max_turns: int = 16,
        sessions: int = 1,
        timeout_s: float = 5.0,
    ):
        check_at_least(1, max_turns=max_turns, sessions=sessions)
        with refusing("environment openenv", ImportError, hint="; run `pip install websockets`"):
            import websockets.sync.client  # noqa: F401
        if (action in ("text", "int", "float")) != bool(field):
            raise Refusal(
                f"field: {field!r} with action {action!r}: name the field of the action that gets "
                "the text or number; actions json and module:function need none"
            )
        self._address = _socket_address(address)
        self._action = action
        self._field = field
        self._show = show
        self._reset = dict(reset or {})
        self._sessions = sessions
        self._timeout_s = timeout_s
        self.max_turns = max_turns
        self.turns = 0
        self.history: list[dict[str, Any]] = []
        """The messages to the server: a reset, and a step for each action."""
        self.seen = ""
        """The server's last answer, as JSON."""
        if action != _JSON:
            action_parser(action)
        if ":" in show:
            import_object(show, kind="function", field="show")

    def reset(self, row: dict) -> list[Message]:
        """Open with the row's prompt and the first observation."""
        messages = opening_messages(row)
        arguments = {**self._reset, **(row.get("reset") or {})}
        result = self._send("reset", {"seed": seed_of(row, messages), **arguments})
        if "error" in result:
            raise RuntimeError(f"{self._address}: reset with {arguments}: {result['error']}")
        return with_observation(messages, self._text(result["observation"]))

    def step(self, response: Response) -> Turn:
        """Take the action in a response, and answer with the observation."""
        self.turns += 1
        is_last = self.turns >= self.max_turns or response.is_truncated
        try:
            action = self._action_of(response.text)
        except ValueError as error:
            return self._turn(str(error), is_done=is_last, info={"bad_actions": 1.0})
        result = self._send("step", action)
        if "error" in result:
            return self._turn(result["error"], is_done=is_last, info={"bad_actions": 1.0})
        is_done = bool(result["done"]) or is_last
        text = self._text(result["observation"])
        reward = float(result["reward"] or 0.0)
        return self._turn(text, is_done=is_done, info={"bad_actions": 0.0}, reward=reward)

    def _action_of(self, text: str) -> dict[str, Any]:
        if self._action != _JSON:
            action = action_parser(self._action)(text)
            return {self._field: action} if self._field else action
        action = json.loads(text)
        if not isinstance(action, dict):
            raise ValueError("expected a JSON object as the action")
        return action

    def _text(self, observation: Mapping[str, Any]) -> str:
        if ":" in self._show:
            return import_object(self._show, kind="function", field="show")(observation)
        if self._show:
            return str(observation[self._show])
        return json.dumps(observation, ensure_ascii=False)

    def _turn(
        self, text: str, *, is_done: bool, info: dict[str, float], reward: float = 0.0
    ) -> Turn:
        if is_done:
            for connection in _take(self._key()):
                connection.close()
            return Turn(is_done=True, reward=reward, info=info | {"turns": float(self.turns)})
        return Turn(messages=[{"role": "user", "content": text}], reward=reward, info=info)

    def _send(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send the next message of the episode; return the answer, or {"error": message}.

        Raises: OSError or RuntimeError for a server that is not reached, does not answer in time,
            refuses the session or does not repeat the episode.
        """
        message = {"type": kind, "data": data}
        result, connection = self._answered(message)
        self.history.append(message)
        self.seen = json.dumps(result, sort_keys=True)
        _keep(self._key(), connection, most=self._sessions)
        return result

    def _answered(self, message: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Return the answer to a message, and the connection that it came from."""
        for connection in _take(self._key()) if self.history else ():
            with contextlib.suppress(_Closed):  # meanwhile, by the server
                return _exchange(connection, message, timeout_s=self._timeout_s), connection
        # The server may count a session for a moment after its end.
        until = time.monotonic() + self._timeout_s
        while True:
            _close_all_but(self._sessions - 1)
            try:
                connection = self._reopened()
                return _exchange(connection, message, timeout_s=self._timeout_s), connection
            except _Full:
                if time.monotonic() > until:
                    raise
                time.sleep(_PAUSE_S)

    def _reopened(self) -> Any:
        """Return a new connection in which the history was repeated."""
        from websockets.sync.client import connect

        timeout_s = self._timeout_s
        opened = connect(
            self._address, open_timeout=timeout_s, close_timeout=_CLOSE_S, max_size=_MAX_BYTES
        )
        connection = opened.__enter__()  # closed by `_exchange`, `_close_all_but` or at the end
        result: dict[str, Any] = {}
        for message in self.history:
            result = _exchange(connection, message, timeout_s=timeout_s)
        if self.history and json.dumps(result, sort_keys=True) != self.seen:
            connection.close()
            raise RuntimeError(
                f"{self._address}: its environment shows {result!r:.200} after the same seed and "
                f"actions that led to {self.seen:.200}; an episode may change its session, so its "
                "environment must draw all that is random from the seed"
            )
        return connection

    def _key(self) -> str:
        return json.dumps([self._address, self.history, self.seen])


_CONNECTIONS: OrderedDict[str, list[Any]] = OrderedDict()
"""{history of an episode, with what was seen: open connections that had it}, the one used last at
the end."""


def _take(key: str) -> list[Any]:
    """Remove and return one connection with a history; an empty list if there is none."""
    kept = _CONNECTIONS.get(key, [])
    taken = kept[-1:]
    del kept[-1:]
    if not kept:
        _CONNECTIONS.pop(key, None)
    return taken


def _keep(key: str, connection: Any, *, most: int) -> None:
    """Keep a connection for the next turn, and close those that were not used for longest."""
    _CONNECTIONS.setdefault(key, []).append(connection)
    _CONNECTIONS.move_to_end(key)
    _close_all_but(most)


def _close_all_but(most: int) -> None:
    while sum(map(len, _CONNECTIONS.values())) > most:
        for oldest in _take(next(iter(_CONNECTIONS))):
            oldest.close()


def _exchange(connection: Any, message: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """Return the server's answer to a message. If there is none, close the connection.

    Raises: _Closed, _Full, TimeoutError; RuntimeError if the server refuses the session.
    """
    from websockets.exceptions import ConnectionClosed

    with contextlib.ExitStack() as failed:
        failed.callback(connection.close)
        try:
            # A server that refuses the session closes it after its answer.
            with contextlib.suppress(ConnectionClosed):
                connection.send(json.dumps(message))
            reply = json.loads(connection.recv(timeout=timeout_s))
        except ConnectionClosed as error:
            raise _Closed(f"the server has closed the session: {error}") from error
        data = reply.get("data") or {}
        code = data.get("code") if reply.get("type") == "error" else ""
        if code and code not in _OF_ACTIONS:
            kind = _Full if code == "CAPACITY_REACHED" else RuntimeError
            raise kind(
                f"the server refuses the session: {data.get('message')} (see `sessions` in "
                "docs/outside_environments.md)"
            )
        failed.pop_all()
    if code:
        return {"error": str(data.get("message"))}
    return {name: data.get(name) for name in ("observation", "reward", "done")}


class _Closed(RuntimeError):
    """The server has ended the session."""


class _Full(RuntimeError):
    """The server has as many sessions as it may have."""


def _socket_address(address: str) -> str:
    for scheme, own in _SCHEMES.items():
        if address.startswith(scheme):
            return f"{own}{address.removeprefix(scheme).rstrip('/')}/ws"
    raise Refusal(f"address: must begin with http:// or https://, got {address!r}")
