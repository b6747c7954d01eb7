"""One worker process as its parent sees it: pipes, queue, deadline, death."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from spmdrl.workers.messages import RECALL, Done, Setup, pack_message, unpack_messages

# The child imports from where we import, installed or not, from any working directory.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from spmdrl.workers.main import main; main(int(sys.argv[2]))"
)
_PIPE_BYTES = 2**20
_READ_BYTES = 2**18
_MIN_WINDOW, _MAX_WINDOW = 2, 256
_WINDOW_S = 0.25
_GRACE_S = 1.0


@dataclass
class QueuedJob:
    """One submitted job."""

    number: int
    """Order of submission."""
    key: Hashable
    kind: type
    """RewardSample, Open or Respond."""
    frame: bytes
    """The message to the worker."""
    sent: float | None = None
    """When its last byte went into the pipe, time.monotonic()."""
    began: float | None = None
    """When a worker that has several under way began it, time.monotonic()."""
    is_alone: bool = False
    """It was under way with others when their worker ended: whose fault that was shows when each
    is done in a worker that does nothing else."""


class WorkerProcess:
    """A child that does jobs: in order, or, where its functions allow it, several at once.

    The child leads a process group of its own, so that killing it takes along what the
    jobs started.
    """

    def __init__(self, setup: Setup):
        read, write = os.pipe()
        self._life = open(write, "wb", buffering=0)  # noqa: SIM115, lives as long as the child
        with open(read, "rb", buffering=0):  # ours goes
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(sys.path), str(read)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[read],
                start_new_session=True,
                bufsize=0,
            )
        assert self.process.stdin and self.process.stdout
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        for pipe in (self.stdin, self.stdout):
            os.set_blocking(pipe.fileno(), False)
            with contextlib.suppress(OSError):  # the system may cap pipes below this: only slower
                fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._pipe_bytes = fcntl.fcntl(self.stdout.fileno(), fcntl.F_GETPIPE_SZ)
        self.started = time.monotonic()
        self.is_ready, self.refusal = False, ""
        self.facts: dict[str, Any] = {}  # what it said of itself when it was ready
        self.jobs: dict[int, QueuedJob] = {}  # by number, in the order of handing over
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
        self.jobs[job.number] = job
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
        for message in unpack_messages(self._inbox):
            if isinstance(message, Done):
                assert message.id in self.jobs, f"job {message.id} answered, it is not here"
                results.append((self.jobs.pop(message.id), message))
                self._is_recalled = False
                self._begin = message.finished
                mean = message.seconds if self._mean_s is None else self._mean_s
                self._mean_s = 0.9 * mean + 0.1 * message.seconds
            else:
                self._greet(*message)
        if taken >= self._pipe_bytes // 2:
            # So much waited for us that the child may have stood before a full pipe, which is
            # no fault of the next sample.
            self._begin = time.monotonic()
        return results

    def _greet(self, word: str, value: Any) -> None:
        if word == "refused":
            self.refusal = value
        elif word == "began":
            number, at = value
            self.jobs[number].began = at
        elif word == "returned":
            self.returned += [self.jobs.pop(number) for number in value]
        else:
            self.is_ready, (self._begin, self.facts) = True, value

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

        It is left unreaped until its group is killed: so long its id cannot be another's.
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
        """End the child and everything in its process group."""
        if self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.stdin, self.stdout, self._life):
            pipe.close()

    def close(self) -> None:
        """Let an idle child end by itself, then make sure."""
        if not self.jobs and self.is_ready:
            self.stdin.close()
            deadline = time.monotonic() + _GRACE_S
            while not self.has_ended() and time.monotonic() < deadline:
                time.sleep(0.002)
        self.kill()
