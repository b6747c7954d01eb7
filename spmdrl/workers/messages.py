"""The messages between the pool and its workers; `main` and `agent_jobs` describe their order.

A message to a worker is a 4-byte little-endian length and a pickle. A worker trusts its parent, and
loads the code that the parent names. A worker's reports are plain data, see `reports`.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal

from spmdrl.agents.containers import Labels
from spmdrl.config.generation import ContainerSettings
from spmdrl.environments.protocol import Message, Response
from spmdrl.rewards.samples import RewardList, RewardSample

_HEADER = struct.Struct("<I")
Failure = Literal["timeout", "error", "bad_value", "overlong", "lost"]
OVERLONG: Failure = "overlong"
"""The opening messages of the environment were too long; no code of the user failed."""
LOST: Failure = "lost"
"""The worker of agents ended while this one ran in it, and did no wrong; it may run again."""
RECALL = "recall"
"""A message to a worker that is stuck in a job: return the jobs after it."""


@dataclass(frozen=True)
class SourceSetup:
    """How the rows of one source are scored and played."""

    task: str = ""
    """The task that generates the rows; empty for none."""
    task_options: dict[str, Any] = field(default_factory=dict)
    """Keyword options of the task."""
    is_own_grader: bool = False
    """Whether the task grades the rows, because no function does."""
    applies: tuple[str, ...] | None = None
    """Names of the functions that score its rows; None for all functions."""
    environment: str = ""
    """The config field of the environment that plays its rows; empty for none."""


@dataclass(frozen=True)
class AgentSetup:
    """The agent that a worker runs."""

    function: str
    """rollout.agent."""
    command: tuple[str, ...]
    """rollout.agent_command; used if there is no function."""
    at_once: int
    """Most episodes at a time."""
    timeout_s: float
    """Deadline of an episode."""
    memory_gib: float
    """Limit for an agent and the processes that it starts, GiB; 0 for none."""
    container: ContainerSettings
    """rollout.agent_container."""
    labels: Labels
    """Of the containers."""


@dataclass(frozen=True)
class Setup:
    """What a worker loads."""

    functions: dict[str, str]
    """{name: `module:function`, `path/file.py:function`, or a generated task, whose grader is
    used}."""
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
    """Limit for a worker and the processes that it starts, GiB; 0 for none."""
    environ: dict[str, str] = field(default_factory=dict)
    """Environment variables to set."""
    agent: AgentSetup | None = None
    """If set, the worker runs this agent and does nothing else."""

    def options_of(self, spec: str) -> dict[str, Any]:
        """Return the options of a generated task among the functions."""
        return next((own.task_options for own in self.sources if own.task == spec), {})

    @property
    def names(self) -> list[str]:
        """Names of the functions, tasks and environments, for messages."""
        tasks = [source.task for source in self.sources if source.is_own_grader]
        environments = [options.get("name") for options in self.environments.values()]
        agents = [self.agent.function or self.agent.command[0]] if self.agent else []
        others = dict.fromkeys(filter(None, [*tasks, *environments, *agents]))
        return [*self.functions.values(), *others]


@dataclass(frozen=True)
class Open:
    """A job: begin an episode."""

    environment: str
    """The config field of the environment."""
    row: dict
    seed: int


@dataclass(frozen=True)
class Respond:
    """A job: play a turn of an episode."""

    environment: str
    """The config field of the environment."""
    packed: bytes
    """The packed environment after the last turn."""
    response: Response


@dataclass(frozen=True)
class Solve:
    """A job: run an agent for one episode."""

    row: dict
    seed: int
    needs_reward: bool
    """Whether the agent must return a reward, because no function scores its rows."""
    base_url: str
    """Address of the gateway, `http://127.0.0.1:PORT/v1`."""
    api_key: str
    """Of the episode."""
    purpose: str
    """`Draw.purpose` of the episode."""


@dataclass(frozen=True)
class Serve:
    """A message to a worker that runs agents: the policy answers those of one purpose from now on.

    Others do not start, and the time of those that run stands still.
    """

    purpose: str
    """`Solve.purpose`; empty for none."""


Work = RewardSample | RewardList | Open | Respond | Solve


@dataclass(frozen=True, kw_only=True)
class _Result:
    """The result of a call."""

    key: Hashable = field(default=None, kw_only=False)
    seconds: float = 0.0
    failure: Failure | None = None
    """Why there is no result. An episode that fails cannot continue, and its rewards so far should
    not count."""
    message: str = ""


@dataclass(frozen=True)
class RewardResult(_Result):
    """The reward of one sample."""

    value: float | None = None
    """Weighted sum of the functions, without reward models; None if it failed, or if no function of
    the scope applies."""
    parts: dict[str, float] = field(default_factory=dict)
    """Unweighted value of each function that applies."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Other numbers that the functions reported."""
    extras: dict[str, str] = field(default_factory=dict)
    """Texts that the functions reported."""
    retries: int = 0
    """Number of repeated calls. A call for several samples counts only for the first of them."""


@dataclass(frozen=True)
class ListResult(_Result):
    """The rewards of samples that were scored together."""

    results: tuple[RewardResult, ...] = ()
    """One for each sample, without keys."""


@dataclass(frozen=True)
class TurnResult(_Result):
    """The result of one `open` or `turn`."""

    environment: bytes = b""
    """The packed environment, for the next `turn`; empty if the episode is done or failed."""
    messages: tuple[Message, ...] = ()
    """Messages to append to the conversation; empty if the episode is done or failed."""
    is_done: bool = False
    reward: float = 0.0
    """Reward of this turn; the reward of an episode is the sum over its turns."""
    info: dict[str, float] = field(default_factory=dict)
    """Numbers for metrics."""
    state: int = -1
    """Hash of the environment's current state; -1 if it has no method `state`."""


@dataclass(frozen=True)
class SolveResult(_Result):
    """The end of an agent's episode."""

    value: float | None = None
    """The reward that the agent returned; None if it returned none. Then rewards.functions score
    its last answer."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Other numbers that it returned."""


@dataclass(frozen=True)
class Done:
    """A worker's report that a job is done."""

    id: int
    finished: float
    """Clock of time.monotonic(), which all processes of a machine share."""
    seconds: float
    failure: Failure | None = None
    message: str = ""
    result: RewardResult | ListResult | TurnResult | SolveResult | None = None
    """Without a key; None if the job failed."""
    retries: int = 0
    """Number of repeated calls of functions."""


def no_result(timeout_s: float, *, called: str, limit: str = "rewards.timeout_s") -> str:
    """Return the message for a job without a result at its deadline.

    Args:
        called: names of the user's functions that it called.
        limit: the field of the deadline.
    """
    return f"no result of {called} within {limit} = {timeout_s:g} s"


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


def take_messages(buffer: bytearray) -> Iterator[Any]:
    """Remove whole messages from the front of `buffer` and yield them, one by one."""
    while len(buffer) >= _HEADER.size:
        end = _HEADER.size + _HEADER.unpack_from(buffer)[0]
        if len(buffer) < end:
            return
        message = pickle.loads(bytes(buffer[_HEADER.size : end]))
        del buffer[:end]
        yield message
