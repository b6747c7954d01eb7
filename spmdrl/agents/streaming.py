"""Send an answer as events while it is sampled.

What was sent cannot be taken back. So a text is sent up to the place from where a later token may
change it: half a character, or the beginning of a stop string or of a mark of reasoning. A request
with tools is sent when it is complete, since a text may become a call.

The writer is a task of its own. An agent that reads slowly, or not at all, holds up nobody, and
what it has not read waits here as text.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from spmdrl.agents.replies import (
    CONTENT,
    MARKS,
    REASONING,
    Choice,
    Usage,
    choice_body,
    cut_at,
    error_body,
    head,
    split_reasoning,
)
from spmdrl.agents.requests import BadRequest, RequestOptions


class GrowingText:
    """The text of a sample that is under way.

    Args:
        tokenizer: decodes it; None if nothing may be sent before it is complete.
        ends: ids that are no part of the text.
        stop: texts that end it.
        is_open: whether it begins in the middle of reasoning; None for a text without reasoning.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        ends: Collection[int],
        stop: Sequence[str],
        is_open: bool | None,
    ):
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ends = ends
        self._stop = stop
        self._is_open = is_open
        self._num_read = 0
        self._text = ""
        self._sent = {CONTENT: "", REASONING: ""}

    @property
    def grows(self) -> bool:
        """Whether it is sent while it is sampled."""
        return self._tokenizer is not None

    def feed(self, tokens: Sequence[int]) -> dict[str, str]:
        """Return what can be sent after more tokens, by its place in the message."""
        if self._tokenizer is None:
            return {}
        self._read(tokens)
        text = cut_at(self._text, self._stop)
        if self._is_open is None:
            return self._new(CONTENT, _settled(text, self._stop))
        text = _settled(text, [*self._stop, *MARKS])
        if not text.strip():
            return {}  # reasoning may still begin
        reasoning, content = split_reasoning(text, is_open=self._is_open)
        return self._new(REASONING, reasoning) | self._new(CONTENT, content)

    def _read(self, tokens: Sequence[int]) -> None:
        assert self._tokenizer is not None
        self._num_read += len(tokens)
        for token in tokens:
            if token not in self._ends:
                self._text += self._decoder.step(self._tokenizer, token) or ""

    def _new(self, key: str, text: str) -> dict[str, str]:
        sent = self._sent[key]
        if len(text) <= len(sent) or not text.startswith(sent):
            return {}
        self._sent[key] = text
        return {key: text[len(sent) :]}

    def complete(self, tokens: Sequence[int], text: str) -> str:
        """Return the whole text of the sample, which goes on from what was sent.

        Args:
            tokens: all that was sampled.
            text: what they are decoded to, all at once.
        """
        if self._tokenizer is None or not self._num_read:  # nothing was sent
            return text
        self._read(tokens[self._num_read :])
        # Only the end of a text may differ: a character that is cut off.
        return text if text.startswith(self._text) else self._text

    def rest(self, key: str, whole: str) -> str:
        """Return what is left to send of a part of the complete message."""
        return whole.removeprefix(self._sent[key])


def _settled(text: str, marks: Sequence[str]) -> str:
    """Return a text without an end that may be the beginning of a mark."""
    for count in range(min(len(text), max(map(len, marks), default=1) - 1), 0, -1):
        end = text[-count:]
        if any(mark.startswith(end) for mark in marks):
            return text[:-count]
    return text


class EventStream:
    """The events of one answer.

    Args:
        http: the request.
        id: of the answer.
        request: of the agent.
        is_chat: whether the events are those of chats.
        texts: of its samples.
    """

    def __init__(
        self,
        http: web.Request,
        id: str,
        request: RequestOptions,
        *,
        is_chat: bool,
        texts: list[GrowingText],
    ):
        self._http = http
        self._request = request
        self._is_chat = is_chat
        self._head = head(id, "chat.completion.chunk" if is_chat else "text_completion", request)
        if request.includes_usage:
            self._head["usage"] = None
        self._texts = texts
        self._unsent: dict[tuple[int, str], str] = {}
        self._last: list[bytes] | None = None
        self._news = asyncio.Event()
        self._response: web.StreamResponse | None = None
        self._writer: asyncio.Task[None] | None = None

    @property
    def grows(self) -> bool:
        """Whether its texts are sent while they are sampled."""
        return all(text.grows for text in self._texts)

    def feed(self, sample: int, tokens: Sequence[int]) -> None:
        """Send what more tokens of a sample add."""
        for key, text in self._texts[sample].feed(tokens).items():
            self._send(sample, key, text)

    def _send(self, sample: int, key: str, text: str) -> None:
        self._unsent[sample, key] = self._unsent.get((sample, key), "") + text
        self._begin()

    def complete(self, sample: int, tokens: Sequence[int], text: str) -> str:
        """Return the whole text of a sample, see `GrowingText.complete`."""
        return self._texts[sample].complete(tokens, text)

    def finish(self, sample: int, **parts: str) -> None:
        """Send what is left of the complete parts of a sample."""
        for key, whole in parts.items():
            if rest := self._texts[sample].rest(key, whole):
                self._send(sample, key, rest)

    async def end(self, choices: Sequence[Choice], usage: Usage) -> web.StreamResponse:
        """Send the end of each choice, and wait until the agent has read all."""
        return await self._close([*self._end_events(choices, usage)])

    @property
    def has_begun(self) -> bool:
        """Whether something was sent, so that an error can only be an event."""
        return self._writer is not None

    async def fail(self, error: BadRequest) -> web.StreamResponse:
        """End an answer that fails in its middle."""
        return await self._close([_event(error_body(error))])

    async def _close(self, last: list[bytes]) -> web.StreamResponse:
        self._last = last
        self._begin()
        assert self._writer is not None
        await self._writer
        assert self._response is not None
        return self._response

    def _begin(self) -> None:
        self._news.set()
        if self._writer is None:
            self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            self._writer = asyncio.create_task(self._write(self._response))

    async def _write(self, response: web.StreamResponse) -> None:
        with contextlib.suppress(ConnectionError):  # the agent does not wait for the rest
            await response.prepare(self._http)
            if self._is_chat:
                for sample in range(len(self._texts)):
                    await response.write(self._delta(sample, {"role": "assistant", CONTENT: ""}))
            while self._last is None or self._unsent:
                await self._news.wait()
                self._news.clear()
                unsent = self._unsent
                self._unsent = {}
                for (sample, key), text in unsent.items():
                    await response.write(self._delta(sample, {key: text}))
            for event in self._last:
                await response.write(event)
            await response.write_eof()

    def _delta(self, sample: int, delta: dict[str, Any]) -> bytes:
        choice = {"index": sample, "finish_reason": None, "logprobs": None}
        own = {"delta": delta} if self._is_chat else {"text": delta[CONTENT]}
        return _event(self._head | {"choices": [choice | own]})

    def _end_events(self, choices: Sequence[Choice], usage: Usage) -> Iterator[bytes]:
        for sample, choice in enumerate(choices):
            for index, call in enumerate((choice.message or {}).get("tool_calls", ())):
                yield self._delta(sample, {"tool_calls": [{"index": index} | call]})
            end = choice_body(sample, choice, self._request)
            end["delta" if self._is_chat else "text"] = {} if self._is_chat else ""
            yield _event(self._head | {"choices": [end]})
        if self._request.includes_usage:
            yield _event(self._head | {"choices": [], "usage": usage.body()})
        yield b"data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()
