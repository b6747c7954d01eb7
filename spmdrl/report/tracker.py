"""The interface of an experiment tracker, and the threads that call trackers.

Training never waits for a tracker: a step only appends to a queue. Each tracker has a thread and a
queue of its own, so one that is down stops no other. If a tracker is down, that is reported once,
and it is tried again every minute and gets what it missed. metrics.jsonl has everything in any
case.

MLflow's own asynchronous logging does not replace the thread. It calls from a pool, so that steps
arrive out of order; it drops a batch that fails and logs an error for each; its flush and its exit
hook wait without a bound; and it makes stores, runs and artifacts in the caller.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from spmdrl.imports import attempt

log = logging.getLogger(__name__)

Status = Literal["finished", "stopped", "failed"]

_GATHER_S = 1.0  # the steps of this long are sent together
_RETRY_S = 60.0
_MAX_ROWS = 50_000  # in the queue, of about 5 kB each; the oldest are dropped


class MetricsRow(NamedTuple):
    """The metrics of one step."""

    step: int
    unix_s: float
    """When the step was recorded."""
    values: Mapping[str, float]


class Tracker(Protocol):
    """An experiment tracker. Its methods may block and may raise anything: a thread calls them."""

    name: str
    """Kind and place, for messages: `MLflow at URI`."""
    view_command: str
    """Shell command that shows the run, or a sentence that says where it is shown."""

    def start(self, params: Mapping[str, Any], tags: Mapping[str, str], *, step: int) -> None:
        """Open the run; open it again if `step` is above 0.

        It is called again until it returns, so it must accept what a failed call left.

        Args:
            params: {name: value} of the run.
            tags: `source.name` and, in a git checkout, `source.git.commit`.
            step: steps already done.
        """

    def metrics(self, rows: Sequence[MetricsRow]) -> None:
        """Log steps, in order."""

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show rows as the table `name` (*.json), which they replace."""

    def artifact(self, path: Path) -> None:
        """Store a copy of a file with the run."""

    def close(self, status: Status) -> None:
        """End the run."""


class Trackers:
    """The trackers of a run. All methods but `close` return at once."""

    def __init__(self, trackers: Sequence[Tracker] = ()):
        self._threads = [TrackerThread(tracker) for tracker in trackers]

    @property
    def view_commands(self) -> list[str]:
        """Return how the run is shown in each; see `Tracker.view_command`."""
        return [thread.tracker.view_command for thread in self._threads]

    def start(self, params: Mapping[str, Any], tags: Mapping[str, str], *, step: int) -> None:
        """Open the run in each; see `Tracker.start`."""
        for thread in self._threads:
            thread.start(params, tags, step=step)
        # A program that ends without `close` has crashed.
        atexit.register(self.close, "failed", timeout_s=10.0)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log one step's metrics, stamped with the present time."""
        for thread in self._threads:
            thread.metrics(step, values)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show rows as a table, which they replace."""
        for thread in self._threads:
            thread.table(name, rows)

    def artifact(self, path: Path) -> None:
        """Store a copy of a file with the run."""
        for thread in self._threads:
            thread.artifact(path)

    def close(self, status: Status, *, timeout_s: float = 30.0) -> None:
        """Send what is in the queues and end the runs; give up on all after `timeout_s`."""
        atexit.unregister(self.close)
        threads = self._threads
        self._threads = []  # a second call, of another thread perhaps, finds nothing to end
        for thread in threads:
            thread.end(status)
        until = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))


class TrackerThread:
    """Calls a tracker from a thread of its own. All methods but `join` return at once."""

    def __init__(self, tracker: Tracker):
        self.tracker = tracker
        self._wake = threading.Condition()
        # What waits to be sent. Only the thread calls the tracker; `_wake` guards these.
        self._rows: deque[MetricsRow] = deque()
        self._first_row = 0  # how many rows came before those that wait
        self._tables: dict[str, Sequence[Mapping[str, Any]]] = {}
        self._files: dict[Path, None] = {}
        self._num_dropped = 0
        self._is_started = False
        self._is_failing = False
        self._called_at = 0.0
        self._status: Status = "failed"  # until `end` says how the run ended
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="spmdrl-tracker")

    # ---------------------------------------------------------------- for the loop

    def start(self, params: Mapping[str, Any], tags: Mapping[str, str], *, step: int) -> None:
        """Start the thread, which opens the run; see `Tracker.start`."""
        self._params = params
        self._tags = tags
        self._step = step
        self._thread.start()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log one step's metrics, stamped with the present time."""
        with self._wake:
            self._rows.append(MetricsRow(step, time.time(), values))
            if len(self._rows) > _MAX_ROWS:
                self._rows.popleft()
                self._first_row += 1
                self._num_dropped += 1
            self._wake.notify()

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show rows as a table, which they replace."""
        with self._wake:
            self._tables[name] = rows
            self._wake.notify()

    def artifact(self, path: Path) -> None:
        """Store a copy of a file with the run."""
        with self._wake:
            self._files[path] = None
            self._wake.notify()

    def end(self, status: Status) -> None:
        """Have the thread send what is in the queue, and end the tracker's run."""
        self._status = status
        with self._wake:
            self._closing.set()
            self._wake.notify()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread after `end`, and log what the tracker did not take."""
        self._thread.join(timeout_s)
        num_lost = self._num_waiting() + self._num_dropped
        if num_lost:
            what = f"the last {num_lost} items" if num_lost > 1 else "the last item"
            log.error("%s did not take %s; metrics.jsonl has them", self.tracker.name, what)
        elif self._thread.is_alive() or self._is_failing:
            log.error("%s has all metrics, but not how the run ended", self.tracker.name)

    # ---------------------------------------------------------------- in the thread

    def _run(self) -> None:
        is_last = False
        while not is_last:
            with self._wake:
                while not self._is_due():
                    self._wake.wait(1.0)
            is_last = self._closing.is_set()
            send = self._send_last if is_last else self._send
            # Whatever a tracker's client raises (its own, the database's, the network's error
            # types) must not reach training.
            _, error = attempt(send, Exception)
            self._report(error)

    def _is_due(self) -> bool:
        if self._closing.is_set():
            return True
        pause_s = _RETRY_S if self._is_failing else _GATHER_S
        if time.monotonic() - self._called_at < pause_s:
            return False
        return not self._is_started or self._num_waiting() > 0

    def _num_waiting(self) -> int:
        return len(self._rows) + len(self._tables) + len(self._files)

    def _report(self, error: BaseException | None) -> None:
        """Log the first failure of several, and the first success after them."""
        if error and not self._is_failing:
            first_line = (str(error).splitlines() or [""])[0][:300]
            log.error(
                "%s fails (%s: %s). Training goes on; metrics.jsonl has everything, and the "
                "tracker gets it when it answers again",
                self.tracker.name,
                type(error).__name__,
                first_line,
            )
        if self._is_failing and not error:
            log.info("%s answers again", self.tracker.name)
        self._is_failing = error is not None
        self._called_at = time.monotonic()

    def _send(self) -> None:
        """Send the queue. An item leaves it once the tracker has taken it."""
        if not self._is_started:
            self.tracker.start(self._params, self._tags, step=self._step)
            self._is_started = True
        self._send_rows()
        with self._wake:
            tables = dict(self._tables)
            files = list(self._files)
        for name, rows in tables.items():
            self.tracker.table(name, rows)
            with self._wake:
                if self._tables[name] is rows:  # else a newer one waits
                    del self._tables[name]
        for path in files:
            self.tracker.artifact(path)
            with self._wake:
                del self._files[path]

    def _send_rows(self) -> None:
        with self._wake:
            rows = list(self._rows)
            end = self._first_row + len(rows)
        if not rows:
            return
        self.tracker.metrics(rows)
        with self._wake:
            while self._first_row < end:  # fewer than were sent, if the oldest were dropped
                self._rows.popleft()
                self._first_row += 1

    def _send_last(self) -> None:
        self._send()
        self.tracker.close(self._status)
