"""Requests of other programs to the policy while it trains (rollout.serve).

They share the engine with the samples of a step. No token of them is trained on. What is under way
when the engine stops sampling waits, and goes on with the next weights.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch

from spmdrl.agents.gateway import Gateway
from spmdrl.agents.messages import SERVE, Ask
from spmdrl.config import Config
from spmdrl.engine.protocol import Completion, EngineProtocol, Request
from spmdrl.model_inputs import TokenIds
from spmdrl.rollout.episode import seed_after
from spmdrl.rollout.judging import EngineJudge, JudgeSample, Question
from spmdrl.run_folder import make_folder, remove, write_file

log = logging.getLogger(__name__)
FOLDER = "serve"
"""Folder below output_dir: address and key of each replica's endpoint."""


class ServedRequests(EngineJudge):
    """Answers the requests of other programs to one replica. Only its leader has one."""

    name: ClassVar[str] = SERVE

    def __init__(self, cfg: Config, *, gateway: Gateway, stops: tuple[int, ...]):
        super().__init__(cfg, gateway=gateway, stops=stops)
        self.is_held = False
        """Whether none may enter the engine: an evaluation samples."""
        self._waiting: list[JudgeSample] = []
        self._num_drawing = 0

    def queue(self, asks: Iterable[Ask]) -> None:
        """Queue the samples of requests."""
        self._waiting += self.take(asks, are_awaited=True)

    def due(self) -> list[JudgeSample]:
        """Return the samples that enter the engine now."""
        if self.is_held:
            return []
        free = self.cfg.rollout.serve - self._num_drawing
        due = self._waiting[:free]
        self._waiting = self._waiting[free:]
        self._num_drawing += len(due)
        return due

    def put_back(self, aborted: Iterable[tuple[JudgeSample, Completion]]) -> None:
        """Queue the rest of samples that the engine aborted, before those that wait."""
        back = [_continued(sample, drawn) for sample, drawn in aborted]
        self._num_drawing -= len(back)
        self._waiting = back + self._waiting

    def complete(self, sample: JudgeSample, completion: Completion) -> None:
        """Add a finished sample to its answer, and send the answer if it is whole."""
        self._num_drawing -= 1
        super().complete(sample, _joined(sample.begun, completion))

    def show(self, engine: EngineProtocol, drawing: Iterable[object]) -> None:
        """Send the new tokens of samples whose clients read along.

        Args:
            drawing: what is in the engine.
        """
        streams = self.gateway.streams
        if not streams:
            return
        own = [one for one in drawing if isinstance(one, JudgeSample)]
        samples = {one.request_key: one for one in own if _place(one) in streams}
        for key, tokens in engine.tokens_so_far(samples.keys()).items():
            sample = samples[key]
            begun = [] if sample.begun is None else sample.begun.tokens.tolist()
            new = [*begun, *tokens][streams[_place(sample)][sample.index] :]
            if new:
                self.gateway.show(*_place(sample), sample.index, new)

    def _problem(self, ask: Ask) -> str:
        most = self.cfg.longest_sequence - 1
        if len(ask.tokens) <= most:
            return ""
        return f"the messages have {len(ask.tokens)} tokens; at most {most} are allowed"

    def request(self, question: Question, index: int) -> Request:
        """Return the request that draws one sample, no longer than the longest sequence."""
        request = super().request(question, index)
        room = self.cfg.longest_sequence - len(request.prompt)
        return replace(request, max_tokens=min(request.max_tokens, room))


def _place(sample: JudgeSample) -> tuple[str, int]:
    return SERVE, sample.question.ask.id


def _continued(sample: JudgeSample, drawn: Completion) -> JudgeSample:
    """Return the sample that draws the rest after what an aborted request drew."""
    request = sample.request
    count = len(drawn.tokens)
    rest = replace(
        request,
        prompt=TokenIds((*request.prompt, *drawn.tokens.tolist())),
        max_tokens=request.max_tokens - count,
        seed=seed_after(request.seed or 0, count),
        num_begun=request.num_begun + count,
    )
    return replace(sample, request=rest, begun=_joined(sample.begun, drawn))


def _joined(begun: Completion | None, rest: Completion) -> Completion:
    """Return what was drawn for a sample, from its first token."""
    if begun is None:
        return rest
    return replace(
        rest,
        tokens=torch.cat([begun.tokens, rest.tokens]),
        logprobs=torch.cat([begun.logprobs, rest.logprobs]),
        versions=torch.cat([begun.versions, rest.versions]),
    )


# --------------------------------------------------------------------------- address and key


def publish(cfg: Config, gateway: Gateway, *, replica: int) -> None:
    """Open the endpoint of a replica, and write its address and key for the owner alone.

    Raises: OSError.
    """
    key = gateway.open(SERVE)
    path = _path(cfg, replica)
    make_folder(path.parent, within=path.parents[1])
    remove(path, within=path.parents[1])  # of an earlier start; others may read it
    access = {"host": socket.gethostname(), "base_url": gateway.address, "api_key": key}
    write_file(path, json.dumps(access) + "\n", within=path.parents[1], is_private=True)
    log.warning(
        "replica %d answers other programs at %s on %s; the key is in %s",
        replica,
        gateway.address,
        access["host"],
        path,
    )


def unpublish(cfg: Config, *, replica: int) -> None:
    """Remove the file of `publish`. Raises: OSError."""
    path = _path(cfg, replica)
    remove(path, within=path.parents[1])


def _path(cfg: Config, replica: int) -> Path:
    return Path(cfg.output_dir) / FOLDER / f"replica_{replica}.json"
