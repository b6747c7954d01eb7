"""What one sample is while it is drawn, and when it is done."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from spmdrl.engine.protocol import Completion, Request
from spmdrl.types import Prompt
from spmdrl.workers.pool import RewardResult

GREEDY = -1
"""Position in its group of a prompt's greedy response: a baseline, never trained on."""


@dataclass(frozen=True)
class Draw:
    """How samples of one purpose are drawn."""

    seed: int
    purpose: str
    """`train` or `eval`: keeps their randomness apart."""
    samples: int
    """Responses per prompt."""
    max_tokens: int
    """Longest response in tokens, what an environment says between turns included."""
    temperature: float
    is_seeded: bool
    stop_token_ids: tuple[int, ...]
    has_greedy: bool = False
    """Draw one more response per prompt at temperature 0."""
    must_score: bool = True
    """The first reward that fails ends the run."""


@dataclass
class Response:
    """All that follows a prompt: sampled tokens, and an environment's between its turns."""

    tokens: list[int] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    """By the policy; False for an environment's tokens."""
    logprobs: list[float] = field(default_factory=list)
    """Natural, as sampled; 0 for an environment's tokens."""
    versions: list[int] = field(default_factory=list)
    """Policy version that sampled each token; -1 for an environment's."""
    is_truncated: bool = False
    """The last turn was cut at the length limit."""
    states: list[int] = field(default_factory=list)
    """Of each finished turn of the policy: number of the state that it answers; -1 for none."""
    earned: list[float] = field(default_factory=list)
    """Of each finished turn: its reward from the environment, task units."""
    routes: Tensor | None = None
    """[n, L, K] of prompt and response, as the engine chose them; see Completion."""

    @property
    def turns(self) -> int:
        """Return how many turns of the policy are finished."""
        return len(self.states)

    @property
    def num_sampled(self) -> int:
        """Return how many tokens the policy sampled."""
        return sum(self.is_sampled)

    def sampled(self, completion: Completion) -> None:
        """Append what the engine drew."""
        count = len(completion.tokens)
        self.tokens += completion.tokens
        self.is_sampled += [True] * count
        self.logprobs += completion.logprobs
        self.versions += completion.versions
        self.is_truncated = completion.is_truncated
        if completion.routes is not None:
            # A turn computes what came before it anew, or finds it in the cache. It was drawn with
            # the routes of then.
            old = completion.routes[:0] if self.routes is None else self.routes
            self.routes = torch.cat([old, completion.routes[len(old) :]])

    def observed(self, tokens: list[int]) -> None:
        """Append what an environment said."""
        self.tokens += tokens
        self.is_sampled += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)


@dataclass(frozen=True)
class Sample:
    """One finished response with its reward."""

    slot: int
    """Position of the prompt in the step's batch."""
    sample: int
    """Position within the prompt's group, or GREEDY."""
    prompt: Prompt
    response: Response
    text: str
    """Decoded response, special tokens left out."""
    reward: RewardResult


@dataclass
class Group:
    """A prompt and its samples, under way or finished."""

    number: int
    """Order among this replica's groups."""
    step: int
    """Step whose prompts it is of: with `slot` it keys the randomness."""
    slot: int
    """Position of the prompt among that step's."""
    prompt: Prompt
    version: int
    """Policy version when it was admitted: no token of it is older."""
    draw: Draw
    samples: dict[int, Sample] = field(default_factory=dict)
    """Finished ones, by position."""

    @property
    def positions(self) -> range:
        """Return the positions of its samples, the greedy one first."""
        return range(GREEDY if self.draw.has_greedy else 0, self.draw.samples)

    @property
    def is_complete(self) -> bool:
        """Whether all samples are finished and rewarded."""
        return len(self.samples) == len(self.positions)

    @property
    def drawn(self) -> list[Sample]:
        """Return the samples in order, without the greedy one."""
        return [self.samples[i] for i in sorted(self.samples) if i != GREEDY]


Stage = Literal["open", "draw", "answer", "score"]


@dataclass
class Episode:
    """One sample under way."""

    group: Group
    sample: int
    stage: Stage = "draw"
    """What comes next: the environment opens, the engine draws a turn, the environment answers
    it, or the reward functions score the end."""
    response: Response = field(default_factory=Response)
    opening: list[int] = field(default_factory=list)
    """Prompt ids that an environment's opening gave; empty where the data row's are used."""
    environment: bytes = b""
    """The pickled environment, see `environments.protocol`."""
    turn_start: int = 0
    """Where in the response the policy's latest turn begins."""
    text: str = ""
    """The latest turn, decoded."""
    state: int = -1
    """Number of the state that the next turn answers; -1 for none."""
    info: dict[str, float] = field(default_factory=dict)
    """What the environment reported besides, added up over turns."""

    def copy(self) -> Episode:
        """Return one that does not change with this one; the group is the same."""
        return replace(self, response=copy.deepcopy(self.response), info=dict(self.info))

    @property
    def prompt(self) -> tuple[int, ...]:
        """Return the ids that the response follows."""
        return tuple(self.opening) or self.group.prompt.tokens

    @property
    def turn(self) -> Completion:
        """Return the policy's latest turn as the engine gave it."""
        part, response = slice(self.turn_start, None), self.response
        return Completion(
            self.key,
            tuple(response.tokens[part]),
            tuple(response.logprobs[part]),
            response.is_truncated,
            tuple(response.versions[part]),
        )

    @property
    def key(self) -> str:
        """Return its name, unique in the run."""
        name = "greedy" if self.sample == GREEDY else self.sample
        return f"{self.group.draw.purpose}-{self.group.step}-{self.group.slot}-{name}"

    @property
    def request_key(self) -> str:
        """Return the name of the request that draws its next tokens."""
        return f"{self.key}@{len(self.response.tokens)}"

    def request(self) -> Request:
        """Return the request that draws its next tokens."""
        draw, so_far = self.group.draw, self.response.tokens
        is_greedy = self.sample == GREEDY
        return Request(
            key=self.request_key,
            prompt=(*self.prompt, *so_far),
            max_tokens=draw.max_tokens - len(so_far),
            temperature=0.0 if is_greedy else draw.temperature,
            stop_token_ids=draw.stop_token_ids,
            seed=self._seed() if draw.is_seeded and not is_greedy else None,
        )

    def _seed(self) -> int:
        seed = sample_seed(self.group, self.sample)
        if not self.response.tokens:
            return seed
        # A continuation must not draw the numbers of the beginning once more.
        return _hashed(f"{seed}/{len(self.response.tokens)}")


def sample_seed(group: Group, sample: int) -> int:
    """Return the 63-bit seed of one sample: a function of the run's seed, the step, the
    prompt's slot and the sample's position, never of a rank."""
    draw = group.draw
    return _hashed(f"{draw.seed}/{draw.purpose}/{group.step}/{group.slot}/{sample}")


def _hashed(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def place(group: Group) -> str:
    """Return where in the run a group is, for messages."""
    is_eval = group.draw.purpose == "eval"
    return f"evaluation after {group.step} steps" if is_eval else f"step {group.step}"


def failure_text(sample: Sample) -> str:
    """Say which sample's reward failed and how."""
    which = "the greedy sample" if sample.sample == GREEDY else f"sample {sample.sample}"
    reward = sample.reward
    return (
        f"the reward of data row {sample.prompt.index}, {which} failed: {reward.failure} after "
        f"{reward.seconds:.1f} s: {reward.message}\n  response: {sample.text[:200]!r}"
    )
