"""The generation loop of one replica. An episode goes through these stages:

    draw -> score -> finished                          without an environment
    open -> draw -> answer -> draw -> ... -> score     with one

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

from spmdrl.config import Config
from spmdrl.engine.protocol import Completion, Drafts, EngineProtocol, Request
from spmdrl.environments.conversation import Chat
from spmdrl.errors import Refusal, RewardFailed
from spmdrl.rollout.decisions import Decisions
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
from spmdrl.rollout.link import Link
from spmdrl.rollout.trajectory import Trajectory
from spmdrl.types import Sums
from spmdrl.workers.messages import OVERLONG, Failure
from spmdrl.workers.pool import RewardPool, RewardResult, TurnResult

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
    """

    def __init__(
        self,
        cfg: Config,
        *,
        tokenizer: PreTrainedTokenizerBase,
        pool: RewardPool,
        link: Link,
        chats: Mapping[int, Chat] = MappingProxyType({}),
    ):
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.pool = pool
        self.link = link
        self.chats = chats
        self.decisions = Decisions()
        self.idle = Idle()
        self._drafts: list[Drafts] = []
        self.failed_rewards = FailedRewardLog()
        self._recomputed = (0, 0.0)  # tokens and seconds, see `take_recomputed`
        self._to_draw: list[Episode] = []
        self._drawing: dict[str, Episode] = {}  # in the engine, by request
        self._outside: dict[Hashable, Episode] = {}  # at the workers, by key

    def admit(self, group: Group) -> None:
        """Start all samples of a new group."""
        stage: Stage = "draw" if self._chat_of(group) is None else "open"
        for sample in group.positions:
            # With an environment the prompt may change: its opening replaces this trajectory.
            trajectory = Trajectory.from_prompt(group.prompt.tokens)
            self.start(Episode(group, sample, trajectory, stage=stage))

    def _chat_of(self, group: Group) -> Chat | None:
        return self.chats.get(group.prompt.source)

    def start(self, episode: Episode) -> None:
        """Start an episode, or resume one of a checkpoint at its stage.

        Raises: Refusal if the episode's source has gained or lost its environment since then.
        """
        _check_environment(episode, has_one=self._chat_of(episode.group) is not None)
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
        return sum(episode.stage != "score" for episode in self._outside.values())

    def unfinished(self, engine: EngineProtocol) -> list[Episode]:
        """Return every unfinished episode, with the tokens drawn so far."""
        return [*self._to_draw, *self._outside.values()] + [
            self._drawing[completion.key].append_completion(completion)
            for completion in engine.unfinished()
            if completion.key in self._drawing
        ]

    def requeue(self, completions: Sequence[Completion]) -> None:
        """Queue the episodes of requests that the engine aborted, to draw the rest of their turns.

        Their order does not depend on their places in the engine, so that a resumed run continues
        in the same order.
        """
        aborted = [self._drawing.pop(one.key).append_completion(one) for one in completions]
        self._to_draw = sorted(
            [*self._to_draw, *aborted], key=lambda episode: (episode.group.number, episode.sample)
        )

    @contextlib.contextmanager
    def hold_back(self) -> Iterator[None]:
        """Keep the waiting episodes out of the engine during an evaluation.

        Its samples must depend on the weights alone, not on other sequences in a batch.
        """
        waiting = self._to_draw
        self._to_draw = []
        yield
        self._to_draw = waiting

    def tick(self, engine: EngineProtocol) -> list[Group]:
        """Take one engine step, or wait for a worker if the engine has nothing to do.

        Returns: groups whose last sample finished.
        Raises: RewardFailed for the first reward that fails, if draw.must_score; Refusal for an
            opening that is too long, unless data.overlong_prompts is drop.
        """
        new = self._to_draw
        self._to_draw = []
        began = time.perf_counter()
        playing = self._num_at_environments()
        # With nothing to draw, wait for a worker instead of taking empty engine steps.
        is_idle = not new and not engine.is_busy
        if not is_idle:
            requests = [episode.request() for episode in new]
            # The replica's other ranks add the same requests: all must take part in the step below.
            self.link.step(requests)
            for request in requests:
                engine.add(request)
            self._drawing |= {episode.request_key: episode for episode in new}
            drawing = len(self._drawing)
            completions = engine.step()
            self.decisions.count_step()
            seconds = time.perf_counter() - began
            self.idle.count_step(seconds, drawing=drawing, playing=playing)
            self._count_recomputed(requests, seconds=seconds)
            self._receive_completions(completions)
        answers = self.decisions.answers(self.pool, self._outside, is_idle=is_idle)
        if is_idle:
            self.idle.add("environment" if playing else "reward", time.perf_counter() - began)
        return self._receive_results(answers)

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
        episodes = [self._drawing.pop(completion.key) for completion in completions]
        for episode, completion in zip(episodes, completions):
            if completion.drafts is not None and episode.group.draw.purpose == "train":
                self._drafts.append(completion.drafts)
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
            self._close_if_whole(episode.group)

    def _close_if_whole(self, group: Group) -> None:
        """Let functions of whole groups score a group once all its samples wait for a reward."""
        if "group" not in self.pool.scopes:
            return
        # Look only at this group's episodes: workers may hold thousands, and each asks once.
        own = (self._outside.get(group.episode_key(sample)) for sample in group.positions)
        waiting = sum(episode is not None and episode.stage == "score" for episode in own)
        if waiting + len(group.samples) == len(group.positions):
            self.pool.close_group(group.key)

    def _receive_results(self, results: Iterable[RewardResult | TurnResult]) -> list[Group]:
        """Process the workers' results; return the groups that they complete."""
        complete = []
        for result in results:
            episode = self._outside.pop(result.key)
            group = episode.group
            if isinstance(result, TurnResult):
                failed = self._receive_turn(episode, result)
                if failed is None:
                    continue
                self._finish(episode, failed)
            else:
                if self._chat_of(group) is not None:
                    result = _add_environment_reward(result, episode)
                self._finish(episode, result)
            if group.is_complete:
                complete.append(group)
        return complete

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
        trajectory = episode.trajectory
        text = episode.text
        prompt = group.prompt
        if self._chat_of(group) is not None:
            (text,) = self.texts([trajectory.response])
            # Keep special tokens, which the text of a row's prompt has too.
            ids = trajectory.prompt.once()
            (opening,) = self.tokenizer.batch_decode([ids], skip_special_tokens=False)
            prompt = trajectory.update_prompt(prompt, text=opening)
        finished = FinishedEpisode(group.slot, episode.sample, prompt, (trajectory,), text, reward)
        group.samples[episode.sample] = finished
        _check_scored(finished, group)
        if reward.failure:
            self.failed_rewards.add(finished, where=place(group))
            if episode.stage != "score":
                # It failed before its scoring; the other samples may have waited for it alone.
                self._close_if_whole(group)

    def texts(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """Decode rows of ids, without special tokens."""
        return self.tokenizer.batch_decode(list(rows), skip_special_tokens=True)


def _check_scored(finished: FinishedEpisode, group: Group) -> None:
    """Raise RewardFailed for a sample without a reward, if draw.must_score."""
    if finished.reward.failure not in (None, OVERLONG) and group.draw.must_score:
        raise RewardFailed(
            f"{place(group)}: {failure_text(finished)}\nThis is the first reward that "
            "failed; more may follow. Fix the reward function, or set "
            "rewards.on_failure=drop to leave such samples out"
        )


def _check_environment(episode: Episode, *, has_one: bool) -> None:
    """Refuse an episode of a checkpoint whose source has gained or lost its environment."""
    had_one = episode.stage == "open" or bool(episode.environment)
    # An episode that waits for its reward does not use its environment any more.
    if episode.stage == "score" or had_one == has_one:
        return
    was = "with an" if had_one else "without an"
    now = "one" if has_one else "none"
    raise Refusal(
        f"{episode.group.prompt.origin}: the checkpoint holds an unfinished episode of this row "
        f"{was} environment, and its data source has {now} now; resume with the same environments "
        "of the data sources, or the same rollout.environment"
    )


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
