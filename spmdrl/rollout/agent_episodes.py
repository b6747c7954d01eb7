"""Episodes that agents play: each calls the policy itself, as often as it likes.

    solve -> score -> finished

While its agent runs, an episode waits among those at the workers. What the agent asks for comes
from the gateway. Each sample of it goes through the engine as an `AskedSample`. When the agent has
ended, the reward is what it returned, or what the reward functions give its last answer.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from spmdrl.agents.gateway import Gateway
from spmdrl.agents.messages import NO_PARENT, Answer, Ask
from spmdrl.config import Config
from spmdrl.engine.protocol import Completion, EngineProtocol, Request
from spmdrl.rollout.decisions import Decisions
from spmdrl.rollout.episode import GREEDY, Episode, Group, sample_seed, seed_after
from spmdrl.rollout.tree import AgentCall, Tree
from spmdrl.workers.messages import LOST, RewardResult, SolveResult
from spmdrl.workers.pool import PoolResult, RewardPool

log = logging.getLogger(__name__)
AGENT = "agent"
"""Name of the agent's reward among a sample's parts."""


@dataclass
class AskedSample:
    """One sample that an agent asked for, on its way through the engine."""

    episode: Episode
    node: int
    """Of the episode's tree."""

    @property
    def tree(self) -> Tree:
        """Return the tree of its episode."""
        assert self.episode.tree is not None
        return self.episode.tree

    @property
    def call(self) -> AgentCall:
        """Return the request of the agent."""
        return self.tree.calls[self.tree.nodes[self.node].call]

    @property
    def place(self) -> tuple[str, int]:
        """Return its episode and the number of the request."""
        return self.episode.key, self.call.id

    @property
    def group(self) -> Group:
        """Return the group of its episode."""
        return self.episode.group

    @property
    def order(self) -> tuple[int, int, int]:
        """Return its position among the sequences of a replica."""
        return (self.group.number, self.episode.sample, self.node)

    @property
    def request_key(self) -> str:
        """Return the name of the request that draws its next tokens."""
        return f"{self.episode.key}#{self.node}@{self._num_drawn}"

    @property
    def _num_drawn(self) -> int:
        return len(self.tree.nodes[self.node].sampled.tokens)

    def request(self) -> Request:
        """Return the request that draws its next tokens."""
        call = self.call
        count = self._num_drawn
        return self.group.draw.request(
            self.request_key,
            self.tree.path(self.node).token_ids,
            max_tokens=call.max_tokens - count,
            seed=seed_after(call.seed_of(self.node), count),
            is_greedy=self.episode.sample == GREEDY,
            num_begun=count,
            stop=call.ask.stop,
        )

    def append_completion(self, completion: Completion) -> AskedSample:
        """Append what an aborted request drew, and return this sample."""
        self.tree.draw(self.node, completion, is_complete=False)
        return self


def asked_samples(episode: Episode) -> list[AskedSample]:
    """Return the unfinished samples that an episode's agent asked for."""
    assert episode.tree is not None
    return [AskedSample(episode, node) for node in episode.tree.unfinished]


def with_drawn(
    episodes: Iterable[Episode], asked: Iterable[tuple[AskedSample, Completion]]
) -> list[Episode]:
    """Return episodes with what the engine has drawn for the samples of their agents so far."""
    drawn: dict[str, dict[int, Completion]] = {}
    for sample, completion in asked:
        drawn.setdefault(sample.episode.key, {})[sample.node] = completion
    found = []
    for episode in episodes:
        tree = episode.tree
        if tree is not None and not tree.is_closed and episode.key in drawn:
            episode = replace(episode, tree=tree.with_drawn(drawn[episode.key]))
        found.append(episode)
    return found


class AgentEpisodes:
    """Runs the agents of a replica's episodes, and answers them.

    Args:
        cfg: its data, sampling and rollout are used.
        pool: runs the agents and the reward functions.
        gateway: the endpoint that the agents call. None if all decisions are repeated: then no
            agent runs.
    """

    def __init__(self, cfg: Config, *, pool: RewardPool, gateway: Gateway | None):
        self.cfg = cfg
        self.pool = pool
        self.gateway = gateway
        self._running: set[Hashable] = set()  # keys of episodes whose agent runs
        self._lost: set[Hashable] = set()  # of those whose agent was lost once

    # ---------------------------------------------------------------- what comes from outside

    def poll(self) -> list[PoolResult]:
        """Return the results of workers, without waiting.

        An agent that is lost for the first time begins again, see `begin`.
        """
        results: list[PoolResult] = []
        again: list[PoolResult] = []
        for result in self.pool.poll():
            if result.failure != LOST:
                results.append(result)
            elif result.key in self._lost:
                results.append(replace(result, failure="error"))
            else:
                again.append(result)
        if again:
            keys = {result.key for result in again}
            self._lost |= keys
            self._running -= keys
            log.warning("%s; %d agents begin again", again[0].message, len(again))
        return results

    @contextlib.contextmanager
    def serving(self, purpose: str) -> Iterator[None]:
        """Answer the agents of one purpose, `Draw.purpose`. The time of others stands still."""
        self.pool.serve_agents(purpose)
        yield
        self.pool.serve_agents("")

    def begin(self, decisions: Decisions, outside: Mapping[Hashable, Episode]) -> None:
        """Start the agents of episodes that have none, unless decisions are repeated.

        Args:
            outside: {key: episode} of the episodes at the workers.
        """
        waiting = [
            episode.key
            for episode in outside.values()
            if episode.stage == "solve" and episode.key not in self._running
        ]
        is_repeated = decisions.is_repeating
        for key in decisions.agents_begin(waiting):
            episode = outside[key]
            assert episode.tree is not None
            episode.tree.unclaim()
            if not is_repeated:
                self._run(episode)

    def _run(self, episode: Episode) -> None:
        assert self.gateway is not None
        self._running.add(episode.key)
        self.pool.solve(
            episode.key,
            row=episode.group.prompt.row,
            seed=sample_seed(episode.group, episode.sample),
            source=episode.group.prompt.source,
            purpose=episode.group.draw.purpose,
            base_url=self.gateway.address,
            api_key=self.gateway.open(episode.key),
        )

    # ---------------------------------------------------------------- requests and answers

    def take(self, asks: Sequence[Ask], outside: Mapping[Hashable, Episode]) -> list[AskedSample]:
        """Return the samples to draw for the requests of agents.

        Args:
            outside: {key: episode} of the episodes at the workers.
        """
        samples: list[AskedSample] = []
        for ask in asks:
            episode = outside[ask.episode]
            tree = episode.tree
            assert tree is not None
            call = tree.claim(ask)
            if call is not None:
                self._answer(episode, call)
                continue
            room, problem = self._room(episode, ask)
            if problem:
                self._send(episode, Answer(ask.episode, ask.id, refusal=problem))
                continue
            call = tree.add(ask, room=room)
            samples += [AskedSample(episode, node) for node in call.nodes]
        return samples

    def _room(self, episode: Episode, ask: Ask) -> tuple[int, str]:
        """Return how many tokens the run allows for each sample of a request.

        Returns: the number; and why there is no room, or an empty text.
        """
        assert episode.tree is not None
        ids, sampled = episode.tree.read_by(ask)
        most_prompt = self.cfg.data.max_prompt_tokens
        most_sampled = episode.group.draw.max_tokens
        most = most_prompt + most_sampled
        if ask.parent == NO_PARENT and len(ids) > most_prompt:
            return 0, f"the messages have {len(ids)} tokens, above {most_prompt} for a first prompt"
        if sampled >= most_sampled:
            return (
                0,
                f"{sampled} tokens of this conversation are answers; {most_sampled} are allowed",
            )
        if not 0 < len(ids) < most:
            return 0, f"the messages have {len(ids)} tokens; from 1 to {most - 1} are allowed"
        return min(most - len(ids), most_sampled - sampled), ""

    def show(self, engine: EngineProtocol, drawing: Iterable[object]) -> None:
        """Send the new tokens of samples whose agents read along.

        Args:
            drawing: what is in the engine.
        """
        if self.gateway is None or not self.gateway.streams:
            return
        samples = {
            one.request_key: one
            for one in drawing
            if isinstance(one, AskedSample) and one.place in self.gateway.streams
        }
        for key, tokens in engine.tokens_so_far(samples.keys()).items():
            sample = samples[key]
            number = sample.node - sample.call.nodes.start
            shown = self.gateway.streams[sample.place][number]
            earlier = sample.tree.nodes[sample.node].sampled.tokens
            new = [*earlier[shown:].tolist(), *tokens[max(0, shown - len(earlier)) :]]
            if new:
                self.gateway.show(*sample.place, number, new)

    def complete(self, sample: AskedSample, completion: Completion) -> None:
        """Add a finished sample to its tree, and answer the agent if it has all of its samples."""
        tree = sample.tree
        if not tree.is_closed:
            tree.draw(sample.node, completion, is_complete=True)
            self._answer(sample.episode, sample.call)

    def _answer(self, episode: Episode, call: AgentCall) -> None:
        tree = episode.tree
        assert tree is not None
        if not (call.is_claimed and tree.is_complete(call)):
            return
        nodes = [tree.nodes[number] for number in call.nodes]
        self._send(
            episode,
            Answer(
                episode.key,
                call.id,
                nodes=tuple(call.nodes),
                tokens=tuple(tuple(node.sampled.tokens.tolist()) for node in nodes),
                logprobs=tuple(tuple(node.sampled.rollout_logprobs.tolist()) for node in nodes),
                are_truncated=tuple(node.is_truncated for node in nodes),
            ),
        )

    def _send(self, episode: Episode, answer: Answer) -> None:
        if episode.key in self._running:
            assert self.gateway is not None
            self.gateway.answer(answer)

    # ---------------------------------------------------------------- the end

    def end(self, episode: Episode, result: SolveResult) -> RewardResult | None:
        """End an episode whose agent has ended.

        Returns: its reward, or its failed reward; None if the reward functions must score it.
        """
        tree = episode.tree
        assert tree is not None
        if episode.key in self._running:
            assert self.gateway is not None
            self._running.remove(episode.key)
            self._lost.discard(episode.key)
            self.gateway.end(episode.key)
        tree.is_closed = True
        episode.info = {f"{AGENT}/{name}": value for name, value in result.metrics.items()}
        answered = tree.answered
        if answered:
            episode.trajectory = tree.path(answered[-1])
            drawn = tree.nodes[answered[-1]].sampled.tokens
            episode.turn_start = episode.trajectory.num_following - len(drawn)
        if result.failure:
            return replace(_failed(result), message=f"{AGENT}: {result.message}")
        if not answered:
            message = f"{AGENT}: it ended without a single answer of the policy"
            return replace(_failed(result), failure="error", message=message)
        if result.value is None:
            return None
        parts = {AGENT: result.value}
        return RewardResult(episode.key, result.value, parts=parts, metrics=dict(episode.info))


def _failed(result: SolveResult) -> RewardResult:
    return RewardResult(
        result.key, seconds=result.seconds, failure=result.failure, message=result.message
    )
