"""Rollouts of one engine replica: which groups are under way, and which make a step's share."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from spmdrl.algorithms import registry
from spmdrl.config import Config
from spmdrl.data.prompts import PromptSource
from spmdrl.engine.protocol import EngineProtocol
from spmdrl.environments.conversation import Chat, make_chat
from spmdrl.rewards.pool import RewardPool
from spmdrl.rewards.signatures import reward_models
from spmdrl.rollout.episode import Draw, Group
from spmdrl.rollout.link import Link
from spmdrl.rollout.loop import Loop
from spmdrl.rollout.outcomes import Outcome, outcomes_of
from spmdrl.rollout.packing import (
    concat_rollouts, empty_rollouts, pack_step, rollouts_from_dict,
)
from spmdrl.rollout.saved import group_from_dict, group_to_dict
from spmdrl.rollout.schedule import Rules, closing, make_rules, num_to_admit, schedule_of
from spmdrl.rollout.sums import has_spread, warn_if_all_failed
from spmdrl.types import Prompt, Rollouts
from spmdrl.world import World

if TYPE_CHECKING:
    from spmdrl.rollout.record import Recorder

log = logging.getLogger(__name__)

_PROBE_PROMPTS = 16


class RolloutSource:
    """Prompts answered by this rank's engine replica and rewarded by its leader's workers.

    The leader knows the groups; the replica's other tensor-parallel ranks follow it step by step.
    """

    def __init__(self, cfg: Config, world: World, *, tokenizer: PreTrainedTokenizerBase):
        self.cfg, self.world, self.tokenizer = cfg, world, tokenizer
        self.prompts = PromptSource(cfg, tokenizer)
        self.check_context = self.prompts.check_context
        self._prompts_of = functools.lru_cache(maxsize=8)(self.prompts.at)
        eos = tokenizer.eos_token_id
        self._stops = tuple(cfg.sampling.stop_token_ids) + ((eos,) if eos is not None else ())
        self.link = Link(world)
        self.is_leader = world.inference_tp_rank == 0
        self.pool = RewardPool(cfg) if self.is_leader else None
        if self.pool is not None:
            self.pool.start()  # an unusable reward function is refused now
            self.recorder = self._recorder()
            self.loop = Loop(tokenizer=tokenizer, pool=self.pool, link=self.link,
                             chat=self._chat(self.pool))
        advantage = registry.get("advantage", cfg.algorithm.advantage)
        self._has_greedy = "greedy_rewards" in registry.inputs_of(advantage)
        has_models = bool(reward_models(cfg.rewards.functions))
        if has_models and cfg.evaluate.every_steps and world.replica == 0 and self.is_leader:
            log.warning("evaluation: reward models, which score on the trainers, are no part of "
                        "eval/reward; it is of the other rewards.functions alone")
        # Whole groups go to one replica, which prefills the prompt once.
        self._slots = range(world.replica, cfg.batch.prompts_per_step, world.num_replicas)
        self._schedule = schedule_of(cfg)
        self.rules: Rules = make_rules(
            len(self._slots) if world.is_inference else 0, lag=cfg.lag,
            over_sample=self._schedule["over_sample"],
            max_staleness=self._schedule["max_staleness"])
        self._engine: EngineProtocol | None = None
        self._ahead: dict[int, Rollouts] = {}  # by step: shares that are complete
        self._next = 0  # first step without its share
        self._waiting: dict[int, Group] = {}  # in no step yet, by number
        self._complete: set[int] = set()  # those of them that are complete
        self._number = self._position = 0  # groups admitted in this life; prompts taken
        self._dropped: list[Group] = []  # without spread, since the last step closed
        self._seconds = 0.0  # of generation, since the last step closed

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
            is_ahead = self._schedule["in_flight"] and until > engine.version
            self._fill(engine, last=last, must_pause=lambda: (
                is_ahead and self.world.is_updated(engine.version)))
            self.link.end()

    def take(self, step: int) -> Rollouts:
        """Hand over this rank's rollouts of `step`; ranks that are no leader hold none."""
        return self._ahead.pop(step, None) or empty_rollouts()

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
        draw = self._draw("eval", samples=cfg.evaluate.samples,
                          temperature=cfg.evaluate.temperature)
        groups = [Group(slot, step, slot, prompts[slot], engine.version, draw)
                  for slot in range(self.world.replica, len(prompts), self.world.num_replicas)]
        for group in groups:
            self.loop.admit(group)
        while not all(group.is_complete for group in groups):
            self._tick(engine)
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
        unfinished = self.loop.unfinished(self._engine) if self._waiting else []
        return {
            "ahead": {k: asdict(r) for k, r in self._ahead.items()}, "next": self._next,
            "position": self._position, "replicas": self.world.num_replicas,
            "waiting": [group_to_dict(self._waiting[n], unfinished)
                        for n in sorted(self._waiting)],
        }

    def load_state_dict(self, states: list[dict[str, Any]], step: int) -> None:
        """Share out what was saved over this job's leaders, whatever their number.

        With another number of replicas, groups of an over-sampled step go on, and prompts that
        only some replicas had come to are left out.
        """
        self._next = max([step, *(state["next"] for state in states)])
        if not self.is_leader:
            return
        mine = states[self.world.replica :: self.world.num_replicas]
        for k in sorted({k for state in mine for k in state["ahead"]}):
            parts = [state["ahead"][k] for state in mine if k in state["ahead"]]
            self._ahead[k] = concat_rollouts([rollouts_from_dict(part) for part in parts])
        if [state["replicas"] for state in states] == [self.world.num_replicas] * len(states):
            self._position = states[self.world.replica]["position"]
        else:
            per_step = [-(-self.cfg.batch.prompts_per_step // state["replicas"])
                        for state in states]
            steps = max(-(-s["position"] // n) for s, n in zip(states, per_step))
            self._position = max(steps, self._next) * len(self._slots)
        draw = self._train_draw()
        groups = [group for state in mine for group in state["waiting"]]
        for plain in sorted(groups, key=lambda group: group["version"]):
            group, episodes = group_from_dict(plain, number=self._number, draw=draw,
                                              prompt=self._prompt(plain["step"], plain["slot"]))
            self._number += 1
            self._waiting[group.number] = group
            if group.is_complete:
                self._complete.add(group.number)
            for episode in episodes:
                self.loop.go_on(episode)

    # ---------------------------------------------------------------- filling steps

    def _fill(self, engine: EngineProtocol, *, last: int, must_pause: Callable[[], bool]) -> None:
        began = time.perf_counter()
        while True:
            while self._next <= last and self._close_step(engine, began=began):
                began = time.perf_counter()
            if self._next > last or must_pause():
                self._seconds += time.perf_counter() - began
                return
            self._admit(engine, last=last)
            self._tick(engine)

    def _admit(self, engine: EngineProtocol, *, last: int) -> None:
        count = num_to_admit(self.rules, len(self._waiting), next_step=self._next,
                             last_step=last, version=engine.version)
        for _ in range(count):
            step, place = divmod(self._position, len(self._slots))
            slot = self._slots[place]
            group = Group(self._number, step, slot, self._prompt(step, slot), engine.version,
                          self._train_draw())
            self._waiting[group.number] = group
            self.loop.admit(group)
            self._number += 1
            self._position += 1

    def _tick(self, engine: EngineProtocol) -> None:
        """Take a step of the generation loop, and note the groups that it completed."""
        for group in self.loop.tick(engine):
            if group.draw.purpose != "train":
                continue
            if self._schedule["dynamic"] and not has_spread(group.drawn):
                self._dropped.append(self._waiting.pop(group.number))
                self._check_dropped()
            else:
                self._complete.add(group.number)

    def _close_step(self, engine: EngineProtocol, *, began: float) -> bool:
        """Hand the next step its share, if that can be done now."""
        if len(self._complete) < self.rules.quota:
            return False  # so most ticks do not sort the groups
        versions = {number: group.version for number, group in self._waiting.items()}
        chosen = closing(self.rules, versions, complete=self._complete, step=self._next)
        if chosen is None:
            return False
        groups = [replace(self._waiting.pop(number), slot=slot)
                  for number, slot in zip(chosen, self._slots)]
        self._complete -= set(chosen)
        assert all(self._next - g.version <= self.rules.max_staleness for g in groups)
        seconds = self._seconds + time.perf_counter() - began
        self._ahead[self._next] = pack_step(
            groups, self.cfg, is_first=self.world.replica == 0, seconds=seconds,
            idle_s=self.loop.idle_s, dropped=self._dropped, num_carried=len(self._waiting))
        if self.recorder is not None:
            self.recorder.record(self._next, groups, self._ahead[self._next])
        self._seconds, self.loop.idle_s, self._dropped = 0.0, 0.0, []
        self._next += 1
        return True

    def _recorder(self) -> Recorder | None:
        if not self.cfg.rollout.record:
            return None
        from spmdrl.rollout.record import Recorder

        return Recorder(self.cfg, replica=self.world.replica,
                        num_replicas=self.world.num_replicas)

    def _check_dropped(self) -> None:
        limit = self._schedule["dynamic"]
        sampled = len(self._dropped) + self.rules.quota
        if sampled <= limit * self.rules.quota:
            return
        rewards = [group.drawn[0].reward.value for group in self._dropped]
        highest = max((r for r in rewards if r is not None), default=float("nan"))
        share = sum(r == highest for r in rewards) / len(rewards)
        raise RuntimeError(
            f"step {self._next}: rollout.schedule.dynamic {limit} is used up: {len(self._dropped)} "
            f"groups had the same reward in all samples ({share:.0%} of them {highest:g}, the "
            f"others less or none), and the step's {self.rules.quota} are not full. The prompts "
            "are too easy or too hard for the policy: change data.train, raise "
            "batch.group_size, or raise the limit")

    # ---------------------------------------------------------------- prompts

    def _chat(self, pool: RewardPool) -> Chat | None:
        if not self.cfg.rollout.environment:
            return None
        return make_chat(self.cfg.rollout.environment, self.tokenizer, tools=pool.tools,
                         stop_token_ids=self._stops, tool_parser=pool.tool_parser)

    def _prompt(self, step: int, slot: int) -> Prompt:
        return self._prompts_of(step)[slot]

    def _train_draw(self) -> Draw:
        return self._draw("train", samples=self.cfg.batch.group_size,
                          temperature=self.cfg.sampling.temperature)

    def _draw(self, purpose: str, *, samples: int, temperature: float) -> Draw:
        return Draw(
            seed=self.cfg.seed, purpose=purpose, samples=samples,
            max_tokens=self.cfg.sampling.max_response_tokens, temperature=temperature,
            is_seeded=self.cfg.engine.seed_per_request, stop_token_ids=self._stops,
            has_greedy=self._has_greedy and purpose == "train",
            must_score=self.cfg.rewards.on_failure == "fail",
        )
