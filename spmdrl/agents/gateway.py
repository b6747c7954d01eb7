"""The leader's side of the gateway: a process that serves OpenAI's protocol to agents."""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
import secrets
import select
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

from spmdrl.agents.frames import FramedSocket
from spmdrl.agents.messages import Answer, Ask
from spmdrl.config import Config
from spmdrl.errors import Refusal

log = logging.getLogger(__name__)
# The child imports from the same places as this process, in any working directory. With -P it does
# not import from the working directory.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from spmdrl.agents.server import main; main(int(sys.argv[2]))"
)
_START_TIMEOUT_S = 300.0  # it imports transformers, perhaps from a slow disk
_SEND_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 5.0


class Gateway:
    """The gateway process of one engine replica. Not thread-safe.

    Args:
        cfg: its model.*, data.*, sampling.* and rollout.* are used.
    """

    def __init__(self, cfg: Config):
        self._cfg = cfg
        self._process: subprocess.Popen | None = None
        self._link: FramedSocket | None = None
        self._asks: list[Ask] = []
        self._opening: Counter[str] = Counter()  # episodes that the process has yet to open
        self.streams: dict[tuple[str, int], Counter[int]] = {}
        """{(episode, number) of a request whose agent reads along: {number of a sample: how many of
        its tokens were shown}}; see `show`."""
        self.address = ""
        """`http://127.0.0.1:PORT/v1`, after `start`."""

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the process and wait until it serves.

        Raises: Refusal if the tokenizer or its chat template cannot be used; RuntimeError if the
            process ends or takes too long.
        """
        ours, theirs = socket.socketpair()
        self._link = FramedSocket(ours)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, json.dumps(sys.path), str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=2,  # our stderr
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pickle.dump(self._cfg, pipe)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self.address:
            if not self._wait(deadline - time.monotonic()):
                self.close()
                raise RuntimeError(f"the gateway did not start in {_START_TIMEOUT_S:g} s")
            self._read()

    def open(self, episode: str) -> str:
        """Begin an episode, or begin it again: requests of its earlier agent are dropped.

        Args:
            episode: `Episode.key`.
        Returns: the API key with which its agent calls.
        """
        self._opening[episode] += 1
        self._asks = [ask for ask in self._asks if ask.episode != episode]
        self._forget_streams(episode)
        key = f"sk-{secrets.token_hex(32)}"
        self._send(["open", [episode, key]])
        return key

    def poll(self) -> list[Ask]:
        """Return the requests that have arrived, in order, without waiting.

        Raises: RuntimeError if the process has ended.
        """
        self._read()
        asks = self._asks
        self._asks = []
        return asks

    def answer(self, answer: Answer) -> None:
        """Send an answer. Those to episodes that have ended are dropped."""
        self.streams.pop((answer.episode, answer.id), None)
        self._send(["answer", asdict(answer)])

    def show(self, episode: str, id: int, sample: int, tokens: list[int]) -> None:
        """Send what more was sampled for a request of `streams`.

        Args:
            sample: number of the sample among those of the request.
        """
        self.streams[episode, id][sample] += len(tokens)
        self._send(["part", [episode, id, sample, tokens]])

    def end(self, episode: str) -> None:
        """End an episode: requests with its key are refused from now on (HTTP status 401)."""
        self._forget_streams(episode)
        self._send(["end", episode])

    def _forget_streams(self, episode: str) -> None:
        self.streams = {own: shown for own, shown in self.streams.items() if own[0] != episode}

    def fileno(self) -> int:
        """Return the descriptor that is readable when there may be something to poll."""
        return self._started.fileno()

    def close(self) -> None:
        """End the process."""
        if self._link is None or self._process is None:
            return
        self._link.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._link = None

    @property
    def _started(self) -> FramedSocket:
        assert self._link is not None, "the gateway is not started, or closed"
        return self._link

    def _wait(self, timeout_s: float) -> bool:
        poller = select.poll()
        poller.register(self._started, select.POLLIN)
        return bool(poller.poll(1000 * max(0.0, timeout_s)))

    def _send(self, value: Any) -> None:
        link = self._started
        link.put(value)
        if not link.drain(_SEND_TIMEOUT_S):
            raise RuntimeError(f"the gateway process has not read for {_SEND_TIMEOUT_S:g} s")

    def _read(self) -> None:
        link = self._started
        for kind, own in link.receive():
            if kind == "ask":
                own |= {"tokens": tuple(own["tokens"]), "stop": tuple(own["stop"])}
                if own["episode"] not in self._opening:
                    self._asks.append(Ask(**own))
            elif kind == "stream":
                if own[0] not in self._opening:
                    self.streams[own[0], own[1]] = Counter()
            elif kind == "opened":
                self._opening -= Counter([own])
            elif kind == "ready":
                self.address = own
            elif kind == "log":
                log.warning("%s", own)
            else:
                self.close()
                raise Refusal(own)
        if link.has_ended:
            self.close()
            assert self._process
            raise RuntimeError(
                f"the gateway process ended with status {self._process.returncode}; its output "
                "above says why"
            )
