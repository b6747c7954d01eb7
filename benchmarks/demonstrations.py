"""Write conversations of careless players for the supervised warm starts of `make game`, `tools`.

    python benchmarks/demonstrations.py configs/demo_game.yaml runs/game/demonstrations.jsonl

Rows (of the training split) and environment are those of the config, and the environment itself
answers each turn, so the policy later meets what it was shown. The players leave something to be
learned from rewards:

- guess_number: guesses at random within the range, half of the time without regard for the hints;
- tools: computes half of the sums in the head, mostly wrongly, the others by the calculator.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
import yaml

from spmdrl.data.tasks import make_task
from spmdrl.environments.protocol import Message, Response, ToolCall
from spmdrl.workers.environment_jobs import EnvironmentServer

Player = Callable[[list[Message], dict], Response]
"""Answers a conversation, given the data row too."""


@dataclass(frozen=True)
class Options:
    """What to write."""

    config: Annotated[Path, tyro.conf.Positional]
    """Of the training run that comes after."""
    out: Annotated[Path, tyro.conf.Positional]
    """JSONL file; its folder is made when missing."""
    count: int = 20000
    """Conversations."""
    careless: float = 0.5
    """Share of guesses that ignore the hints, or of sums that are not given to the calculator."""
    slips: float = 0.8
    """tools: share of the sums done in the head that come out wrong."""
    seed: int = 0


def guesser(options: Options, draw: random.Random) -> Player:
    """Return a player of guess_number whose prompts hold the range as `{low}-{high}`."""

    def play(messages: list[Message], row: dict) -> Response:
        """Guess within what the hints leave, or anywhere."""
        low, high = map(int, row["prompt"].rstrip("?").split("-"))
        if draw.random() >= options.careless:
            for guess, hint in zip(messages[1::2], messages[2::2]):
                if hint["content"] == "higher":
                    low = max(low, int(guess["content"]) + 1)
                else:
                    high = min(high, int(guess["content"]) - 1)
        return Response(str(draw.randint(low, high)))

    return play


def reckoner(options: Options, draw: random.Random) -> Player:
    """Return a user of the calculator for rows such as `123+456=`, or a poor head for figures."""

    def play(messages: list[Message], row: dict) -> Response:
        """Say what the tool found; else call it, or reckon."""
        if messages[-1]["role"] == "tool":
            return Response(messages[-1]["content"])
        if draw.random() >= options.careless:
            call = ToolCall("calculator", {"expression": row["prompt"].rstrip("=")})
            return Response("", (call,))
        error = draw.choice((-20, -10, -2, -1, 1, 2, 10, 20))
        return Response(str(int(row["answer"]) + (error if draw.random() < options.slips else 0)))

    return play


PLAYERS = {"guess_number": guesser, "tools": reckoner}


def as_message(response: Response) -> Message:
    """Return what a player said, in the form of chat templates."""
    message: dict[str, Any] = {"role": "assistant", "content": response.text}
    if response.tool_calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in response.tool_calls
        ]
    return message


def conversation(server: EnvironmentServer, row: dict, player: Player) -> list[Message]:
    """Play one episode to its end and return all its messages."""
    environment, turn, _ = server.open(row, seed=0)
    messages: list[Message] = []
    while not turn.is_done:
        messages += turn.messages
        response = player(messages, row)
        messages.append(as_message(response))
        environment, turn, _ = server.turn(environment, response)
    return messages


def main(options: Options) -> None:
    """Write the file."""
    cfg = yaml.safe_load(options.config.read_text())
    task = make_task(cfg["data"]["train"], cfg["data"]["task_options"], size=options.count)
    server = EnvironmentServer(cfg["rollout"]["environment"])
    player = PLAYERS[cfg["rollout"]["environment"]["name"]](options, random.Random(options.seed))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", encoding="utf-8") as file:
        for index in range(options.count):
            row = task.row(options.seed, index, split="train")
            messages = conversation(server, row, player)
            file.write(json.dumps({"messages": messages, "tools": server.tools or None}) + "\n")
    print(f"{options.out}: {options.count} conversations")


if __name__ == "__main__":
    main(tyro.cli(Options))
