"""Find the answer in a response, and the number in an answer."""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from spmdrl.errors import Refusal
from spmdrl.rewards.number_forms import plain_numbers

# A sign after a digit or a name is a minus: 10-5.
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_UNSIGNED = rf"(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_NUMBER = re.compile(
    rf"(?P<top>(?:(?<![\w)])[-+](?:\\?\$)?)?{_UNSIGNED})"
    rf"(?:\s*/\s*(?P<bottom>{_UNSIGNED}))?(?P<percent>\s*\\?%)?"
)
_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the last match of a pattern. A hostile text has millions, so that only one is kept."""
    matches = deque(pattern.finditer(text), maxlen=1)
    return matches[0] if matches else None


_MAX_DIGITS = 4300
"""Of a number, and the largest exponent: as many as Python reads into an integer. 1e999999999 is a
few characters of a response, and too large to compute with."""


@dataclass(frozen=True)
class Number:
    """A number as it was written."""

    value: Fraction
    """Exact: factorials may differ in digits that a float does not have."""
    is_percent: bool
    """Whether a percent sign follows `value`."""

    def equals(self, other: Number, *, tolerance: float) -> bool:
        """Return whether the difference is at most `tolerance`, relative to the other number or to
        1 if that is less. If only one has a percent sign, the other may be a percentage or a
        share."""
        mine = [self.value]
        if self.is_percent and not other.is_percent:
            mine.append(self.value / 100)
        elif other.is_percent and not self.is_percent:
            mine.append(self.value * 100)
        limit = Fraction(repr(tolerance)) * max(Fraction(1), abs(other.value))
        return any(abs(value - other.value) <= limit for value in mine)

    def __str__(self) -> str:
        return f"{_written(self.value)}{'%' * self.is_percent}"


def _written(value: Fraction) -> str:
    """Return a number in up to 12 digits."""
    with contextlib.suppress(OverflowError):  # a number above all floats
        return f"{float(value):.12g}"
    return f"{Decimal(value.numerator) / Decimal(value.denominator):.12g}"


def last_number(text: str) -> Number | None:
    """Return the last number in a text; None if there is none, or it is too large to compute with.

    It reads thousands separators (1,234), exponents, fractions (3/4, \\frac{3}{4}), percent, and
    the forms that `plain_numbers` turns into these.
    """
    found = last_match(_NUMBER, plain_numbers(text))
    if found is None:
        return None
    top = _exact(found["top"])
    bottom = _exact(found["bottom"] or "1")
    if top is None or not bottom:
        return None
    return Number(top / bottom, found["percent"] is not None)


def _exact(text: str) -> Fraction | None:
    """Return the value of a number's digits; None if there are too many."""
    digits, _, exponent = re.sub(r"[,$\\]", "", text).lower().partition("e")
    is_too_long = len(digits) > _MAX_DIGITS or len(exponent) > len(str(_MAX_DIGITS)) + 1
    if is_too_long or abs(int(exponent or 0)) > _MAX_DIGITS:
        return None
    return Fraction(f"{digits}e{exponent or 0}")


def boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{...} or \\fbox{...}; None if it is not closed."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    first = text.index("{", start) + 1
    depth = 1
    for at in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[first:at].strip()
    return None


def after_hashes(text: str) -> str | None:
    """Return the rest of the line after the last `####`, as in GSM8K; None without."""
    _head, mark, tail = text.rpartition("####")
    return tail.strip().partition("\n")[0].strip() if mark else None


def in_tag(text: str) -> str | None:
    """Return the content of the last <answer>...</answer>; None without."""
    opening = "<answer>"
    closing = "</answer>"
    found = None
    end = 0
    # A regular expression would read from each of many opening tags to the end of the text.
    while (begin := text.find(opening, end)) >= 0:
        begin += len(opening)
        if (end := text.find(closing, begin)) < 0:
            break
        found = text[begin:end].strip()
        end = end + len(closing)
    return found


def fenced_code(text: str) -> str | None:
    """Return the last block between ``` fences, which may be unclosed; None without."""
    found = last_match(_FENCE, text)
    return found[1] if found else None


_FINDERS: dict[str, Callable[[str], str | None]] = {
    "all": str.strip,
    "boxed": boxed,
    "hashes": after_hashes,
    "tag": in_tag,
}


NO_ANSWER = "[INVALID]"
"""The answer of a response without one, as in verl: it takes part in votes and is wrong."""


def reported(score: float, *, pred: str | None) -> dict[str, Any]:
    """Return verl's form of a reward: the score, and the scored answer as `pred`.

    Args:
        pred: equal texts for equal answers; None or empty if no answer was found.
    """
    return {"score": score, "pred": pred or NO_ANSWER}


def find_answer(text: str, *, where: str) -> str | None:
    """Return the answer of a response; None if it is not where it should be.

    Args:
        where: `all` of the response, `boxed`, `hashes` (after ####) or `tag` (<answer>).
    Raises: Refusal for another `where`.
    """
    if where not in _FINDERS:
        raise Refusal(f"where: expected one of {', '.join(_FINDERS)}, got {where!r}")
    return _FINDERS[where](text)


def reference_answer(reference: object) -> str:
    """Return the answer in a reference: after `####` or in \\boxed{} if it has these, else all."""
    text = str(reference)
    found = after_hashes(text) or boxed(text)
    return text.strip() if found is None else found
