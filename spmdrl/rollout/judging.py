"""Requests of reward functions to the engine as their judge (rewards.judge).

A worker asks the gateway, and the gateway asks here. The engine draws a verdict beside the policy's
responses. A verdict goes back to the worker alone: no token of it is trained on.

A request has the seed that its text and its own `seed` give it, so an equal request to equal
weights gets an equal verdict. When generation begins again, verdicts under way are dropped: by then
each group is complete, and nobody waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from spmdrl.agents.gateway import Gateway
from spmdrl.agents.messages import JUDGE, Answer, Ask
from spmdrl.config import Config
from spmdrl.data.hashed import hashed
from spmdrl.engine.protocol import Completion, Request
from spmdrl.model_inputs import TokenIds
from spmdrl.types import Sums

NO_STEP_OF_JUDGE = (
    "the engine, which judges, does nothing meanwhile; set rewards.scope to group, or "
    "rewards.judge.engine to none"
)
"""Why no function can see a whole step."""


@dataclass(eq=False)
class Question:
    """A request to the judge."""

    ask: Ask
    number: int
    """Among those of this process, from 0."""
    began: float
    """time.perf_counter()."""
    is_awaited: bool
    """Whether a worker waits for the answer; not if past decisions are repeated."""
    drawn: dict[int, Completion] = field(default_factory=dict)
    """{sample: what was drawn for it}."""


@dataclass(frozen=True)
class JudgeSample:
    """One sample of the answer to a request, on its way through the engine."""

    question: Question
    index: int
    request: Request
    begun: Completion | None = None
    """What earlier requests drew for it. A judge's samples are not continued."""

    @property
    def request_key(self) -> str:
        """Return the name of the request that draws it."""
        return self.request.key


class EngineJudge:
    """Answers the requests to the judge of one replica. Only its leader has one.

    `ServedRequests` is the same for other programs.

    Args:
        cfg: its rewards.judge and seed are used.
        gateway: the endpoint that the workers call, started.
        stops: token ids that end a verdict.
    """

    name: ClassVar[str] = JUDGE
    """Of NO_EPISODES; prefix of the metrics."""

    def __init__(self, cfg: Config, *, gateway: Gateway, stops: tuple[int, ...]):
        self.cfg = cfg
        self.gateway = gateway
        self._stops = stops
        self._num_asked = 0
        self._open: dict[int, Question] = {}  # by number
        self._reset()

    def take(self, asks: Iterable[Ask], *, are_awaited: bool) -> list[JudgeSample]:
        """Return the samples to draw for requests.

        Args:
            are_awaited: whether workers wait for the answers.
        """
        samples = []
        for ask in asks:
            question = Question(ask, self._num_asked, time.perf_counter(), are_awaited)
            self._num_asked += 1
            if problem := self._problem(ask):
                self._refuse(question, problem)
                continue
            self._open[question.number] = question
            samples += [
                JudgeSample(question, index, self.request(question, index))
                for index in range(ask.samples)
            ]
        return samples

    def _problem(self, ask: Ask) -> str:
        """Return why a request is too long; empty if it is not."""
        most = self.cfg.rewards.judge.max_prompt_tokens
        if len(ask.tokens) <= most:
            return ""
        return (
            f"the messages have {len(ask.tokens)} tokens, above "
            f"rewards.judge.max_prompt_tokens = {most}"
        )

    def request(self, question: Question, index: int) -> Request:
        """Return the request that draws one sample of an answer."""
        ask = question.ask
        text = f"{self.cfg.seed}/{self.name}/{ask.seed}/{index}/{ask.tokens}"
        return Request(
            key=f"{self.name}-{question.number}-{index}",
            prompt=TokenIds(ask.tokens),
            max_tokens=ask.max_tokens,
            temperature=ask.temperature,
            # Without a seed, also a greedy request would take one of the engine's own generator.
            seed=hashed(text) >> 1,
            stop_token_ids=self._stops,
            stop=ask.stop,
            is_of_base=self.name == JUDGE and self.cfg.rewards.judge.engine == "base",
        )

    def complete(self, sample: JudgeSample, completion: Completion) -> None:
        """Add a finished sample to its answer, and send the answer if it is whole."""
        question = sample.question
        question.drawn[sample.index] = completion
        ask = question.ask
        if len(question.drawn) < ask.samples:
            return
        del self._open[question.number]
        own = [question.drawn[index] for index in range(ask.samples)]
        self._requests += 1
        self._prompt_tokens += len(ask.tokens)
        self._tokens += sum(len(one.tokens) for one in own)
        self._seconds += time.perf_counter() - question.began
        answer = Answer(
            self.name,
            ask.id,
            nodes=tuple(range(ask.samples)),
            tokens=tuple(tuple(one.tokens.tolist()) for one in own),
            logprobs=tuple(tuple(one.logprobs.tolist()) for one in own),
            are_truncated=tuple(one.is_truncated for one in own),
        )
        if question.is_awaited:
            self.gateway.answer(answer)

    def drop(self) -> None:
        """Refuse all requests that are under way."""
        for question in self._open.values():
            self._refuse(question, "the step of its sample is complete")
        self._open = {}

    def _refuse(self, question: Question, why: str) -> None:
        if question.is_awaited:
            self.gateway.answer(Answer(self.name, question.ask.id, refusal=why))

    # ---------------------------------------------------------------- metrics

    def count_step(self, seconds: float, *, share: float) -> None:
        """Count an engine step.

        Args:
            share: of the sequences in the engine that are the judge's.
        """
        self._engine_seconds += share * seconds

    def take_sums(self, *, is_first: bool) -> Sums:
        """Return the metrics since the last call, and reset them.

        Args:
            is_first: whether this is the first replica, see `pack_step`.
        """
        one = int(is_first)
        sums: Sums = {
            f"{self.name}/requests": (self._requests, one),
            f"{self.name}/prompt_tokens": (self._prompt_tokens, one),
            f"{self.name}/tokens": (self._tokens, one),
            f"{self.name}/request_s": (self._seconds, self._requests),
            f"{self.name}/engine_s": (self._engine_seconds, 1),
        }
        self._reset()
        return sums

    def _reset(self) -> None:
        self._requests = 0
        self._prompt_tokens = 0
        self._tokens = 0
        self._seconds = 0.0
        self._engine_seconds = 0.0
