"""Be a rank of train.py that writes down where it is, and dies at a given moment.

All of it is done from outside: the two methods by which a rank names its places are wrapped before
train.py is run.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import socket
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

ROOT = Path(__file__).resolve().parents[2]
SHORT_S = 8.0
"""Deadline of all waits from the moment on at which a rank was stopped."""
_TICK_S = 0.1
# Others hear of a rank's place as it enters it, and with its next beat when it has only left one.
# Of rank 0, which takes the store along, they know what they have read last.
_SAID_LATE_S = (30.0, 3.0)

Death = Literal["kill", "stop", "cut"]
"""SIGKILL, SIGSTOP, or every TCP connection of the process shut down."""


@dataclass(frozen=True)
class Moment:
    """When a rank dies: some time after it first entered a place."""

    rank: int
    phase: str
    step: int
    after_s: float
    death: Death


class Diary:
    """What one rank writes down in a folder: each place that it enters and leaves, and how late
    its threads are.

    Args:
        moment: of its own death or another's; None for none.
    """

    def __init__(self, folder: Path, rank: int, moment: Moment | None):
        self._rank, self._moment, self._deed = rank, moment, folder / "deed.json"
        self._file = os.open(folder / f"places_{rank}.jsonl", os.O_WRONLY | os.O_CREAT, 0o644)
        self._recent: deque[tuple[float, str, int]] = deque([(0.0, "start", -1)], maxlen=1000)
        self._within: list[tuple[str, int]] = []
        self._is_due = moment is not None and moment.rank == rank
        self.moving = threading.RLock()
        """Held while the rank tells others of a new place and writes it down, and while it dies."""

    def entered(self, phase: str, step: int, *, waits: bool) -> None:
        """Write down that the rank enters a place, and die there if it is time."""
        self._within.append((phase, step))
        self._be_in(phase, step)
        self._write(enter=phase, step=step, waits=waits)
        moment = self._moment
        if self._is_due and moment and (moment.phase, moment.step) == (phase, step):
            self._is_due = False
            if moment.after_s:
                threading.Thread(target=self._die, daemon=True).start()
            else:
                self._die()

    def left(self, phase: str, step: int) -> None:
        """Write down that the rank leaves a place."""
        with self.moving:
            self._within.pop()
            self._be_in(*(self._within[-1] if self._within else (f"after {phase}", step)))
            self._write(leave=phase, step=step)

    def mind_deadlines(self, watch: Any) -> None:
        """Have a thread shorten a watch's deadline once a rank was stopped."""
        threading.Thread(target=self._mind, args=(watch,), daemon=True).start()

    def _mind(self, watch: Any) -> None:
        while True:
            began = time.time()
            time.sleep(_TICK_S)
            if not self._deed.exists():
                continue
            self._write(late_s=time.time() - began - _TICK_S)
            if self._moment and self._moment.death == "stop":
                watch.timeout_s = SHORT_S

    def _die(self) -> None:
        assert self._moment
        time.sleep(self._moment.after_s)
        with self.moving:
            self._die_here(self._moment)

    def _die_here(self, moment: Moment) -> None:
        below = psutil.Process().children(recursive=True)
        now = time.time()
        since = now - _SAID_LATE_S[self._rank > 0]
        last = [place for place in self._recent if place[0] < since][-1:]
        last += [place for place in self._recent if place[0] >= since]
        deed = asdict(moment) | {
            "at": now,
            "host": socket.gethostname(),
            "places": [place[1:] for place in last],
            "children": [(child.pid, child.create_time()) for child in below],
        }
        draft = self._deed.with_suffix(".draft")
        draft.write_text(json.dumps(deed))
        draft.rename(self._deed)
        _DEATHS[moment.death]()

    def _be_in(self, phase: str, step: int) -> None:
        self._recent.append((time.time(), phase, step))

    def _write(self, **what: Any) -> None:
        os.write(self._file, (json.dumps({"at": time.time()} | what) + "\n").encode())


def be_rank(argv: list[str], folder: Path, moment: Moment | None) -> None:
    """Become `python train.py`, printing into a file of the folder."""
    rank = int(os.environ["RANK"])
    printed = os.open(folder / f"printed_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.chdir(ROOT)
    sys.argv, sys.path[0] = argv, str(ROOT)
    _keep(Diary(folder, rank, moment))
    runpy.run_path(argv[0], run_name="__main__")


def _keep(diary: Diary) -> None:
    """Have each watch of this process keep a diary."""
    from spmdrl.world.lost_peers.watch import Watch

    make = Watch.__init__

    def made(self: Watch, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        diary.mind_deadlines(self)

    Watch.__init__ = made  # type: ignore[method-assign]
    Watch.phase = _written(Watch.phase, diary, waits=False)  # type: ignore[method-assign]
    Watch.wait = _written(Watch.wait, diary, waits=True)  # type: ignore[method-assign]


def _written(enter: Callable, diary: Diary, *, waits: bool) -> Callable:
    @contextlib.contextmanager
    def entered(self: Any, name: str, step: int, **options: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            with diary.moving:
                stack.enter_context(enter(self, name, step, **options))
                diary.entered(name, step, waits=waits)
            try:
                yield
            finally:
                diary.left(name, step)

    return entered


def _cut() -> None:
    """Shut down every TCP connection of this process, as a network that fails does."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()  # OSError of those that only listen
                    connection.shutdown(socket.SHUT_RDWR)


_DEATHS: dict[Death, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "cut": _cut,
}
