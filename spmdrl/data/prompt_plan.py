"""Plans, some steps ahead, which rows a step takes and how long their responses will be.

After the exchange of a batch all ranks know the same measurements, but replicas may draw the
prompts of a step earlier, and at different times. So a step is planned `horizon` steps before it is
trained on, from the measurements up to then. A plan is a function of seed, step and the gathered
numbers, never of a rank or of timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch

from spmdrl.algorithms.shaping import RIGHT_AT, ROUNDING
from spmdrl.data.hashed import hashed
from spmdrl.data.prompt_order import RowOrder
from spmdrl.types import Scalars

_SETTLED_MARGIN = 0.05
_NEW = 0.5  # weight of a new value in a running mean: a run visits a row only a few times


@dataclass(frozen=True)
class PromptPlan:
    """The prompts of a step."""

    rows: tuple[int, ...]
    """Positions among the usable rows."""
    lengths: tuple[float, ...]
    """Expected sampled tokens of a response to each; 0 if nothing was measured yet."""
    passed_over: int = 0
    """Prompts that were next in the order and were left for a later epoch."""
    measured: int = 0
    """Rows of the data whose pass rate is known."""
    settled: int = 0
    """Those of them whose pass rate is 0 or 1."""


@dataclass
class Measured:
    """Running means of each row of the data, and of all rows."""

    rates: dict[int, float] = field(default_factory=dict)
    """Share of samples that were right; without rows whose rewards all failed."""
    lengths: dict[int, float] = field(default_factory=dict)
    """Sampled tokens of a response."""
    length: float = 0.0
    """The same over all rows."""

    def observe(self, scalars: Scalars) -> None:
        """Add the measurements of a batch's episodes, group after group."""
        scalars = scalars.episodes().scalars
        is_right = scalars.rewards >= RIGHT_AT - ROUNDING
        columns = (
            scalars.group_ids,
            scalars.rows,
            scalars.response_lengths,
            is_right,
            scalars.is_valid,
        )
        # `groupby` joins adjacent samples only.
        samples = sorted(zip(*(c.tolist() for c in columns)), key=itemgetter(0))
        for _, group in groupby(samples, key=itemgetter(0)):
            _, rows, lengths, right, valid = zip(*group)
            _move(self.lengths, rows[0], sum(lengths) / len(lengths))
            if any(valid):
                num_right = sum(r for r, is_valid in zip(right, valid) if is_valid)
                _move(self.rates, rows[0], num_right / sum(valid))
        mean = scalars.response_lengths.double().mean().item()
        self.length = mean if not self.length else self.length + _NEW * (mean - self.length)

    def is_settled(self, row: int) -> bool:
        """Return whether the policy always or never solves a row, as far as is known."""
        rate = self.rates.get(row, 0.5)
        return not _SETTLED_MARGIN <= rate <= 1 - _SETTLED_MARGIN


def _move(means: dict[int, float], row: int, value: float) -> None:
    mean = means.get(row, value)
    means[row] = mean + _NEW * (value - mean)


def choose(
    order: RowOrder, cursor: int, *, is_settled: Callable[[int], bool], keep: float
) -> tuple[list[int], int, int]:
    """Take the next rows of the order, but pass over most settled rows.

    A settled row is taken with probability `keep`, so that it is measured again now and then. No
    row is lost, and the others keep their order.

    Source: as GRESO's pre-rollout filter (arXiv 2506.02177), whose probability depends on how
        often a prompt's rewards were alike; the fixed share and the pass rate are the habit of
        difficulty pools. That prompts at 0 or 1 give no gradient: arXiv 2503.14476, section 3.2.
    Args:
        cursor: place in the endless order to begin at.
        is_settled: takes a position among the usable rows.
    Returns: row positions, none twice; the new cursor; and how many were passed over. If two
        epochs do not fill a step, rows that were passed over fill it.
    """
    taken: list[int] = []
    passed: list[int] = []
    end = cursor + 2 * order.num_rows
    while len(taken) < order.per_step and cursor < end:
        row = order.row(cursor)
        # Where an epoch ends within the step, a row of it may come again.
        if row not in taken and row not in passed:
            is_taken = not is_settled(row) or _coin(order.seed, cursor) < keep
            (taken if is_taken else passed).append(row)
        cursor += 1
    missing = order.per_step - len(taken)
    filling = passed[:missing]
    return taken + filling, cursor, len(passed) - len(filling)


def _coin(seed: int, cursor: int) -> float:
    return hashed(f"{seed}/curriculum/{cursor}", num_bytes=7) / 2**56


class PromptPlanner:
    """Plans steps in order, each from the measurements up to `horizon` steps before it.

    Args:
        order: of the rows.
        kept: index in the data of each usable row.
        horizon: steps, at least 1; 0 plans any step at any time, without measurements.
        keep: probability that a settled row is taken when it is next; 1 takes all rows.
        history: steps before the last observed one whose plans are kept.
    """

    def __init__(
        self,
        order: RowOrder,
        *,
        kept: Sequence[int],
        horizon: int,
        keep: float = 1.0,
        history: int = 0,
    ):
        assert keep == 1 or horizon, "a curriculum needs measurements"
        self.order = order
        self.horizon = horizon
        self.keep = keep
        self.history = history
        self._kept = kept
        self.measured = Measured()
        self._cursor = 0  # place in the order
        self._planned = 0  # steps
        self._plans: dict[int, PromptPlan] = {}
        self._plan_until(horizon)

    def at(self, step: int) -> PromptPlan:
        """Return the plan of a step."""
        if not self.horizon:
            rows = tuple(self.order.at(step))
            return PromptPlan(rows, (0.0,) * len(rows))
        assert step in self._plans, f"step {step} is not planned: {sorted(self._plans)} are"
        return self._plans[step]

    def observe(self, scalars: Scalars, *, step: int) -> None:
        """Add the measurements of the batch of `step`, and plan the steps that waited for them."""
        if not self.horizon:
            return
        self.measured.observe(scalars)
        self._plan_until(step + self.horizon + 1)
        for old in [k for k in self._plans if k < step - self.history]:
            del self._plans[old]

    def _plan_until(self, step: int) -> None:
        while self._planned < step:
            self._plans[self._planned] = self._next_plan(self._planned)
            self._planned += 1

    def _next_plan(self, step: int) -> PromptPlan:
        known = self.measured
        if self.keep == 1:
            rows = self.order.at(step)
            passed = 0
        else:
            rows, self._cursor, passed = choose(
                self.order,
                self._cursor,
                keep=self.keep,
                is_settled=lambda row: known.is_settled(self._kept[row]),
            )
        indices = [self._kept[row] for row in rows]
        lengths = tuple(known.lengths.get(index, known.length) for index in indices)
        num_settled = sum(map(known.is_settled, known.rates))
        return PromptPlan(tuple(rows), lengths, passed, len(known.rates), num_settled)

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return measurements and plans as tensors and plain values."""
        known = self.measured
        rows = sorted(known.lengths)
        return {
            "num_rows": self.order.num_rows,
            "per_step": self.order.per_step,
            "cursor": self._cursor,
            "planned": self._planned,
            "plans": {step: asdict(plan) for step, plan in self._plans.items()},
            "rows": torch.tensor(rows, dtype=torch.int64),
            "lengths": torch.tensor([known.lengths[r] for r in rows], dtype=torch.float64),
            "rates": torch.tensor(
                [known.rates.get(r, torch.nan) for r in rows], dtype=torch.float64
            ),
            "length": known.length,
        }

    def has_same_places(self, state: dict[str, Any]) -> bool:
        """Return whether a `state_dict` is of as many rows and as many prompts per step."""
        saved = (state["num_rows"], state["per_step"])
        return saved == (self.order.num_rows, self.order.per_step)

    def load_state_dict(
        self, state: dict[str, Any], *, step: int, allow_change: bool = False
    ) -> None:
        """Continue from a `state_dict` that was saved before `step`.

        Args:
            allow_change: if data.train has another number of rows now, plan again from `step` on.
        Raises: Refusal if it has another number of rows and that is not allowed.
        """
        if not allow_change:
            self.order.check_num_rows(state["num_rows"])
        rows = state["rows"].tolist()
        rates = state["rates"].tolist()
        # A rate is NaN, and unequal to itself, for a row whose rewards all failed.
        self.measured = Measured(
            rates={row: rate for row, rate in zip(rows, rates) if rate == rate},
            lengths=dict(zip(rows, state["lengths"].tolist())),
            length=state["length"],
        )
        self._planned = state["planned"]
        self._cursor = state["cursor"]
        self._plans = {
            k: PromptPlan(**plan | {name: tuple(plan[name]) for name in ("rows", "lengths")})
            for k, plan in state["plans"].items()
        }
        if not self.has_same_places(state):
            # Saved positions may mean other rows now, so plans start again at the place that the
            # steps so far reach without a curriculum.
            self._planned = step
            self._cursor = step * self.order.per_step
            self._plans = {}
        self._plan_until(step + self.horizon)
