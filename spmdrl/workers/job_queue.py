"""A queue of jobs over worker processes. Every job ends, and none can harm another.

Every job ends in exactly one Done. If a job raises, exits, crashes, hangs or returns a wrong value,
only this job fails: its worker is replaced, and the jobs after it go to another worker.

A job that runs alone in its worker is killed with the worker at its deadline. If a worker runs
several jobs at once (`concurrent`), it checks their deadlines itself, and is killed only if it does
not. A job whose result comes after the deadline is late, even if this process had not yet looked.

A worker is stuck if its job takes much longer than the average job. It returns the jobs after that
one, and another worker replaces it until the job is done or killed.
"""

from __future__ import annotations

import math
import secrets
import select
import time
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from spmdrl.errors import Refusal
from spmdrl.workers.messages import Done, Failure, Setup, Solve, no_result, pack_message
from spmdrl.workers.worker_process import QueuedJob, WorkerProcess

_SPARE_SHARE = 0.5
"""After the first worker was replaced: number of spare workers, as a share of all workers."""
_MOST_DEATHS = 2
_START_TIMEOUT_S = 300.0  # a user's module may import a large package from a slow disk
_REPORT_S = 1.0  # a worker that checks deadlines itself must report this soon after a deadline
_WAIT_S = 0.5
_STUCK_TIMES = 4.0
_STUCK_S = 0.2
"""A job is stuck if it takes longer than this multiple of the mean, and this many seconds."""


class JobQueue:
    """Worker processes and the jobs that wait for them. Not thread-safe.

    Only `start` and `wait` block, and not forever.

    Args:
        setup: what each worker loads.
        workers: number of processes.
        timeout_s: deadline of each job, from its start.
    """

    _limit = "rewards.timeout_s"

    def __init__(self, setup: Setup, *, workers: int, timeout_s: float):
        self._setup = setup
        self._num_workers = workers
        self._timeout_s = timeout_s
        self._mean_s: dict[type, float] = {}  # how long jobs take on average, by kind
        self._workers: list[WorkerProcess] = []
        self._waiting: deque[QueuedJob] = deque()
        self._done: list[tuple[QueuedJob, Done]] = []
        self._submitted = 0
        self._num_spares = 0
        self._is_closed = False
        self.facts: dict[str, Any] = {}
        """Facts about the loaded setup, see `Server.facts`; empty before `start`."""

    def __len__(self) -> int:
        """Return the number of jobs that are submitted and not done."""
        return len(self._waiting) + sum(len(worker.jobs) for worker in self._workers)

    def start(self) -> None:
        """Start the workers and wait until they have loaded the setup.

        Raises: Refusal if something cannot be loaded.
        """
        self._replenish(self._num_workers)
        self._advance()
        while not all(worker.is_ready for worker in self._workers):
            self.wait()
            self._advance()
        if self._workers:
            self.facts = self._workers[0].facts

    def put(self, key: Hashable, work: Any) -> None:
        """Queue a job.

        Args:
            key: returned with the result.
            work: for `Server.serve`.
        Raises: pickle.PicklingError, TypeError or AttributeError if it cannot be sent.
        """
        id = secrets.randbits(62)
        frame = pack_message((id, work))
        purpose = work.purpose if isinstance(work, Solve) else ""
        self._waiting.append(QueuedJob(self._submitted, id, key, type(work), frame, purpose))
        self._submitted += 1

    def take(self) -> list[tuple[QueuedJob, Done]]:
        """Return the jobs that are done, in the order of submission, without waiting.

        Raises: Refusal as `start`; RuntimeError if workers cannot be started again.
        """
        self._advance()
        done = self._done
        self._done = []
        return sorted(done, key=lambda pair: pair[0].number)

    def wait(self, *, also: Iterable[int] = ()) -> None:
        """Sleep until a worker has written something, or a deadline may have passed.

        Args:
            also: other descriptors that end the sleep when they are readable.
        """
        wait_for_any([self], also=also)

    def prepare_wait(self, poller: select.poll) -> float:
        """Register what there is to wait for. Returns: seconds until a deadline may have passed."""
        self.hand_out()  # otherwise jobs that were put after the last round would wait too
        for worker in self._workers:
            poller.register(worker.stdout, select.POLLIN)
            if worker.has_unsent:
                poller.register(worker.stdin, select.POLLOUT)
        return min(map(self._left_s, self._workers), default=math.inf)

    def close(self) -> None:
        """End all workers; jobs that are not done are dropped."""
        self._is_closed = True
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        self._waiting.clear()

    # ---------------------------------------------------------------- deadlines

    def _kill_after_s(self, worker: WorkerProcess) -> float:
        """Return how long a job may run before its worker is killed, seconds."""
        return self._timeout_s + (_REPORT_S if self._checks_deadlines(worker) else 0.0)

    def _checks_deadlines(self, worker: WorkerProcess) -> bool:
        """Return whether a worker checks the deadlines of its jobs itself."""
        return worker.concurrency > 1

    def _running_s(self, worker: WorkerProcess, at: float | None = None) -> float:
        """Return how long a worker has been running the job that it must end first, seconds."""
        return worker.running_s(at)

    def _stuck_after_s(self, worker: WorkerProcess) -> float:
        """Return how long a worker's first job may run before the worker is stuck, seconds."""
        if self._checks_deadlines(worker) or not worker.jobs:
            return float("inf")
        first = next(iter(worker.jobs.values()))
        mean = self._mean_s.get(first.kind, self._timeout_s / 8)
        return max(_STUCK_S, _STUCK_TIMES * mean)

    def _is_stuck(self, worker: WorkerProcess) -> bool:
        return self._running_s(worker) > self._stuck_after_s(worker)

    def _left_s(self, worker: WorkerProcess) -> float:
        """Return the seconds until a worker may be stuck or late; negative if it is."""
        if not worker.jobs:
            return float("inf")
        limit = self._kill_after_s(worker)
        if not self._is_stuck(worker):
            limit = min(limit, self._stuck_after_s(worker))
        return limit - self._running_s(worker)

    def _judge(self, job: QueuedJob, done: Done, *, called: str) -> Done:
        """Return a result, or a failure if it is late. Also update the mean time of jobs.

        Args:
            called: names of the user's functions that the job called, for messages.
        """
        if done.seconds > self._timeout_s and done.failure != "timeout":
            limit = f"{self._limit} = {self._timeout_s:g}"
            late = f"{called} took {done.seconds:.2f} s, above {limit}"
            return replace(done, failure="timeout", message=late, result=None)
        if done.failure is None:
            mean = self._mean_s.get(job.kind, done.seconds)
            self._mean_s[job.kind] = 0.95 * mean + 0.05 * done.seconds
        return done

    # ---------------------------------------------------------------- one round

    def _advance(self) -> None:
        assert not self._is_closed, "the pool is closed"
        for worker in list(self._workers):
            self._collect(worker)
        if len(self):
            self._replenish(min(self._num_workers, len(self)) + self._num_spares)
        self.hand_out()

    def _replenish(self, count: int) -> None:
        """Start workers until `count` are not stuck, with a limit for many stuck ones."""
        count += min(sum(map(self._is_stuck, self._workers)), self._num_workers)
        while len(self._workers) < count:
            self._workers.append(WorkerProcess(self._setup))

    def _collect(self, worker: WorkerProcess) -> None:
        looked = time.monotonic()  # a job that `_take` does not return was not done at this time
        worker.flush()
        self._take(worker)
        self._check_start(worker)
        if self._is_stuck(worker):
            self._expect_faults()
            worker.recall()
        if worker.fault:
            message = f"the worker process wrote something that is not a result: {worker.fault}"
            self._replace(worker, failure="error", message=message)
        elif self._running_s(worker, looked) > self._kill_after_s(worker):
            called = worker.called(worker.suspects()[0])
            message = no_result(self._timeout_s, called=called, limit=self._limit)
            self._replace(worker, failure="timeout", message=message)
        elif worker.has_ended():
            self._take(worker)  # it may have written something between `_take` and its end
            self._check_start(worker)
            self._replace(worker, failure="error", message=worker.describe_end())

    def _take(self, worker: WorkerProcess) -> None:
        for job, done in worker.receive():
            self._done.append((job, self._judge(job, done, called=worker.called(job))))
        returned = worker.returned
        worker.returned = []
        self._waiting.extendleft(reversed(returned))

    def _check_start(self, worker: WorkerProcess) -> None:
        if worker.is_ready:
            return
        names = ", ".join(self._setup.names)
        if worker.fault:
            raise RuntimeError(
                f"a worker process wrote into the pool's pipe while loading {names}: {worker.fault}"
            )
        if worker.refusal:
            raise Refusal(worker.refusal)
        if worker.has_ended():
            raise RuntimeError(
                f"a worker process ended with status {worker.exit_code()} while "
                f"loading {names}; its output above says why"
            )
        if time.monotonic() - worker.started > _START_TIMEOUT_S:
            raise RuntimeError(f"a worker process did not load {names} in {_START_TIMEOUT_S:g} s")

    def _replace(self, worker: WorkerProcess, *, failure: Failure, message: str) -> None:
        done = Done(0, time.monotonic(), self._running_s(worker), failure, message)
        suspects = worker.suspects()
        worker.kill()
        self._workers.remove(worker)
        self._expect_faults()
        self._blame(worker, suspects, done)
        self._waiting.extendleft(reversed(worker.jobs.values()))

    def _blame(self, worker: WorkerProcess, suspects: Sequence[QueuedJob], done: Done) -> None:
        """End the jobs that are to blame for the end of a worker. The others go to another worker.

        Args:
            suspects: jobs that may be to blame.
            done: how a job that is to blame ends, without its id.
        """
        if len(suspects) == 1 and _is_to_blame(suspects[0], worker, failure=done.failure):
            self._end(worker, suspects[0], done)
        for job in suspects:
            job.is_alone = True
            job.deaths += 1

    def _end(self, worker: WorkerProcess, job: QueuedJob, done: Done) -> None:
        del worker.jobs[job.id]
        self._done.append((job, replace(done, id=job.id)))

    def _expect_faults(self) -> None:
        """Have spare workers from now on."""
        self._num_spares = math.ceil(_SPARE_SHARE * self._num_workers)

    def hand_out(self) -> None:
        """Give waiting jobs to workers that have room."""
        ready = [worker for worker in self._workers if worker.is_ready]
        able = [worker for worker in ready if not self._is_stuck(worker)][: self._num_workers]
        while self._waiting:
            job = self._waiting[0]
            free = [worker for worker in able if worker.has_room(job)]
            if not free:
                break
            self._waiting.popleft()
            # A job during which a worker ended goes to a worker that has done no job yet, if there
            # is one. If that one ends too, no earlier job can be to blame.
            if job.deaths:
                free.sort(key=lambda worker: worker.num_done)
            min(free, key=lambda worker: len(worker.jobs)).add(job)
        for worker in ready:
            worker.flush()


def wait_for_any(queues: Sequence[JobQueue], *, also: Iterable[int] = ()) -> None:
    """Sleep as `JobQueue.wait`, for several queues."""
    poller = select.poll()  # not select(), which fails for descriptors above 1023
    for descriptor in also:
        poller.register(descriptor, select.POLLIN)
    left_s = min([_WAIT_S, *(queue.prepare_wait(poller) for queue in queues)])
    poller.poll(1000 * max(0.001, left_s))


def _is_to_blame(job: QueuedJob, worker: WorkerProcess, *, failure: Failure | None) -> bool:
    """Return whether a worker ended because of the job that it was doing.

    An earlier job may have left a thread or a process that ends the worker later. So the job is
    repeated in another worker before it gets the blame.
    """
    return failure == "timeout" or worker.num_done == 0 or job.deaths >= _MOST_DEATHS
