"""Write conversations of careless players for the supervised warm starts of `make game`, `tools`
and `agent`.

    python benchmarks/demonstrations.py configs/demo_game.yaml runs/game/demonstrations.jsonl

Rows (of the training split) and environment are those of the config, and the environment itself
answers each turn, so the policy later meets what it was shown. The players leave something to be
learned from rewards:

- guess_number: guesses at random within the range, half of the time without regard for the hints;
- tools: computes half of the sums in the head, mostly wrongly, the others by the calculator;
- agent: as with tools, and forgets every fourth time what is left to add. The agent of the config
  runs as it is, with a client that has this player's answers; each of its conversations is a row.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import tyro
import yaml
from openai.types.chat import ChatCompletionMessage

from spmdrl.agents.requests import normal_message
from spmdrl.data.tasks import make_task
from spmdrl.environments.protocol import Message, Response, ToolCall
from spmdrl.imports import import_object
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
    """Episodes, each of a conversation or, with an agent, several."""
    careless: float = 0.5
    """Share of guesses that ignore the hints, or of sums that are not given to the calculator."""
    slips: float = 0.8
    """tools, agent: share of the sums done in the head that come out wrong."""
    forgotten: float = 0.25
    """agent: share of summaries that leave out what is still to be added."""
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


class AdderClient:
    """Answers the requests of configs/demo_agent.py in the place of OpenAI's client.

    Attributes:
        conversations: of an episode, each with its answers.
    """

    def __init__(self, options: Options, draw: random.Random):
        self._options = options
        self._draw = draw
        self.conversations: list[list[Message]] = []
        self.tools: list[dict] = []
        self.chat = SimpleNamespace(completions=self)

    async def create(self, *, messages: list[Any], tools: list[dict], **_: Any) -> Any:
        """Answer one request."""
        self.tools = tools
        known = [as_plain(message) for message in messages]
        answer = self._answer(known)
        if self.conversations and known[:-1] == self.conversations[-1]:
            self.conversations.pop()
        self.conversations.append([*known, as_plain(answer)])
        return SimpleNamespace(choices=[SimpleNamespace(message=answer)])

    def _answer(self, messages: list[Message]) -> ChatCompletionMessage:
        numbers = [int(number) for number in messages[0]["content"].split("+")]
        if messages[-1]["role"] == "tool":
            is_forgotten = self._draw.random() < self._options.forgotten
            rest = [] if is_forgotten else numbers[2:]
            text = "+".join([messages[-1]["content"], *map(str, rest)])
            return ChatCompletionMessage(role="assistant", content=text)
        if self._draw.random() >= self._options.careless:
            arguments = json.dumps({"of": f"{numbers[0]}+{numbers[1]}"})
            call = {"id": "1", "type": "function"}
            call |= {"function": {"name": "add", "arguments": arguments}}
            return ChatCompletionMessage.model_validate({"role": "assistant", "tool_calls": [call]})
        error = self._draw.choice((-20, -10, -2, -1, 1, 2, 10, 20))
        is_wrong = self._draw.random() < self._options.slips
        text = str(sum(numbers) + (error if is_wrong else 0))
        return ChatCompletionMessage(role="assistant", content=text)


def as_plain(message: Any) -> Message:
    """Return a message as chat templates take it, with the arguments of calls as mappings."""
    plain = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
    return normal_message(plain, place="message")


def agent_rows(cfg: dict, options: Options) -> Iterator[dict]:
    """Yield the conversations of the agent of a config as rows."""
    solve = import_object(cfg["rollout"]["agent"], kind="function", field="rollout.agent")
    draw = random.Random(options.seed)
    for row in task_rows(cfg, options):
        client = AdderClient(options, draw)
        asyncio.run(solve(row, client))
        for messages in client.conversations:
            yield {"messages": messages, "tools": client.tools}


def environment_rows(cfg: dict, options: Options) -> Iterator[dict]:
    """Yield the conversations of the environment of a config as rows."""
    server = EnvironmentServer(cfg["rollout"]["environment"])
    player = PLAYERS[cfg["rollout"]["environment"]["name"]](options, random.Random(options.seed))
    for row in task_rows(cfg, options):
        yield {"messages": conversation(server, row, player), "tools": server.tools or None}


def task_rows(cfg: dict, options: Options) -> Iterator[dict]:
    """Yield the problems of a config."""
    task = make_task(cfg["data"]["train"], cfg["data"]["task_options"], size=options.count)
    for index in range(options.count):
        yield task.row(options.seed, index, split="train")


def main(options: Options) -> None:
    """Write the file."""
    cfg = yaml.safe_load(options.config.read_text())
    rows = agent_rows if "agent" in cfg["rollout"] else environment_rows
    options.out.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with options.out.open("w", encoding="utf-8") as file:
        for row in rows(cfg, options):
            file.write(json.dumps(row) + "\n")
            count += 1
    print(f"{options.out}: {count} conversations")


if __name__ == "__main__":
    main(tyro.cli(Options))
