"""An agent that adds three numbers, two at a time, by a tool. It is trained by `make agent`.

It is an ordinary program against OpenAI's client. Each round is a conversation of two answers:

    user       5+3+9
    assistant  calls add("5+3")
    tool       8
    assistant  8+9                  what is left: a summary of the conversation

The next round begins a new conversation that holds that summary alone, until no sum is left.
"""

from __future__ import annotations

import json
import re
from typing import Any

import openai

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"of": {"type": "string"}}},
    },
}
SUM = r"\d{1,9}(\+\d{1,9})+"
MOST_ROUNDS = 3


async def solve(row: dict, client: Any) -> dict[str, float]:
    """Solve `5+3+9=`; the reward is 1 for the right number."""
    task = row["prompt"].rstrip("=")
    calls = 0
    for _ in range(MOST_ROUNDS):
        messages: list[Any] = [{"role": "user", "content": task}]
        message = await ask(client, messages)
        if message.tool_calls:
            calls += 1
            call = message.tool_calls[0]
            result = add(call.function.arguments)
            tool = {"role": "tool", "tool_call_id": call.id, "content": result}
            try:
                message = await ask(client, [*messages, message, tool])
            except openai.BadRequestError as error:
                if error.code != "context_length_exceeded":
                    raise
                break  # the call was too long to leave room for an answer
        task = message.content or ""
        if not re.fullmatch(SUM, task):
            break
    return {"reward": float(task == row["answer"]), "calls": calls}


async def ask(client: Any, messages: list[Any]) -> Any:
    """Return the policy's next message."""
    answer = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
    return answer.choices[0].message


def add(arguments: str) -> str:
    """Return the sum of two numbers; of anything else, `error`."""
    numbers = json.loads(arguments).get("of")
    if not isinstance(numbers, str) or not re.fullmatch(SUM, numbers) or numbers.count("+") > 1:
        return "error"
    return str(sum(map(int, numbers.split("+"))))
