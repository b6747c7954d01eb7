"""One worker process as its parent sees it: pipes, queue, deadline, death."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from spmdrl.rewards.samples import RewardList, RewardSample
from spmdrl.workers.messages import (
    RECALL,
    Done,
    ListResult,
    RewardResult,
    Setup,
    TurnResult,
    pack_message,
)
from spmdrl.workers.reports import BadReport, Began, Ready, Refused, Report, Returned, take_reports

# The child imports from where we import, installed or not, from any working directory, and by -P
# not from that directory itself.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from spmdrl.workers.main import main; main(*map(int, sys.argv[2:]))"
)
_PIPE_BYTES = 2**20
_READ_BYTES = 2**18
_MIN_WINDOW = 2
_MAX_WINDOW = 256
_WINDOW_S = 0.25
_GRACE_S = 1.0
_KILL_S = 10.0
_RESULTS = {RewardSample: RewardResult, RewardList: ListResult}


@dataclass
class QueuedJob:
    """One submitted job."""

    number: int
    """Order of submission."""
    id: int
    """Its name on the way, drawn by chance: a job cannot answer for those after it."""
    key: Hashable
    kind: type
    """RewardSample, RewardList, Open or Respond."""
    frame: bytes
    """The message to the worker."""
    sent: float | None = None
    """When its last byte went into the pipe, time.monotonic()."""
    began: float | None = None
    """When a worker that has several under way began it, time.monotonic()."""
    is_alone: bool = False
    """It was under way with others when their worker ended: whose fault that was shows when each
    is done in a worker that does nothing else."""
    deaths: int = 0
    """Workers that ended at it, perhaps of what an earlier job had left in them."""


class WorkerProcess:
    """A child that does jobs: in order, or, where its functions allow it, several at once.

    The child is a keeper with the worker below it, so that killing it takes along what the jobs
    started, see `keeper`.
    """

    def __init__(self, setup: Setup):
        self._life, theirs = socket.socketpair()  # ours lives as long as the child
        self._life.setblocking(False)
        self._memory_bytes = int(setup.memory_gib * 2**30)
        told = [json.dumps(sys.path), str(theirs.fileno()), str(self._memory_bytes)]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, *told],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                bufsize=0,
            )
        assert self.process.stdin and self.process.stdout
        self.stdin = self.process.stdin
        self.stdout = self.process.stdout
        for pipe in (self.stdin, self.stdout):
            os.set_blocking(pipe.fileno(), False)
            with contextlib.suppress(OSError):  # the system may cap pipes below this: only slower
                fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._pipe_bytes = fcntl.fcntl(self.stdout.fileno(), fcntl.F_GETPIPE_SZ)
        self.started = time.monotonic()
        self.is_ready = False
        self.refusal = ""
        self.facts: dict[str, Any] = {}  # what it said of itself when it was ready
        self.jobs: dict[int, QueuedJob] = {}  # by id, in the order of handing over
        self.num_done = 0
        self._held = ""  # bytes of memory that its keeper ended it for
        self.fault = ""  # what it wrote that is no report; it can only be killed then
        self.returned: list[QueuedJob] = []  # that it gave back
        self._unsent: deque[tuple[QueuedJob | None, memoryview]] = deque()
        self._inbox = bytearray()
        self._begin = 0.0  # the job at the head cannot have begun before
        self._mean_s: float | None = None
        self._is_recalled = False  # since its last result
        self._unsent.append((None, memoryview(pack_message(setup))))
        self.flush()

    @property
    def concurrency(self) -> int:
        """Jobs that it has under way at once, known when it is ready."""
        return self.facts.get("concurrency", 1)

    def called(self, job: QueuedJob) -> str:
        """Return what of the user's a job calls, with file and line."""
        return self.facts["called"].get(job.kind.__name__) or "the function"

    @property
    def window(self) -> int:
        """Jobs to hand over at once: a quarter of a second's worth, so that a slow function
        does not pile up jobs behind one worker."""
        mean = self._mean_s if self._mean_s is not None else _WINDOW_S / 16
        worth = int(_WINDOW_S * self.concurrency / max(mean, 1e-6))
        return max(_MIN_WINDOW * self.concurrency, min(_MAX_WINDOW, worth))

    def has_room(self, job: QueuedJob) -> bool:
        """Return whether a job may be handed over now."""
        if job.is_alone:
            return not self.jobs
        return len(self.jobs) < self.window and not any(j.is_alone for j in self.jobs.values())

    def suspects(self) -> list[QueuedJob]:
        """Return the jobs that may be at fault where it ended or stands still: those begun."""
        begun = [job for job in self.jobs.values() if job.began is not None]
        return begun if begun else list(self.jobs.values())[:1]

    def add(self, job: QueuedJob) -> None:
        """Queue a job."""
        job.sent = job.began = None
        self.jobs[job.id] = job
        self._unsent.append((job, memoryview(job.frame)))

    def recall(self) -> None:
        """Ask, once, for the jobs behind the one that it is stuck in; see `returned`.

        It answers unless the job holds the interpreter lock.
        """
        if len(self.jobs) > 1 and not self._is_recalled:
            self._is_recalled = True
            self._unsent.append((None, memoryview(pack_message(RECALL))))
            self.flush()

    def flush(self) -> None:
        """Write as much as the pipe takes."""
        with contextlib.suppress(BrokenPipeError):
            while self._unsent:
                job, view = self._unsent[0]
                written = self.stdin.write(view) or 0  # None: there is no room
                if written < len(view):
                    self._unsent[0] = (job, view[written:])
                    return
                self._unsent.popleft()
                if job is not None:
                    job.sent = time.monotonic()
            return
        self._unsent.clear()  # it died; `exit_code` tells

    def receive(self) -> list[tuple[QueuedJob, Done]]:
        """Return the jobs that are done, with their results."""
        taken = 0
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.stdout.fileno(), _READ_BYTES):
                self._inbox += data
                taken += len(data)
        results: list[tuple[QueuedJob, Done]] = []
        if not self.fault:
            self._read(results)
        if taken >= self._pipe_bytes // 2:
            # So much waited for us that the child may have stood before a full pipe, which is
            # no fault of the next sample.
            self._begin = time.monotonic()
        return results

    def _read(self, results: list[tuple[QueuedJob, Done]]) -> None:
        try:
            for report in take_reports(self._inbox):
                if isinstance(report, Done):
                    results.append((self._answered(report), report))
                else:
                    self._greet(report)
        except BadReport as error:
            self.fault = str(error)

    def _answered(self, done: Done) -> QueuedJob:
        """Return the job that is done, which must be one under way."""
        begun = self.suspects() if self.concurrency == 1 else self.jobs.values()
        job = next((job for job in begun if job.id == done.id), None)
        if job is None or (
            done.result and type(done.result) is not _RESULTS.get(job.kind, TurnResult)
        ):
            raise BadReport("a result of no job that is under way")
        del self.jobs[job.id]
        self.num_done += 1
        self._is_recalled = False
        self._begin = min(done.finished, time.monotonic())
        mean = done.seconds if self._mean_s is None else self._mean_s
        self._mean_s = 0.9 * mean + 0.1 * done.seconds
        return job

    def _greet(self, report: Report) -> None:
        if isinstance(report, Refused) and not self.is_ready:
            self.refusal = report.text or "it gave no reason"
        elif isinstance(report, Ready) and not self.is_ready:
            self.is_ready = True
            self.facts = report.facts
            self._begin = min(report.at, time.monotonic())
        elif isinstance(report, Began) and report.id in self.jobs:
            self.jobs[report.id].began = min(report.at, time.monotonic())
        elif isinstance(report, Returned) and set(report.ids) <= self.jobs.keys():
            self.returned += [self.jobs.pop(id) for id in dict.fromkeys(report.ids)]
        else:
            raise BadReport(f"out of turn: {report!r:.80}")

    def running_s(self, at: float | None = None) -> float:
        """Return how long the job begun first has been running, seconds; 0 for none.

        Args:
            at: when, time.monotonic(); now by default.
        """
        if not self.jobs:
            return 0.0
        head = next(iter(self.jobs.values()))
        began = [job.began for job in self.jobs.values() if job.began is not None]
        if began:
            start = min(began)
        elif self.concurrency > 1 or head.sent is None:
            return 0.0
        else:
            start = max(self._begin, head.sent)
        return (time.monotonic() if at is None else at) - start

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait for room in the pipe."""
        return bool(self._unsent)

    def has_ended(self) -> bool:
        """Return whether the child is gone.

        It is left unreaped until it is killed: so long its id cannot be another's.
        """
        if self.process.returncode is not None:
            return True
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, flags) is not None

    def exit_code(self) -> int:
        """Return the exit status of a child that has ended; negative for a signal."""
        self.kill()
        return self.process.returncode

    def kill(self) -> None:
        """End the child and everything that it started."""
        if self.process.returncode is not None:
            return
        with contextlib.suppress(OSError):
            self._life.shutdown(socket.SHUT_WR)
        self._wait_for_end(_KILL_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # should the keeper itself hang
        self.process.wait()
        with contextlib.suppress(OSError):
            self._held = self._life.recv(100).decode("ascii", "replace")
        for pipe in (self.stdin, self.stdout, self._life):
            pipe.close()

    def death(self) -> str:
        """Say how a child that has ended did."""
        code = self.exit_code()
        if self._held.isdigit():
            return (
                f"the worker process and what it started held {int(self._held) / 2**30:.2f} GiB, "
                f"above rewards.worker_memory_gib = {self._memory_bytes / 2**30:g}"
            )
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"the worker process ended with {how} at work"

    def _wait_for_end(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.has_ended() and time.monotonic() < deadline:
            time.sleep(0.002)

    def close(self) -> None:
        """Let an idle child end by itself, then make sure."""
        if not self.jobs and self.is_ready:
            self.stdin.close()
            self._wait_for_end(_GRACE_S)
        self.kill()
