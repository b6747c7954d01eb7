"""Run agents, inside a worker: each episode in a fork of it.

The worker imports the user's module once, and a fork of it costs little. So an agent that exits,
crashes, blocks its event loop or uses up its memory ends its own episode only. The fork has a
subreaper of its own (`subreaper`), which also kills all processes that the agent has started:

    pool -> subreaper -> worker -> subreaper of an episode -> agent -> processes that it starts

The worker runs no code of users after the import, and it has one thread, so that forks are safe.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spmdrl.agents.containers import Container
from spmdrl.agents.solve import Agent, CommandFailed, episode_fault
from spmdrl.rewards.samples import BadValue, finite
from spmdrl.workers.messages import (
    AgentSetup,
    Done,
    Serve,
    Solve,
    SolveResult,
    no_result,
    take_messages,
)
from spmdrl.workers.reports import Began, Report
from spmdrl.workers.reward_jobs import RunningJob
from spmdrl.workers.subreaper import become_worker

_LIMIT = "rollout.agent_timeout_s"
_MOST_JOBS = 10**6  # they wait here, so that those of another purpose find room
_READ_BYTES = 2**18
_READS_AT_ONCE = 8
_SHOWN_BYTES = 2**16
"""Output of an episode that goes to the log."""
_MOST_RESULT_BYTES = 2**20
_SHORT_MS = 20
_IDLE_MS = 1000
_KILL_S = 5.0


@dataclass(eq=False)
class RunningEpisode:
    """An agent that runs, as its worker sees it."""

    id: int
    """Of the job."""
    pid: int
    """Of the episode's subreaper."""
    end_fd: int
    """Readable when that has ended; -1 where the system has no such descriptor."""
    life: socket.socket
    """Shut down to end the episode."""
    result_fd: int
    """-1 when nobody can write to it any more; otherwise a poll would return at once."""
    output_fd: int
    """What it and the processes that it started print; -1 as above."""
    work: Solve
    folder: str
    began: float
    """time.monotonic(), plus the time in which it was held."""
    result: bytearray = field(default_factory=bytearray)
    held_at: float | None = None
    """Since when the policy has not answered it, time.monotonic(); None while it does."""
    killed_at: float | None = None
    """When its deadline was over, time.monotonic()."""
    num_shown: int = 0
    """Bytes of its output that went to the log."""

    def used_s(self, now: float) -> float:
        """Return how much of its time it has used by now, time.monotonic(), seconds."""
        return (now if self.held_at is None else self.held_at) - self.began

    def serve(self, purpose: str) -> None:
        """Note which agents the policy answers from now on."""
        now = time.monotonic()
        self.began = now - self.used_s(now)
        self.held_at = None if self.work.purpose == purpose else now


class AgentServer:
    """Runs the agent of a setup for one episode after the other, several at once.

    Raises (on construction): Refusal as `Agent`.
    """

    def __init__(self, setup: AgentSetup):
        self._setup = setup
        container = Container(setup.container, setup.labels) if setup.container.image else None
        self._agent = Agent(setup.function, setup.command, container=container)
        self._agent.preload()
        self._waiting: deque[tuple[int, Solve]] = deque()
        self._running: list[RunningEpisode] = []
        self._served = ""  # the purpose of the agents that the policy answers

    @property
    def facts(self) -> dict[str, Any]:
        """Return facts for the parent, see `Server.facts`."""
        return {
            "concurrency": _MOST_JOBS,
            "scopes": [],
            "called": {"Solve": self._agent.called},
            "environments": {},
        }

    def serve(self, source: int, write: Callable[[Report], None]) -> None:
        """Run episodes until there are no more.

        Args:
            source: descriptor of the messages from the parent.
            write: sends a report.
        """
        inbox = bytearray()
        while True:
            if source in self._wait(source):
                data = os.read(source, _READ_BYTES)
                if not data:
                    return  # the subreaper kills what still runs
                inbox += data
                for message in take_messages(inbox):
                    self._take(message)
            for episode in list(self._running):
                if (done := self._look_at(episode)) is not None:
                    self._running.remove(episode)
                    write(done)
            for id, work in self._to_start():
                write(Began(id, time.monotonic()))
                self._running.append(self._start(id, work, source))

    def _take(self, message: Serve | tuple[int, Solve]) -> None:
        if not isinstance(message, Serve):
            self._waiting.append(message)
            return
        self._served = message.purpose
        for episode in self._running:
            episode.serve(self._served)

    def _to_start(self) -> list[tuple[int, Solve]]:
        """Remove and return the jobs to start now. Agents that are held take no place."""
        num_running = sum(episode.held_at is None for episode in self._running)
        own = [job for job in self._waiting if job[1].purpose == self._served]
        chosen = own[: max(0, self._setup.at_once - num_running)]
        for job in chosen:
            self._waiting.remove(job)
        return chosen

    def _wait(self, source: int) -> set[int]:
        """Wait for a message, an episode's result or end, or a deadline.

        Returns: the descriptors that are readable.
        """
        poller = select.poll()
        poller.register(source, select.POLLIN)
        poll_ms = _IDLE_MS
        now = time.monotonic()
        for episode in self._running:
            for fd in (episode.result_fd, episode.output_fd, episode.end_fd):
                if fd >= 0:
                    poller.register(fd, select.POLLIN)
            left_s = self._setup.timeout_s - episode.used_s(now)
            if episode.end_fd < 0 or episode.killed_at is not None:
                left_s = _SHORT_MS / 1000
            poll_ms = min(poll_ms, max(1, int(1000 * left_s) + 1))
        return {fd for fd, _ in poller.poll(poll_ms)}

    # ---------------------------------------------------------------- one episode

    def _start(self, id: int, work: Solve, source: int) -> RunningEpisode:
        life, theirs = socket.socketpair()
        result_fd, write_fd = os.pipe()
        output_fd, print_fd = os.pipe()
        folder = tempfile.mkdtemp(prefix="spmdrl-agent-")
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            # The descriptors of other episodes, and of this one's other end, are not the agent's.
            for other in self._running:
                _close(other)
            life.close()
            os.close(result_fd)
            os.close(output_fd)
            os.dup2(print_fd, 1)
            os.dup2(print_fd, 2)
            os.close(print_fd)
            self._be_agent(id, work, theirs, write_fd, folder)
        theirs.close()
        os.close(write_fd)
        os.close(print_fd)
        os.set_blocking(result_fd, False)
        os.set_blocking(output_fd, False)
        life.setblocking(False)
        end_fd = -1
        with contextlib.suppress(OSError):  # an old kernel, or one that forbids it
            end_fd = os.pidfd_open(pid)
        began = time.monotonic()
        return RunningEpisode(id, pid, end_fd, life, result_fd, output_fd, work, folder, began)

    def _be_agent(
        self, id: int, work: Solve, life: socket.socket, write_fd: int, folder: str
    ) -> None:
        """Run an agent in this fork, write its result, and end."""
        try:
            os.setsid()
            memory_bytes = int(self._setup.memory_gib * 2**30)
            become_worker(life.detach(), memory_bytes=memory_bytes)
            job = RunningJob(id=id)
            value: float | None = None
            metrics: dict[str, float] = {}
            called = self._agent.called
            with job.blame_user_code(returned=f"{called}: ", raised=f"{called}: "):
                try:
                    value, metrics = self._agent.run(
                        work.row,
                        seed=work.seed,
                        base_url=work.base_url,
                        api_key=work.api_key,
                        folder=folder,
                    )
                except CommandFailed as error:  # no line of this process is to blame
                    job.failure = "error"
                    job.message = f"{called}: {error}"
            self._add_fault(job, work)
            if job.failure is None and value is None and work.needs_reward:
                job.failure = "bad_value"
                job.message = (
                    f"{called} returned no reward, and rewards.functions has none for its rows; "
                    "return a number, or set rewards.functions"
                )
            text = json.dumps([job.failure, job.done(None).message, value, metrics])
            with os.fdopen(write_fd, "w") as sink:
                sink.write(text)
            sys.stdout.flush()
            os._exit(0)  # without the exit handlers of the worker
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _add_fault(self, job: RunningJob, work: Solve) -> None:
        """Make it the failure of a job that the gateway says that its episode failed."""
        try:
            fault = episode_fault(work.base_url, work.api_key)
        except (OSError, ValueError) as error:
            fault = f"the gateway does not answer: {error}"
        if fault:
            job.failure = "error"
            job.message = f"{self._agent.called}: {fault}"

    def _look_at(self, episode: RunningEpisode) -> Done | None:
        """Return the report on an episode that has ended; None for one that runs.

        One whose deadline is over, or that writes too much, is killed.
        """
        self._read(episode)
        self._show(episode)
        pid, status = os.waitpid(episode.pid, os.WNOHANG)
        now = time.monotonic()
        if not pid:
            is_late = episode.used_s(now) > self._setup.timeout_s
            if episode.killed_at is None and (is_late or len(episode.result) > _MOST_RESULT_BYTES):
                episode.killed_at = now
                with contextlib.suppress(OSError):
                    episode.life.shutdown(socket.SHUT_WR)
            elif episode.killed_at is not None and now - episode.killed_at > _KILL_S:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(episode.pid, signal.SIGKILL)  # the subreaper itself hangs
            return None
        self._read(episode)
        self._show(episode)
        used = b""
        with contextlib.suppress(OSError):
            used = episode.life.recv(100)
        _close(episode)
        self._agent.clean(episode.folder)
        return self._report(episode, now, code=os.waitstatus_to_exitcode(status), used=used)

    def _read(self, episode: RunningEpisode) -> None:
        with contextlib.suppress(BlockingIOError):
            while episode.result_fd >= 0 and len(episode.result) <= _MOST_RESULT_BYTES:
                data = os.read(episode.result_fd, _READ_BYTES)
                if not data:
                    os.close(episode.result_fd)
                    episode.result_fd = -1
                episode.result += data

    def _show(self, episode: RunningEpisode) -> None:
        """Write the beginning of an episode's output to the log, and drop the rest."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_READS_AT_ONCE):  # an agent that only prints must not hold up others
                if episode.output_fd < 0:
                    return
                data = os.read(episode.output_fd, _READ_BYTES)
                if not data:
                    os.close(episode.output_fd)
                    episode.output_fd = -1
                shown = data[: _SHOWN_BYTES - episode.num_shown]
                if shown:
                    os.write(2, shown)
                episode.num_shown += len(shown)

    def _report(self, episode: RunningEpisode, now: float, *, code: int, used: bytes) -> Done:
        used_s = episode.used_s(now)
        job = RunningJob(id=episode.id, began=now - used_s)
        called = self._agent.called
        value = None
        metrics: dict[str, float] = {}
        if used.isdigit():
            limit = f"rewards.worker_memory_gib = {self._setup.memory_gib:g}"
            job.failure = "error"
            job.message = (
                f"{called} and the processes that it started used {int(used) / 2**30:.2f} GiB, "
                f"above {limit}"
            )
        elif used_s > self._setup.timeout_s:
            job.failure = "timeout"
            job.message = no_result(self._setup.timeout_s, called=called, limit=_LIMIT)
            # It may have gone on after the gateway refused to answer it.
            self._add_fault(job, episode.work)
            job.failure = "timeout"
        else:
            try:
                job.failure, job.message, value, metrics = _checked(episode.result)
            except (ValueError, RecursionError):
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                job.failure = "error"
                job.message = f"the process of {called} ended with {how} and without a result"
        return job.done(None if job.failure else SolveResult(None, value=value, metrics=metrics))


def _checked(data: bytearray) -> tuple[Any, str, float | None, dict[str, float]]:
    """Return what an agent's process wrote. Its agent may have written something else.

    Raises: ValueError.
    """
    failure, message, value, metrics = json.loads(data)
    if failure not in (None, "error", "bad_value") or not isinstance(message, str):
        raise ValueError(f"{failure!r:.80}")
    if not isinstance(metrics, dict):
        raise ValueError(f"{metrics!r:.80}")
    try:
        numbers = {name: finite(own) for name, own in metrics.items()}
        return failure, message, None if value is None else finite(value), numbers
    except BadValue as error:
        raise ValueError(str(error)) from None


def _close(episode: RunningEpisode) -> None:
    episode.life.close()
    for fd in (episode.result_fd, episode.output_fd, episode.end_fd):
        if fd >= 0:
            os.close(fd)
