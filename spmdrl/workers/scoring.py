"""Score samples with the functions of a run, inside a worker."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field
from typing import Any

from spmdrl.data.tasks import is_generated, make_task
from spmdrl.rewards.answers import reported
from spmdrl.rewards.signatures import BadValue, Reward, Sample, Score, adapt, load_reward
from spmdrl.workers.messages import Failure, Scored, Setup

MAX_MESSAGE_CHARS = 2000


@dataclass
class Scoring:
    """A sample while it is scored."""

    id: int
    sample: Sample
    began: float
    """Clock of time.monotonic()."""
    scores: dict[str, Score] = field(default_factory=dict)
    """Of the functions that are done."""
    failure: Failure | None = None
    message: str = ""

    def blame(self, name: str, error: BaseException) -> None:
        """Fail the sample by what a function raised."""
        if isinstance(error, BadValue):
            self.failure, self.message = "bad_value", f"{name} returned {error}"
        else:
            self.failure, self.message = "error", f"{name}: {describe(error)}"


class Scorer:
    """Scores samples with all functions of a Setup.

    Raises (on construction): ValueError for a function or task that cannot be used.
    """

    def __init__(self, setup: Setup):
        self._weights, self.timeout_s = setup.weights, setup.timeout_s
        self._least = 0.0 if setup.has_models or setup.environment else None
        self._rewards: dict[str, Reward] = {
            name: self._grader(spec, setup) if is_generated(spec) else load_reward(spec)
            for name, spec in setup.functions.items()
        }
        self._tasks = {
            spec: (spec.rpartition(":")[2], self._grader(spec, setup)) for spec in setup.tasks
        }

    @property
    def concurrency(self) -> int:
        """Return how many samples may be under way: as many as each function that allows more
        than one allows; 1 where none does."""
        return min((r.concurrency for r in self._rewards.values() if r.concurrency > 1), default=1)

    def score(self, id: int, sample: Sample) -> Scored:
        """Return the result of one sample; whatever the functions do is part of it."""
        scoring = Scoring(id, sample, time.monotonic())
        self._call(scoring, [(n, r) for n, _, r in self._applicable(sample)])
        return self.result(scoring)

    def begin(self, id: int, sample: Sample) -> Scoring:
        """Begin a sample with the functions that run one at a time."""
        scoring = Scoring(id, sample, time.monotonic())
        self._call(scoring, [(n, r) for n, _, r in self._applicable(sample) if r.concurrency == 1])
        return scoring

    def left(self, scoring: Scoring) -> list[tuple[str, Reward]]:
        """Return the functions still to be called, beside those of other samples."""
        return (
            []
            if scoring.failure
            else [(n, r) for n, _, r in self._applicable(scoring.sample) if n not in scoring.scores]
        )

    def _call(self, scoring: Scoring, rewards: list[tuple[str, Reward]]) -> None:
        for name, reward in rewards:
            try:
                scoring.scores[name] = reward(scoring.sample)
            except BaseException as error:  # SystemExit too: user code may call sys.exit
                scoring.blame(name, error)
                return

    def result(self, scoring: Scoring) -> Scored:
        """Return what the functions came to."""
        parts, total = {}, Score(self._least)
        failure, message = scoring.failure, scoring.message
        for name, weight, _ in self._applicable(scoring.sample):
            if (score := scoring.scores.get(name)) is None:
                continue
            prefix = f"{name}/" if len(self._rewards) > 1 else ""
            total.metrics |= {prefix + k: v for k, v in score.metrics.items()}
            total.extras |= {prefix + k: v for k, v in score.extras.items()}
            if score.value is not None:
                parts[name] = score.value
                total.value = (total.value or 0.0) + weight * score.value
        if not failure and (total.value is None or not abs(total.value) < float("inf")):
            failure, message = (
                "bad_value",
                (
                    f"the weighted sum of {parts} is not finite"
                    if parts
                    else "every reward function returned None for this row; one at least must apply"
                ),
            )
        finished = time.monotonic()
        return Scored(
            id=scoring.id,
            finished=finished,
            seconds=finished - scoring.began,
            value=None if failure else total.value,
            parts=parts,
            metrics=total.metrics,
            extras=total.extras,
            failure=failure,
            message=message[:MAX_MESSAGE_CHARS],
        )

    def _grader(self, spec: str, setup: Setup) -> Reward:
        task = make_task(spec, setup.task_options)

        def graded(answer: str, entry: dict) -> dict[str, Any]:
            # To a task the whole response is the answer.
            return reported(task.score_answer(answer, entry), pred=answer.strip())

        return adapt(graded, spec=spec)

    def _applicable(self, sample: Sample) -> list[tuple[str, float, Reward]]:
        if self._rewards:
            return [(n, w, r) for (n, r), w in zip(self._rewards.items(), self._weights)]
        if not self._tasks:  # the environment's rewards are all there are
            return []
        name, reward = self._tasks[sample.row["data_source"]]
        return [(name, 1.0, reward)]


def describe(error: BaseException) -> str:
    """Return what was raised, and where, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
