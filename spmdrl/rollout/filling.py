"""Fill a replica's share of each step: admit groups, and pack them when they are complete.

Under `balance: steal` the replicas share one book (book.py). A replica that has nothing left to do
waits in `_await_replicas` for the groups of other replicas. Nowhere else does generation wait for
another replica.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from spmdrl.config import Config
from spmdrl.data.prompts import PromptSource
from spmdrl.engine.protocol import EngineProtocol
from spmdrl.rollout.book import Book, BookRules, Move, OwnBook, SharedBook, Ticket
from spmdrl.rollout.episode import Draw, Episode, Group
from spmdrl.rollout.idle import Idle
from spmdrl.rollout.loop import Loop
from spmdrl.rollout.packing import concat_rollouts, pack_step, rollouts_from_dict, rollouts_to_dict
from spmdrl.rollout.resumed_work import (
    Share,
    check_environments,
    group_from_dict,
    group_to_dict,
    resume_state,
    row_digest,
    without_work,
)
from spmdrl.rollout.staleness import make_rules, num_to_admit
from spmdrl.rollout.step_prompts import StepPrompts
from spmdrl.rollout.step_scores import score_step
from spmdrl.rollout.sums import has_spread
from spmdrl.types import Rollouts
from spmdrl.world.world import World

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.002


class StepFiller:
    """Holds the groups that a replica samples, and the shares of steps that it has completed.

    Args:
        loop: samples and scores the groups.
        prompts: prompts of the data.
        draw: sampling settings of the training samples.
    """

    def __init__(self, cfg: Config, world: World, *, loop: Loop, prompts: PromptSource, draw: Draw):
        self.cfg = cfg
        self.world = world
        self.loop = loop
        self.draw = draw
        self.schedule = cfg.rollout.schedule
        replicas = max(1, world.num_replicas)
        is_shared = self.schedule.dealing == "steal" and replicas > 1
        self.share = Share(world.replica, replicas, is_shared=is_shared)
        # A whole group goes to one replica, which prefills the prompt once.
        slots = range(cfg.batch.prompts_per_step)
        self.rules = make_rules(
            len(slots if is_shared else slots[world.replica :: replicas]),
            lag=cfg.lag,
            over_sample=self.schedule.over_sample,
            max_staleness=self.schedule.max_staleness,
        )
        self.prompts = StepPrompts(
            cfg, prompts, share=self.share, max_staleness=self.rules.max_staleness
        )
        self.recorder = None
        if cfg.rollout.record.every:
            from spmdrl.rollout.recorder import Recorder

            self.recorder = Recorder(cfg, replica=world.replica, num_replicas=replicas)
        self._per_group = draw.samples + draw.has_greedy
        self.decisions = loop.decisions
        ahead = cfg.lag if self.schedule.in_flight else 0
        most = num_to_admit(self.rules, 0, next_step=0, last_step=ahead, version=0)
        max_sequences = -(-most // self.share.num_writers) * self._per_group
        places = min(cfg.engine.max_num_seqs, max_sequences)
        loop.idle = Idle(places, spans=world.watch.spans)
        self._use_book(Book())
        self.ahead: dict[int, Rollouts] = {}
        """{step: this replica's complete share}."""
        self.next = 0
        """First step without its share."""
        self.waiting: dict[int, Group] = {}  # {number: group that no step has taken yet}
        self._complete: list[int] = []  # complete groups that the book does not know of yet
        self._flat: list[int] = []  # the same for groups with equal rewards, which get replaced
        self._dropped: list[Group] = []  # groups replaced since the last step closed
        # Seconds of generation since the last step closed, without the current call of `fill`.
        # `_since` is the time at which that call began; inf outside of `fill`.
        self._seconds = 0.0
        self._since = math.inf

    def fill(
        self, engine: EngineProtocol, *, last: int, farthest: int, must_pause: Callable[[], bool]
    ) -> None:
        """Sample until this replica has its share of every step up to `last`, or must pause.

        Args:
            last: last step to wait for.
            farthest: last step to sample for, where places of the engine are free.
            must_pause: returns whether new weights are there.
        Raises: RuntimeError if dynamic sampling gets too few groups with a spread of rewards.
        """
        self.loop.idle.resume(self.world.watch.totals)
        self._since = time.perf_counter()
        self.decisions.begin("fill", version=engine.version, book=self.book, last=last)
        with self.loop.serving("train"):
            self._sample(engine, last=last, farthest=farthest, must_pause=must_pause)
        self.decisions.end()
        self._seconds += time.perf_counter() - self._since
        self._since = math.inf
        self.loop.idle.pause(self.world.watch.totals)

    def _sample(
        self, engine: EngineProtocol, *, last: int, farthest: int, must_pause: Callable[[], bool]
    ) -> None:
        while True:
            is_pausing = self.decisions.pauses(must_pause)
            tickets = self._update_book(engine.version, last=farthest, is_pausing=is_pausing)
            for ticket in tickets:
                group = self.waiting[ticket.number] = self._make_group(ticket, engine.version)
                self.loop.admit(group)
            if self.next > last or is_pausing:
                break
            if self.loop.is_busy:
                self.tick(engine)
            else:
                self._await_replicas(must_pause)

    def tick(self, engine: EngineProtocol) -> None:
        """Take a step of the generation loop, and report the training groups that it completed."""
        for group in self.loop.tick(engine):
            if group.draw.purpose == "train":
                self._report(group)

    def take(self, step: int) -> Rollouts | None:
        """Remove and return this replica's share of a step; None if it has none."""
        return self.ahead.pop(step, None)

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self, engine: EngineProtocol | None) -> dict[str, Any]:
        """Return the shares of later steps and the unfinished groups, as plain values."""
        # Replicas may have played different numbers of moves, and all must save the same book.
        if engine is not None:
            self.book.settle(engine.version)
        book = self.book.book
        self._hand_over(book.closed)
        unfinished: list[Episode] = []
        if self.waiting:
            assert engine is not None, "there are groups before the first call of `generate`"
            unfinished = self.loop.unfinished(engine)
        return {
            "ahead": {k: rollouts_to_dict(rollouts) for k, rollouts in self.ahead.items()},
            "next": self.next,
            "opened": book.opened,
            "number": book.number,
            "complete": list(book.complete),
            "left": book.left,
            "is_shared": self.share.is_shared,
            "waiting": [
                group_to_dict(self.waiting[n], unfinished) | {"number": n}
                for n in sorted(self.waiting)
            ],
            "planner": self.prompts.state_dict(),
        }

    def load_state_dict(self, states: list[dict[str, Any]], step: int) -> None:
        """Deal the saved groups to this job's leaders. Their number may have changed."""
        is_same = self.prompts.load_state_dict(states[0]["planner"], step=step)
        if not is_same or not self._continues(states):
            self._warn_of_dropped(states)
            states = without_work(states, step=step)
        check_environments(states, trusts_pickles=self.cfg.checkpoint.trust_pickles)
        restored = resume_state(states, step=step, share=self.share, costs_of=self.prompts.costs)
        self._use_book(restored.book)
        self.next = restored.book.next
        parts: dict[int, list[Rollouts]] = {}
        for state in restored.states:
            for later_step, plain in state["ahead"].items():
                parts.setdefault(later_step, []).append(rollouts_from_dict(plain))
        for later_step in sorted(parts):
            self.ahead[later_step] = concat_rollouts(parts[later_step])
        for number, plain in restored.groups:
            prompt = self.prompts.at(plain["step"], plain["slot"])
            group, episodes = group_from_dict(
                plain, number=number, draw=self.draw.of_prompt(prompt, self.cfg), prompt=prompt
            )
            self.waiting[number] = group
            if group.is_complete and number not in restored.book.complete:
                self._report(group)
            for episode in episodes:
                self.loop.start(episode)

    def _continues(self, states: list[dict[str, Any]]) -> bool:
        """Return whether this run can finish all saved groups: each still has its row and its
        number of samples."""
        return all(
            plain["row"] == row_digest(self.prompts.at(plain["step"], plain["slot"]))
            and len(plain["samples"]) + len(plain["episodes"]) == self._per_group
            for state in states
            for plain in state["waiting"]
        )

    def _warn_of_dropped(self, states: list[dict[str, Any]]) -> None:
        groups = sum(len(state["waiting"]) for state in states)
        steps = sorted({step for state in states for step in state["ahead"]})
        if (groups or steps) and not self.share.replica:
            log.warning(
                "the checkpoint's rollouts have other prompts, or more or fewer samples, than this "
                "run: %d groups under way and the rollouts of %d later steps are dropped, and "
                "these steps are sampled again",
                groups,
                len(steps),
            )

    # ---------------------------------------------------------------- the book

    def _use_book(self, book: Book) -> None:
        """Use this book from now on."""
        book_rules = BookRules(self.rules, self.prompts.deal, self.prompts.slots_of)
        replicas = self.share.replicas
        self.book = OwnBook(book, book_rules)
        if self.share.is_shared:
            self.book = SharedBook(self.world.store, book, book_rules, replicas=replicas)

    def _update_book(self, version: int, *, last: int, is_pausing: bool) -> list[Ticket]:
        """Report complete groups to the book, hand over closed steps, and return new tickets."""
        flat = tuple(self._flat)
        move = Move(
            self.share.part,
            version,
            last,
            max_tickets=0 if is_pausing else self._room(last),
            complete=tuple(self._complete),
            dropped=flat,
        )
        is_urgent = is_pausing or not self.loop.is_busy
        tickets = self.decisions.move(self.book, move, is_urgent=is_urgent)
        if tickets is not None:
            self._complete = []
            self._flat = []
            self._dropped += [self.waiting.pop(number) for number in flat]
        num_dropped = self.book.book.dropped
        self._hand_over(self.book.book.closed)
        if flat and tickets is not None:
            self._check_dropped(num_dropped, last=last)
        return tickets or []

    def _room(self, last: int) -> int:
        """Return how many groups this replica may begin now, at most.

        With a book of its own there is no limit. With a shared book a replica begins no more than a
        fair share of the groups that are still needed, and no more than its engine has places for.
        """
        if not self.share.is_shared:
            return sys.maxsize
        # Without these limits the first replica that asks would take all prompts.
        wanted = self.rules.quota * (last - self.next) + self.rules.lookahead
        fair_share = -(-wanted // self.share.replicas)
        unfinished = sum(not group.is_complete for group in self.waiting.values())
        free_places = self.cfg.engine.max_num_seqs - self.loop.num_unsampled
        free_groups = -(-free_places // self._per_group)
        return max(0, min(fair_share - unfinished, free_groups))

    def _make_group(self, ticket: Ticket, version: int) -> Group:
        """Return a new group for a ticket."""
        number, step, slot = ticket
        prompt = self.prompts.at(step, slot)
        return Group(number, step, slot, prompt, version, self.draw.of_prompt(prompt, self.cfg))

    def _report(self, group: Group) -> None:
        """Let the next move report a complete group to the book."""
        is_flat = self.schedule.dynamic and not has_spread(group.drawn_samples)
        (self._flat if is_flat else self._complete).append(group.number)

    def _await_replicas(self, must_pause: Callable[[], bool]) -> None:
        """Wait until another replica changes the book: others sample the missing groups."""
        if not self.share.is_shared:
            raise RuntimeError(
                f"generate: the engine's weights are too old to sample step {self.next}. Did this "
                "rank leave out a stream.push? Every rank must call it"
            )
        if not self.decisions.waits():
            return
        began = time.perf_counter()
        with self.world.watch.wait("await other replicas", self.next):
            while not must_pause() and not (self.book.is_due and self.book.follow()):
                time.sleep(_LOOK_EVERY_S)
        self.loop.idle.add("replicas", time.perf_counter() - began)

    def _hand_over(self, closed: Mapping[int, Mapping[int, int]]) -> None:
        """Pack this replica's share of each closed step."""
        for step in sorted(step for step in closed if step >= self.next):
            # From here on the slot of a group is its slot in the batch.
            groups = [
                replace(self.waiting.pop(number), slot=slot)
                for number, slot in sorted(closed[step].items(), key=lambda pair: pair[1])
                if number in self.waiting
            ]
            assert step == self.next
            score_step(self.loop, groups, step=step)
            self.decisions.record_groups(step, groups)
            assert all(step - g.version <= self.rules.max_staleness for g in groups)
            now = time.perf_counter()
            seconds = self._seconds + max(0.0, now - self._since)
            measured = self.loop.idle.take() | self.prompts.sums(step)
            if (asked := self.loop.judge or self.loop.served) is not None:
                measured |= asked.take_sums(is_first=self.world.replica == 0)
            if self.schedule.mixes_versions:
                measured |= self.loop.take_recomputed(is_first=self.world.replica == 0)
            self.ahead[step] = pack_step(
                groups,
                self.cfg,
                is_first=self.world.replica == 0,
                seconds=seconds,
                measured=measured | self.loop.draft_sums(),
                dropped=self._dropped,
                num_carried=len(self.waiting),
            )
            if self.recorder is not None:
                self.recorder.record(step, groups, self.ahead[step])
            self._seconds = 0.0
            self._since = max(now, self._since)  # stays inf outside of `fill`
            self._dropped = []
            self.next += 1

    def _check_dropped(self, num_dropped: int, *, last: int) -> None:
        """Raise RuntimeError if dynamic sampling replaced more groups than it may.

        Args:
            num_dropped: groups that all writers of the book replaced since the last step closed.
            last: last step to sample for.
        """
        limit = self.schedule.dynamic
        # While a long response keeps the next step open, groups of later ones are replaced too.
        steps = max(1, last - self.next + 1)
        if num_dropped <= (limit - 1) * self.rules.quota * steps:
            return
        rewards = [group.drawn_samples[0].reward.value for group in self._dropped]
        highest = max((r for r in rewards if r is not None), default=float("nan"))
        share = sum(r == highest for r in rewards) / len(rewards)
        raise RuntimeError(
            f"step {self.next}: rollout.schedule.dynamic {limit} is used up: {num_dropped} "
            f"groups had the same reward in all samples ({share:.0%} of them {highest:g}, the "
            f"others less or none), and the step's {self.rules.quota} are not full. The prompts "
            "are too easy or too hard for the policy: change data.train, raise "
            "batch.group_size, or raise the limit"
        )
