"""What the gateway and the leader of an engine replica tell each other. Both know ids of tokens;
only the gateway knows messages and texts."""

from __future__ import annotations

import os
from dataclasses import dataclass

from spmdrl.rewards.samples import JUDGE_KEY, JUDGE_URL

HOST = "127.0.0.1"
"""Where the gateway listens."""
NO_PARENT = -1
"""The parent of a request that begins a trace."""
JUDGE = "judge"
"""In place of an episode: requests of reward functions to the engine as their judge."""
SERVE = "serve"
"""The same: requests of other programs (rollout.serve)."""
NO_EPISODES = (JUDGE, SERVE)
"""Their requests continue nothing, and have no limit of an agent."""


@dataclass(frozen=True)
class Ask:
    """A request from the gateway to the leader: of an agent, to the judge, of another program."""

    episode: str
    """`Episode.key`, JUDGE or SERVE."""
    id: int
    """Number of the request in its episode, from 0 in the order of arrival at the gateway. Requests
    that the gateway refuses have numbers too."""
    parent: int
    """Node whose tokens it continues, as `Answer.nodes` names it; NO_PARENT: it begins a trace."""
    tokens: tuple[int, ...]
    """Ids to append to those of the parent's path; the whole prompt if it begins a trace."""
    samples: int
    """Number of samples to draw, 1 or more."""
    max_tokens: int
    """Most tokens of each sample. The leader draws fewer where the trace becomes too long."""
    stop: tuple[str, ...]
    """Texts that end a sample."""
    temperature: float = 0.0
    """Of samples of NO_EPISODES; the run's settings decide on those of agents."""
    seed: int = 0
    """The same."""


@dataclass(frozen=True)
class Answer:
    """The leader's answer to an Ask, when all its samples are complete."""

    episode: str
    id: int
    """Of the Ask."""
    nodes: tuple[int, ...] = ()
    """Number of each sample's node, unique in the episode; empty if it is refused."""
    tokens: tuple[tuple[int, ...], ...] = ()
    """Sampled ids of each."""
    logprobs: tuple[tuple[float, ...], ...] = ()
    """Of each sampled token, nats."""
    are_truncated: tuple[bool, ...] = ()
    """Whether each was cut at its length limit."""
    refusal: str = ""
    """Why it is not answered: the agent gets HTTP status 400, `context_length_exceeded`, with this
    text. Empty if it is answered."""


def judge_variables(address: str, key: str) -> dict[str, str]:
    """Return the environment variables by which a reward function finds the judge.

    Args:
        address: `Gateway.address`.
        key: what `Gateway.open` returned for JUDGE.
    """
    return {JUDGE_URL: address, JUDGE_KEY: key} | no_proxy()


def no_proxy() -> dict[str, str]:
    """Return the environment variables by which a proxy does not get requests to this machine."""
    names = ("NO_PROXY", "no_proxy")
    return {name: ",".join(filter(None, [os.environ.get(name), HOST])) for name in names}
