"""The worker: reads jobs from stdin, writes one result each to stdout.

    python -m spmdrl.rewards.worker

It scores samples, and opens and plays episodes of the run's environment. A message is a 4-byte
little-endian length and a pickle. The first one in is a Setup, the first one out ("ready",
(seconds, facts)) or ("refused", message). Then jobs and results, one by one, in order. The
process is light (no torch) and ends with its parent: see `_die_with`.
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
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Literal

from spmdrl.data.tasks import is_generated, make_task
from spmdrl.environments.protocol import Response, Turn
from spmdrl.environments.serve import EnvironmentServer
from spmdrl.rewards.signatures import BadValue, Reward, Sample, Score, adapt, load_reward

_HEADER = struct.Struct("<I")
_MAX_MESSAGE_CHARS = 2000
Failure = Literal["timeout", "error", "bad_value"]


@dataclass(frozen=True)
class Setup:
    """What a worker scores and plays with."""

    functions: dict[str, str]
    """{name: `module:function`, `path/file.py:function`, or a generated task for its grader}."""
    weights: tuple[float, ...]
    """One per function."""
    tasks: tuple[str, ...]
    """Generated tasks whose own graders are used when there are no functions."""
    task_options: dict[str, Any]
    """Keyword options of generated tasks."""
    has_models: bool = False
    """Reward models score the samples too, elsewhere: no function need apply to a row."""
    environment: dict[str, Any] = field(default_factory=dict)
    """The name of an environment and its options; empty for none."""

    @property
    def names(self) -> list[str]:
        """Return what is loaded, for messages."""
        return [*(self.functions.values() or self.tasks), *filter(None, [
            self.environment.get("name")])]


@dataclass(frozen=True)
class Open:
    """A job: begin an episode."""

    row: dict
    seed: int


@dataclass(frozen=True)
class Respond:
    """A job: play a turn of an episode."""

    environment: bytes
    """The pickled environment, as the last turn left it."""
    response: Response


@dataclass(frozen=True)
class Done:
    """What became of a job, as it travels back."""

    id: int
    finished: float
    """Clock of time.monotonic(), which all processes of a machine share."""
    seconds: float
    failure: Failure | None
    message: str


@dataclass(frozen=True)
class Scored(Done):
    """The result of one sample."""

    value: float | None
    parts: dict[str, float]
    metrics: dict[str, float]
    extras: dict[str, str]


@dataclass(frozen=True)
class Moved(Done):
    """The result of an Open or a Respond that did not fail."""

    environment: bytes
    """The pickled environment as it is now; empty when the episode is done."""
    turn: Turn
    state: int
    """See `EnvironmentServer`."""


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
        self._least = 0.0 if setup.has_models or setup.environment else None
        self._rewards: dict[str, Reward] = {
            name: self._grader(spec, setup) if is_generated(spec) else load_reward(spec)
            for name, spec in setup.functions.items()}
        self._tasks = {
            spec: (spec.rpartition(":")[2], self._grader(spec, setup)) for spec in setup.tasks}

    def score(self, id: int, sample: Sample) -> Scored:
        """Return the result of one sample; whatever the functions do is part of it."""
        began, parts = time.monotonic(), {}
        total, failure, message = Score(self._least), None, ""
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

    def _grader(self, spec: str, setup: Setup) -> Reward:
        return adapt(make_task(spec, setup.task_options).score_answer, spec=spec)

    def _applicable(self, sample: Sample) -> list[tuple[str, float, Reward]]:
        if self._rewards:
            return [(n, w, r) for (n, r), w in zip(self._rewards.items(), self._weights)]
        if not self._tasks:  # the environment's rewards are all there are
            return []
        name, reward = self._tasks[sample.row["data_source"]]
        return [(name, 1.0, reward)]


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


# --------------------------------------------------------------------------- all jobs


class Server:
    """Does every kind of job.

    Raises (on construction): ValueError for what cannot be loaded.
    """

    def __init__(self, setup: Setup):
        self._environments = EnvironmentServer(setup.environment) if setup.environment else None
        if self._environments is not None and not self._environments.is_graded:
            # A generated task is here to make the rows; its environment knows what they are worth.
            setup = replace(setup, tasks=())
        self._scorer = Scorer(setup)

    @property
    def facts(self) -> dict[str, Any]:
        """Return what the parent may want to know of what was loaded."""
        if self._environments is None:
            return {}
        return {"tools": self._environments.tools, "tool_parser": self._environments.tool_parser}

    def serve(self, id: int, work: Sample | Open | Respond) -> Done:
        """Do a job; whatever the user's code does is part of the result."""
        if isinstance(work, Sample):
            return self._scorer.score(id, work)
        began, failure = time.monotonic(), "error"
        try:
            if isinstance(work, Open):
                moved = self._environments.open(work.row, seed=work.seed)
            else:
                moved = self._environments.turn(work.environment, work.response)
            finished = time.monotonic()
            return Moved(id, finished, finished - began, None, "", *moved)
        except BadValue as error:
            failure, message = "bad_value", str(error)
        except BaseException as error:  # SystemExit too: user code may call sys.exit
            message = _describe(error)
        finished = time.monotonic()
        return Done(id, finished, finished - began, failure, message[:_MAX_MESSAGE_CHARS])


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
        server = Server(setup)
    except BaseException as error:  # sys.exit in a user's module too
        text = str(error) if isinstance(error, ValueError) else _describe(error)
        write(pack_message(("refused", text)))
        return
    write(pack_message(("ready", (time.monotonic(), server.facts))))
    while (message := _read(source)) is not None:
        write(pack_message(server.serve(*message)))


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
