"""Read the bodies of OpenAI's requests: what is honoured, what is refused, what is ignored."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from spmdrl.environments.fit_values import fit_problem
from spmdrl.environments.protocol import Message
from spmdrl.errors import describe

TOO_LONG = "context_length_exceeded"
"""OpenAI's code of a request that does not fit."""
_ROLES = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name; templates know the older one
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_MESSAGE_KEYS = {
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"
}  # fmt: skip
_MOST_SAMPLES = 128
_MOST_STOPS = 16
_LONGEST_STOP = 256
_HOTTEST = 100
_PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "modalities": (["text"],),
    "prediction": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
    "web_search_options": (),
}
"""{field that would change what the answer is: values that change nothing}."""


@dataclass(frozen=True)
class RequestLimits:
    """What no request of this run can go beyond."""

    new_tokens: int
    """`max_tokens` of a request that sets none, and the most that is taken."""
    sequence: int
    """Tokens of the longest sequence."""
    token_characters: int
    """Characters of the longest token."""
    vocab_size: int
    of: Literal["agent", "judge", "program"] = "agent"
    """Whose requests: an agent's, to a judge, or another program's. Those of agents are sampled as
    the run's settings say. Others choose their temperature and seed, and what has no effect is
    refused."""

    def check(self, characters: int, *, messages: int = 1) -> None:
        """Refuse texts that are too long for any sequence, before they become tokens.

        Raises: BadRequest.
        """
        most = self.sequence * self.token_characters
        if characters > most or messages > self.sequence:
            raise BadRequest(
                f"{messages} messages or prompts of {characters} characters are more than the "
                f"longest sequence of this run can hold ({self.sequence} tokens, at most {most} "
                "characters); shorten them",
                code=TOO_LONG,
            )


class BadRequest(Exception):
    """A request that is not served.

    Args:
        message: what, the value seen, what to do.
        field: of the body that is wrong.
        status: of HTTP.
        code: OpenAI's name of the error.
    """

    def __init__(self, message: str, *, field: str = "", status: int = 400, code: str = ""):
        super().__init__(message)
        self.field = field
        self.status = status
        self.code = code


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What requests of both kinds ask."""

    model: str
    samples: int
    """`n`."""
    max_tokens: int
    stop: tuple[str, ...]
    temperature: float
    """0 for agents; so is the seed."""
    seed: int
    has_logprobs: bool
    """Whether the logprobs of the sampled tokens are returned."""
    streams: bool
    """Whether the answer is sent as events."""
    includes_usage: bool
    """Whether the last event has the counts of tokens."""
    ignored: tuple[str, ...]
    """Names of fields that are set and have no effect."""


@dataclass(frozen=True, kw_only=True)
class ChatRequest(RequestOptions):
    """A request for chat completions."""

    messages: list[Message]
    """In the form of `normal_message`, at least one; the last one is not the assistant's."""
    tools: list[dict]
    parses_calls: bool
    """Whether tool calls are read in the answer."""


@dataclass(frozen=True, kw_only=True)
class TextRequest(RequestOptions):
    """A request for completions."""

    prompt: str | tuple[int, ...]
    """Text or token ids, at least one."""


def read_body(data: bytes) -> dict[str, Any]:
    """Return a body as an object of JSON. Raises: BadRequest."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error!s:.200}") from None
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, got {describe(body)}")
    return body


def read_chat(body: dict[str, Any], limits: RequestLimits) -> ChatRequest:
    """Read the body of a request for chat completions. Raises: BadRequest."""
    fields = _Fields(body)
    given = fields.take("messages")
    if isinstance(given, list):
        limits.check(0, messages=len(given))
    messages, odd = _messages(given)
    tools = _tools(fields.take("tools"))
    if tools and limits.of == "judge":
        raise BadRequest("tools: a judge has none; leave them out", field="tools")
    size = sum(len(message["content"]) for message in messages) + len(json.dumps(tools))
    limits.check(size, messages=len(messages))
    choice = fields.take("tool_choice")
    has_logprobs = fields.flag("logprobs")
    options = _options(fields, limits, has_logprobs=has_logprobs, odd=odd)
    return ChatRequest(
        **options, messages=messages, tools=tools, parses_calls=bool(tools) and choice != "none"
    )


def read_text(body: dict[str, Any], limits: RequestLimits) -> TextRequest:
    """Read the body of a request for completions. Raises: BadRequest."""
    fields = _Fields(body)
    prompt = _prompt(fields.take("prompt"), vocab_size=limits.vocab_size)
    limits.check(len(prompt))
    logprobs = fields.take("logprobs")
    if logprobs not in (None, 0, False):
        raise BadRequest(
            f"logprobs: {describe(logprobs)} asks for those of other tokens; 0 gives those of the "
            "sampled ones",
            field="logprobs",
        )
    has_logprobs = logprobs is not None and logprobs is not False
    options = _options(fields, limits, has_logprobs=has_logprobs, odd=())
    return TextRequest(**options, prompt=prompt)


class _Fields:
    """The fields of a body, of which each is taken once."""

    def __init__(self, body: dict[str, Any]):
        for name, plain in _PLAIN_VALUES.items():
            value = body.get(name)
            if value is not None and value not in plain:
                can = f"; it can be {' or '.join(map(repr, plain))}" if plain else ""
                raise BadRequest(
                    f"{name}: {describe(value)} is not supported{can}; leave it out", field=name
                )
        self._left = {name: own for name, own in body.items() if own is not None}

    @property
    def ignored(self) -> tuple[str, ...]:
        """The names of fields that nobody has taken."""
        return tuple(name for name in self._left if name not in _PLAIN_VALUES)

    def take(self, name: str) -> Any:
        """Return the value of a field; None if it is absent or null."""
        value = self._left.pop(name, None)
        if problem := fit_problem(value):
            raise BadRequest(f"{name}: cannot be used: {problem}", field=name)
        return value

    def flag(self, name: str) -> bool:
        """Return a field that is true or false, by default false."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise BadRequest(f"{name}: must be true or false, got {describe(value)}", field=name)
        return bool(value)

    def count(self, name: str, *, default: int, most: int, least: int = 1) -> int:
        """Return a field that is a whole number from `least` to `most`."""
        value = self.take(name)
        if value is None:
            return default
        if type(value) is not int or not least <= value <= most:
            raise BadRequest(
                f"{name}: must be a whole number from {least} to {most}, got {describe(value)}",
                field=name,
            )
        return value

    def temperature(self, *, default: float) -> float:
        """Return the temperature."""
        value = self.take("temperature")
        if value is None:
            return default
        if type(value) not in (int, float) or not 0 <= value <= _HOTTEST:
            raise BadRequest(
                f"temperature: must be from 0 to {_HOTTEST}, got {describe(value)}",
                field="temperature",
            )
        return float(value)


def _options(
    fields: _Fields, limits: RequestLimits, *, has_logprobs: bool, odd: Sequence[str]
) -> dict[str, Any]:
    """Return the arguments of RequestOptions."""
    model = fields.take("model")
    if model is not None and not isinstance(model, str):
        raise BadRequest(f"model: must be a text, got {describe(model)}", field="model")
    newer = fields.count("max_completion_tokens", default=limits.new_tokens, most=10**9)
    older = fields.count("max_tokens", default=limits.new_tokens, most=10**9)
    stream_options = fields.take("stream_options")
    includes_usage = isinstance(stream_options, dict) and stream_options.get("include_usage")
    seed = 0
    temperature = 0.0
    if limits.of == "judge":
        seed = fields.count("seed", default=0, most=2**63 - 1, least=0)
        temperature = fields.temperature(default=0.0)
    elif limits.of == "program":
        seed = fields.count("seed", default=secrets.randbits(63), most=2**63 - 1, least=0)
        temperature = fields.temperature(default=1.0)
    fields.take("seed")  # taken as honoured: the run's own seeds decide
    options = dict(
        model=model or "policy",
        samples=fields.count("n", default=1, most=_MOST_SAMPLES),
        max_tokens=min(newer, older, limits.new_tokens),
        stop=_stops(fields.take("stop")),
        has_logprobs=has_logprobs,
        seed=seed,
        temperature=temperature,
        streams=fields.flag("stream"),
        includes_usage=bool(includes_usage),
    )
    ignored = (*fields.ignored, *odd)
    if limits.of != "agent" and ignored:
        raise BadRequest(
            f"{ignored[0]}: is not honoured here; leave it out (temperature, seed, stop, n and "
            "max_tokens are)",
            field=ignored[0],
        )
    return options | dict(ignored=ignored)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    is_list = isinstance(stops, list) and all(isinstance(stop, str) for stop in stops)
    if not is_list:
        raise BadRequest(f"stop: must be texts, got {describe(value)}", field="stop")
    if len(stops) > _MOST_STOPS or not all(0 < len(stop) <= _LONGEST_STOP for stop in stops):
        raise BadRequest(
            f"stop: at most {_MOST_STOPS} texts of 1 to {_LONGEST_STOP} characters are taken",
            field="stop",
        )
    return tuple(dict.fromkeys(stops))


def _tools(value: Any) -> list[dict]:
    if not isinstance(value or [], list):
        raise BadRequest(f"tools: must be a list, got {describe(value)}", field="tools")
    for i, tool in enumerate(value or []):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or tool.get("type") != "function":
            raise BadRequest(
                f"tools[{i}]: expected {{'type': 'function', 'function': {{'name': ...}}}}, got "
                f"{describe(tool)}",
                field=f"tools[{i}]",
            )
    return list(value or [])


def _prompt(value: Any, *, vocab_size: int) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        if all(type(token) is int and 0 <= token < vocab_size for token in value):
            return tuple(value)
    raise BadRequest(
        f"prompt: must be one text, or the ids of one text (0 to {vocab_size - 1}), and not empty; "
        f"got {describe(value)}",
        field="prompt",
    )


# --------------------------------------------------------------------------- messages


def _messages(value: Any) -> tuple[list[Message], list[str]]:
    """Return messages in normal form, and the names of keys that are ignored."""
    if not isinstance(value, list) or not value:
        raise BadRequest(
            f"messages: must be a list of at least one message, got {describe(value)}",
            field="messages",
        )
    found = []
    odd: dict[str, None] = {}
    for i, message in enumerate(value):
        place = f"messages[{i}]"
        found.append(normal_message(message, place=place))
        for key in message.keys() - _MESSAGE_KEYS:
            if message[key]:
                odd[f"messages[].{key}"] = None
    if found[-1]["role"] == "assistant":
        raise BadRequest(
            "messages: the last one is the assistant's, and the policy begins each turn itself; "
            "end with a user or tool message",
            field="messages",
        )
    return found, list(odd)


def normal_message(message: Any, *, place: str) -> Message:
    """Return a message as the chat template takes it. Two messages that mean the same are equal.

    Its content is a text, the arguments of tool calls are mappings, and keys without a value are
    left out.

    Args:
        place: of the message in the body, for errors.
    Raises: BadRequest.
    """
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise BadRequest(
            f"{place}: expected an object with a role ({', '.join(_ROLES)}) and content, got "
            f"{describe(message)}",
            field=place,
        )
    role = _ROLES[message["role"]]
    content = message.get("content")
    calls = message.get("tool_calls")
    if content is None and role != "assistant":
        raise BadRequest(f"{place}.content: is missing", field=f"{place}.content")
    normal: Message = {"role": role, "content": _text(content, place=f"{place}.content")}
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            normal[key] = _plain_text(message[key], place=f"{place}.{key}")
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning:
            place_of_it = f"{place}.reasoning_content"
            normal["reasoning_content"] = _plain_text(reasoning, place=place_of_it)
        if calls:
            normal["tool_calls"] = _calls(calls, place=f"{place}.tool_calls")
    return normal


def _text(content: Any, *, place: str) -> str:
    """Return content as one text: the parts of a list are joined by line feeds, as vLLM does."""
    if not isinstance(content, list):
        return _plain_text("" if content is None else content, place=place)
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise BadRequest(
                f"{place}[{i}]: only parts of text are supported, got {describe(part)}",
                field=f"{place}[{i}]",
            )
        texts.append(_plain_text(part.get("text"), place=f"{place}[{i}].text"))
    return "\n".join(texts)


def _plain_text(value: Any, *, place: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{place}: must be a text, got {describe(value)}", field=place)
    return value


def _calls(value: Any, *, place: str) -> list[dict]:
    """Return tool calls with their arguments as mappings, as chat templates expect them."""
    calls = []
    for i, call in enumerate(value if isinstance(value, list) else [value]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(
                f"{place}[{i}]: expected {{'id': ..., 'function': {{'name': ..., 'arguments': "
                f"...}}}}, got {describe(call)}",
                field=f"{place}[{i}]",
            )
        name = function["name"]
        id = _plain_text(call.get("id") or "", place=f"{place}[{i}].id")
        arguments = _arguments(function.get("arguments"))
        own = {"name": name, "arguments": arguments}
        calls.append({"id": id, "type": "function", "function": own})
    return calls


def _arguments(value: Any) -> Any:
    """Return the arguments of a call as a mapping; a text that holds none stays as it is."""
    if not isinstance(value, str):
        return value or {}
    try:
        mapping = json.loads(value or "{}")
    except (ValueError, RecursionError):
        return value
    return mapping if isinstance(mapping, dict) else value
