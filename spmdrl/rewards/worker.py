"""The reward worker: reads samples from stdin, writes one result each to stdout.

    python -m spmdrl.rewards.worker

A message is a 4-byte little-endian length and a pickle. The first one in is a Setup, the
first one out ("ready", seconds) or ("refused", message). Then samples and results, one by
one, in order. The process is light (no torch) and ends with its parent: see `_die_with`.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

from spmdrl.data.tasks import make_task
from spmdrl.rewards.signatures import (
    BadValue, Reward, Sample, Score, adapt, load_reward, part_names,
)

_HEADER = struct.Struct("<I")
_MAX_MESSAGE_CHARS = 2000


@dataclass(frozen=True)
class Setup:
    """What a worker scores with."""

    functions: tuple[str, ...]
    """`module:function` or `path/file.py:function`."""
    weights: tuple[float, ...]
    """One per function."""
    tasks: tuple[str, ...]
    """Generated tasks whose own graders are used when there are no functions."""
    task_options: dict[str, Any]
    """Keyword options of those tasks."""


@dataclass(frozen=True)
class Scored:
    """The result of one sample, as it travels back."""

    id: int
    finished: float
    """Clock of time.monotonic(), which all processes of a machine share."""
    seconds: float
    value: float | None
    parts: dict[str, float]
    metrics: dict[str, float]
    extras: dict[str, str]
    failure: str | None
    message: str


def pack_message(value: Any) -> bytes:
    """Return a value as one message."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(data)) + data


def unpack_messages(buffer: bytearray) -> list[Any]:
    """Take all whole messages out of the front of `buffer`."""
    values, at = [], 0
    while len(buffer) - at >= _HEADER.size:
        end = at + _HEADER.size + _HEADER.unpack_from(buffer, at)[0]
        if end > len(buffer):
            break
        values.append(pickle.loads(memoryview(buffer)[at + _HEADER.size : end]))
        at = end
    del buffer[:at]
    return values


# --------------------------------------------------------------------------- scoring


class Scorer:
    """Scores samples with all functions of a Setup.

    Raises (on construction): ValueError for a function or task that cannot be used.
    """

    def __init__(self, setup: Setup):
        self._weights = setup.weights
        names = part_names(setup.functions)
        self._rewards: dict[str, Reward] = {
            name: load_reward(spec) for name, spec in zip(names, setup.functions)}
        self._tasks = {
            spec: (spec.rpartition(":")[2],
                   adapt(make_task(spec, setup.task_options).score_answer, spec=spec))
            for spec in setup.tasks
        }

    def score(self, id: int, sample: Sample) -> Scored:
        """Return the result of one sample; whatever the functions do is part of it."""
        began, parts = time.monotonic(), {}
        total, failure, message = Score(), None, ""
        for name, weight, reward in self._applicable(sample):
            try:
                score = reward(sample)
            except BadValue as error:
                failure, message = "bad_value", f"{name} returned {error}"
            except BaseException as error:  # SystemExit too: user code may call sys.exit
                failure, message = "error", f"{name}: {_describe(error)}"
            if failure:
                break
            prefix = f"{name}/" if len(self._rewards) > 1 else ""
            total.metrics |= {prefix + k: v for k, v in score.metrics.items()}
            total.extras |= {prefix + k: v for k, v in score.extras.items()}
            if score.value is not None:
                parts[name] = score.value
                total.value = (total.value or 0.0) + weight * score.value
        if not failure and (total.value is None or not abs(total.value) < float("inf")):
            failure, message = "bad_value", (
                f"the weighted sum of {parts} is not finite" if parts else
                "every reward function returned None for this row; one at least must apply")
        finished = time.monotonic()
        return Scored(
            id=id, finished=finished, seconds=finished - began,
            value=None if failure else total.value, parts=parts, metrics=total.metrics,
            extras=total.extras, failure=failure, message=message[:_MAX_MESSAGE_CHARS],
        )

    def _applicable(self, sample: Sample) -> list[tuple[str, float, Reward]]:
        if self._rewards:
            return [(n, w, r) for (n, r), w in zip(self._rewards.items(), self._weights)]
        name, reward = self._tasks[sample.row["data_source"]]
        return [(name, 1.0, reward)]


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


# --------------------------------------------------------------------------- process


def main(life_fd: int = -1) -> None:
    """Serve until stdin closes.

    Args:
        life_fd: read end of a pipe whose write end only the parent holds; -1 for none.
    """
    # Schedulers signal every process of a job; what to do about it is the parent's to say. Not
    # SIG_IGN, which programs started by reward functions would inherit.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    if life_fd >= 0:
        _die_with(life_fd)
    source, write = _take_pipes()
    setup = _read(source)
    try:
        scorer = Scorer(setup)
    except BaseException as error:  # sys.exit in a user's module too
        text = str(error) if isinstance(error, ValueError) else _describe(error)
        write(pack_message(("refused", text)))
        return
    write(pack_message(("ready", time.monotonic())))
    while (message := _read(source)) is not None:
        id, sample = message
        write(pack_message(scorer.score(id, sample)))


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
    sys.stdout.reconfigure(line_buffering=True)

    def write(data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(sink, view) :]

    return source, write


def _read(source: BinaryIO) -> Any:
    header = source.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    size = _HEADER.unpack(header)[0]
    data = source.read(size)
    return pickle.loads(data) if len(data) == size else None


if __name__ == "__main__":
    # Pickles name the module that the parent imported, so serve from that one.
    from spmdrl.rewards import worker

    worker.main(*map(int, sys.argv[1:]))
