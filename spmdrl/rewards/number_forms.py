"""Turns numbers as people and models write them into the form that `answers.last_number` reads."""

from __future__ import annotations

import re
import unicodedata

_MINUS = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"), "-")
_SLASH = dict.fromkeys(map(ord, "\u2044\u2215"), "/")
# Fractions of one character: \u00bd becomes \frac{1}{2}, so that a 1 before it makes 3/2.
_VULGAR = {
    code: "\\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", chr(code)).split("\u2044"))
    for code in (*range(0xBC, 0xBF), *range(0x2150, 0x215F))
}
_RAISED = {ord(c): unicodedata.normalize("NFKC", c).replace("\u2212", "-") for c in "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"}
_CHARACTERS = _MINUS | _SLASH | _VULGAR
# Repeats are bounded, so that no pattern is tried from each character of a long part to its end.
_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\{,\}|,?\\[,;:!]|[\u00a0\u2009\u202f])\d{3})+(?!\d)")
_PART = r"\s{0,9}(?:\{([^{}]*)\}|(\d))"
_FRACTION = re.compile(rf"(?:(?<![\d.,])(\d{{1,18}})\s{{0,9}})?\\[cdt]?frac{_PART}{_PART}")
_MIXED = re.compile(r"(?<![\w.,/^)])(\d{1,18}) (\d{1,18})/(\d{1,18})(?![\d/^]|[.,]\d)")
_TENS = re.compile(
    r"(?<=\d)\s{0,9}(?:\\times|\\cdot|[*\u00d7\u00b7])\s{0,9}10\^(?:\{([-+]?\d{1,5})\}|([-+]?\d{1,5}))"
)
_RAISE = r"\^(?:\{([-+]?\d+)\}|([-+]?\d+))"
_POWER = re.compile(rf"(?<![\d.,])(?:(\d{{1,18}})|[\d.,]++)?{_RAISE}")
_MAX_POWER = 200
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")


def plain_numbers(text: str) -> str:
    """Return a text with its numbers in the plain form: -1234.5, 3/4, 5e3.

    It reads minus signs of any kind, thousands separated as in LaTeX or by thin spaces, LaTeX
    fractions, 1\\frac{1}{2} and 1 1/2 and 1½ as 3/2, and powers of numbers. Exponents of anything
    else are removed: the 2 of `5 cm^2` is no answer.
    """
    text = _SUPERSCRIPT.sub(lambda m: "^" + m[0].translate(_RAISED), text)
    text = text.translate(_CHARACTERS)
    text = _GROUPED.sub(lambda m: "".join(filter(str.isdigit, m[0])), text)
    text = _TENS.sub(lambda m: f"e{m[1] or m[2]}", text)
    text = _FRACTION.sub(_of_fraction, text)
    text = _MIXED.sub(lambda m: _mixed(m[1], m[2], m[3]) or m[0], text)
    return _POWER.sub(_of_power, text)


def _of_fraction(found: re.Match[str]) -> str:
    whole = found[1] or ""
    top = (found[2] or found[3] or "").strip()
    bottom = (found[4] or found[5] or "").strip()
    if bottom.startswith("-"):  # move the sign before the fraction
        top = top[1:] if top.startswith("-") else f"-{top}"
        bottom = bottom[1:]
    before = found.string[found.start() - 1 : found.start()]
    after = found.string[found.end() : found.end() + 1]
    value = _mixed(whole, top, bottom) if whole else ""
    if not value:
        value = f"{whole} {top}/{bottom}"
        if not whole and not before.isdigit():
            value = value[1:]
    # Spaces keep digits beside the fraction out of it.
    return value + " " if after.isdigit() else value


def _of_power(found: re.Match[str]) -> str:
    base = found[1]
    power = found[2] or found[3]
    if not base or len(power) > 4 or abs(int(power)) > _MAX_POWER:
        return " "
    value = str(int(base) ** abs(int(power)))
    return f"1/{value}" if power.startswith("-") else value


def _mixed(whole: str, top: str, bottom: str) -> str:
    """Return a whole number and a proper fraction as one fraction; empty if they are none."""
    are_short = all(part.isdecimal() and len(part) <= 18 for part in (top, bottom))
    if not are_short or not int(top) < int(bottom):
        return ""
    return f"{int(whole) * int(bottom) + int(top)}/{int(bottom)}"
