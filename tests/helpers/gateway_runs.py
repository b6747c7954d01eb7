"""A gateway with a stand-in for the leader, which answers with the texts that a test gives."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import openai
from transformers import AutoConfig

from spmdrl.agents.frames import FramedSocket
from spmdrl.agents.gateway import Gateway
from spmdrl.agents.messages import Answer, Ask
from spmdrl.agents.server import GatewayServer
from spmdrl.config import Config
from tests.helpers.built import made
from tests.helpers.chat_templates import chat_tokenizer

QUESTION = [{"role": "user", "content": "What is 2+2?"}]


def agent_config(folder: Path, *, family: str = "qwen", template: str = "", **fields) -> Config:
    """Return a config whose model has a tokenizer and no weights."""
    tokenizer = chat_tokenizer(family, template=template)
    tokenizer.save_pretrained(folder)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=300)
    AutoConfig.for_model("llama", **sizes).save_pretrained(folder)
    return made(
        **{
            "model": dict(path=str(folder)),
            "data": dict(train="rows.jsonl", max_prompt_tokens=2048),
            "sampling": dict(max_response_tokens=512),
        }
        | fields
    )


class StandIn:
    """Answers what a gateway asks, in a thread, and remembers it.

    Args:
        write: returns the texts of a request's samples, each with the tokens that end it; by
            default one text for each.
    """

    def __init__(self, gateway: Gateway, tokenizer, write: Callable[[Ask], Sequence[str]]):
        self.gateway = gateway
        self.tokenizer = tokenizer
        self.write = write
        self.asks: list[Ask] = []
        self.paths: dict[tuple[str, int], tuple[int, ...]] = {}
        """{(episode, node): ids of its path}."""
        self.is_held = threading.Event()  # set: answers wait
        self.holds: set[str] = set()  # those of these episodes alone; empty: of all
        self._held: list[Ask] = []
        self._encoded: dict[str, tuple[int, ...]] = {}
        self._lock = threading.Lock()
        self._is_over = False
        self._thread = threading.Thread(target=self._lead, daemon=True)
        self._thread.start()

    def open(self, episode: str = "e") -> str:
        with self._lock:
            return self.gateway.open(episode)

    def end(self, episode: str = "e") -> None:
        with self._lock:
            self.gateway.end(episode)

    def client(self, episode: str = "e", **options) -> openai.OpenAI:
        key = self.open(episode)
        return openai.OpenAI(base_url=self.gateway.address, api_key=key, max_retries=0, **options)

    def text(self, node: int, episode: str = "e") -> str:
        """Return the whole text of a node's path."""
        return self.tokenizer.decode(self.paths[episode, node])

    def close(self) -> None:
        self._is_over = True
        self._thread.join(10.0)

    def _lead(self) -> None:
        poller = select.poll()
        poller.register(self.gateway, select.POLLIN)
        while not self._is_over:
            poller.poll(20)
            with self._lock:
                asks = self._held + self.gateway.poll()
                self._held = list(filter(self._holds, asks))
                for ask in asks:
                    if ask not in self._held:
                        self.gateway.answer(self._answer(ask))

    def _holds(self, ask: Ask) -> bool:
        return self.is_held.is_set() and (not self.holds or ask.episode in self.holds)

    def _answer(self, ask: Ask) -> Answer:
        self.asks.append(ask)
        before = self.paths.get((ask.episode, ask.parent), ())
        if len(before) + len(ask.tokens) > 2048:
            return Answer(ask.episode, ask.id, refusal="too long: summarise")
        texts = self.write(ask)
        assert len(texts) == ask.samples
        nodes = []
        sampled = []
        for text in texts:
            if text not in self._encoded:
                encoded = self.tokenizer(text, add_special_tokens=False)["input_ids"]
                self._encoded[text] = tuple(encoded)
            tokens = self._encoded[text]
            nodes.append(sum(key[0] == ask.episode for key in self.paths))
            self.paths[ask.episode, nodes[-1]] = (*before, *ask.tokens, *tokens)
            sampled.append(tokens)
        return Answer(
            ask.episode,
            ask.id,
            nodes=tuple(nodes),
            tokens=tuple(sampled),
            logprobs=tuple(tuple(-0.5 for _ in own) for own in sampled),
            are_truncated=tuple(own[-1] != self.tokenizer.eos_token_id for own in sampled),
        )


@contextlib.contextmanager
def standing_in(gateway: Gateway, tokenizer, write: Callable[[Ask], Sequence[str]]):
    """Yield a StandIn."""
    leader = StandIn(gateway, tokenizer, write)
    try:
        yield leader
    finally:
        leader.close()


@contextlib.contextmanager
def gateway_in_thread(cfg: Config) -> Iterator[Gateway]:
    """Yield a gateway whose server is a thread of this process: no process is started."""
    ours, theirs = socket.socketpair()
    gateway = Gateway(cfg)
    link = gateway._link = FramedSocket(ours)
    server = GatewayServer(cfg, FramedSocket(theirs))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    until = time.monotonic() + 30
    while not gateway.address and time.monotonic() < until:
        gateway._wait(1.0)
        gateway._read()
    try:
        yield gateway
    finally:
        link.close()
        thread.join(10.0)
