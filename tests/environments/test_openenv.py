"""Environments of OpenEnv, by a server that speaks its protocol in a thread of this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from websockets.sync.server import ServerConnection, serve

from spmdrl.environments import openenv
from spmdrl.environments.plain_state import PLAIN
from spmdrl.environments.protocol import Response
from spmdrl.errors import Refusal
from tests.environments.environment_runs import play, served

ROW = {"prompt": "Climb.", "seed": 3, "reset": {"goal": 9}}


@dataclass
class Climb:
    """A game: each action adds to the height; at the goal it is won."""

    most_sessions: int = 100
    drifts: bool = False
    """Whether a new session shows another height than the session before it."""
    resets: list[dict] = field(default_factory=list)
    sessions: int = 0
    connections: list[ServerConnection] = field(default_factory=list)

    def serve_session(self, connection: ServerConnection) -> None:
        if self.sessions >= self.most_sessions:
            error = {"message": "too many", "code": "CAPACITY_REACHED"}
            connection.send(json.dumps({"type": "error", "data": error}))
            return
        self.sessions += 1
        self.connections.append(connection)
        try:
            self._play(connection)
        finally:
            self.sessions -= 1

    def _play(self, connection: ServerConnection) -> None:
        height = 0
        goal = 0
        for text in connection:
            message = json.loads(text)
            data = message["data"]
            reward: float | None = None
            if message["type"] == "reset":
                self.resets.append(data)
                height = data["seed"] + self.drifts * len(self.resets)
                goal = data["goal"]
            elif data.get("by", 0) < 0:
                error = {"message": "only up", "code": "EXECUTION_ERROR"}
                connection.send(json.dumps({"type": "error", "data": error}))
                continue
            else:
                height += data["by"]
                reward = data["by"] / 10
            observation = {"height": height, "metadata": {}}
            answer: dict[str, Any] = {"observation": observation, "reward": reward}
            answer["done"] = height >= goal
            connection.send(json.dumps({"type": "observation", "data": answer}))


@contextmanager
def climbing(**options: Any) -> Iterator[tuple[Climb, str]]:
    game = Climb(**options)
    with serve(game.serve_session, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield game, f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            openenv._close_all_but(0)
            server.shutdown()
            thread.join(10)


BY = {"action": "int", "field": "by", "show": "height"}


def test_episodes_are_played_on_the_server():
    with climbing() as (game, address):
        server = served("openenv", address=address, **BY, sessions=2, reset={"level": 1})
        opened = server.open(ROW, seed=0)
        assert opened[0][:1] == PLAIN
        assert opened[1].messages == [{"role": "user", "content": "Climb.\n\n3"}]
        assert game.resets == [{"seed": 3, "level": 1, "goal": 9}]
        turns = play(server, ROW, ["up?", "by -1", "by 2", "(4)"])
        assert turns[0].info["bad_actions"] == 1 and "number" in turns[0].messages[0]["content"]
        assert turns[1].info["bad_actions"] == 1 and turns[1].messages[0]["content"] == "only up"
        assert turns[2].messages == [{"role": "user", "content": "5"}]
        assert turns[2].reward == pytest.approx(0.2)
        assert turns[3].is_done and turns[3].reward == pytest.approx(0.4)
        assert turns[3].info == {"bad_actions": 0, "turns": 4}
        assert len(game.resets) == 2  # one connection for each of two episodes
        kept = set(openenv._CONNECTIONS)
        server = served("openenv", address=address, max_turns=1)
        (turn,) = play(server, ROW, ['{"by": 1}'])
        assert turn.is_done and turn.reward == pytest.approx(0.1)
        assert play(server, ROW, ["up"])[0].is_done
        assert openenv._CONNECTIONS.keys() <= kept  # ended episodes keep none


@pytest.mark.parametrize("sessions", [1, 4])
def test_an_episode_goes_on_where_its_connection_is_not(sessions):
    with climbing(most_sessions=sessions) as (game, address):
        server = served("openenv", address=address, **BY, sessions=sessions)
        packed = [server.open(ROW, seed=0)[0] for _ in range(3)]
        heights = []
        for by in (1, 2):  # in turns, as episodes of a step are played
            for i, one in enumerate(packed):
                packed[i], turn, _ = server.turn(one, Response(f"{by + i}"))
                heights.append(turn.messages[0]["content"] if turn.messages else "done")
        assert heights == ["4", "5", "6", "6", "8", "done"]
        resets = len(game.resets)
        assert resets == 3 if sessions == 4 else resets > 3
        for connection in game.connections:
            connection.close()  # a server may end a session that waits
        assert server.turn(packed[0], Response("0"))[1].messages[0]["content"] == "6"
        assert len(game.resets) == resets + 1


def test_an_environment_that_does_not_repeat_fails_the_episode():
    with climbing(drifts=True) as (_, address):
        server = served("openenv", address=address, **BY)
        first = server.open(ROW, seed=0)[0]
        server.open(ROW, seed=0)  # the only session is another episode's now
        with pytest.raises(RuntimeError, match="after the same seed and actions"):
            server.turn(first, Response("1"))


def test_servers_and_options_that_cannot_work_are_refused():
    with climbing(most_sessions=0) as (_, address):
        server = served("openenv", address=address, timeout_s=0.2)
        with pytest.raises(RuntimeError, match="refuses the session: too many"):
            server.open(ROW, seed=0)
    with pytest.raises(OSError):
        served("openenv", address="http://127.0.0.1:9").open(ROW, seed=0)
    for options, words in [
        ({"address": "127.0.0.1:8000"}, "must begin with http://"),
        ({"address": "http://a", "field": "by"}, "with action 'json'"),
        ({"address": "http://a", "action": "int"}, "name the field"),
        ({"address": "http://a", "action": "jsn"}, "jsn"),
    ]:
        with pytest.raises(Refusal, match=words):
            served("openenv", **options)
