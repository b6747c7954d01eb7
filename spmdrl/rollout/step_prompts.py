"""The prompts of each step, their expected costs, and the replicas that they are dealt to."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

from spmdrl.config import Config
from spmdrl.data.prompt_plan import PromptPlanner
from spmdrl.data.prompts import PromptSource
from spmdrl.rollout.balance import deal
from spmdrl.rollout.resumed_work import Share
from spmdrl.rollout.staleness import horizon
from spmdrl.same_run.data_files import data_digests
from spmdrl.types import Prompt, Sums

log = logging.getLogger(__name__)


class StepPrompts:
    """Prompts by step and slot, planned with the measurements of gathered batches.

    Args:
        prompts: prompts of the data.
        share: this replica's share of the prompts.
        max_staleness: steps after which the plan of a step is no longer asked for.
    """

    def __init__(self, cfg: Config, prompts: PromptSource, *, share: Share, max_staleness: int):
        self.cfg = cfg
        self.share = share
        self.schedule = cfg.rollout.schedule
        self.planner = PromptPlanner(
            prompts.order,
            kept=prompts.kept,
            keep=self.schedule.curriculum,
            horizon=horizon(self.schedule, lag=cfg.lag),
            history=max_staleness + 1,
        )
        # Numbers of rows mean the same only within the same data.
        sources = {"sources": repr(cfg.data.sources("train")), "seed": str(cfg.seed)}
        self._data = sources | data_digests(cfg)
        self._of = functools.lru_cache(maxsize=8)(
            lambda step: prompts.of(self.planner.at(step).rows)
        )

    def at(self, step: int, slot: int) -> Prompt:
        """Return the prompt in a slot of a step."""
        return self._of(step)[slot]

    def costs(self, step: int) -> list[float]:
        """Return the expected number of tokens of a sample, for each of a step's prompts."""
        if self.schedule.dealing == "even":
            return [0.0] * self.cfg.batch.prompts_per_step
        lengths = self.planner.at(step).lengths
        return [len(p.tokens) + length for p, length in zip(self._of(step), lengths)]

    def deal(self, step: int) -> list[list[int]]:
        """Return the slots of a step by part: for all replicas, or for this one alone."""
        parts = deal(self.costs(step), self.share.replicas)
        if self.schedule.leaves_unfinished:
            # `deal` puts the longest first, so that a step that waits for all its groups ends
            # early. With this schedule a step takes the first groups that are complete, and long
            # ones first would leave only long groups unfinished. So restore the order of the slots.
            parts = [sorted(part) for part in parts]
        return self.share.select(parts)

    def slots_of(self, step: int) -> Sequence[int]:
        """Return the slots of a step's batch that this replica's book fills."""
        if self.share.is_shared:
            return range(self.cfg.batch.prompts_per_step)
        return self.deal(step)[0]

    def sums(self, step: int) -> Sums:
        """Return the metrics of a step's plan; only the first replica has any."""
        if self.schedule.curriculum == 1 or self.share.replica:
            return {}
        plan = self.planner.at(step)
        return {
            "data/passed_over_prompts": (plan.passed_over, 1),
            "data/settled_prompts_frac": (plan.settled, plan.measured),
        }

    def state_dict(self) -> dict[str, Any] | None:
        """Return the planner's state, which all replicas share; None off the first replica."""
        return None if self.share.replica else self.planner.state_dict() | {"data": self._data}

    def load_state_dict(self, state: dict[str, Any], *, step: int) -> bool:
        """Restore the state that the first replica returned before `step`; of other data, without
        what was measured of rows.

        Returns: whether steps and slots of the checkpoint may still have the same prompts.
        """
        is_same = state["data"] == self._data
        if not is_same:
            state = state | {name: state[name][:0] for name in ("rows", "rates", "lengths")}
            if not self.share.replica:
                log.warning(
                    "data.train is not that of the checkpoint: pass rates of rows "
                    "(rollout.schedule.curriculum) and lengths of responses are measured again"
                )
        allow = self.cfg.checkpoint.allow_config_change
        self.planner.load_state_dict(state, step=step, allow_change=allow)
        self._of.cache_clear()
        return is_same and self.planner.has_same_places(state)
