"""Types of numbers that are bounded, by which a field says its range."""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple


class Range(NamedTuple):
    """Where a number must lie; infinity is in no range, nor is what is no number."""

    text: str
    """For messages, behind `must be`."""
    low: float
    high: float = math.inf
    has_low: bool = True
    has_high: bool = False

    def problem(self, value: float | str) -> str:
        """Return what is wrong with a value, empty if nothing is, or it is a word (`auto`)."""
        if isinstance(value, str):
            return ""
        above = value >= self.low if self.has_low else value > self.low
        if above and (value <= self.high if self.has_high else value < self.high):
            return ""
        finite = " and finite" if value == self.high == math.inf and self.has_low else ""
        return f"must be {self.text}{finite}, got {value}"


def at_least(low: int) -> Range:
    """Return the range of finite numbers from `low` on."""
    return Range(f"at least {low}", low)


Natural = Annotated[int, at_least(0)]
Count = Annotated[int, at_least(1)]
NonNegative = Annotated[float, at_least(0)]
Positive = Annotated[float, Range("above 0 and finite", 0, has_low=False)]
BelowOne = Annotated[float, Range("in [0, 1)", 0, 1)]
Fraction = Annotated[float, Range("in [0, 1]", 0, 1, has_high=True)]
Share = Annotated[float, Range("in (0, 1]", 0, 1, has_low=False, has_high=True)]
InsideUnit = Annotated[float, Range("in (0, 1)", 0, 1, has_low=False)]
