"""A queue of jobs over worker processes: whatever a job does, it ends, and alone.

Every job ends in exactly one Done. One that raises, exits, crashes, hangs or returns nonsense
costs itself and nothing else: its worker is replaced, and the jobs behind it go to another. Not at
its deadline only: a worker whose job takes much longer than they do is stuck, gives back what is
behind it, and another stands in for it until it is done or killed.
"""

from __future__ import annotations

import math
import secrets
import select
import time
from collections import deque
from collections.abc import Hashable
from typing import Any

from spmdrl.errors import Refusal
from spmdrl.workers.deadlines import Deadlines, no_result
from spmdrl.workers.messages import Done, Failure, Setup, pack_message
from spmdrl.workers.worker_process import QueuedJob, WorkerProcess

_SPARE_SHARE = 0.5
"""Workers beside those at work, started before they are needed, once one was replaced."""
_MOST_DEATHS = 2
_START_TIMEOUT_S = 300.0  # importing a user's module; may bring a large package from a slow disk


class JobQueue:
    """Worker processes and the jobs that wait for them. For one thread; nothing in it blocks
    but `start` and `wait`, both bounded.

    Args:
        setup: what each worker loads.
        workers: processes.
        timeout_s: deadline of each job, from its beginning.
    """

    def __init__(self, setup: Setup, *, workers: int, timeout_s: float):
        self._setup = setup
        self._num_workers = workers
        self._deadlines = Deadlines(timeout_s)
        self._workers: list[WorkerProcess] = []
        self._waiting: deque[QueuedJob] = deque()
        self._done: list[tuple[QueuedJob, Done]] = []
        self._submitted = 0
        self._num_spares = 0
        self._is_closed = False
        self.facts: dict[str, Any] = {}
        """What the workers said of what they loaded; empty before `start`."""

    def __len__(self) -> int:
        """Return how many jobs are submitted and not done yet."""
        return len(self._waiting) + sum(len(w.jobs) for w in self._workers)

    def start(self) -> None:
        """Start the workers and wait until they have loaded what they serve.

        Raises: Refusal when something cannot be loaded.
        """
        self._replenish(self._num_workers)
        self._pump()
        while not all(worker.is_ready for worker in self._workers):
            self.wait()
            self._pump()
        if self._workers:
            self.facts = self._workers[0].facts

    def put(self, key: Hashable, work: Any) -> None:
        """Queue a job.

        Args:
            key: goes with the result.
            work: what a worker's `Server` understands.
        Raises: pickle.PicklingError, TypeError or AttributeError when it cannot be sent.
        """
        id = secrets.randbits(62)
        frame = pack_message((id, work))
        self._waiting.append(QueuedJob(self._submitted, id, key, type(work), frame))
        self._submitted += 1

    def take(self) -> list[tuple[QueuedJob, Done]]:
        """Return what is done, in the order of submission, without waiting.

        Raises: Refusal as `start`; RuntimeError when workers cannot be started again.
        """
        self._pump()
        done = self._done
        self._done = []
        return sorted(done, key=lambda pair: pair[0].number)

    def wait_for_all(self) -> None:
        """Wait until every job is done. Raises as `take`."""
        self._pump()
        while len(self):
            self.wait()
            self._pump()

    def wait(self) -> None:
        """Sleep until a worker has something for us, or a deadline may have passed."""
        self._hand_out()  # what was put since the last look would wait as long as we do
        poller = select.poll()  # not select(), which fails for descriptors above 1023
        for worker in self._workers:
            poller.register(worker.stdout, select.POLLIN)
            if worker.has_unsent:
                poller.register(worker.stdin, select.POLLOUT)
        left = map(self._deadlines.left_s, self._workers)
        poller.poll(1000 * max(0.001, min([0.5, *left])))

    def close(self) -> None:
        """End all workers; jobs not done yet are dropped."""
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
        if len(self):
            self._replenish(min(self._num_workers, len(self)) + self._num_spares)
        self._hand_out()

    def _replenish(self, count: int) -> None:
        """Have `count` workers beside those that are stuck, for which as many again stand in."""
        count += min(sum(map(self._deadlines.is_stuck, self._workers)), self._num_workers)
        while len(self._workers) < count:
            self._workers.append(WorkerProcess(self._setup))

    def _collect(self, worker: WorkerProcess) -> None:
        looked = time.monotonic()  # what `_take` does not find was not done by then
        worker.flush()
        self._take(worker)
        self._check_start(worker)
        if self._deadlines.is_stuck(worker):
            self._expect_faults()
            worker.recall()
        if worker.fault:
            wrote = f"the worker process wrote what is no result: {worker.fault}"
            self._replace(worker, failure="error", message=wrote)
            return
        if worker.running_s(looked) > self._deadlines.kill_after_s(worker):
            called = worker.called(worker.suspects()[0])
            why = no_result(self._deadlines.timeout_s, called=called)
            self._replace(worker, failure="timeout", message=why)
            return
        if worker.has_ended():
            self._take(worker)  # what it wrote between our look and its end
            self._check_start(worker)
            self._replace(worker, failure="error", message=worker.death())

    def _take(self, worker: WorkerProcess) -> None:
        for job, done in worker.receive():
            called = worker.called(job)
            self._done.append((job, self._deadlines.judged(done, kind=job.kind, called=called)))
        returned = worker.returned
        worker.returned = []
        self._waiting.extendleft(reversed(returned))

    def _check_start(self, worker: WorkerProcess) -> None:
        if worker.fault and not worker.is_ready:
            raise RuntimeError(
                f"a worker process wrote into the pool's pipe while loading "
                f"{', '.join(self._setup.names)}: {worker.fault}"
            )
        if worker.refusal:
            raise Refusal(worker.refusal)
        if worker.is_ready:
            return
        names = ", ".join(self._setup.names)
        if worker.has_ended():
            raise RuntimeError(
                f"a worker process ended with status {worker.exit_code()} while "
                f"loading {names}; its output above says why"
            )
        if time.monotonic() - worker.started > _START_TIMEOUT_S:
            raise RuntimeError(f"a worker process did not load {names} in {_START_TIMEOUT_S:g} s")

    def _replace(self, worker: WorkerProcess, *, failure: Failure, message: str) -> None:
        seconds = worker.running_s()
        suspects = worker.suspects()
        worker.kill()
        self._workers.remove(worker)
        self._expect_faults()
        if len(suspects) == 1 and _is_to_blame(suspects[0], worker, failure=failure):
            job = worker.jobs.pop(suspects[0].id)
            self._done.append((job, Done(job.id, time.monotonic(), seconds, failure, message)))
        for job in suspects:
            job.is_alone = True
            job.deaths += 1
        self._waiting.extendleft(reversed(worker.jobs.values()))

    def _expect_faults(self) -> None:
        self._num_spares = math.ceil(_SPARE_SHARE * self._num_workers)

    def _hand_out(self) -> None:
        ready = [w for w in self._workers if w.is_ready]
        able = [w for w in ready if not self._deadlines.is_stuck(w)][: self._num_workers]
        while self._waiting:
            free = [w for w in able if w.has_room(self._waiting[0])]
            if not free:
                break
            job = self._waiting.popleft()
            # After a death rather a worker that did nothing yet: there it shows whose fault it was.
            min(free, key=lambda w: (len(w.jobs), job.deaths and w.num_done)).add(job)
        for worker in ready:
            worker.flush()


def _is_to_blame(job: QueuedJob, worker: WorkerProcess, *, failure: Failure) -> bool:
    """Return whether the job that a worker was at is why it ended.

    A job that was done before may have left a thread or a process that ends the worker later: then
    the next is innocent, and is done again in another.
    """
    return failure == "timeout" or worker.num_done == 0 or job.deaths >= _MOST_DEATHS
