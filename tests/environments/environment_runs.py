"""Play episodes of an environment in this process, as a worker does."""

from __future__ import annotations

from typing import Any

from spmdrl.environments.plain_state import PLAIN
from spmdrl.environments.protocol import Response, Turn
from spmdrl.workers.environment_jobs import EnvironmentServer

ROW = {"prompt": "What is 2+3?", "answer": "5"}


def served(name: str, **options: Any) -> EnvironmentServer:
    """Load an environment."""
    return EnvironmentServer({"name": name, **options})


def play(server: EnvironmentServer, row: dict, texts: list[str], *, read: Any = None) -> list[Turn]:
    """Play an episode; return its turns. In between the environment is plain data."""
    environment, _, _ = server.open(row, seed=0)
    turns = []
    for text in texts:
        assert environment[:1] == PLAIN
        calls = read(text) if read else ()
        environment, turn, _ = server.turn(environment, Response(text, calls))
        turns.append(turn)
        if turn.is_done:
            assert environment == b""
            break
    return turns
