"""The generation loop of one replica. An episode goes through these stages:

    draw -> score -> finished                          without an environment
    open -> draw -> answer -> draw -> ... -> score     with one
    solve -> score                                     with an agent, see agent_episodes.py

With a judge, the reward functions ask the engine too, see judging.py; other programs may as well,
see serving.py.

The engine draws, and worker processes do the rest. Neither waits for the other: a tick takes one
engine step, and then the results that the workers have.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from transformers import PreTrainedTokenizerBase

from spmdrl.agents.gateway import Gateway
from spmdrl.agents.messages import JUDGE, NO_EPISODES, SERVE
from spmdrl.config import Config
from spmdrl.engine.protocol import Completion, Drafts, EngineProtocol, Request
from spmdrl.environments.conversation import Chat
from spmdrl.errors import Refusal, RewardFailed
from spmdrl.rollout.agent_episodes import AgentEpisodes, AskedSample, asked_samples, with_drawn
from spmdrl.rollout.decisions import Answer, Decisions, Report
from spmdrl.rollout.episode import (
    Episode,
    FinishedEpisode,
    Group,
    Stage,
    failure_text,
    place,
    sample_seed,
)
from spmdrl.rollout.failed_rewards import FailedRewardLog
from spmdrl.rollout.idle import Idle
from spmdrl.rollout.judging import EngineJudge, JudgeSample
from spmdrl.rollout.link import Link
from spmdrl.rollout.serving import ServedRequests
from spmdrl.rollout.trajectory import Trajectory
from spmdrl.rollout.tree import Tree
from spmdrl.types import Sums
from spmdrl.workers.messages import OVERLONG, Failure, RewardResult, SolveResult, TurnResult
from spmdrl.workers.pool import RewardPool

Drawable = Episode | AskedSample | JudgeSample
"""What the engine draws tokens for."""
ENVIRONMENT = "environment"
"""Name of the environment's rewards among a sample's parts."""


class Loop:
    """Runs a replica's episodes. Only the replica's leader has a loop.

    Args:
        cfg: the config, of which `data` is used.
        tokenizer: decodes responses for the reward functions.
        pool: worker processes of rewards and environments.
        link: to the replica's other ranks.
        chats: {index of a data source: the Chat of its episodes}, for sources with an environment.
            An episode of another source ends with its first response.
        agents: plays all episodes; None without an agent.
        judge: answers reward functions; None without `rewards.judge`.
        served: answers other programs; None without `rollout.serve`.
        gateway: what agents, reward functions and other programs ask; None if nothing can.
    """

    def __init__(
        self,
        cfg: Config,
        *,
        tokenizer: PreTrainedTokenizerBase,
        pool: RewardPool,
        link: Link,
        chats: Mapping[int, Chat] = MappingProxyType({}),
        agents: AgentEpisodes | None = None,
        judge: EngineJudge | None = None,
        served: ServedRequests | None = None,
        gateway: Gateway | None = None,
    ):
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.pool = pool
        self.link = link
        self.chats = chats
        self.agents = agents
        self.judge = judge
        self.served = served
        self._gateway = gateway
        self.decisions = Decisions()
        self.idle = Idle()
        self._drafts: list[Drafts] = []
        self.failed_rewards = FailedRewardLog()
        self._recomputed = (0, 0.0)  # tokens and seconds, see `take_recomputed`
        self._to_draw: list[Drawable] = []
        self._drawing: dict[str, Drawable] = {}  # in the engine, by request
        self._outside: dict[Hashable, Episode] = {}  # at the workers, by key
        # Those of `_outside` that no function scores yet: past decisions may hold their rewards.
        self._unscored: dict[Hashable, Episode] = {}

    def admit(self, group: Group) -> None:
        """Start all samples of a new group."""
        stage: Stage = "draw" if self._chat_of(group) is None else "open"
        for sample in group.positions:
            # An environment or an agent may begin with other tokens than these.
            trajectory = Trajectory.from_prompt(group.prompt.tokens)
            episode = Episode(group, sample, trajectory, stage=stage)
            if self.agents is not None:
                episode.stage = "solve"
                episode.tree = Tree(sample_seed(group, sample))
            self.start(episode)

    def _chat_of(self, group: Group) -> Chat | None:
        return self.chats.get(group.prompt.source)

    def start(self, episode: Episode) -> None:
        """Start an episode, or resume one of a checkpoint at its stage.

        Raises: Refusal if the episode's source has gained or lost its environment or its agent
            since then.
        """
        _check_player(episode, chat=self._chat_of(episode.group), agents=self.agents)
        if episode.stage == "draw":
            self._to_draw.append(episode)
        elif episode.stage == "open":
            self._outside[episode.key] = episode
            self.pool.open(
                episode.key,
                row=episode.group.prompt.row,
                seed=sample_seed(episode.group, episode.sample),
                source=episode.group.prompt.source,
            )
        elif episode.stage == "answer":
            self._answer([episode])
        elif episode.stage == "solve":
            self._outside[episode.key] = episode
            self._to_draw += asked_samples(episode)
        else:
            self._score([episode])

    @property
    def is_busy(self) -> bool:
        """Whether any episode is unfinished."""
        return bool(self._to_draw or self._drawing or self._outside)

    @property
    def num_unsampled(self) -> int:
        """Return how many episodes may draw another turn."""
        return len(self._to_draw) + len(self._drawing) + self._num_at_environments()

    def _num_at_environments(self) -> int:
        """Return how many episodes wait for their environment, or for their agent to ask."""
        asking: set[str] = set()
        if self.agents is not None:
            drawing = (*self._to_draw, *self._drawing.values())
            asking = {one.episode.key for one in drawing if isinstance(one, AskedSample)}
        outside = self._outside.items()
        return sum(episode.stage != "score" and key not in asking for key, episode in outside)

    def unfinished(self, engine: EngineProtocol) -> list[Episode]:
        """Return every unfinished episode, with the tokens drawn so far."""
        waiting = [one for one in self._to_draw if isinstance(one, Episode)]
        drawn: list[Episode] = []
        asked: list[tuple[AskedSample, Completion]] = []
        for completion in engine.unfinished():
            one = self._drawing.get(completion.key)
            if isinstance(one, AskedSample):
                asked.append((one, completion))
            elif isinstance(one, Episode):
                drawn.append(one.append_completion(completion))
        return [*waiting, *with_drawn(self._outside.values(), asked), *drawn]

    def requeue(self, completions: Sequence[Completion]) -> None:
        """Queue the episodes of requests that the engine aborted, to draw the rest of their turns.

        Their order does not depend on their places in the engine, so that a resumed run continues
        in the same order. Verdicts of a judge are dropped: each complete group has its rewards.
        """
        if self.judge is not None:
            self.judge.drop()
        waiting = [one for one in self._to_draw if not isinstance(one, JudgeSample)]
        asked = []
        for completion in completions:
            one = self._drawing.pop(completion.key)
            if isinstance(one, JudgeSample):
                asked.append((one, completion))
            else:
                waiting.append(one.append_completion(completion))
        if self.served is not None:
            self.served.put_back(asked)  # without a judge: see check/rules
        self._to_draw = [*sorted(waiting, key=lambda one: one.order)]

    def serving(self, purpose: str) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the engine draws for samples of one purpose."""
        return contextlib.nullcontext() if self.agents is None else self.agents.serving(purpose)

    @contextlib.contextmanager
    def hold_back(self) -> Iterator[None]:
        """Keep the waiting episodes out of the engine during an evaluation.

        Its samples must depend on the weights alone, not on other sequences in a batch.
        """
        waiting = self._to_draw
        self._to_draw = []
        if self.served is not None:
            self.served.is_held = True
        with self.serving("eval"):
            yield
        if self.served is not None:
            self.served.is_held = False
        self._to_draw = waiting

    def tick(self, engine: EngineProtocol) -> list[Group]:
        """Take one engine step, or wait for a worker if the engine has nothing to do.

        Returns: groups whose last sample finished.
        Raises: RewardFailed for the first reward that fails, if draw.must_score; Refusal for an
            opening that is too long, unless data.overlong_prompts is drop.
        """
        if self.agents is not None:
            self.agents.begin(self.decisions, self._outside)
        if self._unscored and not self.decisions.is_repeating:
            unscored = [*self._unscored.values()]
            self._unscored = {}
            self._submit(unscored)
        if self.served is not None:
            self._to_draw += self.served.due()
        new = [one for one in self._to_draw if not _is_unwanted(one)]
        self._to_draw = []
        began = time.perf_counter()
        playing = self._num_at_environments()
        # With nothing to draw, wait for a worker instead of taking empty engine steps.
        is_idle = not new and not engine.is_busy
        if not is_idle:
            requests = [_request_of(one) for one in new]
            # The replica's other ranks add the same requests: all must take part in the step below.
            self.link.step(requests)
            for request in requests:
                engine.add(request)
            self._drawing |= {one.request_key: one for one in new}
            drawing = len(self._drawing)
            judging = sum(isinstance(one, JudgeSample) for one in self._drawing.values())
            completions = engine.step()
            self.decisions.count_step()
            seconds = time.perf_counter() - began
            self.idle.count_step(seconds, drawing=drawing, playing=playing, judging=judging)
            if (asked := self.judge or self.served) is not None:
                asked.count_step(seconds, share=judging / max(1, drawing))
            self._count_recomputed(requests, seconds=seconds)
            self._receive_completions(completions)
            if self.agents is not None:
                self.agents.show(engine, self._drawing.values())
            if self.served is not None:
                self.served.show(engine, self._drawing.values())
        answers = self.decisions.answers(self, self._outside, is_idle=is_idle)
        if is_idle:
            self.idle.add("environment" if playing else "reward", time.perf_counter() - began)
        complete = self._receive_results(answers)
        if self._gateway is not None or self.agents is not None:
            self._receive_asks()
        return complete

    def _receive_asks(self) -> None:
        """Queue what agents, reward functions and other programs have asked for."""
        are_awaited = not self.decisions.is_repeating
        asks = self.decisions.asks(self._outside)
        if self.agents is not None:
            own = [ask for ask in asks if ask.episode not in NO_EPISODES]
            self._to_draw += self.agents.take(own, self._outside)
        if self.judge is not None:
            own = [ask for ask in asks if ask.episode == JUDGE]
            self._to_draw += self.judge.take(own, are_awaited=are_awaited)
        if self.served is not None:
            self.served.queue(ask for ask in asks if ask.episode == SERVE)

    # ---------------------------------------------------------------- what comes from outside

    def poll(self) -> list[Report]:
        """Return the results of workers and the requests to the gateway, without waiting."""
        asks = [] if self._gateway is None else self._gateway.poll()
        results = self.pool.poll() if self.agents is None else self.agents.poll()
        return [*results, *asks]

    def wait(self) -> None:
        """Sleep until there may be something to poll, or a deadline may have passed."""
        self.pool.wait(also=[] if self._gateway is None else [self._gateway.fileno()])

    def _count_recomputed(self, requests: Sequence[Request], *, seconds: float) -> None:
        """Count what an engine step computed again of responses that it had begun."""
        if again := sum(len(request.prompt) for request in requests if request.num_begun):
            tokens, earlier = self._recomputed
            self._recomputed = (tokens + again, earlier + seconds)

    def take_recomputed(self, *, is_first: bool) -> Sums:
        """Return how many tokens were computed again since the last call, and the seconds of the
        engine steps that did so, which also drew for other requests; reset both.

        Args:
            is_first: whether this is the first replica, see `pack_step`.
        """
        tokens, seconds = self._recomputed
        self._recomputed = (0, 0.0)
        return {
            "rollout/recomputed_tokens": (tokens, int(is_first)),
            "time/recompute": (seconds, 1),
        }

    def draft_sums(self) -> Sums:
        """Return the sums of the drafts of training samples since the last call; empty for none."""
        drafts = self._drafts
        self._drafts = []
        tokens = sum(one.num_tokens for one in drafts)
        accepted = sum(one.num_accepted for one in drafts)
        steps = sum(one.num_steps for one in drafts)
        if not drafts:
            return {}
        return {
            "rollout/draft_accepted_frac": (accepted, tokens),
            "rollout/draft_step_tokens": (accepted + steps, steps),
        }

    # ---------------------------------------------------------------- from stage to stage

    def _receive_completions(self, completions: Sequence[Completion]) -> None:
        """Send finished turns to their environment, or to the reward functions."""
        episodes = []
        for completion in completions:
            episode = self._drawing.pop(completion.key)
            if isinstance(episode, JudgeSample):
                asked = self.judge or self.served
                assert asked is not None
                asked.complete(episode, completion)
                continue
            if completion.drafts is not None and episode.group.draw.purpose == "train":
                self._drafts.append(completion.drafts)
            if isinstance(episode, AskedSample):
                assert self.agents is not None
                self.agents.complete(episode, completion)
                continue
            episodes.append(episode)
            trajectory = episode.trajectory.append_completion(completion)
            episode.trajectory = trajectory.end_turn(episode.state)
        # The tokenizer decodes many turns at once faster than one after the other.
        by_chat: dict[Chat | None, list[Episode]] = {}
        for episode in episodes:
            by_chat.setdefault(self._chat_of(episode.group), []).append(episode)
        for chat, own in by_chat.items():
            if chat is not None:
                self._answer(own)
                continue
            texts = self.texts(e.trajectory.response for e in own)
            for episode, text in zip(own, texts):
                episode.text = text
            self._score(own)

    def _answer(self, episodes: Sequence[Episode]) -> None:
        """Send the latest turns of episodes to their environment; all have the same chat."""
        chat = self._chat_of(episodes[0].group)
        assert chat is not None
        responses = chat.decode_turns(
            [episode.turn for episode in episodes],
            are_truncated=[episode.trajectory.is_truncated for episode in episodes],
        )
        for episode, response in zip(episodes, responses):
            episode.stage = "answer"
            episode.text = response.text
            self._outside[episode.key] = episode
            self.pool.turn(
                episode.key,
                environment=episode.environment,
                response=response,
                source=episode.group.prompt.source,
            )

    def _score(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            episode.stage = "score"
            self._outside[episode.key] = episode
        if self.judge is not None and self.decisions.is_repeating:
            self._unscored |= {episode.key: episode for episode in episodes}
        else:
            self._submit(episodes)

    def _submit(self, episodes: Sequence[Episode]) -> None:
        """Send episodes to the reward functions."""
        for episode in episodes:
            self.pool.submit(
                episode.key,
                prompt=episode.group.prompt,
                response_text=episode.text,
                response_tokens=episode.turn,
                truncated=episode.trajectory.is_truncated,
                group=episode.group.key,
                position=episode.sample,
                step=episode.group.step,
            )
        for group in {episode.group.key: episode.group for episode in episodes}.values():
            self._close_if_whole(group)

    def _close_if_whole(self, group: Group) -> None:
        """Let functions of whole groups score a group once all its samples wait for a reward."""
        if "group" not in self.pool.scopes:
            return
        if any(group.episode_key(sample) in self._unscored for sample in group.positions):
            return
        # Look only at this group's episodes: workers may hold thousands, and each asks once.
        own = (self._outside.get(group.episode_key(sample)) for sample in group.positions)
        waiting = sum(episode is not None and episode.stage == "score" for episode in own)
        if waiting + len(group.samples) == len(group.positions):
            self.pool.close_group(group.key)

    def _receive_results(self, results: Iterable[Answer]) -> list[Group]:
        """Process the workers' results; return the groups that they complete."""
        complete = []
        for result in results:
            episode = self._outside.pop(result.key)
            self._unscored.pop(result.key, None)
            group = episode.group
            reward: RewardResult | None
            if isinstance(result, TurnResult):
                reward = self._receive_turn(episode, result)
            elif isinstance(result, SolveResult):
                reward = self._receive_end(episode, result)
            elif self._chat_of(group) is not None:
                reward = _add_environment_reward(result, episode)
            elif episode.tree is not None:
                reward = replace(result, metrics=result.metrics | episode.info)
            else:
                reward = result
            if reward is None:
                continue
            self._finish(episode, reward)
            if group.is_complete:
                complete.append(group)
        return complete

    def _receive_end(self, episode: Episode, result: SolveResult) -> RewardResult | None:
        """End an episode whose agent has ended.

        Returns: its reward, or its failed reward; None if the reward functions must score it.
        """
        assert self.agents is not None
        reward = self.agents.end(episode, result)
        (episode.text,) = self.texts([episode.turn])
        if reward is None:
            self._score([episode])
        return reward

    def _receive_turn(self, episode: Episode, result: TurnResult) -> RewardResult | None:
        """Continue an episode after its environment opened it or answered a turn.

        Returns: the failed reward of an episode that cannot continue, else None.
        """
        chat = self._chat_of(episode.group)
        assert chat is not None
        if result.failure:
            return _fail(result, result.failure, f"environment: {result.message}")
        episode.environment = result.environment
        episode.state = result.state
        for name, value in result.info.items():
            episode.info[name] = episode.info.get(name, 0.0) + value
        is_opening = episode.stage == "open"
        trajectory = episode.trajectory
        if not is_opening:
            # `end_turn` gave the turn the reward 0. Its own reward comes with the answer.
            earned = (*trajectory.earned[:-1], result.reward)
            trajectory = replace(trajectory, earned=earned)
            episode.trajectory = trajectory
            if result.is_done or trajectory.is_truncated:
                self._score([episode])
                return None
        messages = list(result.messages)
        try:
            if is_opening:
                tokens = chat.encode_opening(messages)
            else:
                tokens = chat.encode_answer(episode.turn, messages)
        except Refusal as error:
            return _fail(result, "error", f"environment: {error}")
        if is_opening:
            if len(tokens) > self.cfg.data.max_prompt_tokens:
                return _fail_overlong(self.cfg, result, episode, length=len(tokens))
            episode.trajectory = Trajectory.from_prompt(tokens)
        elif trajectory.num_following + len(tokens) >= episode.group.draw.max_tokens:
            # There is no room for another turn.
            episode.trajectory = replace(trajectory, is_truncated=True)
            self._score([episode])
            return None
        else:
            episode.trajectory = trajectory.append_answer(tokens)
            episode.turn_start = episode.trajectory.num_following
        episode.stage = "draw"
        self._to_draw.append(episode)
        return None

    def _finish(self, episode: Episode, reward: RewardResult) -> None:
        group = episode.group
        traces = episode.traces
        text = episode.text
        prompt = group.prompt
        if self._chat_of(group) is not None or self.agents is not None:
            (text,) = self.texts([traces[-1].response])
            # Keep special tokens, which the text of a row's prompt has too.
            ids = traces[0].prompt.once()
            (opening,) = self.tokenizer.batch_decode([ids], skip_special_tokens=False)
            prompt = traces[0].update_prompt(prompt, text=opening)
        finished = FinishedEpisode(group.slot, episode.sample, prompt, traces, text, reward)
        group.samples[episode.sample] = finished
        _check_scored(finished, group)
        if reward.failure:
            self.failed_rewards.add(finished, where=place(group))
        if episode.stage != "score":
            # Nothing scores it; the other samples may have waited for it alone.
            self._close_if_whole(group)

    def texts(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """Decode rows of ids, without special tokens."""
        return self.tokenizer.batch_decode(list(rows), skip_special_tokens=True)


def _request_of(one: Drawable) -> Request:
    return one.request if isinstance(one, JudgeSample) else one.request()


def _is_unwanted(one: Drawable) -> bool:
    """Return whether a sequence is a sample of an agent that has ended."""
    return isinstance(one, AskedSample) and one.tree.is_closed


def _check_scored(finished: FinishedEpisode, group: Group) -> None:
    """Raise RewardFailed for a sample without a reward, if draw.must_score."""
    if finished.reward.failure not in (None, OVERLONG) and group.draw.must_score:
        raise RewardFailed(
            f"{place(group)}: {failure_text(finished)}\nThis is the first reward that "
            "failed; more may follow. Fix the reward function, or set "
            "rewards.on_failure=drop to leave such samples out"
        )


def _check_player(episode: Episode, *, chat: Chat | None, agents: AgentEpisodes | None) -> None:
    """Refuse an episode of a checkpoint whose environment or agent the run has no more, or that
    has got one since then."""
    had = _player(episode.tree is not None, episode.stage == "open" or bool(episode.environment))
    has = _player(agents is not None, chat is not None)
    # An episode that waits for its reward does not use them any more.
    if episode.stage == "score" or had == has:
        return
    raise Refusal(
        f"{episode.group.prompt.origin}: the checkpoint holds an unfinished episode of this row "
        f"with {had}, and its data source has {has} now; resume with the same environments of the "
        "data sources, or the same rollout.environment or rollout.agent"
    )


def _player(has_agent: bool, has_environment: bool) -> str:
    if has_agent:
        return "an agent"
    return "an environment" if has_environment else "no environment"


def _fail(result: TurnResult, failure: Failure, message: str) -> RewardResult:
    return RewardResult(result.key, seconds=result.seconds, failure=failure, message=message)


def _fail_overlong(
    cfg: Config, result: TurnResult, episode: Episode, *, length: int
) -> RewardResult:
    """Return the failed reward of a sample whose opening is too long.

    Raises: Refusal unless data.overlong_prompts is drop.
    """
    data = cfg.data
    field, options = cfg.environments()[episode.group.prompt.source]
    message = (
        f"{field} {options['name']}: its opening of {episode.group.prompt.origin} has {length} "
        f"tokens, above data.max_prompt_tokens = {data.max_prompt_tokens}"
    )
    if data.overlong_prompts != "drop":
        raise Refusal(
            f"{message}; raise it, shorten the opening, or set "
            "data.overlong_prompts=drop to leave such samples out"
        )
    return _fail(result, OVERLONG, message)


def _add_environment_reward(result: RewardResult, episode: Episode) -> RewardResult:
    """Add the environment's rewards to that of the reward functions."""
    if result.value is None:
        return result
    earned = sum(episode.trajectory.earned)
    metrics = {f"{ENVIRONMENT}/{name}": value for name, value in episode.info.items()}
    return replace(
        result,
        value=result.value + earned,
        parts={ENVIRONMENT: earned} | result.parts,
        metrics=result.metrics | metrics,
    )
