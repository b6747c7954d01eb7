"""The samples that reward functions get, and the scores that they give.

Reward workers import this module, so it imports nothing heavy.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any, Literal, get_args

Scope = Literal["sample", "group", "step"]
"""How many samples a function sees in one call: one, all of a prompt, all of a step."""
SCOPES: tuple[Scope, ...] = get_args(Scope)
JUDGE_URL = "SPMDRL_JUDGE_URL"
"""Environment variable of a worker: base of OpenAI's API, at which the run's engine judges."""
JUDGE_KEY = "SPMDRL_JUDGE_KEY"
"""The same: the API key."""
_MAX_EXTRA_CHARS = 500


class BadValue(Exception):
    """A reward function returned something that is not a finite number."""


@dataclass(frozen=True)
class TrainerState:
    """Where the run is, as TRL's `trainer_state` has it."""

    global_step: int = 0
    """The step of the sample's prompt; without a lag, also the number of updates before it."""
    max_steps: int = 0
    epoch: float = 0.0
    """Passes over data.train so far, with the part of the current one."""
    num_train_epochs: int = 0
    """Passes of the whole run, rounded up."""

    def __getattr__(self, name: str) -> Any:
        own = ", ".join(field.name for field in fields(self))
        raise AttributeError(f"trainer_state has no {name!r} here; it has {own}")


@dataclass(frozen=True)
class RewardSample:
    """One response to score."""

    row: dict
    text: str
    tokens: list[int]
    is_truncated: bool
    state: TrainerState = TrainerState()
    source: int = 0
    """Number of the row's source, as `Prompt.source`."""


@dataclass(frozen=True)
class RewardList:
    """Responses to score in one call, by the functions of one scope."""

    scope: Scope
    samples: tuple[RewardSample, ...]


@dataclass
class Score:
    """The score that one function gave one sample."""

    value: float | None = None
    """None: the function does not apply to this row (TRL)."""
    metrics: dict[str, float] = field(default_factory=dict)
    extras: dict[str, str] = field(default_factory=dict)
    bad: str = ""
    """Why the value of this sample alone, in a call for several, is none."""

    def note(self, name: str, value: Any) -> None:
        """Store a finite number as a metric, anything else as text."""
        name = str(name)[:_MAX_EXTRA_CHARS]
        if (number := as_finite(value)) is None:
            self.extras[name] = str(value)[:_MAX_EXTRA_CHARS]
        else:
            self.metrics[name] = number


def finite(value: Any, *, what: str = "") -> float:
    """Return a number as a finite float.

    Args:
        what: the beginning of the message.
    Raises: BadValue for anything else: None, text, NaN, infinity, arrays.
    """
    if (number := as_finite(value)) is None:
        value = _scalar(value)
        raise BadValue(
            f"{what}expected a finite number, got {value!r:.100} ({type(value).__name__})"
        )
    return number


def as_finite(value: Any) -> float | None:
    """Return a number as a finite float; None for anything else."""
    value = _scalar(value)
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer above all floats
        return None
    return number if isfinite(number) else None


def _scalar(value: Any) -> Any:
    """Return the number in a scalar of numpy or torch; anything else unchanged."""
    if not isinstance(value, (numbers.Real, str, bytes)) and hasattr(value, "item"):
        if getattr(value, "size", 1) in (0, 1) or getattr(value, "ndim", 1) == 0:
            return value.item()
    return value
