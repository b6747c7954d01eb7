"""Types of numbers and texts with bounds.

A bound is in the type of its field, as in `Annotated[int, within(1, 8)]`. `check/values.py` checks
every field against its bound before any other check computes with it, and `--help` shows it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qsl, urlsplit


@dataclass(frozen=True)
class Range:
    """The range of a number. nan is in no range."""

    low: float
    high: float
    has_low: bool = True
    has_high: bool = True
    zero: str = ""
    """Meaning of 0, if 0 is allowed outside the range: `to have it chosen`."""
    why: str = ""
    """Reason for the lower end, for messages."""

    def __str__(self) -> str:
        ends = f"{_text(self.low)}, {_text(self.high)}"
        return (
            ("0 or " if self.zero else "in ")
            + ("[" if self.has_low else "(")
            + ends
            + ("]" if self.has_high else ")")
        )

    def problem(self, value: float | str) -> str:
        """Return what is wrong with a value; empty if nothing is, and for a word such as `auto`."""
        if isinstance(value, str) or (self.zero and value == 0):
            return ""
        or_zero = f", or 0 {self.zero}" if self.zero else ""
        if math.isnan(value):
            return f"must be a number {self}, got nan"
        if value < self.low or (value == self.low and not self.has_low):
            least = f"{'at least' if self.has_low else 'above'} {_text(self.low)}"
            return f"must be {least}{or_zero}, got {value}{self.why and '; ' + self.why}"
        if value > self.high or (value == self.high and not self.has_high):
            most = f"{'at most' if self.has_high else 'below'} {_text(self.high)}"
            return f"must be {most}{or_zero}, got {value}"
        return ""


def _text(end: float) -> str:
    return str(int(end)) if math.isfinite(end) and end == int(end) else str(end)


def within(low: float, high: float, *, zero: str = "") -> Range:
    """Return the range from `low` to `high`, both included."""
    return Range(low, high, zero=zero)


def above(low: float, high: float, *, why: str = "") -> Range:
    """Return the range above `low`, up to `high`."""
    return Range(low, high, has_low=False, why=why)


@dataclass(frozen=True)
class PathForm:
    """A path that a file system can hold, or the name of a hub model or function."""

    def __str__(self) -> str:
        return ""

    def problem(self, value: str) -> str:
        """Return what is wrong with a path; empty if nothing is."""
        if _bytes(value) > _LONGEST_PATH:
            return f"is a path of {len(value)} characters; at most {_LONGEST_PATH} bytes can be one"
        names = value.replace(":", "/").split("/")
        if long := next((name for name in names if _bytes(name) > _LONGEST_NAME), ""):
            return (
                f"has a name of {len(long)} characters, {long[:30]!r}..., in its path; a file's "
                f"name has at most {_LONGEST_NAME} bytes"
            )
        try:
            Path(value).expanduser()
        except RuntimeError:
            return f"{value!r}: there is no user {names[0][1:]!r} on this machine; write the path"
        return ""


@dataclass(frozen=True)
class AddressForm:
    """The address of a tracker. It is written to many files, and must hold no secret."""

    def __str__(self) -> str:
        return ""

    def problem(self, value: str) -> str:
        """Return what is wrong with an address, without showing a secret; empty if nothing is."""
        if _holds_secret(value):
            return _TAKE_OUT
        if _HOST_AND_PORT.fullmatch(value):
            return f"{value!r} does not say how to reach the server; write http://{value}"
        return ""


_TAKE_OUT = (
    "holds a user's name, a password or a token, which config.yaml, logs and other files of the "
    "run would show; take it out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, "
    "or MLFLOW_TRACKING_TOKEN, in the environment of the ranks (of a database, what its own client "
    "reads: PGPASSWORD, a file of options)"
)
_HOST_AND_PORT = re.compile(r"[\w.-]+:\d+(/.*)?")
_SECRETS = re.compile(r"pass|pwd|token|secret|key|credential|auth", re.IGNORECASE)


def _holds_secret(address: str) -> bool:
    scheme, colon, rest = address.partition("://")
    if not colon:  # a folder, or a mistake such as user:password@host
        first = address.partition("/")[0]
        return "@" in first
    try:
        parts = urlsplit(address)
        query = [*parse_qsl(parts.query), *parse_qsl(parts.fragment)]
    except ValueError:  # brackets that do not match, in a password say
        return "@" in rest
    if any(_SECRETS.search(name) for name, _ in query):
        return True
    if scheme.partition("+")[0] in ("sqlite", "file"):
        return "@" in parts.netloc
    # A database needs the name of a user; in other addresses such a name may be a token. An
    # unescaped slash in a password puts the rest of it after the host.
    user, has_user, _ = rest.rpartition("@")
    is_name = scheme not in ("http", "https") and re.fullmatch(r"[\w.-]+", user) is not None
    return bool(has_user) and not is_name


def _bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


_LONGEST_PATH = 4095
_LONGEST_NAME = 255
_MONTH_S = 31 * 24 * 3600

PathText = Annotated[str, PathForm()]
Address = Annotated[str, AddressForm()]
Natural = Annotated[int, within(0, 10**9)]
Count = Annotated[int, within(1, 10**9)]
Ranks = Annotated[int, within(1, 2**17)]
Tokens = Annotated[int, within(1, 2**24)]
Samples = Annotated[int, within(1, 2**16)]
Seconds = Annotated[float, above(0, _MONTH_S)]
Deadline = Annotated[float, within(1, _MONTH_S)]
NonNegative = Annotated[float, within(0, 10**9)]
Positive = Annotated[float, above(0, 10**6)]
Real = Annotated[float, within(-(10**9), 10**9)]
Temperature = Annotated[float, within(0, 100)]
LearningRate = Annotated[float, within(0, 1)]
Coefficient = Annotated[float, within(0, 1000)]
BelowOne = Annotated[float, Range(0, 1, has_high=False)]
Fraction = Annotated[float, within(0, 1)]
Share = Annotated[float, above(0, 1)]
InsideUnit = Annotated[float, Range(0, 1, has_low=False, has_high=False)]
