"""When a job is late, or keeps its worker so long that another stands in for it.

A job that runs alone is killed with its worker at the deadline (by `job_queue`); one that runs
beside others is left to itself (`concurrent`), and its worker is killed only where nothing comes of
that. A result that came late, though nobody looked in time, is late all the same.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spmdrl.workers.messages import Done
    from spmdrl.workers.worker_process import WorkerProcess

_STUCK_TIMES = 4.0
_STUCK_S = 0.2
"""A job is stuck that runs longer than this many times the mean, and this long."""
_SILENT_S = 1.0  # a worker that keeps its deadlines itself says so earlier


class Deadlines:
    """The deadline of one queue's jobs, and how long they take on average.

    Args:
        timeout_s: of each job, from its beginning.
    """

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self._mean_s: dict[type, float] = {}  # by kind of job

    def kill_after_s(self, worker: WorkerProcess) -> float:
        """Return how long a job may run before its worker is killed, seconds."""
        return self.timeout_s + (_SILENT_S if worker.concurrency > 1 else 0.0)

    def stuck_after_s(self, worker: WorkerProcess) -> float:
        """Return how long the job at the head may run before the worker is stuck, seconds."""
        if worker.concurrency > 1 or not worker.jobs:
            return float("inf")
        mean = self._mean_s.get(next(iter(worker.jobs.values())).kind, self.timeout_s / 8)
        return max(_STUCK_S, _STUCK_TIMES * mean)

    def is_stuck(self, worker: WorkerProcess) -> bool:
        """Return whether a worker's job takes much longer than others do."""
        return worker.running_s() > self.stuck_after_s(worker)

    def left_s(self, worker: WorkerProcess) -> float:
        """Return the seconds until a worker may be stuck or late; may be in the past."""
        if not worker.jobs:
            return float("inf")
        limits = [self.kill_after_s(worker)]
        if not self.is_stuck(worker):
            limits.append(self.stuck_after_s(worker))
        return min(limits) - worker.running_s()

    def judged(self, done: Done, *, kind: type, called: str) -> Done:
        """Return a result, or that it came late; learn from it how long jobs take.

        Args:
            called: what of the user's it was, for messages.
        """
        if done.seconds > self.timeout_s and done.failure != "timeout":
            limit = f"rewards.timeout_s = {self.timeout_s:g}"
            late = f"{called} took {done.seconds:.2f} s, above {limit}"
            return replace(done, failure="timeout", message=late, result=None)
        if done.failure is None:
            mean = self._mean_s.get(kind, done.seconds)
            self._mean_s[kind] = 0.95 * mean + 0.05 * done.seconds
        return done


def no_result(timeout_s: float, *, called: str) -> str:
    """Say that a job was given up at its deadline. `called`: what of the user's it was."""
    return f"no result of {called} within rewards.timeout_s = {timeout_s:g} s"


def seconds_left(began: float, *, timeout_s: float) -> float:
    """Return what is left of a deadline, at least 0; `began` is of time.monotonic()."""
    return max(0.0, min(began + timeout_s - time.monotonic(), 1e6))
