"""The worker: reads jobs from stdin, writes one result each to stdout.

It scores samples, and opens and plays episodes of the run's environment. The first message in is
a Setup, the first one out ("ready", (seconds, facts)) or ("refused", message). Then jobs and
results, one by one, in order; where functions allow several at once (`concurrent`), in any order,
with a ("began", (id, seconds)) before each. RECALL, instead of a job, asks for those not begun:
("returned", ids). The process is light (no torch) and ends with its parent: see `_die_with`.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from spmdrl.errors import described
from spmdrl.workers.messages import RECALL, pack_message, read_message
from spmdrl.workers.server import Server


def main(life_fd: int) -> None:
    """Serve until stdin closes.

    Args:
        life_fd: read end of a pipe whose write end only the parent holds.
    """
    # Schedulers signal every process of a job; what to do about it is the parent's to say. Not
    # SIG_IGN, which programs started by reward functions would inherit.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    _die_with(life_fd)
    source, write = _take_pipes()
    setup = read_message(source)
    try:
        server = Server(setup)
    except BaseException as error:  # sys.exit in a user's module too
        write(pack_message(("refused", described(error))))
        return
    write(pack_message(("ready", (time.monotonic(), server.facts))))
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    # In the main thread is the user's code, which may want signals there.
    threading.Thread(target=_read_ahead, args=(source, inbox, write), daemon=True).start()
    if server.scorer.concurrency > 1:
        from spmdrl.workers.concurrent import serve_concurrently

        serve_concurrently(server, lambda: _next(inbox), write)
        return
    while (message := _next(inbox)) is not None:
        write(pack_message(server.serve(*message)))


def _read_ahead(source: BinaryIO, inbox: queue.SimpleQueue, write: Callable[[bytes], None]) -> None:
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
            write(pack_message(("returned", ids)))
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


def _die_with(life_fd: int) -> None:
    """Have the kernel kill this process group when the parent's end of the pipe closes.

    End of file on stdin does not reach a worker that is stuck in a reward function, and no
    thread would run while one holds the interpreter lock (a runaway regular expression).
    """
    os.set_inheritable(life_fd, False)
    if sys.platform == "linux":  # elsewhere a worker outlives its parent by one sample at most
        import fcntl

        fcntl.fcntl(life_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(life_fd, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(life_fd, fcntl.F_GETFL)
        fcntl.fcntl(life_fd, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([life_fd], [], [], 0)[0]:  # closed before we listened
        raise SystemExit(0)


def _take_pipes() -> tuple[BinaryIO, Callable[[bytes], None]]:
    """Keep the protocol's pipes for ourselves: what user code prints goes to stderr."""
    source = os.fdopen(os.dup(0), "rb", buffering=1 << 18)
    sink = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    is_free = threading.Lock()

    def write(data: bytes) -> None:
        view = memoryview(data)
        with is_free:
            while view:
                view = view[os.write(sink, view) :]

    return source, write
