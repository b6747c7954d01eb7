"""The generation loop of one replica: episodes, each at one stage at a time.

    draw -> score -> finished                          without an environment
    open -> draw -> answer -> draw -> ... -> score     with one

The engine draws; worker processes do the rest. Neither waits for the other: a tick is one engine
step, and whatever the workers have by then.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from transformers import PreTrainedTokenizerBase

from spmdrl.config import Config
from spmdrl.engine.protocol import Completion, EngineProtocol
from spmdrl.errors import Refusal, RewardFailed
from spmdrl.model_inputs import TokenIds
from spmdrl.rollout.conversation import Chat
from spmdrl.rollout.decisions import Decisions
from spmdrl.rollout.episode import (
    Episode,
    FinishedEpisode,
    Group,
    Trajectory,
    failure_text,
    place,
    sample_seed,
)
from spmdrl.rollout.failed_rewards import FailedRewardLog
from spmdrl.rollout.idle import Idle
from spmdrl.rollout.link import Link
from spmdrl.workers.messages import OVERLONG, Failure
from spmdrl.workers.pool import RewardPool, RewardResult, TurnResult

ENVIRONMENT = "environment"
"""Name of the environment's rewards among a sample's parts."""


class Loop:
    """Episodes under way on a replica; the leader alone has one.

    Args:
        cfg: data.*, for how long what an environment says first may be.
        tokenizer: decodes responses for the reward functions.
        pool: worker processes, of rewards and environments.
        link: to the replica's other ranks.
        chats: of each source of rows that has an environment, by its number: what joins the turns
            of its episodes. Where there is none every response is final.
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
        self.decisions = Decisions()  # of time
        self.idle = Idle()  # takes the seconds in which the engine was not full
        self.failed_rewards = FailedRewardLog()
        self._to_draw: list[Episode] = []
        self._drawing: dict[str, Episode] = {}  # by request
        self._outside: dict[Hashable, Episode] = {}  # with the workers, by key
        self._ends = _Ends(pool)

    def admit(self, group: Group) -> None:
        """Start all samples of a group that are not finished."""
        is_played = self._chat_of(group) is not None
        for sample in group.positions:
            if sample not in group.samples:
                # Until an environment says else.
                begun = Trajectory.begun(group.prompt.tokens)
                self.go_on(Episode(group, sample, begun, stage="open" if is_played else "draw"))

    def _chat_of(self, group: Group) -> Chat | None:
        return self.chats.get(group.prompt.source)

    def go_on(self, episode: Episode) -> None:
        """Start an episode, or take it up where it was left.

        Raises: Refusal for one that was left with an environment and has none now, or without.
        """
        _check_kind(episode, is_played=self._chat_of(episode.group) is not None)
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
        """Return how many episodes have turns to draw."""
        return len(self._to_draw) + len(self._drawing) + self._num_playing()

    def _num_playing(self) -> int:
        return sum(episode.stage != "score" for episode in self._outside.values())

    def unfinished(self, engine: EngineProtocol) -> list[Episode]:
        """Return every episode that is not finished, with what was drawn so far."""
        return [*self._to_draw, *self._outside.values()] + [
            self._drawing[completion.key].with_drawn(completion)
            for completion in engine.unfinished()
            if completion.key in self._drawing
        ]

    def take_back(self, completions: Sequence[Completion]) -> None:
        """Have requests that an engine has ended drawn on as new ones, in an order that does not
        depend on where they stood: a resumed run goes on so, and every run with new weights."""
        begun = [self._drawing.pop(one.key).with_drawn(one) for one in completions]
        self._to_draw = sorted(
            [*self._to_draw, *begun], key=lambda episode: (episode.group.number, episode.sample)
        )

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold back what is to be drawn, for an evaluation: what it samples is a function of the
        weights, and what waits is not computed in its company."""
        waiting = self._to_draw
        self._to_draw = []
        yield
        self._to_draw = waiting

    def tick(self, engine: EngineProtocol) -> list[Group]:
        """Take one engine step, or wait for workers where the engine has nothing to do.

        Returns: groups whose last sample finished.
        Raises: RuntimeError naming the sample as soon as a reward fails, if draw.must_score;
            Refusal for an opening that is too long, unless such are dropped.
        """
        new = self._to_draw
        self._to_draw = []
        began = time.perf_counter()
        playing = self._num_playing()
        is_idle = not new and not engine.is_busy
        if not is_idle:
            requests = [episode.request() for episode in new]
            self.link.step(requests)
            for request in requests:
                engine.add(request)
            self._drawing |= {episode.request_key: episode for episode in new}
            drawing = len(self._drawing)
            completions = engine.step()
            self.decisions.stepped()
            self.idle.stepped(time.perf_counter() - began, drawing=drawing, playing=playing)
            self._drawn(completions)
        answers = self.decisions.answers(self.pool, self._outside, is_idle=is_idle)
        if is_idle:
            self.idle.add("environment" if playing else "reward", time.perf_counter() - began)
        return self._returned(answers)

    # ---------------------------------------------------------------- from stage to stage

    def _drawn(self, completions: Sequence[Completion]) -> None:
        """Move what the engine finished on to its environment, or its reward."""
        episodes = [self._drawing.pop(completion.key) for completion in completions]
        for episode, completion in zip(episodes, completions):
            episode.trajectory = episode.trajectory.sampled(completion).ended(episode.state)
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
        """Have their environment answer episodes of one chat."""
        chat = self._chat_of(episodes[0].group)
        assert chat is not None
        responses = chat.responses(
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
            self._ends.close_if_whole(episode.group, ended=1)

    def _returned(self, results: Iterable[RewardResult | TurnResult]) -> list[Group]:
        """Take what the workers have done; return the groups that are complete now."""
        complete = []
        for result in results:
            episode = self._outside.pop(result.key)
            if isinstance(result, TurnResult):
                reward = self._take_turn(episode, result)
            else:
                is_played = self._chat_of(episode.group) is not None
                reward = _with_environment(result, episode) if is_played else result
            if reward is not None and self._finish(episode, reward).is_complete:
                complete.append(episode.group)
        return complete

    def _take_turn(self, episode: Episode, result: TurnResult) -> RewardResult | None:
        """Go on with an opening, or with an answer; return why that fails, if it does."""
        chat = self._chat_of(episode.group)
        assert chat is not None
        if result.failure:
            return _failed(result, result.failure, f"environment: {result.message}")
        episode.environment = result.environment
        episode.state = result.state
        for name, value in result.info.items():
            episode.info[name] = episode.info.get(name, 0.0) + value
        is_opening = episode.stage == "open"
        so_far = episode.trajectory
        if not is_opening:
            so_far = episode.trajectory = replace(
                so_far, earned=(*so_far.earned[:-1], result.reward)
            )
            if result.is_done or so_far.is_truncated:
                self._score([episode])
                return None
        try:
            tokens = (
                chat.opening(list(result.messages))
                if is_opening
                else chat.observed(episode.turn, list(result.messages))
            )
        except Refusal as error:
            return _failed(result, "error", f"environment: {error}")
        if is_opening:
            if len(tokens) > self.cfg.data.max_prompt_tokens:
                return _overlong(self.cfg, result, episode, length=len(tokens))
            episode.trajectory = Trajectory.begun(tokens)
        elif so_far.num_following + len(tokens) >= episode.group.draw.max_tokens:
            episode.trajectory = replace(so_far, is_truncated=True)  # no room for another turn
            self._score([episode])
            return None
        else:
            episode.trajectory = so_far.observed(tokens)
            episode.turn_start = episode.trajectory.num_following
        episode.stage = "draw"
        self._to_draw.append(episode)
        return None

    def _finish(self, episode: Episode, reward: RewardResult) -> Group:
        group = episode.group
        trajectory = episode.trajectory
        text = episode.text
        prompt = group.prompt
        if self._chat_of(group) is not None:
            (text,) = self.texts([trajectory.response])
            prompt = trajectory.opened(prompt, text=self._prompt_text(trajectory.prompt))
        finished = FinishedEpisode(group.slot, episode.sample, prompt, trajectory, text, reward)
        group.samples[episode.sample] = finished
        _check_scored(finished, group)
        if reward.failure:
            self.failed_rewards.note(finished, where=place(group))
            self._ends.close_if_whole(group)
        return group

    def _prompt_text(self, prompt: TokenIds) -> str:
        """Return what was tokenised: special tokens stand in it, as in the prompt of a row, and
        each item that is shown has one token."""
        ids = prompt.once()
        return self.tokenizer.batch_decode([ids], skip_special_tokens=False)[0]

    def texts(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """Return what ids say, special tokens left out."""
        return self.tokenizer.batch_decode(list(rows), skip_special_tokens=True)


class _Ends:
    """How many samples of each group are at their end: functions of lists score whole groups.

    Args:
        pool: has these functions.
    """

    def __init__(self, pool: RewardPool):
        self._pool = pool
        self._counts: Counter[str] = Counter()  # episodes handed in to be scored, by group

    def close_if_whole(self, group: Group, *, ended: int = 0) -> None:
        """Have a group scored where each of its samples is at its end.

        Args:
            ended: how many samples were handed in just now.
        """
        if "group" not in self._pool.scopes:
            return
        self._counts[group.key] += ended
        # None that was handed in can be finished before the group is scored: others failed.
        if self._counts[group.key] + len(group.samples) == len(group.positions):
            del self._counts[group.key]
            self._pool.close_group(group.key)


def _check_scored(finished: FinishedEpisode, group: Group) -> None:
    """Raise RewardFailed for a sample without a reward where all must have one."""
    if finished.reward.failure not in (None, OVERLONG) and group.draw.must_score:
        raise RewardFailed(
            f"{place(group)}: {failure_text(finished)}\nThis is the first reward that "
            "failed; more may follow. Mend the reward function, or set "
            "rewards.on_failure=drop to leave such samples out"
        )


def _check_kind(episode: Episode, *, is_played: bool) -> None:
    """Refuse an episode of a checkpoint that cannot go on as its source now says."""
    was_played = episode.stage == "open" or bool(episode.environment)
    if episode.stage != "score" and was_played != is_played:
        was, now = ("in an", "none") if was_played else ("without an", "one")
        raise Refusal(
            f"{episode.group.prompt.origin}: the checkpoint holds an episode of it under way {was} "
            f"environment, and its source of data has {now} now; resume with rollout.environment "
            "and those of the sources as they were"
        )


def _failed(result: TurnResult, failure: Failure, message: str) -> RewardResult:
    return RewardResult(result.key, seconds=result.seconds, failure=failure, message=message)


def _overlong(cfg: Config, result: TurnResult, episode: Episode, *, length: int) -> RewardResult:
    """Drop a sample whose opening is too long. Raises: Refusal where that ends the run."""
    data = cfg.data
    field, options = cfg.environments()[episode.group.prompt.source]
    message = (
        f"{field} {options['name']}: what it opens "
        f"{episode.group.prompt.origin} with has {length} tokens, above "
        f"data.max_prompt_tokens = {data.max_prompt_tokens}"
    )
    if data.overlong_prompts != "drop":
        raise Refusal(
            f"{message}; raise it, shorten the opening, or set "
            "data.overlong_prompts=drop to leave such samples out"
        )
    return _failed(result, OVERLONG, message)


def _with_environment(result: RewardResult, episode: Episode) -> RewardResult:
    """Add the environment's rewards to the score of the end."""
    if result.value is None:
        return result
    earned = sum(episode.trajectory.earned)
    return replace(
        result,
        value=result.value + earned,
        parts={ENVIRONMENT: earned} | result.parts,
        metrics=result.metrics
        | {f"{ENVIRONMENT}/{name}": value for name, value in episode.info.items()},
    )
