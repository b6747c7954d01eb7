"""Reward jobs, inside a worker: score samples by calling the functions of a run.

`job_queue` ends a job after rewards.timeout_s; `concurrent` does this for jobs that share a worker.
"""

from __future__ import annotations

import contextlib
import resource
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from time import monotonic
from types import TracebackType
from typing import Any

from spmdrl.data.tasks import is_generated, make_task
from spmdrl.errors import Refusal, error_text
from spmdrl.rewards.answers import reported
from spmdrl.rewards.retries import Retries
from spmdrl.rewards.samples import BadValue, RewardList, RewardSample, Scope, Score
from spmdrl.rewards.signatures import Reward, adapt, load_reward
from spmdrl.workers.messages import (
    Done,
    Failure,
    ListResult,
    RewardResult,
    Setup,
    SolveResult,
    TurnResult,
)

_MAX_MESSAGE_CHARS = 2000
_MOST_FRAMES = 200


@dataclass(kw_only=True)
class RunningJob:
    """A job while the user's code runs."""

    id: int
    began: float = field(default_factory=monotonic)
    """Clock of monotonic()."""
    failure: Failure | None = None
    message: str = ""

    @contextlib.contextmanager
    def blame_user_code(self, *, returned: str = "", raised: str = "") -> Iterator[None]:
        """If the user's code raises, make this the failure of the job.

        Args:
            returned: prefix of the message about a bad value.
            raised: prefix of the message about any other error.
        """
        try:
            yield
        except BadValue as error:
            self.failure = "bad_value"
            self.message = f"{returned}{error}"
        except BaseException as error:  # SystemExit too: user code may call sys.exit
            self.failure = "error"
            self.message = f"{raised}{describe_error(error)}"

    def done(self, result: RewardResult | ListResult | TurnResult | SolveResult | None) -> Done:
        """Return the report on this job, with the time that it took."""
        now = monotonic()
        message = self.message[:_MAX_MESSAGE_CHARS]
        return Done(self.id, now, now - self.began, self.failure, message, result, self.num_retries)

    @property
    def num_retries(self) -> int:
        """Return the number of repeated calls."""
        return 0


@dataclass(kw_only=True)
class PartialScore(RunningJob):
    """A sample or a list of samples while it is scored."""

    work: RewardSample | RewardList
    retries: Retries
    scores: dict[str, list[Score]] = field(default_factory=dict)
    """{function that is done: its score of each sample}."""

    @property
    def samples(self) -> tuple[RewardSample, ...]:
        """The samples to score."""
        return self.work.samples if isinstance(self.work, RewardList) else (self.work,)

    def call(self, name: str, reward: Reward) -> None:
        """Call a function in this thread. If it raises, this is the failure of the job."""
        with self._blame_function(name, reward):
            self.scores[name] = self.retries.call(
                lambda: reward(self.samples), transient=reward.transient
            )

    async def call_async(self, name: str, reward: Reward) -> None:
        """Call an `async def` function, as `call` does."""
        with self._blame_function(name, reward):
            self.scores[name] = await self.retries.call_async(
                lambda: reward.awaited(self.samples), transient=reward.transient
            )

    @property
    def num_retries(self) -> int:
        """Return the number of repeated calls."""
        return self.retries.count

    @contextlib.contextmanager
    def _blame_function(self, name: str, reward: Reward) -> Iterator[None]:
        """If the calls of a function raise, make this the failure of the job."""
        before = self.retries.count
        with self.blame_user_code(returned=f"{name}{reward.place}: ", raised=f"{name}: "):
            yield
        count = self.retries.count - before
        if self.failure and count:
            self.message = f"{self.message[: _MAX_MESSAGE_CHARS - 40]}; after {count} retries"


class RewardScorer:
    """Scores samples with the functions of a Setup; each job calls the functions of one scope.

    Raises (on construction): Refusal for a function or task that cannot be used.
    """

    def __init__(self, setup: Setup):
        self._weights = setup.weights
        self.timeout_s = setup.timeout_s
        self._retries = setup.retries
        self._rewards: dict[str, Reward] = {
            name: self._grader(spec, setup.options_of(spec))
            if is_generated(spec)
            else load_reward(spec, scope=setup.scope, concurrency=setup.concurrency)
            for name, spec in setup.functions.items()
        }
        self._tasks = {
            i: (own.task.rpartition(":")[2], self._grader(own.task, own.task_options))
            for i, own in enumerate(setup.sources)
            if own.is_own_grader
        }
        self._applies = {
            i: own.applies for i, own in enumerate(setup.sources) if own.applies is not None
        }
        for name, reward in self._rewards.items():
            if reward.scope == "step" and any(name not in own for own in self._applies.values()):
                raise Refusal(
                    f"rewards: {name} scores whole steps, and some sources of data have others; "
                    "have each source name it, or set rewards.scope to group"
                )

    @property
    def concurrency(self) -> int:
        """Return how many jobs may run at once: the smallest number that is allowed by a function
        that allows more than one; 1 if none does."""
        return min((r.concurrency for r in self._rewards.values() if r.concurrency > 1), default=1)

    @property
    def scopes(self) -> list[str]:
        """Return the scopes of the functions."""
        scopes = [reward.scope for reward in self._rewards.values()]
        if self._tasks:
            scopes.append("sample")
        return list(dict.fromkeys(scopes))

    def called(self, *, is_list: bool) -> str:
        """Return the names and lines of the functions that a job may call, for messages."""
        names = []
        for name, reward in (*self._rewards.items(), *self._tasks.values()):
            if (reward.scope != "sample") == is_list:
                names.append(f"{name}{reward.place}")
        return " or ".join(dict.fromkeys(names))

    def score(self, id: int, work: RewardSample | RewardList) -> Done:
        """Do one job. Errors of the functions become part of its result."""
        return self.result(self.begin(id, work, calls_all=True))

    def begin(
        self, id: int, work: RewardSample | RewardList, *, calls_all: bool = False
    ) -> PartialScore:
        """Begin a job: call the functions that run one at a time, or all functions."""
        began = monotonic()
        retries = Retries(self._retries, end=began + self.timeout_s)
        partial = PartialScore(id=id, began=began, work=work, retries=retries)
        for name, reward in self.remaining(partial):
            if (calls_all or reward.concurrency == 1) and not partial.failure:
                partial.call(name, reward)
        return partial

    def remaining(self, partial: PartialScore) -> list[tuple[str, Reward]]:
        """Return the functions that are still to be called for a job."""
        if partial.failure:
            return []
        applicable = self._applicable(partial.work)
        return [(name, reward) for name, _, reward in applicable if name not in partial.scores]

    def result(self, partial: PartialScore) -> Done:
        """Return the report on a job whose functions are done."""
        if partial.failure:
            return partial.done(None)
        results = [self._sum(partial, index) for index in range(len(partial.samples))]
        if isinstance(partial.work, RewardList):
            return partial.done(ListResult(None, results=tuple(results)))
        partial.failure = results[0].failure
        partial.message = results[0].message
        return partial.done(replace(results[0], failure=None))

    def _sum(self, partial: PartialScore, index: int) -> RewardResult:
        """Return the weighted sum of one sample's scores; its value is None if none applies."""
        parts = {}
        total = Score()
        applicable = self._applicable(partial.work)
        for name, weight, reward in applicable:
            score = partial.scores[name][index]
            if score.bad:
                why = f"{name}{reward.place}: {score.bad}"
                return RewardResult(None, failure="bad_value", message=why)
            prefix = f"{name}/" if len(self._rewards) > 1 else ""
            total.metrics |= {prefix + k: v for k, v in score.metrics.items()}
            total.extras |= {prefix + k: v for k, v in score.extras.items()}
            if score.value is not None:
                parts[name] = score.value
                total.value = (total.value or 0.0) + weight * score.value
        if total.value is not None and not abs(total.value) < float("inf"):
            why = f"the weighted sum of {parts} is not finite"
            return RewardResult(None, failure="bad_value", message=why)
        called = [f"{name}{reward.place}" for name, _, reward in applicable]
        why = f"{' and '.join(called)} returned None" if called and total.value is None else ""
        return RewardResult(None, total.value, parts, total.metrics, total.extras, message=why)

    def _grader(self, spec: str, options: dict[str, Any]) -> Reward:
        task = make_task(spec, options)

        def graded(answer: str, entry: dict) -> dict[str, Any]:
            # The whole response is the answer.
            return reported(task.score_answer(answer, entry), pred=answer.strip())

        return adapt(graded, spec=spec)

    def _applicable(self, work: RewardSample | RewardList) -> list[tuple[str, float, Reward]]:
        scope: Scope = work.scope if isinstance(work, RewardList) else "sample"
        source = work.samples[0].source if isinstance(work, RewardList) else work.source
        if scope == "sample" and source in self._tasks:
            name, reward = self._tasks[source]
            return [(name, 1.0, reward)]
        names = self._applies.get(source, self._rewards)
        if scope == "step":  # samples of a step come from all sources
            names = self._rewards
        applicable = []
        for (name, reward), weight in zip(self._rewards.items(), self._weights):
            if reward.scope == scope and name in names:
                applicable.append((name, weight, reward))
        return applicable


def describe_error(error: BaseException) -> str:
    """Return an exception and where it was raised, in one line."""
    error.__traceback__ = _last_frames(error.__traceback__)
    try:
        text = error_text(error)
    except BaseException as other:  # `__str__` may be user code, which may raise too
        text = f"{type(error).__name__}: its text raises {type(other).__name__}"
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if isinstance(error, MemoryError) and limit != resource.RLIM_INFINITY:
        text += f"; rewards.worker_memory_gib = {limit / 2**30:g}"
    return text


def _last_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the last frames of a traceback; a deep recursion may have a million."""
    frames = deque([trace], maxlen=_MOST_FRAMES)
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    return frames[0]
