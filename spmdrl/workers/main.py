"""The worker: reads jobs from stdin, writes one result each to stdout.

It scores samples, and opens and plays episodes of the run's environment. The first message in is
a Setup, the first report Ready or Refused. Then jobs (id, work) and their Done, one by one, in
order; where functions allow several at once (`concurrent`), in any order, with a Began before
each. RECALL, instead of a job, asks for those not begun: Returned. The process is light (no torch)
and ends with its parent: see `keeper`.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from spmdrl.workers.messages import RECALL, read_message
from spmdrl.workers.process_state import ProcessState
from spmdrl.workers.reports import Ready, Refused, Report, Returned, pack_report
from spmdrl.workers.reward_jobs import told
from spmdrl.workers.server import Server
from spmdrl.workers.subreaper import Strays, become_worker


def main(life_fd: int, memory_bytes: int) -> None:
    """Serve until stdin closes.

    Args:
        life_fd: socket whose other end only the parent holds.
        memory_bytes: that the worker and what it starts may hold; 0 for no limit.
    """
    # Schedulers signal every process of a job; what to do about it is the parent's to say. Not
    # SIG_IGN, which programs started by reward functions would inherit.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    become_worker(life_fd, memory_bytes=memory_bytes)
    source, write = _take_pipes()
    setup = read_message(source)
    try:
        server = Server(setup)
    except BaseException as error:  # sys.exit in a user's module too
        write(Refused(told(error)))
        return
    write(Ready(time.monotonic(), server.facts))
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    # In the main thread is the user's code, which may want signals there.
    threading.Thread(target=_read_ahead, args=(source, inbox, write), daemon=True).start()
    if server.scorer.concurrency > 1:
        from spmdrl.workers.concurrent import serve_concurrently

        serve_concurrently(server, lambda: _next(inbox), write)
        return
    process_state = ProcessState()
    strays = Strays()
    while (message := _next(inbox)) is not None:
        done = server.serve(*message)
        process_state.restore()
        strays.end()
        write(done)


def _read_ahead(
    source: BinaryIO, inbox: queue.SimpleQueue, write: Callable[[Report], None]
) -> None:
    """Put jobs into the inbox, None at the end of file, and what went wrong with a message."""
    try:
        while (message := read_message(source)) is not None:
            if message != RECALL:
                inbox.put(message)
                continue
            # This thread alone puts, so what is there now can only become less.
            ids = []
            while (job := _taken(inbox)) is not None:
                ids.append(job[0])
            write(Returned(tuple(ids)))
        inbox.put(None)
    except BaseException as error:  # a row that cannot be unpickled here is its job's fault
        inbox.put(error)


def _taken(inbox: queue.SimpleQueue) -> Any:
    """Return the next job that is there now; None for none."""
    with contextlib.suppress(queue.Empty):
        return inbox.get_nowait()
    return None


def _next(inbox: queue.SimpleQueue) -> Any:
    message = inbox.get()
    if isinstance(message, BaseException):
        raise message
    return message


def _take_pipes() -> tuple[BinaryIO, Callable[[Report], None]]:
    """Keep the protocol's pipes for ourselves: what user code prints goes to stderr."""
    source = os.fdopen(os.dup(0), "rb", buffering=1 << 18)
    sink = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    is_free = threading.Lock()
    worker = os.getpid()
    # Bound here: what user code puts in their places is not called.
    pid = os.getpid
    leave = os._exit
    put = os.write
    # A process that user code forks has no part in the protocol.
    os.register_at_fork(after_in_child=lambda: _close(sink, source.fileno()))

    def write(report: Report) -> None:
        if pid() != worker:  # such a process returned from the user's code
            leave(0)
        view = memoryview(pack_report(report))
        with is_free:
            while view:
                view = view[put(sink, view) :]

    return source, write


def _close(*fds: int) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):  # user code was there before
            os.close(fd)
