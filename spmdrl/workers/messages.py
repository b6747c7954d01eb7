"""What passes between the pool and its workers; see `main` for which messages come when.

To a worker goes a 4-byte little-endian length and a pickle: a worker does what its parent says
anyhow, and loads the code that the parent names, so it can only be as sound as its parent is.
What comes back is plain data, see `reports`.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal

from spmdrl.environments.protocol import Message, Response
from spmdrl.rewards.samples import RewardList, RewardSample

_HEADER = struct.Struct("<I")
Failure = Literal["timeout", "error", "bad_value", "overlong"]
OVERLONG: Failure = "overlong"
"""The environment's opening was too long: nothing of the user's failed."""
RECALL = "recall"
"""A message to a worker that is stuck in a job: give back those behind it."""


@dataclass(frozen=True)
class SourceSetup:
    """How the rows of one source are scored and played."""

    task: str = ""
    """The generated task that it is; empty for none."""
    task_options: dict[str, Any] = field(default_factory=dict)
    """Keyword options of its generated task."""
    is_own_grader: bool = False
    """Its task grades its rows, since no functions do."""
    applies: tuple[str, ...] | None = None
    """Names of the functions that score its rows; None: all do."""
    environment: str = ""
    """The config field that says what answers the policy in its rows; empty where responses are
    final."""


@dataclass(frozen=True)
class Setup:
    """What a worker scores and plays with."""

    functions: dict[str, str]
    """{name: `module:function`, `path/file.py:function`, or a generated task for its grader}."""
    weights: tuple[float, ...]
    """One per function."""
    sources: tuple[SourceSetup, ...] = ()
    """In the order of `Prompt.source`."""
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    """{config field: name of an environment, and its options}."""
    scope: str = "auto"
    """rewards.scope."""
    concurrency: int = 0
    """rewards.concurrency."""
    retries: int = 0
    """rewards.retries."""
    timeout_s: float = float("inf")
    """Deadline of a job."""
    memory_gib: float = 0.0
    """That a worker and what it starts may hold, GiB; 0 for no limit."""

    def options_of(self, spec: str) -> dict[str, Any]:
        """Return the options of a generated task among the functions."""
        return next((own.task_options for own in self.sources if own.task == spec), {})

    @property
    def names(self) -> list[str]:
        """Return what is loaded, for messages."""
        tasks = [source.task for source in self.sources if source.is_own_grader]
        environments = [options.get("name") for options in self.environments.values()]
        return [*self.functions.values(), *dict.fromkeys(filter(None, [*tasks, *environments]))]


@dataclass(frozen=True)
class Open:
    """A job: begin an episode."""

    environment: str
    """The config field that says of what."""
    row: dict
    seed: int


@dataclass(frozen=True)
class Respond:
    """A job: play a turn of an episode."""

    environment: str
    """The config field that says of what."""
    packed: bytes
    """The packed environment, as the last turn left it."""
    response: Response


Work = RewardSample | RewardList | Open | Respond


@dataclass(frozen=True, kw_only=True)
class _Result:
    """What became of a call."""

    key: Hashable = field(default=None, kw_only=False)
    seconds: float = 0.0
    failure: Failure | None = None
    """Why it came to nothing. Of an episode: it cannot go on, and what it earned so far should not
    count."""
    message: str = ""


@dataclass(frozen=True)
class RewardResult(_Result):
    """What became of one submitted sample."""

    value: float | None = None
    """Weighted sum of the functions, without reward models; None when it failed, or, of one scope's
    functions, when none of them applies."""
    parts: dict[str, float] = field(default_factory=dict)
    """Unweighted value of each function that applies."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that the functions reported besides."""
    extras: dict[str, str] = field(default_factory=dict)
    """Texts that the functions reported besides."""
    retries: int = 0
    """Calls that were made again for it; those for several samples count with the first."""


@dataclass(frozen=True)
class ListResult(_Result):
    """What became of samples that were scored together."""

    results: tuple[RewardResult, ...] = ()
    """One for each, with empty keys."""


@dataclass(frozen=True)
class TurnResult(_Result):
    """What became of one `open` or `turn`."""

    environment: bytes = b""
    """The packed environment, for the next `turn`; empty when the episode is done, or failed."""
    messages: tuple[Message, ...] = ()
    """To append; empty when the episode is done, or failed."""
    is_done: bool = False
    reward: float = 0.0
    """Of this turn: to be added to the episode's."""
    info: dict[str, float] = field(default_factory=dict)
    """Numbers for metrics."""
    state: int = -1
    """Number of the state that the episode is in now; -1 where the environment names none."""


@dataclass(frozen=True)
class Done:
    """What became of a job, as it travels back."""

    id: int
    finished: float
    """Clock of time.monotonic(), which all processes of a machine share."""
    seconds: float
    failure: Failure | None = None
    message: str = ""
    result: RewardResult | ListResult | TurnResult | None = None
    """What was found, with an empty key; None where nothing was."""
    retries: int = 0
    """Calls of functions that were made again."""


def pack_message(value: Any) -> bytes:
    """Return a value as one message to a worker."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(data)) + data


def read_message(source: BinaryIO) -> Any:
    """Wait for the next message from the parent; None at the end of file."""
    header = source.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    size = _HEADER.unpack(header)[0]
    data = source.read(size)
    return pickle.loads(data) if len(data) == size else None
