"""What a reward function is asked about, and what it says.

Runs inside a reward worker, so it imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import numbers
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any, Literal, get_args

Scope = Literal["sample", "group", "step"]
"""How many samples a function sees in one call: one, all of a prompt, all of a step."""
SCOPES: tuple[Scope, ...] = get_args(Scope)
_MAX_EXTRA_CHARS = 500


class BadValue(Exception):
    """A reward function returned something that is not a finite number."""


@dataclass(frozen=True)
class TrainerState:
    """Where the run is, as TRL's `trainer_state` has it."""

    global_step: int = 0
    """Step whose prompts the sample answers: so many updates came before, without a lag."""
    max_steps: int = 0
    epoch: float = 0.0
    """Passes over data.train so far, with the part of the present one."""
    num_train_epochs: int = 0
    """Passes that the whole run takes, the last one perhaps in part."""

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
    """What one function said of one sample."""

    value: float | None = None
    """None: the function does not apply to this row (TRL)."""
    metrics: dict[str, float] = field(default_factory=dict)
    extras: dict[str, str] = field(default_factory=dict)
    bad: str = ""
    """Why its value is none, where those of other samples of the call are."""

    def note(self, name: str, value: Any) -> None:
        """Keep a finite number as a metric, anything else as text."""
        name = str(name)[:_MAX_EXTRA_CHARS]
        if (number := as_finite(value)) is None:
            self.extras[name] = str(value)[:_MAX_EXTRA_CHARS]
        else:
            self.metrics[name] = number


def finite(value: Any, *, what: str = "") -> float:
    """Return a number as a finite float.

    Args:
        what: said first where it is none.
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
    with contextlib.suppress(OverflowError):  # of an integer above all floats
        number = float(value)
        return number if isfinite(number) else None
    return None


def _scalar(value: Any) -> Any:
    """Return what a scalar of numpy or torch holds; anything else as it is."""
    if not isinstance(value, (numbers.Real, str, bytes)) and hasattr(value, "item"):
        if getattr(value, "size", 1) in (0, 1) or getattr(value, "ndim", 1) == 0:
            return value.item()
    return value
