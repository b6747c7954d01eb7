"""Score responses in worker processes: submit, poll, drain; no reward function can stall us.

Every sample ends in exactly one RewardResult. A function that raises, exits, crashes, hangs
or returns nonsense costs its own sample and nothing else: the worker is replaced and the
samples behind it are scored by another.
"""

from __future__ import annotations

import pickle
import select
import time
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from spmdrl.config import Config
from spmdrl.data.tasks import is_generated
from spmdrl.rewards.process import Job, WorkerProcess
from spmdrl.rewards.signatures import Sample
from spmdrl.rewards.worker import Scored, Setup, pack_message
from spmdrl.types import Prompt

_START_TIMEOUT_S = 300.0  # importing a user's module; may bring a large package from a slow disk
Failure = Literal["timeout", "error", "bad_value"]


@dataclass(frozen=True)
class RewardResult:
    """What became of one submitted sample."""

    key: Hashable
    value: float | None
    """Weighted sum of the functions; None when it failed."""
    parts: dict[str, float] = field(default_factory=dict)
    """Unweighted value of each function that applies."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that the functions reported besides."""
    extras: dict[str, str] = field(default_factory=dict)
    """Texts that the functions reported besides."""
    seconds: float = 0.0
    failure: Failure | None = None
    message: str = ""


class RewardPool:
    """Reward workers of one engine replica. For one thread; nothing in it blocks but
    `start`, `results` and `drain`, all bounded.

    Args:
        cfg: rewards.*, and data.* for the graders of generated tasks.
    Raises (on construction): ValueError when there is nothing to score with.
    """

    def __init__(self, cfg: Config):
        rewards = cfg.rewards
        specs = dict.fromkeys(s for s in (cfg.data.train, cfg.data.eval) if is_generated(s))
        tasks = () if rewards.functions else tuple(specs)
        if not rewards.functions and not tasks:
            raise ValueError("rewards.functions: is empty and no generated task brings a grader")
        self._setup = Setup(
            functions=rewards.functions, tasks=tasks, task_options=dict(cfg.data.task_options),
            weights=tuple(rewards.weights) or (1.0,) * len(rewards.functions))
        self._num_workers, self._timeout_s = rewards.workers, rewards.timeout_s
        self._workers: list[WorkerProcess] = []
        self._waiting: deque[Job] = deque()
        self._done: list[tuple[int, RewardResult]] = []
        self._submitted = 0
        self._is_closed = False

    def __len__(self) -> int:
        """Return how many samples are submitted and not scored yet."""
        return len(self._waiting) + sum(len(w.jobs) for w in self._workers)

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the workers and wait until the functions are loaded.

        Raises: ValueError when a function cannot be imported or its signature is unknown.
        """
        self._replenish(self._num_workers)
        self._pump()
        while not all(worker.is_ready for worker in self._workers):
            self._wait()
            self._pump()

    def submit(
        self, key: Hashable, *, prompt: Prompt, response_text: str, response_tokens: list[int],
        truncated: bool,
    ) -> None:
        """Hand in one response; its result comes out of `poll` or `drain` under `key`.

        Raises: ValueError when the data row cannot be sent to another process.
        """
        sample = Sample(prompt.row, response_text, response_tokens, truncated)
        number = self._submitted
        try:
            frame = pack_message((number, sample))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ValueError(f"data row {prompt.index} cannot be sent to a reward worker: "
                             f"{error}") from error
        self._submitted += 1
        self._waiting.append(Job(number, key, frame))

    def poll(self) -> list[RewardResult]:
        """Return the results that are there, without waiting.

        Raises: ValueError as `start`; RuntimeError when workers cannot be started again.
        """
        self._pump()
        done, self._done = self._done, []
        return [result for _, result in sorted(done, key=lambda pair: pair[0])]

    def drain(self) -> list[RewardResult]:
        """Wait for every submitted sample and return the results not yet polled, in the order
        of submission. Raises as `poll`."""
        self._pump()
        while len(self):
            self._wait()
            self._pump()
        return self.poll()

    def results(self) -> Iterator[RewardResult]:
        """Yield the results not yet polled, each as soon as it is there, until every submitted
        sample is scored. Raises as `poll`."""
        yield from self.poll()
        while len(self):
            self._wait()
            yield from self.poll()

    def close(self) -> None:
        """End all workers; samples not scored yet are dropped."""
        self._is_closed = True
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        self._waiting.clear()

    # ---------------------------------------------------------------- one round

    def _pump(self) -> None:
        assert not self._is_closed, "the pool is closed"
        for worker in list(self._workers):
            self._collect(worker)
        if self._waiting:
            self._replenish(min(self._num_workers, len(self)))
        self._hand_out()

    def _replenish(self, count: int) -> None:
        while len(self._workers) < count:
            self._workers.append(WorkerProcess(self._setup))

    def _collect(self, worker: WorkerProcess) -> None:
        worker.flush()
        self._take(worker)
        self._check_start(worker)
        if worker.running_s() > self._timeout_s:
            self._replace(worker, failure="timeout",
                          message=f"no result within {self._timeout_s:g} s")
            return
        if worker.has_ended():
            self._take(worker)  # what it wrote between our look and its end
            code = worker.exit_code()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._replace(worker, failure="error",
                          message=f"the worker process ended with {how} while scoring")

    def _take(self, worker: WorkerProcess) -> None:
        for scored in worker.receive():
            job = worker.jobs.popleft()
            assert job.number == scored.id, f"sample {scored.id} answered, {job.number} expected"
            self._done.append((job.number, self._judge(job, scored)))

    def _judge(self, job: Job, scored: Scored) -> RewardResult:
        # Late is late, whether or not we looked in time to kill it.
        if scored.seconds > self._timeout_s:
            return RewardResult(job.key, None, seconds=scored.seconds, failure="timeout",
                                message=f"took {scored.seconds:.2f} s, above "
                                        f"rewards.timeout_s = {self._timeout_s:g}")
        return RewardResult(job.key, scored.value, parts=scored.parts, metrics=scored.metrics,
                            extras=scored.extras, seconds=scored.seconds, failure=scored.failure,
                            message=scored.message)

    def _check_start(self, worker: WorkerProcess) -> None:
        if worker.refusal:
            raise ValueError(worker.refusal)
        if worker.is_ready:
            return
        names = ", ".join(self._setup.functions or self._setup.tasks)
        if worker.has_ended():
            raise RuntimeError(f"a reward worker ended with status {worker.exit_code()} while "
                               f"loading {names}; its output above says why")
        if time.monotonic() - worker.started > _START_TIMEOUT_S:
            raise RuntimeError(f"a reward worker did not load {names} in {_START_TIMEOUT_S:g} s")

    def _replace(self, worker: WorkerProcess, *, failure: Failure, message: str) -> None:
        seconds = worker.running_s()
        worker.kill()
        self._workers.remove(worker)
        if worker.jobs:
            job = worker.jobs.popleft()
            self._done.append((job.number, RewardResult(
                job.key, None, seconds=seconds, failure=failure, message=message)))
        self._waiting.extendleft(reversed(worker.jobs))

    def _hand_out(self) -> None:
        ready = [w for w in self._workers if w.is_ready]
        while self._waiting:
            free = [w for w in ready if len(w.jobs) < w.window]
            if not free:
                break
            min(free, key=lambda w: len(w.jobs)).add(self._waiting.popleft())
        for worker in ready:
            worker.flush()

    def _wait(self) -> None:
        """Sleep until a worker has something for us, or a deadline may have passed."""
        poller = select.poll()  # not select(), which fails for descriptors above 1023
        for worker in self._workers:
            poller.register(worker.process.stdout, select.POLLIN)
            if worker.has_unsent:
                poller.register(worker.process.stdin, select.POLLOUT)
        left = [self._timeout_s - w.running_s() for w in self._workers if w.jobs]
        poller.poll(1000 * max(0.001, min([0.5, *left])))
