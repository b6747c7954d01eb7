"""Write OpenAI's objects: completions, their events, errors."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spmdrl.agents.requests import BadRequest, RequestOptions
from spmdrl.environments.protocol import Message, Response

_THINK = "<think>"
_END_OF_THINKING = "</think>"
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
    response: Response, *, stop: Sequence[str], parses_calls: bool, call_id: str
) -> Message:
    """Return a sample as the assistant's message.

    Text up to `</think>` is its `reasoning_content`. If a call cannot be read, the message has none
    and its content is the whole text, as vLLM has it.

    Args:
        stop: texts of the request, which end the content.
        parses_calls: whether tool calls are read.
        call_id: name of the sample, from which the ids of its calls are hashed.
    """
    reasoning, text = split_reasoning(cut_at(response.text, stop))
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
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


def split_reasoning(text: str) -> tuple[str, str]:
    """Return the reasoning in a text, and the rest of it.

    A text that begins with `<think>` and does not end its reasoning has no rest.
    """
    before, end, after = text.partition(_END_OF_THINKING)
    if not end and not text.lstrip().startswith(_THINK):
        return "", text
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
        own.append(_choice(index, choice, request) | content)
    return _head(id, kind, request) | {"choices": own, "usage": usage.body()}


def events(
    id: str, choices: Sequence[Choice], usage: Usage, request: RequestOptions
) -> Iterator[bytes]:
    """Yield an answer as server-sent events: for each choice its role, its content and its end."""
    is_chat = choices[0].message is not None
    head = _head(id, "chat.completion.chunk" if is_chat else "text_completion", request)
    if request.includes_usage:
        head["usage"] = None
    for index, choice in enumerate(choices):
        end = _choice(index, choice, request)
        if choice.message is None:
            yield _event(head | {"choices": [end | {"text": choice.text}]})
            continue
        begin = {"index": index, "finish_reason": None, "logprobs": None}
        for delta in _deltas(choice.message):
            yield _event(head | {"choices": [begin | {"delta": delta}]})
        yield _event(head | {"choices": [end | {"delta": {}}]})
    if request.includes_usage:
        yield _event(head | {"choices": [], "usage": usage.body()})
    yield b"data: [DONE]\n\n"


def _deltas(message: Message) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    for key in ("reasoning_content", "content"):
        if message.get(key):
            yield {key: message[key]}
    for index, call in enumerate(message.get("tool_calls", ())):
        yield {"tool_calls": [{"index": index} | call]}


def _event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


def _head(id: str, kind: str, request: RequestOptions) -> dict[str, Any]:
    return {"id": id, "object": kind, "created": int(time.time()), "model": request.model}


def _choice(index: int, choice: Choice, request: RequestOptions) -> dict[str, Any]:
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
