"""The gateway process: it serves OpenAI's protocol to the agents of one engine replica, to reward
functions that ask its engine as their judge, and to other programs (rollout.serve).

It knows messages and texts, and the leader knows ids of tokens. It holds no weights and runs no
code of users. It listens on this machine alone, and it ends with its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ctypes
import functools
import json
import os
import pickle
import resource
import signal
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler
from tokenizers import Tokenizer

from spmdrl.agents.chats import FIELD, make_agent_chat, make_judge_chat
from spmdrl.agents.frames import FramedSocket
from spmdrl.agents.messages import HOST, JUDGE, NO_EPISODES, NO_PARENT, SERVE, Answer, Ask
from spmdrl.agents.replies import (
    CONTENT,
    END_OF_THINKING,
    REASONING,
    Choice,
    Usage,
    chat_message,
    completion,
    cut_at,
    error_body,
    is_reasoning,
    models,
)
from spmdrl.agents.requests import (
    TOO_LONG,
    BadRequest,
    RequestLimits,
    RequestOptions,
    normal_message,
    read_body,
    read_chat,
    read_text,
)
from spmdrl.agents.stitching import EpisodeHistory, KnownAnswer
from spmdrl.agents.streaming import EventStream, GrowingText
from spmdrl.config import Config
from spmdrl.data.templates import encode_prompt
from spmdrl.data.tokenizer import end_token_ids, load_tokenizer
from spmdrl.environments.conversation import Chat
from spmdrl.errors import Refusal, error_text

T = TypeVar("T")
BODY_BYTES = 10 * 2**20
"""Largest body of a request."""
QUEUED = 64
"""Most requests of other programs that are under way or wait, per replica."""
TOO_MANY = "too_many_requests"
_PDEATHSIG = 1
_CACHED_CHATS = 64
_BODIES_AT_ONCE = 4
_IDLE_PER_AGENT = 16
"""Connections without a request that stay open, per agent that may run at a time."""
_IDLE_OF_JUDGE = 1024
"""The same, of reward functions that ask a judge."""
_LOOK_S = 1.0
_LOOKS = 3
"""A connection is idle if it has no request for so many looks."""
_END_TOKENS = 32
"""Tokens at the end of a prompt among which a template may begin reasoning."""
_STREAM = web.RequestKey("stream", EventStream)


def main(fd: int) -> None:
    """Serve until the parent closes its end of a socket.

    Args:
        fd: our end.
    """
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Schedulers signal every process of a job. The parent decides what to do.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    link = FramedSocket(socket.socket(fileno=fd))
    cfg = pickle.load(sys.stdin.buffer)  # of our parent
    try:
        server = GatewayServer(cfg, link)
    except Refusal as error:
        link.put(["refused", str(error)])
        link.drain(10.0)
        return
    asyncio.run(server.serve())
    # Requests may be under way in a thread, and nobody waits for them.
    os._exit(0)


@dataclass(eq=False)
class LiveEpisode:
    """What the gateway knows of an episode whose agent may call, or of requests of NO_EPISODES."""

    key: str
    """`Episode.key`, or one of NO_EPISODES."""
    api_key: str
    history: EpisodeHistory
    num_requests: int = 0
    """Requests that have arrived."""
    num_open: int = 0
    """Requests whose clients wait."""
    num_samples: int = 0
    """Samples that they asked for; a request that is refused counts as one."""
    fault: str = ""
    """Why its sample fails; empty as long as it does not."""
    reading: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_BODIES_AT_ONCE))
    """Bounds the memory of requests whose bodies have not arrived in whole."""
    waiting: dict[int, asyncio.Future[Answer]] = field(default_factory=dict)
    """{number of a request: its answer}."""
    streams: dict[int, EventStream] = field(default_factory=dict)
    """{number of a request whose answer is sent while it is sampled: its events}."""


_EPISODE = web.RequestKey("episode", LiveEpisode)


class GatewayServer:
    """Answers requests of agents with what the leader samples.

    Args:
        link: to the leader.
    Raises (on construction): Refusal if the tokenizer or its chat template cannot be used.
    """

    def __init__(self, cfg: Config, link: FramedSocket):
        self._cfg = cfg
        self._link = link
        self._tokenizer = load_tokenizer(cfg)
        self._stops = frozenset(end_token_ids(cfg, self._tokenizer))
        self._limits = RequestLimits(
            new_tokens=cfg.sampling.max_response_tokens,
            sequence=cfg.longest_sequence,
            token_characters=max(map(len, self._tokenizer.get_vocab())),
            vocab_size=len(self._tokenizer),
        )
        self._chats: OrderedDict[str, Chat] = OrderedDict()
        if self._tokenizer.chat_template and (cfg.rollout.has_agent or cfg.rollout.serve):
            self._chat_of([])
        judge = cfg.rewards.judge
        self._judge_limits = replace(
            self._limits,
            new_tokens=judge.max_response_tokens,
            sequence=judge.max_prompt_tokens + judge.max_response_tokens,
            of="judge",
        )
        self._program_limits = replace(self._limits, of="program")
        if judge.is_on:
            self._judge_chat = make_judge_chat(cfg, self._tokenizer, stops=self._stops)
        self._episodes: dict[str, LiveEpisode] = {}  # by API key
        self._by_name: dict[str, LiveEpisode] = {}
        self._told: set[str] = set()
        # Tokenizers are not safe in threads, so all calls go to one. It leaves this thread free.
        self._encoder = ThreadPoolExecutor(max_workers=1)
        self._has_ended = asyncio.Event()
        self._busy: set[Any] = set()  # connections with a request under way
        self._idle_looks: dict[Any, int] = {}  # by connection, looks at which it had none

    async def serve(self) -> None:
        """Serve until the leader closes the link."""
        listener = socket.create_server((HOST, 0), backlog=1024)
        runner = web.AppRunner(self._application(), access_log=None, handle_signals=False)
        await runner.setup()
        await web.SockSite(runner, listener).start()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._link, self._receive)
        self._put(["ready", f"http://{HOST}:{listener.getsockname()[1]}/v1"])
        assert runner.server
        while not self._has_ended.is_set():
            self._close_idle(runner.server)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_ended.wait(), _LOOK_S)

    def _close_idle(self, server: web.Server) -> None:
        """Close the oldest idle connections if there are too many: each takes a descriptor.

        The request of a new connection may be on its way. So only those count that were idle at
        each of the last looks.
        """
        self._idle_looks = {
            own: self._idle_looks.get(own, 0) + 1
            for own in server.connections
            if own not in self._busy
        }
        idle = [own for own, looks in self._idle_looks.items() if looks > _LOOKS]
        most = _IDLE_PER_AGENT * self._cfg.agents_at_once
        if self._cfg.rewards.judge.is_on:
            most += _IDLE_OF_JUDGE
        if self._cfg.rollout.serve:
            most += QUEUED
        for connection in idle[:-most]:
            connection.force_close()

    def _application(self) -> web.Application:
        middlewares = [self._mark_busy, _explain]
        app = web.Application(client_max_size=BODY_BYTES, middlewares=middlewares)
        app.router.add_post("/v1/chat/completions", self._serve_chat)
        app.router.add_post("/v1/completions", self._serve_text)
        app.router.add_get("/v1/models", self._serve_models)
        app.router.add_get("/v1/episode", self._serve_episode)
        return app

    @web.middleware
    async def _mark_busy(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Keep the connection of a request while it is under way."""
        self._busy.add(request.protocol)
        try:
            return await handler(request)
        finally:
            self._busy.discard(request.protocol)
            if (episode := request.get(_EPISODE)) is not None:
                episode.num_open -= 1

    # ---------------------------------------------------------------- the leader

    def _put(self, value: Any) -> None:
        """Send a value to the leader, now or when it reads."""
        self._link.put(value)
        if not self._link.flush():
            asyncio.get_running_loop().add_writer(self._link, self._flush)

    def _flush(self) -> None:
        if self._link.flush():
            asyncio.get_running_loop().remove_writer(self._link)

    def _receive(self) -> None:
        for kind, own in self._link.receive():
            if kind == "open":
                self._open(*own)
            elif kind == "end":
                self._end(own)
            elif kind == "part":
                self._show(*own)
            else:
                self._take(Answer(**own))
        if self._link.has_ended:
            self._has_ended.set()

    def _open(self, name: str, api_key: str) -> None:
        self._end(name)
        history = EpisodeHistory(continues=name not in NO_EPISODES)
        self._by_name[name] = self._episodes[api_key] = LiveEpisode(name, api_key, history)
        self._put(["opened", name])  # requests before this one are of an earlier agent

    def _end(self, name: str) -> None:
        episode = self._by_name.pop(name, None)
        if episode is None:
            return
        del self._episodes[episode.api_key]
        for future in episode.waiting.values():
            if not future.done():
                future.set_exception(_ended())

    def _take(self, answer: Answer) -> None:
        episode = self._by_name.get(answer.episode)
        future = episode.waiting.pop(answer.id, None) if episode else None
        if future is not None and not future.done():
            future.set_result(answer)

    def _show(self, name: str, number: int, sample: int, tokens: list[int]) -> None:
        episode = self._by_name.get(name)
        stream = episode.streams.get(number) if episode else None
        if stream is not None:
            stream.feed(sample, tokens)

    def _tell_once(self, name: str) -> None:
        """Have the leader log that a field of requests has no effect."""
        if name not in self._told and len(self._told) < 100:
            self._told.add(name)
            self._put(["log", f"agents set {name} in requests, which has no effect in a run"])

    # ---------------------------------------------------------------- requests

    async def _serve_models(self, http: web.Request) -> web.StreamResponse:
        self._episode_of(http)
        return web.json_response(models())

    async def _serve_episode(self, http: web.Request) -> web.StreamResponse:
        """Answer how an episode stands; workers ask it at the end."""
        episode = self._episode_of(http)
        return web.json_response({"requests": episode.num_requests, "fault": episode.fault})

    async def _serve_chat(self, http: web.Request) -> web.StreamResponse:
        episode, number, body = await self._begin(http)
        request = read_chat(body, self._limits_of(episode))
        self._admit(episode, request)
        known, covered = episode.history.find_chat(request.messages, request.tools)
        if episode.key == JUDGE:
            chat = self._judge_chat
        else:
            chat = await self._in_encoder(lambda: self._chat_of(request.tools))

        def encode() -> tuple[Sequence[int], bool]:
            if known is None:
                tokens = chat.encode_opening(request.messages)
            else:
                tokens = chat.encode_answer(known.sampled, request.messages[covered:])
            return tokens, is_reasoning(self._tokenizer.decode(tokens[-_END_TOKENS:]))

        tokens, is_open = await self._in_encoder(encode)
        grows = not request.parses_calls
        stream = self._stream(http, f"chatcmpl-{number}", request, grows=grows, is_open=is_open)
        answer, num_prompt = await self._ask(episode, number, known, tokens, request, stream)
        responses = await self._in_encoder(
            lambda: chat.decode_turns(answer.tokens, are_truncated=answer.are_truncated)
        )
        choices = []
        for i, response in enumerate(responses):
            if stream is not None:
                text = stream.complete(i, answer.tokens[i], response.text)
                response = replace(response, text=text)
            # Some templates begin reasoning in another way. But what was sent as content stays so.
            was_sent = stream is not None and stream.grows
            is_late = END_OF_THINKING in response.text and not was_sent
            message = chat_message(
                response,
                stop=request.stop,
                is_open=is_open or is_late,
                parses_calls=request.parses_calls,
                call_id=f"{episode.key}/{answer.nodes[i]}",  # the same in a repeated run
            )
            if stream is not None:
                texts = {key: message.get(key) or "" for key in (REASONING, CONTENT)}
                stream.finish(i, **texts)
            conversation = [*request.messages, normal_message(message, place="the answer")]
            own = _known(answer, i, num_prompt)
            episode.history.add_chat(conversation, request.tools, own)
            choices.append(await self._choice(answer, i, request, message=message))
        usage = Usage(num_prompt, sum(map(len, answer.tokens)))
        if stream is not None:
            return await stream.end(choices, usage)
        return web.json_response(completion(f"chatcmpl-{number}", choices, usage, request))

    async def _serve_text(self, http: web.Request) -> web.StreamResponse:
        episode, number, body = await self._begin(http)
        request = read_text(body, self._limits_of(episode))
        self._admit(episode, request)
        prompt = request.prompt
        known, covered = episode.history.find_text(prompt)
        if isinstance(prompt, tuple):
            tokens: Sequence[int] = prompt[covered:]
        else:
            rest = prompt[covered:]
            is_new = known is None
            tokens = await self._in_encoder(lambda: self._encode_text(rest, is_new=is_new))
        stream = self._stream(http, f"cmpl-{number}", request, grows=True, is_open=None)
        answer, num_prompt = await self._ask(episode, number, known, tokens, request, stream)
        choices = []
        for i, sampled in enumerate(answer.tokens):
            body_text = await self._decode(self._body(sampled))
            if stream is not None:
                body_text = stream.complete(i, sampled, body_text)
            own = _known(answer, i, num_prompt)
            if isinstance(prompt, tuple):
                episode.history.add_text((*prompt, *sampled), own)
            elif len(self._body(sampled)) == len(sampled):
                # A text that goes on after a token that ended it is another one.
                episode.history.add_text(prompt + body_text, own)
            text = cut_at(body_text, request.stop)
            if stream is not None:
                stream.finish(i, content=text)
            choices.append(await self._choice(answer, i, request, text=text))
        usage = Usage(num_prompt, sum(map(len, answer.tokens)))
        if stream is not None:
            return await stream.end(choices, usage)
        return web.json_response(completion(f"cmpl-{number}", choices, usage, request))

    async def _begin(self, http: web.Request) -> tuple[LiveEpisode, int, dict[str, Any]]:
        """Return the episode of a request, its number and its body."""
        episode = self._episode_of(http)
        # The answer to a client that has left is still drawn.
        if episode.key == SERVE and max(episode.num_open, len(episode.waiting)) >= QUEUED:
            raise BadRequest(
                f"{QUEUED} requests of programs are under way or wait; ask again later",
                status=429,
                code=TOO_MANY,
            )
        http[_EPISODE] = episode
        episode.num_open += 1
        number = episode.num_requests
        episode.num_requests += 1
        self._count(episode, 1)
        async with episode.reading:
            data = await http.read()
        return episode, number, read_body(data)

    def _episode_of(self, http: web.Request) -> LiveEpisode:
        self._receive()  # the leader may have opened it a moment ago
        key = http.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        episode = self._episodes.get(key)
        if episode is None:
            raise _ended()
        return episode

    def _limits_of(self, episode: LiveEpisode) -> RequestLimits:
        special = {JUDGE: self._judge_limits, SERVE: self._program_limits}
        return special.get(episode.key, self._limits)

    def _admit(self, episode: LiveEpisode, request: RequestOptions) -> None:
        """Count the samples of a request, and log what it asks without effect."""
        self._count(episode, request.samples - 1)
        for name in request.ignored:
            self._tell_once(name)

    def _count(self, episode: LiveEpisode, samples: int) -> None:
        episode.num_samples += samples
        most = self._cfg.rollout.agent_max_requests
        has_limit = episode.key not in NO_EPISODES
        if episode.num_samples > most and not episode.fault and has_limit:
            episode.fault = (
                f"the agent asked for more than rollout.agent_max_requests = {most} answers; raise "
                "it, or let the agent ask less often"
            )
        if episode.fault:
            raise BadRequest(episode.fault, status=429, code=TOO_MANY)

    async def _ask(
        self,
        episode: LiveEpisode,
        number: int,
        known: KnownAnswer | None,
        tokens: Sequence[int],
        request: RequestOptions,
        stream: EventStream | None,
    ) -> tuple[Answer, int]:
        """Return the leader's answer, and the number of tokens before it.

        Args:
            stream: gets what is sampled, as it comes.
        Raises: BadRequest if it refuses, or the episode ends.
        """
        if self._by_name.get(episode.key) is not episode:
            raise _ended()
        parent = NO_PARENT
        num_tokens = len(tokens)
        if known is not None:
            parent = known.node
            num_tokens += known.num_tokens
        if not num_tokens:
            raise BadRequest("the prompt has no tokens")
        ask = Ask(
            episode=episode.key,
            id=number,
            parent=parent,
            tokens=tuple(tokens),
            samples=request.samples,
            max_tokens=request.max_tokens,
            stop=request.stop,
            temperature=request.temperature,
            seed=request.seed,
        )
        future = episode.waiting[number] = asyncio.get_running_loop().create_future()
        if stream is not None and stream.grows:
            episode.streams[number] = stream
            self._put(["stream", [episode.key, number]])
        self._put(["ask", asdict(ask)])
        try:
            answer = await future
        finally:
            episode.streams.pop(number, None)
        if answer.refusal:
            raise BadRequest(answer.refusal, code=TOO_LONG)
        return answer, num_tokens

    # ---------------------------------------------------------------- texts and ids

    async def _in_encoder(self, work: Callable[[], T]) -> T:
        """Run work in the thread of the tokenizer. Raises: BadRequest for what it refuses."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._encoder, work)
        except Refusal as error:
            raise BadRequest(str(error)) from None

    def _chat_of(self, tools: list[dict]) -> Chat:
        """Return the Chat of a request's tools. Raises: Refusal as Chat."""
        if not self._tokenizer.chat_template:
            raise Refusal(
                "the model's tokenizer has no chat template, without which the endpoint serves "
                "/v1/completions alone; use a model folder with a template"
            )
        key = json.dumps(tools)
        chat = self._chats.get(key)
        if chat is None:
            chat = make_agent_chat(self._cfg, self._tokenizer, tools=tools, stops=self._stops)
            self._chats[key] = chat
            if len(self._chats) > _CACHED_CHATS:
                self._chats.popitem(last=False)
        self._chats.move_to_end(key)
        return chat

    def _encode_text(self, text: str, *, is_new: bool) -> Sequence[int]:
        if not is_new:
            return self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return encode_prompt(text, self._tokenizer, template="auto", tools=None, where=FIELD)[0]

    def _body(self, sampled: Sequence[int]) -> Sequence[int]:
        """Return sampled ids without the one that ended them."""
        return sampled[:-1] if sampled and sampled[-1] in self._stops else sampled

    async def _decode(self, tokens: Sequence[int]) -> str:
        return await self._in_encoder(
            lambda: self._tokenizer.decode(tokens, skip_special_tokens=True)
        )

    async def _choice(
        self,
        answer: Answer,
        index: int,
        request: RequestOptions,
        *,
        text: str = "",
        message: dict[str, Any] | None = None,
    ) -> Choice:
        if answer.are_truncated[index]:
            finish_reason = "length"
        elif message and message.get("tool_calls"):
            finish_reason = "tool_calls"
        else:
            finish_reason = "stop"
        body = self._body(answer.tokens[index]) if request.has_logprobs else ()
        tokens = await self._in_encoder(
            lambda: tuple(self._tokenizer.decode([token]) for token in body)
        )
        return Choice(text, message, finish_reason, tokens, tuple(answer.logprobs[index]))

    def _stream(
        self,
        http: web.Request,
        id: str,
        request: RequestOptions,
        *,
        grows: bool,
        is_open: bool | None,
    ) -> EventStream | None:
        """Return the events of an answer; None for a request that wants none.

        Args:
            grows: whether texts are sent while they are sampled.
            is_open: whether texts begin in the middle of reasoning; None for texts without it.
        """
        if not request.streams:
            return None
        # Its own copy: the other one is used in a thread.
        tokenizer = self._stream_tokenizer if grows else None
        texts = [
            GrowingText(tokenizer, ends=self._stops, stop=request.stop, is_open=is_open)
            for _ in range(request.samples)
        ]
        is_chat = is_open is not None
        stream = http[_STREAM] = EventStream(http, id, request, is_chat=is_chat, texts=texts)
        return stream

    @functools.cached_property
    def _stream_tokenizer(self) -> Tokenizer | None:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return copy.deepcopy(backend)


def _known(answer: Answer, index: int, num_prompt: int) -> KnownAnswer:
    """Return one sample of an answer as an answer that requests may continue.

    Args:
        num_prompt: tokens before it.
    """
    sampled = tuple(answer.tokens[index])
    return KnownAnswer(answer.nodes[index], num_prompt + len(sampled), sampled)


def _ended() -> BadRequest:
    return BadRequest(
        "this API key is of no episode that is under way", status=401, code="invalid_api_key"
    )


@web.middleware
async def _explain(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return errors as OpenAI's objects. Clients should not repeat what is refused here."""
    try:
        return await handler(request)
    except BadRequest as error:
        refused = error
    except web.HTTPRequestEntityTooLarge as error:
        refused = BadRequest(
            f"a request may have at most {BODY_BYTES // 2**20} MiB", status=error.status
        )
    except web.HTTPException as error:
        refused = BadRequest(
            f"{request.method} {request.path}: {error.reason}", status=error.status
        )
    except ConnectionError:
        raise
    except Exception as error:
        print(f"gateway: {request.method} {request.path}: {error_text(error)}", file=sys.stderr)
        refused = BadRequest(f"the gateway failed: {error_text(error)}", status=500)
    stream = request.get(_STREAM)
    if stream is not None and stream.has_begun:
        return await stream.fail(refused)
    headers = {"x-should-retry": "false"}
    return web.json_response(error_body(refused), status=refused.status, headers=headers)
