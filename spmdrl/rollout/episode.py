"""Samples and their groups, unfinished and finished."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from spmdrl.config import NO_PENALTIES, Config, Penalties
from spmdrl.data.hashed import hashed
from spmdrl.data.row_sampling import row_sampling
from spmdrl.engine.protocol import UNTRUNCATED, Completion, Request, Truncation
from spmdrl.model_inputs import TokenIds
from spmdrl.rollout.trajectory import Trajectory
from spmdrl.rollout.tree import Tree
from spmdrl.types import Prompt
from spmdrl.workers.pool import RewardResult

GREEDY = -1
"""Position in its group of a prompt's greedy response: a baseline, never trained on."""


@dataclass(frozen=True)
class Draw:
    """Sampling settings of the samples for one purpose."""

    seed: int
    purpose: str
    """`train` or `eval`; part of every seed, so that the two draw different numbers."""
    samples: int
    """Responses per prompt."""
    max_tokens: int
    """Longest response in tokens, including the environment's answers between turns."""
    temperature: float
    is_seeded: bool
    stop_token_ids: tuple[int, ...]
    has_greedy: bool = False
    """Draw one more response per prompt at temperature 0."""
    must_score: bool = True
    """Whether the first reward that fails ends the run."""
    truncation: Truncation = UNTRUNCATED
    """Truncation of all responses but the greedy one."""
    penalties: Penalties = NO_PENALTIES
    stop: tuple[str, ...] = ()

    def of_prompt(self, prompt: Prompt, cfg: Config) -> Draw:
        """Return the settings for a prompt's samples; its row may change some of them."""
        return self.of_row(row_sampling(prompt.row, cfg, where=prompt.origin))

    def of_row(self, own: Mapping[str, Any]) -> Draw:
        """Return these settings with a row's own ones in place; see `row_sampling`."""
        if not own:
            return self
        limits = {name: value for name, value in own.items() if name != "max_tokens"}
        return replace(
            self,
            max_tokens=own.get("max_tokens", self.max_tokens),
            truncation=replace(self.truncation, **limits),
        )

    def request(
        self,
        key: str,
        prompt: TokenIds,
        *,
        max_tokens: int,
        seed: int,
        is_greedy: bool,
        num_begun: int,
        stop: tuple[str, ...] = (),
    ) -> Request:
        """Return a request with these settings; see Request.

        Args:
            stop: further strings that end the response; those of the settings end it too.
        """
        return Request(
            key=key,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0.0 if is_greedy else self.temperature,
            stop_token_ids=self.stop_token_ids,
            seed=seed if self.is_seeded and not is_greedy else None,
            truncation=UNTRUNCATED if is_greedy else self.truncation,
            penalties=self.penalties,
            stop=(*self.stop, *stop),
            num_begun=num_begun,
        )


@dataclass(frozen=True)
class FinishedEpisode:
    """A finished sample: one trace, or the traces of an agent's tree, with one reward."""

    slot: int
    """Position of the prompt in the step's batch."""
    sample: int
    """Position within the prompt's group, or GREEDY."""
    prompt: Prompt
    traces: tuple[Trajectory, ...]
    """At least one, in order. A token that the policy sampled is in the response_mask of one trace,
    and its turn in `states` and `earned` of that trace. In other traces it is context."""
    text: str
    """Decoded response, without special tokens."""
    reward: RewardResult

    @property
    def trajectory(self) -> Trajectory:
        """Return the trace of an episode that has only one. Raises: ValueError if it has more."""
        (only,) = self.traces
        return only

    @property
    def num_sampled(self) -> int:
        """Return the number of tokens that the policy sampled."""
        return sum(trace.num_sampled for trace in self.traces)

    @property
    def num_turns(self) -> int:
        """Return the number of finished turns of the policy."""
        return sum(trace.num_turns for trace in self.traces)

    @property
    def is_truncated(self) -> bool:
        """Whether the last turn of any trace was cut at the length limit."""
        return any(trace.is_truncated for trace in self.traces)


@dataclass
class Group:
    """A prompt and its samples, unfinished or finished."""

    number: int
    """Position in the order of admission."""
    step: int
    """Step that the prompt belongs to; seeds depend on it and on `slot`."""
    slot: int
    """Position of the prompt among that step's."""
    prompt: Prompt
    version: int
    """Policy version at its admission: none of its tokens is older."""
    draw: Draw
    samples: dict[int, FinishedEpisode] = field(default_factory=dict)
    """{position: finished sample}."""

    @property
    def key(self) -> str:
        """Return its name, unique in the run."""
        return f"{self.draw.purpose}-{self.step}-{self.slot}"

    def episode_key(self, sample: int) -> str:
        """Return the name of the episode of one of its positions, unique in the run."""
        name = "greedy" if sample == GREEDY else sample
        return f"{self.key}-{name}"

    @property
    def positions(self) -> range:
        """Return the positions of its samples, the greedy one first."""
        return range(GREEDY if self.draw.has_greedy else 0, self.draw.samples)

    @property
    def is_complete(self) -> bool:
        """Whether all samples are finished."""
        return len(self.samples) == len(self.positions)

    @property
    def all_samples(self) -> list[FinishedEpisode]:
        """Return the samples in order, the greedy one first, each with the group's slot."""
        return [replace(self.samples[i], slot=self.slot) for i in sorted(self.samples)]

    @property
    def drawn_samples(self) -> list[FinishedEpisode]:
        """Return the samples in order, without the greedy one."""
        return [self.samples[i] for i in sorted(self.samples) if i != GREEDY]


Stage = Literal["open", "draw", "answer", "solve", "score"]


@dataclass
class Episode:
    """One unfinished sample."""

    group: Group
    sample: int
    trajectory: Trajectory
    stage: Stage = "draw"
    """What happens next: the environment opens the episode, the engine draws a turn, the
    environment answers the turn, an agent plays the whole episode, or the reward functions score
    the episode."""
    environment: bytes = b""
    """The packed environment, see `environments.protocol`."""
    turn_start: int = 0
    """Index of the first token of the policy's latest turn among the tokens after the prompt."""
    text: str = ""
    """The latest turn, decoded."""
    state: int = -1
    """Number of the environment's state before the next turn; -1 for none."""
    info: dict[str, float] = field(default_factory=dict)
    """Numbers that the environment or the agent reported by name, summed over turns."""
    tree: Tree | None = None
    """What an agent asked for; None without an agent. Once it has ended, the trajectory is what
    its last answer read, and that answer."""

    def append_completion(self, completion: Completion) -> Episode:
        """Return a copy with this completion appended, in the same group."""
        return replace(
            self, trajectory=self.trajectory.append_completion(completion), info=dict(self.info)
        )

    @property
    def turn(self) -> list[int]:
        """Return the ids of the policy's latest turn."""
        return self.trajectory.response[self.turn_start :]

    @property
    def traces(self) -> tuple[Trajectory, ...]:
        """Return its traces, see FinishedEpisode."""
        own = () if self.tree is None else self.tree.traces()
        return own or (self.trajectory,)

    @property
    def key(self) -> str:
        """Return its name, unique in the run."""
        return self.group.episode_key(self.sample)

    @property
    def order(self) -> tuple[int, int, int]:
        """Return its position among the sequences of a replica."""
        return (self.group.number, self.sample, 0)

    @property
    def request_key(self) -> str:
        """Return the name of the request that draws its next tokens."""
        return f"{self.key}@{self.trajectory.num_following}"

    def request(self) -> Request:
        """Return the request that draws its next tokens."""
        draw = self.group.draw
        num_following = self.trajectory.num_following
        return draw.request(
            self.request_key,
            self.trajectory.token_ids,
            max_tokens=draw.max_tokens - num_following,
            seed=seed_after(sample_seed(self.group, self.sample), num_following),
            is_greedy=self.sample == GREEDY,
            num_begun=num_following - self.turn_start,
        )


def sample_seed(group: Group, sample: int) -> int:
    """Return the 63-bit seed of one sample.

    It depends on the run's seed, the purpose, the step, the prompt's slot and the sample's
    position, never on a rank.
    """
    draw = group.draw
    return hashed(f"{draw.seed}/{draw.purpose}/{group.step}/{group.slot}/{sample}") >> 1


def seed_after(seed: int, count: int) -> int:
    """Return the 63-bit seed of a request that continues a sample after `count` tokens.

    A continuation must not draw the same random numbers as the beginning.
    """
    return hashed(f"{seed}/{count}") >> 1 if count else seed


def place(group: Group) -> str:
    """Return the step or the evaluation of a group, for messages."""
    is_eval = group.draw.purpose == "eval"
    return f"evaluation after {group.step} steps" if is_eval else f"step {group.step}"


def failure_text(sample: FinishedEpisode) -> str:
    """Return a message that names the sample and says how its reward failed."""
    which = "the greedy sample" if sample.sample == GREEDY else f"sample {sample.sample}"
    reward = sample.reward
    return (
        f"the reward of {sample.prompt.origin}, {which} failed: {reward.failure} after "
        f"{reward.seconds:.1f} s: {reward.message}\n  response: {sample.text[:200]!r}"
    )
