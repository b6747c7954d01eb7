"""Rollouts of one engine replica: which groups are under way, and which make a step's share."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from spmdrl.algorithms import registry
from spmdrl.config import Config
from spmdrl.data.prompt_order import Planner
from spmdrl.data.prompts import PromptSource, end_token_ids
from spmdrl.engine.protocol import EngineProtocol
from spmdrl.rewards.signatures import reward_models
from spmdrl.rollout.balance import deal
from spmdrl.rollout.book import Book, Keeper, OwnBook, SharedBook, Ticket, finish, take_tickets
from spmdrl.rollout.conversation import Chat, make_chat
from spmdrl.rollout.episode import Draw, Group
from spmdrl.rollout.idle import Idle
from spmdrl.rollout.link import Link
from spmdrl.rollout.loop import Loop, Openings
from spmdrl.rollout.outcomes import Outcome, outcomes_of
from spmdrl.rollout.packing import concat_rollouts, empty_rollouts, pack_step, rollouts_from_dict
from spmdrl.rollout.resume import Share, resumed
from spmdrl.rollout.saved import group_from_dict, group_to_dict
from spmdrl.rollout.schedule import Rules, horizon, make_rules
from spmdrl.rollout.sums import has_spread, warn_if_all_failed
from spmdrl.types import Batch, Prompt, Rollouts, Sums
from spmdrl.workers.pool import RewardPool
from spmdrl.world import World

if TYPE_CHECKING:
    from spmdrl.rollout.record import Recorder

log = logging.getLogger(__name__)

_PROBE_PROMPTS = 16
_LOOK_EVERY_S = 0.002


class RolloutSource:
    """Prompts answered by this rank's engine replica and rewarded by its leader's workers.

    The leader knows the groups; the replica's other tensor-parallel ranks follow it step by step.
    """

    def __init__(self, cfg: Config, world: World, *, tokenizer: PreTrainedTokenizerBase):
        self.cfg, self.world, self.tokenizer = cfg, world, tokenizer
        self.prompts = PromptSource(cfg, tokenizer)
        self.check_context = self.prompts.check_context
        self._prompts_of = functools.lru_cache(maxsize=8)(
            lambda step: self.prompts.of(self.planner.at(step).rows)
        )
        self._stops = end_token_ids(cfg, tokenizer)
        self.link = Link(world)
        self.is_leader = world.inference_tp_rank == 0
        self.pool = RewardPool(cfg) if self.is_leader else None
        if self.pool is not None:
            self.pool.start()  # an unusable reward function is refused now
            self.recorder = self._recorder()
            self.loop = Loop(
                tokenizer=tokenizer,
                pool=self.pool,
                link=self.link,
                chat=self._chat(self.pool),
                openings=self._openings(),
            )
        advantage = registry.get("advantage", cfg.algorithm.advantage)
        self._has_greedy = "greedy_rewards" in registry.inputs_of(advantage)
        has_models = bool(reward_models(cfg.rewards.functions))
        if has_models and cfg.evaluate.every_steps and world.replica == 0 and self.is_leader:
            log.warning(
                "evaluation: reward models, which score on the trainers, are no part of "
                "eval/reward; it is of the other rewards.functions alone"
            )
        self._schedule = cfg.rollout.schedule
        self._share = Share(
            world.replica,
            max(1, world.num_replicas),
            is_shared=self._schedule.dealing == "steal" and world.num_replicas > 1,
        )
        # Whole groups go to one replica, which prefills the prompt once.
        every = range(cfg.batch.prompts_per_step)
        own = every if self._share.is_shared else every[world.replica :: self._share.replicas]
        self.rules: Rules = make_rules(
            len(own) if world.is_inference else 0,
            lag=cfg.lag,
            over_sample=self._schedule.over_sample,
            max_staleness=self._schedule.max_staleness,
        )
        self.planner = Planner(
            self.prompts.order,
            kept=self.prompts.kept,
            keep=self._schedule.curriculum,
            horizon=horizon(self._schedule, lag=cfg.lag),
            history=self.rules.max_staleness + 1,
        )
        self._keep(Book())
        if self.is_leader:
            size = cfg.batch.group_size + self._has_greedy
            most = -(-self.rules.lookahead // self._share.keepers) * size
            self.loop.idle = Idle(min(cfg.engine.max_num_seqs, most))
        self._engine: EngineProtocol | None = None
        self._ahead: dict[int, Rollouts] = {}  # by step: shares that are complete
        self._next = 0  # first step without its share
        self._waiting: dict[int, Group] = {}  # in no step yet, by number
        self._complete: list[int] = []  # those that became so, and are not in the book yet
        self._flat: list[int] = []  # the same, without a spread of rewards: to be replaced
        self._dropped: list[Group] = []  # replaced, since the last step closed
        # Of generation since the last step closed; when this stretch of it began, inf outside one.
        self._seconds, self._since = 0.0, math.inf

    # ---------------------------------------------------------------- the loop's calls

    def generate(self, engine: EngineProtocol, *, until: int) -> None:
        """Make this replica's share of every step up to `until`, with the engine's weights.

        What goes beyond the step of these weights ends early under in-flight updates, when the
        trainers are done with it: the rest goes on at the next call.

        Raises: RuntimeError naming the sample when a reward fails under on_failure=fail, or
            when dynamic sampling finds too few groups with a spread of rewards.
        """
        last = min(until, self.cfg.steps - 1)
        if not self.world.is_inference:
            return
        self._engine = engine
        with self.world.watch.phase("generate", engine.version):
            if not engine.is_busy:
                # From an empty prefix cache, so that the numbers are a function of weights and
                # step alone and a resumed run repeats them.
                engine.weights_changed(engine.version)
            if not self.is_leader:
                self.link.follow(engine)
                return
            is_ahead = self._schedule.in_flight and until > engine.version
            self._fill(
                engine,
                last=last,
                must_pause=lambda: is_ahead and self.world.is_updated(engine.version),
            )
            self.link.end()

    def take(self, step: int) -> Rollouts:
        """Hand over this rank's rollouts of `step`; ranks that are no leader hold none."""
        return self._ahead.pop(step, None) or empty_rollouts()

    def observe(self, batch: Batch, *, step: int) -> None:
        """Take in what the whole batch of `step` came to, for the prompts to come."""
        if self.is_leader:
            self.planner.observe(batch.scalars, step=step)

    def probe_tokens(self) -> list[tuple[int, ...]]:
        """Return the first prompts of the data, those with more than one token."""
        prompts = self.prompts.at(0)[:_PROBE_PROMPTS]
        return [p.tokens for p in prompts if len(p.tokens) > 1]

    def evaluate(self, engine: EngineProtocol, *, step: int) -> list[Outcome]:
        """Sample this replica's held-out prompts; its leader gets what they came to.

        Rewards are as the functions give them, without rewards.shaping. Raises as `generate`.
        """
        if not self.world.is_inference:
            return []
        if not self.is_leader:
            self.link.follow(engine)
            return []
        cfg, prompts = self.cfg, self.prompts.eval()
        draw = self._draw(
            "eval", samples=cfg.evaluate.samples, temperature=cfg.evaluate.temperature
        )
        groups = [
            Group(slot, step, slot, prompts[slot], engine.version, draw)
            for slot in range(self.world.replica, len(prompts), self.world.num_replicas)
        ]
        idle, self.loop.idle = self.loop.idle, Idle()  # it is no part of a step
        for group in groups:
            self.loop.admit(group)
        while not all(group.is_complete for group in groups):
            self._tick(engine)
        self.loop.idle = idle
        self.link.end()
        samples = [sample for group in groups for sample in group.drawn]
        warn_if_all_failed(samples, groups)
        return outcomes_of(samples)

    def close(self) -> None:
        """End the reward workers."""
        if self.pool is not None:
            self.pool.close()

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any] | None:
        """Return what was made ahead and what is under way, as plain values; leaders only."""
        if not self.is_leader:
            return None
        book = self.book.read()
        self._hand_over(book.closed)
        unfinished = self.loop.unfinished(self._engine) if self._waiting else []
        return {
            "ahead": {k: asdict(rollouts) for k, rollouts in self._ahead.items()},
            "next": self._next,
            "opened": book.opened,
            "left": book.left,
            "is_shared": self._share.is_shared,
            "waiting": [
                group_to_dict(self._waiting[n], unfinished) | {"number": n}
                for n in sorted(self._waiting)
            ],
            "planner": self.planner.state_dict() if self.world.replica == 0 else None,
        }

    def load_state_dict(self, states: list[dict[str, Any]], step: int) -> None:
        """Share out what was saved over this job's leaders, whatever their number."""
        if not self.is_leader:
            return
        self.planner.load_state_dict(states[0]["planner"], step=step)
        self._prompts_of.cache_clear()
        found = resumed(states, step=step, share=self._share, costs_of=self._costs)
        self._keep(found.book)
        self._next = found.book.next
        for k in sorted({k for state in found.states for k in state["ahead"]}):
            parts = [state["ahead"][k] for state in found.states if k in state["ahead"]]
            self._ahead[k] = concat_rollouts([rollouts_from_dict(part) for part in parts])
        draw = self._train_draw()
        for number, plain in found.groups:
            group, episodes = group_from_dict(
                plain, number=number, draw=draw, prompt=self._prompt(plain["step"], plain["slot"])
            )
            self._waiting[number] = group
            if group.is_complete:
                self._note(group)
            for episode in episodes:
                self.loop.go_on(episode)

    # ---------------------------------------------------------------- filling steps

    def _fill(self, engine: EngineProtocol, *, last: int, must_pause: Callable[[], bool]) -> None:
        self.loop.idle.came_back(self.world.watch.totals)
        self._since = time.perf_counter()
        while True:
            is_pausing = must_pause()
            most = 0 if is_pausing else self._room(last)
            tickets = self._keep_book(engine.version, last=last, most=most)
            if self._next > last or is_pausing:
                break
            for ticket in tickets:
                self._admit(ticket, version=engine.version)
            if self.loop.is_busy:
                self._tick(engine)
            else:
                self._await_replicas(must_pause)
        self._seconds += time.perf_counter() - self._since
        self._since = math.inf
        self.loop.idle.left(self.world.watch.totals)

    def _keep_book(self, version: int, *, last: int, most: float) -> list[Ticket]:
        """Tell the book what is complete, take up to `most` tickets, hand over closed steps."""
        complete, flat = tuple(self._complete), tuple(self._flat)

        def change(book: Book) -> tuple[list[Ticket], dict[int, dict[int, int]], int]:
            for step in [step for step in book.closed if step < version]:
                del book.closed[step]  # all replicas have handed it over
            finish(
                book,
                self.rules,
                complete=complete,
                dropped=flat,
                last=last,
                slots_of=self._slots_of,
            )
            tickets = take_tickets(
                book,
                self.rules,
                part=self._share.part,
                most=most,
                last=last,
                version=version,
                deal=self._deal,
            )
            return tickets, dict(book.closed), book.dropped

        tickets, closed, num_dropped = self.book.update(change)
        self._complete, self._flat = [], []
        self._dropped += [self._waiting.pop(number) for number in flat]
        self._hand_over(closed)
        if flat:
            self._check_dropped(num_dropped)
        return tickets

    def _room(self, last: int) -> float:
        """Return how many groups to take up at most: where there is a choice who does, a fair
        share of those that are wanted, and not more than the engine has places for."""
        if not self._share.is_shared:
            return math.inf
        wanted = self.rules.quota * (last - self._next) + self.rules.lookahead
        busy = sum(not group.is_complete for group in self._waiting.values())
        free = self.cfg.engine.max_num_seqs - self.loop.num_unsampled
        size = self.cfg.batch.group_size + self._has_greedy
        return max(0, min(-(-wanted // self._share.replicas) - busy, -(-free // size)))

    def _admit(self, ticket: Ticket, *, version: int) -> None:
        number, step, slot = ticket
        group = Group(number, step, slot, self._prompt(step, slot), version, self._train_draw())
        self._waiting[number] = group
        self.loop.admit(group)

    def _tick(self, engine: EngineProtocol) -> None:
        """Take a step of the generation loop, and note the groups that it completed."""
        for group in self.loop.tick(engine):
            if group.draw.purpose == "train":
                self._note(group)

    def _note(self, group: Group) -> None:
        is_flat = self._schedule.dynamic and not has_spread(group.drawn)
        (self._flat if is_flat else self._complete).append(group.number)

    def _await_replicas(self, must_pause: Callable[[], bool]) -> None:
        """Wait until another replica has changed the book: what is missing is with them."""
        assert isinstance(self.book, SharedBook), "nothing is under way, and nothing to admit"
        began = time.perf_counter()
        with self.world.watch.wait("await other replicas", self._next):
            while not self.book.is_changed() and not must_pause():
                time.sleep(_LOOK_EVERY_S)
        self.loop.idle.add("replicas", time.perf_counter() - began)

    def _hand_over(self, closed: Mapping[int, Mapping[int, int]]) -> None:
        """Pack this replica's share of the steps that are closed."""
        for step in sorted(step for step in closed if step >= self._next):
            groups = [
                replace(self._waiting.pop(number), slot=slot)
                for number, slot in sorted(closed[step].items(), key=lambda pair: pair[1])
                if number in self._waiting
            ]
            assert step == self._next
            assert all(step - g.version <= self.rules.max_staleness for g in groups)
            now = time.perf_counter()
            seconds = self._seconds + max(0.0, now - self._since)
            self._ahead[step] = pack_step(
                groups,
                self.cfg,
                is_first=self.world.replica == 0,
                seconds=seconds,
                measured=self.loop.idle.take() | self._plan_sums(step),
                dropped=self._dropped,
                num_carried=len(self._waiting),
            )
            if self.recorder is not None:
                self.recorder.record(step, groups, self._ahead[step])
            self._seconds, self._since, self._dropped = 0.0, max(now, self._since), []
            self._next += 1

    def _plan_sums(self, step: int) -> Sums:
        if self._schedule.curriculum == 1 or self.world.replica:
            return {}
        plan = self.planner.at(step)
        return {
            "data/passed_over_prompts": (plan.passed_over, 1),
            "data/settled_prompts_frac": (plan.settled, plan.measured),
        }

    def _recorder(self) -> Recorder | None:
        if not self.cfg.rollout.record.every:
            return None
        from spmdrl.rollout.record import Recorder

        return Recorder(self.cfg, replica=self.world.replica, num_replicas=self.world.num_replicas)

    def _check_dropped(self, num_dropped: int) -> None:
        limit = self._schedule.dynamic
        if num_dropped + self.rules.quota <= limit * self.rules.quota:
            return
        rewards = [group.drawn[0].reward.value for group in self._dropped]
        highest = max((r for r in rewards if r is not None), default=float("nan"))
        share = sum(r == highest for r in rewards) / len(rewards)
        raise RuntimeError(
            f"step {self._next}: rollout.schedule.dynamic {limit} is used up: {num_dropped} "
            f"groups had the same reward in all samples ({share:.0%} of them {highest:g}, the "
            f"others less or none), and the step's {self.rules.quota} are not full. The prompts "
            "are too easy or too hard for the policy: change data.train, raise "
            "batch.group_size, or raise the limit"
        )

    # ---------------------------------------------------------------- prompts

    def _keep(self, book: Book) -> None:
        self.book: Keeper = (
            SharedBook(self.world.store, initial=book, writer=self.world.replica)
            if self._share.is_shared
            else OwnBook(book)
        )

    def _costs(self, step: int) -> list[float]:
        """Return the tokens that a sample of each of a step's prompts is expected to come to."""
        if self._schedule.dealing == "even":
            return [0.0] * self.cfg.batch.prompts_per_step
        prompts = self._prompts_of(step)
        return [
            len(prompt.tokens) + length
            for prompt, length in zip(prompts, self.planner.at(step).lengths)
        ]

    def _deal(self, step: int) -> list[list[int]]:
        parts = deal(self._costs(step), self._share.replicas)
        if self._schedule.leaves_unfinished:
            # Longest first ends a step early that waits for all; one that is made of the first
            # to be complete would have nothing but long ones under way.
            parts = [sorted(part) for part in parts]
        return self._share.own(parts)

    def _slots_of(self, step: int) -> Sequence[int]:
        if self._share.is_shared:
            return range(self.cfg.batch.prompts_per_step)
        return self._deal(step)[0]

    def _openings(self) -> Openings | None:
        options, data = self.cfg.rollout.environment, self.cfg.data
        return (
            Openings(
                str(options["name"]),
                max_tokens=data.max_prompt_tokens,
                is_dropped=data.overlong_prompts == "drop",
            )
            if options
            else None
        )

    def _chat(self, pool: RewardPool) -> Chat | None:
        if not self.cfg.rollout.environment:
            return None
        return make_chat(
            self.cfg.rollout.environment,
            self.tokenizer,
            tools=pool.tools,
            stop_token_ids=self._stops,
            tool_parser=pool.tool_parser,
        )

    def _prompt(self, step: int, slot: int) -> Prompt:
        return self._prompts_of(step)[slot]

    def _train_draw(self) -> Draw:
        return self._draw(
            "train", samples=self.cfg.batch.group_size, temperature=self.cfg.sampling.temperature
        )

    def _draw(self, purpose: str, *, samples: int, temperature: float) -> Draw:
        return Draw(
            seed=self.cfg.seed,
            purpose=purpose,
            samples=samples,
            max_tokens=self.cfg.sampling.max_response_tokens,
            temperature=temperature,
            is_seeded=self.cfg.engine.seed_per_request,
            stop_token_ids=self._stops,
            has_greedy=self._has_greedy and purpose == "train",
            must_score=self.cfg.rewards.on_failure == "fail",
        )
