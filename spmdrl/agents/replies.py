"""Write OpenAI's objects: completions, what their events have too, errors."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spmdrl.agents.requests import BadRequest, RequestOptions
from spmdrl.environments.protocol import Message, Response

CONTENT = "content"
REASONING = "reasoning_content"
_THINK = "<think>"
END_OF_THINKING = "</think>"
MARKS = (_THINK, END_OF_THINKING)
"""Around reasoning."""
_CALL = "<tool_call>"
_ID_CHARACTERS = 9  # Mistral's templates take no other length


@dataclass(frozen=True)
class Choice:
    """One sample as the agent gets it."""

    text: str
    """Of completions; empty for chats."""
    message: Message | None
    """Of chats, as OpenAI writes it; None for completions."""
    finish_reason: str
    tokens: tuple[str, ...]
    """Text of each sampled token."""
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Usage:
    """Counts of tokens."""

    prompt: int
    completion: int

    def body(self) -> dict[str, int]:
        """Return them as OpenAI writes them."""
        total = self.prompt + self.completion
        return dict(
            prompt_tokens=self.prompt, completion_tokens=self.completion, total_tokens=total
        )


def chat_message(
    response: Response, *, stop: Sequence[str], is_open: bool, parses_calls: bool, call_id: str
) -> Message:
    """Return a sample as the assistant's message.

    Text up to `</think>` is its `reasoning_content`. If a call cannot be read, the message has none
    and its content is the whole text, as vLLM has it.

    Args:
        stop: texts of the request, which end the content.
        is_open: whether it begins in the middle of reasoning.
        parses_calls: whether tool calls are read.
        call_id: name of the sample, from which the ids of its calls are hashed.
    """
    reasoning, text = split_reasoning(cut_at(response.text, stop), is_open=is_open)
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message[REASONING] = reasoning
    calls = response.tool_calls
    if parses_calls and calls and not any(call.error for call in calls):
        before = text.partition(_CALL)[0].rstrip() if _CALL in text else ""
        message["content"] = before or None
        message["tool_calls"] = [
            {
                "id": _hashed(f"{call_id}/{index}"),
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for index, call in enumerate(calls)
        ]
    return message


def is_reasoning(prompt: str) -> bool:
    """Return whether reasoning is open at the end of a prompt: many templates begin it."""
    return prompt.rfind(_THINK) > prompt.rfind(END_OF_THINKING)


def split_reasoning(text: str, *, is_open: bool) -> tuple[str, str]:
    """Return the reasoning in a text, and the rest of it.

    Args:
        is_open: whether it begins in the middle of reasoning. Else `<think>` must begin it.
    """
    if not is_open and not text.lstrip().startswith(_THINK):
        return "", text
    before, _, after = text.partition(END_OF_THINKING)
    return before.replace(_THINK, "", 1).strip("\n"), after.lstrip("\n")


def cut_at(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the first of the texts that end it."""
    places = [text.find(stop) for stop in stops]
    return text[: min((place for place in places if place >= 0), default=len(text))]


def _hashed(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:_ID_CHARACTERS]


# --------------------------------------------------------------------------- whole answers


def completion(
    id: str, choices: Sequence[Choice], usage: Usage, request: RequestOptions
) -> dict[str, Any]:
    """Return the body of an answer."""
    is_chat = choices[0].message is not None
    kind = "chat.completion" if is_chat else "text_completion"
    own = []
    for index, choice in enumerate(choices):
        content = {"message": choice.message} if is_chat else {"text": choice.text}
        own.append(choice_body(index, choice, request) | content)
    return head(id, kind, request) | {"choices": own, "usage": usage.body()}


def head(id: str, kind: str, request: RequestOptions) -> dict[str, Any]:
    """Return what answers and events begin with."""
    return {"id": id, "object": kind, "created": int(time.time()), "model": request.model}


def choice_body(index: int, choice: Choice, request: RequestOptions) -> dict[str, Any]:
    """Return what a choice has in answers and in the last event of a stream."""
    logprobs = None
    if request.has_logprobs:
        logprobs = _text_logprobs(choice) if choice.message is None else _chat_logprobs(choice)
    return {"index": index, "finish_reason": choice.finish_reason, "logprobs": logprobs}


def _chat_logprobs(choice: Choice) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(choice.tokens, choice.logprobs)
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(choice: Choice) -> dict[str, Any]:
    offsets = []
    at = 0
    for text in choice.tokens:
        offsets.append(at)
        at += len(text)
    return {
        "tokens": list(choice.tokens),
        "token_logprobs": list(choice.logprobs),
        "top_logprobs": None,
        "text_offset": offsets,
    }


# --------------------------------------------------------------------------- others


def models() -> dict[str, Any]:
    """Return the list of models: the policy."""
    own = {"id": "policy", "object": "model", "created": 0, "owned_by": "spmdrl"}
    return {"object": "list", "data": [own]}


def error_body(error: BadRequest) -> dict[str, Any]:
    """Return OpenAI's object of an error."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    own = {
        "message": str(error),
        "type": kind,
        "param": error.field or None,
        "code": error.code or None,
    }
    return {"error": own}
