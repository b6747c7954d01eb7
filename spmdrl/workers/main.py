"""The worker: it reads jobs from stdin, and writes one result for each to stdout.

A worker that runs an agent does nothing else, see `agent_jobs`. Others do this:

It scores samples, and plays episodes of the run's environments. The first message is a Setup; the
first report is Ready or Refused. Then the worker gets jobs (id, work) and sends a Done for each. It
does them one by one in order; or, if functions allow several at once (`concurrent`), in any order,
with a Began before each. On the message RECALL it returns the jobs that have not begun in a
Returned. It does not load torch, and it ends with its parent (`subreaper`).
"""

from __future__ import annotations

import _signal
import builtins
import contextlib
import io
import operator
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import replace
from typing import Any, BinaryIO

from spmdrl.rewards.samples import RewardList, RewardSample
from spmdrl.workers.agent_jobs import AgentServer
from spmdrl.workers.environment_jobs import EnvironmentServer
from spmdrl.workers.messages import (
    RECALL,
    Done,
    Open,
    Setup,
    Solve,
    SourceSetup,
    TurnResult,
    Work,
    read_message,
)
from spmdrl.workers.reports import Ready, Refused, Report, Returned, pack_report
from spmdrl.workers.reward_jobs import RewardScorer, RunningJob, describe_error
from spmdrl.workers.subreaper import Strays, become_worker

_METHODS = {"Open": "reset", "Respond": "step"}
"""{job: method of an environment that it calls}."""
# This module uses `_signal.getsignal`, because `signal.getsignal` makes enum members and takes ten
# times as long.
_SIGNALS = [n for n in range(1, 32) if n not in (signal.SIGKILL, signal.SIGSTOP)]


def main(life_fd: int, memory_bytes: int) -> None:
    """Serve until stdin closes.

    Args:
        life_fd: socket; only the parent has the other end.
        memory_bytes: limit for the worker and the processes that it starts; 0 for none.
    """
    # Schedulers signal every process of a job. The parent reacts to that, so ignore it here, but
    # not by SIG_IGN, which programs that reward functions start would inherit.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    become_worker(life_fd, memory_bytes=memory_bytes)
    source, write = _take_pipes()
    setup = read_message(source)
    os.environ.update(setup.environ)
    try:
        server = Server(setup) if setup.agent is None else AgentServer(setup.agent)
    except BaseException as error:  # also sys.exit in a user's module
        write(Refused(describe_error(error)))
        return
    write(Ready(time.monotonic(), server.facts))
    if isinstance(server, AgentServer):
        server.serve(source.fileno(), write)
        return
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    # The user's code may use signals, which Python handles in the main thread. So another thread
    # reads.
    threading.Thread(target=_read_ahead, args=(source, inbox, write), daemon=True).start()
    if server.scorer.concurrency > 1:
        from spmdrl.workers.concurrent import serve_concurrently

        serve_concurrently(
            server.scorer, serve=server.serve, take=lambda: _next(inbox), write=write
        )
        return
    process_state = ProcessState()
    strays = Strays()
    while (message := _next(inbox)) is not None:
        done = server.serve(*message)
        process_state.restore()
        strays.end()
        write(done)


class Server:
    """Loads a setup, and does jobs with it.

    Raises (on construction): Refusal for something that cannot be loaded.
    """

    def __init__(self, setup: Setup):
        self._environments = {
            field: EnvironmentServer(options, field=field)
            for field, options in setup.environments.items()
        }
        self.scorer = RewardScorer(replace(setup, sources=tuple(map(self._graded, setup.sources))))

    def _graded(self, source: SourceSetup) -> SourceSetup:
        """Return a source without the grader of its task, if an environment gives the rewards."""
        environment = self._environments.get(source.environment)
        if environment is None or environment.is_graded:
            return source
        return replace(source, is_own_grader=False)

    @property
    def facts(self) -> dict[str, Any]:
        """Return facts about the loaded setup for the parent."""
        scorer = self.scorer
        environments = self._environments
        called = {
            "RewardSample": scorer.called(is_list=False),
            "RewardList": scorer.called(is_list=True),
        }
        for job, method in _METHODS.items():
            methods = dict.fromkeys(own.called(method) for own in environments.values())
            called[job] = " or ".join(methods)
        return {
            "concurrency": scorer.concurrency,
            "scopes": scorer.scopes,
            "called": called,
            "environments": {field: own.facts for field, own in environments.items()},
        }

    def serve(self, id: int, work: Work) -> Done:
        """Do a job. Errors of the user's code become part of the result."""
        if isinstance(work, RewardSample | RewardList):
            return self.scorer.score(id, work)
        assert not isinstance(work, Solve)
        environment = self._environments[work.environment]
        job = RunningJob(id=id)
        result = None
        with job.blame_user_code():
            if isinstance(work, Open):
                packed, turn, state = environment.open(work.row, seed=work.seed)
            else:
                packed, turn, state = environment.turn(work.packed, work.response)
            result = TurnResult(
                None, packed, tuple(turn.messages), turn.is_done, turn.reward, turn.info, state
            )
        return job.done(result)


# --------------------------------------------------------------------------- shared state


class ProcessState:
    """The state of the process when this is constructed, to be restored after jobs.

    This is the working directory, umask, signal handlers, timers, recursion limit, and the entries
    of environment, modules and builtins. Only for the main thread.
    """

    def __init__(self) -> None:
        self._folder = os.getcwd()
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        self._handlers = {n: _signal.getsignal(n) for n in _SIGNALS}
        self._recursion = sys.getrecursionlimit()
        self._trace = sys.gettrace()
        self._streams = {name: getattr(sys, name) for name in ("stdin", "stdout", "stderr")}
        # Entries that are added later are not removed: a function may import at its first call.
        self._kept: list[tuple[MutableMapping, dict]] = [
            (shared, dict(shared)) for shared in (sys.modules, vars(builtins))
        ]
        self._environment = dict(os.environ)
        self._as_bytes = dict(vars(os.environb)["_data"])
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])

    def restore(self) -> None:
        """Undo the changes of a job, and stop its timers."""
        with contextlib.suppress(OSError):  # the folder may have been removed
            os.chdir(self._folder)
        os.umask(self._umask)
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        for number, handler in self._handlers.items():
            if handler is not None and _signal.getsignal(number) is not handler:
                with contextlib.suppress(OSError):  # the C library uses this signal itself
                    signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        sys.setrecursionlimit(self._recursion)
        if sys.gettrace() is not self._trace:
            sys.settrace(self._trace)
        for name, stream in self._streams.items():
            setattr(sys, name, stream)
        for shared, kept in self._kept:
            for name in _changed(shared, kept):
                shared[name] = kept[name]
        if _changed(vars(os.environb)["_data"], self._as_bytes):
            os.environ.update(self._environment)


def _changed(shared: MutableMapping[Any, Any], kept: dict[Any, Any]) -> list[Any]:
    """Return the names that have another value now, or that are missing."""
    # `map` takes 30 ns per entry, and there may be thousands of modules.
    is_same = list(map(operator.is_, map(shared.get, kept), kept.values()))
    if all(is_same):
        return []
    return [name for name, same in zip(kept, is_same) if not same]


# --------------------------------------------------------------------------- pipes


def _read_ahead(
    source: BinaryIO, inbox: queue.SimpleQueue, write: Callable[[Report], None]
) -> None:
    """Put jobs into the inbox, then None at the end of file, or the exception of a failed read."""
    try:
        while (message := read_message(source)) is not None:
            if message != RECALL:
                inbox.put(message)
                continue
            write(Returned(tuple(_take_ids(inbox))))
        inbox.put(None)
    except BaseException as error:  # e.g. a row that cannot be unpickled; its job gets the blame
        inbox.put(error)


def _take_ids(inbox: queue.SimpleQueue) -> Iterator[int]:
    """Remove all jobs from the inbox, and yield their ids."""
    with contextlib.suppress(queue.Empty):
        while True:
            yield inbox.get_nowait()[0]


def _next(inbox: queue.SimpleQueue) -> Any:
    message = inbox.get()
    if isinstance(message, BaseException):
        raise message
    return message


def _take_pipes() -> tuple[BinaryIO, Callable[[Report], None]]:
    """Move the protocol's pipes to other descriptors, so that users' output goes to stderr.

    Returns: the source of messages, and a function that writes reports.
    """
    source = os.fdopen(os.dup(0), "rb", buffering=1 << 18)
    sink = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    is_free = threading.Lock()
    worker = os.getpid()
    # User code may replace these functions of `os`, so keep the originals.
    pid = os.getpid
    leave = os._exit
    put = os.write
    # A process that user code forks must not touch the pipes.
    os.register_at_fork(after_in_child=lambda: _close(sink, source.fileno()))

    def write(report: Report) -> None:
        if pid() != worker:  # this is a fork that returned from the user's code
            leave(0)
        view = memoryview(pack_report(report))
        try:
            with is_free:
                while view:
                    view = view[put(sink, view) :]
        except BrokenPipeError:  # the parent is gone, or ends this worker
            leave(0)

    return source, write


def _close(*fds: int) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):  # user code may have closed it
            os.close(fd)
