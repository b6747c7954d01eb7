"""One worker process, as seen by its parent: its pipes, its jobs, and its end."""

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
    Solve,
    SolveResult,
    TurnResult,
    pack_message,
)
from spmdrl.workers.reports import BadReport, Began, Ready, Refused, Report, Returned, take_reports

# The child imports from the same places as this process, in any working directory. With -P it does
# not import from the working directory.
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
_RESULTS = {RewardSample: RewardResult, RewardList: ListResult, Solve: SolveResult}


@dataclass
class QueuedJob:
    """One submitted job."""

    number: int
    """Order of submission."""
    id: int
    """Its name in messages. It is random, so that a job cannot answer for later jobs."""
    key: Hashable
    kind: type
    """RewardSample, RewardList, Open, Respond or Solve."""
    frame: bytes
    """The message to the worker."""
    purpose: str = ""
    """Of a Solve."""
    sent: float | None = None
    """When its last byte was written to the pipe, time.monotonic()."""
    began: float | None = None
    """When a worker that does several jobs at once began it, time.monotonic()."""
    is_alone: bool = False
    """Whether a worker ended while it ran this and other jobs. To find the job to blame, each of
    them is repeated alone in a worker."""
    deaths: int = 0
    """Number of workers that ended during it, perhaps because of an earlier job."""


class WorkerProcess:
    """A child process that does jobs in order, or several at once if its functions allow it.

    The child is a subreaper, and the worker is the subreaper's child. So killing the child also
    kills all processes that the jobs have started, see `subreaper`.
    """

    def __init__(self, setup: Setup):
        self._life, theirs = socket.socketpair()  # closing ours ends the child
        self._life.setblocking(False)
        self._memory_bytes = int(setup.memory_gib * 2**30)
        arguments = [json.dumps(sys.path), str(theirs.fileno()), str(self._memory_bytes)]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, *arguments],
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
            with contextlib.suppress(OSError):  # the system may limit pipes, which is only slower
                fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._pipe_bytes = fcntl.fcntl(self.stdout.fileno(), fcntl.F_GETPIPE_SZ)
        self.started = time.monotonic()
        self.is_ready = False
        self.refusal = ""
        self.facts: dict[str, Any] = {}  # see Server.facts; empty until it is ready
        self.jobs: dict[int, QueuedJob] = {}  # by id, in the order in which they were added
        self.num_done = 0
        self._memory_at_kill = ""  # the bytes of memory for which the subreaper ended it
        self.fault = ""  # output that is not a report; then it can only be killed
        self.returned: list[QueuedJob] = []  # jobs that it returned
        self._unsent: deque[tuple[QueuedJob | None, memoryview]] = deque()
        self._inbox = bytearray()
        self._begin = 0.0  # the first job cannot have begun earlier
        self._mean_s: float | None = None
        self._is_recalled = False  # since its last result
        self.send(setup)

    @property
    def concurrency(self) -> int:
        """Number of jobs that it does at once; known when it is ready."""
        return self.facts.get("concurrency", 1)

    def called(self, job: QueuedJob) -> str:
        """Return the names of the user's functions that a job calls, with file and line."""
        return self.facts["called"].get(job.kind.__name__) or "the function"

    @property
    def window(self) -> int:
        """Largest number of its jobs: as many as take a quarter of a second. With more, jobs would
        wait for a slow function of one worker while other workers are free."""
        mean_s = _WINDOW_S / 16 if self._mean_s is None else self._mean_s
        count = int(_WINDOW_S * self.concurrency / max(mean_s, 1e-6))
        return max(_MIN_WINDOW * self.concurrency, min(_MAX_WINDOW, count))

    def has_room(self, job: QueuedJob) -> bool:
        """Return whether a job may be added now."""
        if job.is_alone or any(other.is_alone for other in self.jobs.values()):
            return not self.jobs
        return len(self.jobs) < self.window

    def suspects(self) -> list[QueuedJob]:
        """Return the jobs that may be to blame if it ends or hangs: those that have begun."""
        begun = [job for job in self.jobs.values() if job.began is not None]
        return begun if begun else list(self.jobs.values())[:1]

    def add(self, job: QueuedJob) -> None:
        """Queue a job."""
        job.sent = None
        job.began = None
        self.jobs[job.id] = job
        self._unsent.append((job, memoryview(job.frame)))

    def recall(self) -> None:
        """Ask once for the jobs after the one in which it is stuck; see `returned`.

        It answers unless that job holds the interpreter lock.
        """
        if len(self.jobs) > 1 and not self._is_recalled:
            self._is_recalled = True
            self.send(RECALL)

    def send(self, message: Any) -> None:
        """Send a message that is not a job."""
        self._unsent.append((None, memoryview(pack_message(message))))
        self.flush()

    def flush(self) -> None:
        """Write as much as the pipe accepts."""
        with contextlib.suppress(BrokenPipeError):
            while self._unsent:
                job, view = self._unsent[0]
                written = self.stdin.write(view) or 0  # None if the pipe is full
                if written < len(view):
                    self._unsent[0] = (job, view[written:])
                    return
                self._unsent.popleft()
                if job is not None:
                    job.sent = time.monotonic()
            return
        self._unsent.clear()  # it has ended

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
            # The pipe was so full that the child may have waited to write. That time does not count
            # for the next job.
            self._begin = time.monotonic()
        return results

    def _read(self, results: list[tuple[QueuedJob, Done]]) -> None:
        try:
            for report in take_reports(self._inbox):
                if isinstance(report, Done):
                    results.append((self._finish(report), report))
                else:
                    self._note(report)
        except BadReport as error:
            self.fault = str(error)

    def _finish(self, done: Done) -> QueuedJob:
        """Remove and return the job that is done. It must be one that may be running."""
        current = self.suspects() if self.concurrency == 1 else self.jobs.values()
        job = next((job for job in current if job.id == done.id), None)
        if job is None:
            raise BadReport("a result of no job that is under way")
        if done.result and type(done.result) is not _RESULTS.get(job.kind, TurnResult):
            raise BadReport("a result of no job that is under way")
        del self.jobs[job.id]
        self.num_done += 1
        self._is_recalled = False
        self._begin = min(done.finished, time.monotonic())
        mean_s = done.seconds if self._mean_s is None else self._mean_s
        self._mean_s = 0.9 * mean_s + 0.1 * done.seconds
        return job

    def _note(self, report: Report) -> None:
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
        """Return how long the job that began first has been running, seconds; 0 without a job.

        Args:
            at: end of that time, time.monotonic(); now by default.
        """
        if not self.jobs:
            return 0.0
        first = next(iter(self.jobs.values()))
        began = [job.began for job in self.jobs.values() if job.began is not None]
        if began:
            start = min(began)
        elif self.concurrency > 1 or first.sent is None:
            return 0.0
        else:
            start = max(self._begin, first.sent)
        return (time.monotonic() if at is None else at) - start

    @property
    def has_unsent(self) -> bool:
        """Whether bytes are waiting to be written to the pipe."""
        return bool(self._unsent)

    def has_ended(self) -> bool:
        """Return whether the child has ended, without reaping it.

        Only `kill` reaps it, so that until then no other process can get its id.
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
        """Kill the child and all processes that it started."""
        if self.process.returncode is not None:
            return
        with contextlib.suppress(OSError):
            self._life.shutdown(socket.SHUT_WR)
        self._wait_for_end(_KILL_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # the subreaper itself may hang
        self.process.wait()
        with contextlib.suppress(OSError):
            self._memory_at_kill = self._life.recv(100).decode("ascii", "replace")
        for pipe in (self.stdin, self.stdout, self._life):
            pipe.close()

    def describe_end(self) -> str:
        """Return a sentence on how a child ended."""
        code = self.exit_code()
        if self._memory_at_kill.isdigit():
            return (
                "the worker process and the processes that it started used "
                f"{int(self._memory_at_kill) / 2**30:.2f} GiB, above rewards.worker_memory_gib = "
                f"{self._memory_bytes / 2**30:g}"
            )
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"the worker process ended with {how} at work"

    def _wait_for_end(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.has_ended() and time.monotonic() < deadline:
            time.sleep(0.002)

    def close(self) -> None:
        """Let an idle child end by itself, and kill it if it does not."""
        if not self.jobs and self.is_ready:
            self.stdin.close()
            self._wait_for_end(_GRACE_S)
        self.kill()
