"""Find the answer in a response, and the number in an answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spmdrl.errors import Refusal

# A sign after a digit or a name is a minus: 10-5.
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_UNSIGNED = rf"(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_NUMBER = re.compile(
    rf"(?P<top>(?:(?<![\w)])[-+])?{_UNSIGNED})"
    rf"(?:\s*/\s*(?P<bottom>{_UNSIGNED}))?(?P<percent>\s*\\?%)?"
)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Number:
    """A number as it was written."""

    value: float
    is_percent: bool
    """`value` is what stands before the sign."""

    def equals(self, other: Number, *, tolerance: float) -> bool:
        """Compare relative to the other's size, or to 1 if that is less. Where one of the two
        has a percent sign, the other may be meant as percent or as a share."""
        mine = [self.value]
        if self.is_percent and not other.is_percent:
            mine.append(self.value / 100)
        elif other.is_percent and not self.is_percent:
            mine.append(self.value * 100)
        limit = tolerance * max(1.0, abs(other.value))
        return any(abs(value - other.value) <= limit for value in mine)

    def __str__(self) -> str:
        return f"{self.value:.12g}{'%' * self.is_percent}"


def last_number(text: str) -> Number | None:
    """Return the last number in a text; None if there is none.

    Read are thousands separators (1,234), exponents, fractions (3/4, \\frac{3}{4}) and percent.
    """
    plain = _LATEX_FRACTION.sub(r"\1/\2", text.replace("\u2212", "-").replace("{,}", ","))
    if not (every := list(_NUMBER.finditer(plain))):
        return None
    found = every[-1]
    top, bottom = (_float(found[name] or "1") for name in ("top", "bottom"))
    if bottom == 0 or abs(top) == float("inf"):
        return None
    return Number(top / bottom, found["percent"] is not None)


def _float(text: str) -> float:
    return float(text.replace(",", ""))


def boxed(text: str) -> str | None:
    """Return what stands in the last \\boxed{...} or \\fbox{...}; None without a closed one."""
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
    """Return what stands in the last <answer>...</answer>; None without."""
    found = _TAG.findall(text)
    return found[-1].strip() if found else None


def fenced_code(text: str) -> str | None:
    """Return the last block between ``` fences, an unclosed one too; None without."""
    found = _FENCE.findall(text)
    return found[-1] if found else None


_FINDERS: dict[str, Callable[[str], str | None]] = {
    "all": str.strip,
    "boxed": boxed,
    "hashes": after_hashes,
    "tag": in_tag,
}


NO_ANSWER = "[INVALID]"
"""Reported for a response without an answer, as by verl: it takes part in a vote and is wrong."""


def reported(score: float, *, pred: str | None) -> dict[str, Any]:
    """Return verl's form of a reward: the score, and the answer that it is of as `pred`.

    Args:
        pred: written so that equal answers are equal texts; None or empty where none was found.
    """
    return {"score": score, "pred": pred or NO_ANSWER}


def find_answer(text: str, *, where: str) -> str | None:
    """Return the answer of a response; None if it does not stand where it should.

    Args:
        where: `all` of it, `boxed`, `hashes` (after ####) or `tag` (<answer>).
    Raises: Refusal for another `where`.
    """
    if where not in _FINDERS:
        raise Refusal(f"where: expected one of {', '.join(_FINDERS)}, got {where!r}")
    return _FINDERS[where](text)


def reference_answer(reference: object) -> str:
    """Return the answer in a reference: after `####` or in \\boxed{}, where it has them."""
    text = str(reference)
    found = after_hashes(text) or boxed(text)
    return text.strip() if found is None else found
