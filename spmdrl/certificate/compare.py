"""The differences of two certified steps."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy

from spmdrl.certificate.fingerprint_collector import SECTIONS
from spmdrl.certificate.fingerprints import deviation, digest_of
from spmdrl.certificate.line_form import Line

_COLUMNS = {
    ("rollouts", "tokens"): "tokens",
    ("rollouts", "rollout_logprobs"): "rollout_logprobs",
    ("rollouts", "rewards"): "rewards",
    ("advantages", "advantages"): "advantages",
}
"""{section and name: column of a line's `sequences`}."""


@dataclass(frozen=True)
class SequencePlace:
    """The first sequence in which a column differs."""

    column: str
    group: int
    sample: int
    count: int
    """Number of sequences that differ."""
    values: tuple[Any, ...] = ()
    """The two values, for rewards."""
    trace: int = 0
    """Number of the sequence in its episode."""

    def __str__(self) -> str:
        others = f" and {self.count - 1} more" if self.count > 1 else ""
        trace = f", trace {self.trace}" if self.trace else ""
        return f"group {self.group}, sample {self.sample}{trace}{others}"


@dataclass(frozen=True)
class NumberDifference:
    """A number or tensor that differs between two runs in one step."""

    what: str
    """A description, e.g. `gradient of lm_head.weight`."""
    section: str
    name: str
    deviation: float | None = float("inf")
    """As a share of the norm; inf if it is not a number, None if only digests are known."""
    values: tuple[Any, ...] = ()
    """The two values, if they are short."""
    place: SequencePlace | None = None

    def __str__(self) -> str:
        """Return what differs and where, then both values, or else how far they are apart."""
        what = self.what
        values = self.values
        if self.place is not None:
            what += f" of {self.place}"
            values = values or self.place.values
        if values:
            return f"{what}: {values[0]} and {values[1]}"
        if self.deviation is None or self.deviation == float("inf"):
            return what
        return f"{what}: differs by {self.deviation:.1e} of its norm"


def step_differences(a: Line, b: Line) -> Iterator[NumberDifference]:
    """Yield the differences of two certified steps, each cause before its effects."""
    for which, line in (("first", a), ("second", b)):
        for name in line.get("differing_copies", ()):
            section, _, own = name.partition("/")
            what = f"copies on several ranks of the {which} run's {_describe(section, own)}"
            yield NumberDifference(what, section, own)
    for section in SECTIONS:
        one = a[section]
        other = b[section]
        for name in one | other:
            pair = one.get(name), other.get(name)
            if not _are_alike(*pair):
                found = _difference(section, name, *pair)
                yield replace(found, place=_place(a, b, section=section, name=name))


def _are_alike(one: Any, other: Any) -> bool:
    """Return whether two entries are equal, by their digests alone: one may have no norms."""
    if isinstance(one, (list, str)) and isinstance(other, (list, str)):
        return digest_of(one) == digest_of(other)
    return one == other


def _difference(section: str, name: str, one: Any, other: Any) -> NumberDifference:
    what = _describe(section, name)
    if isinstance(one, (list, str)) and isinstance(other, (list, str)):
        return NumberDifference(what, section, name, deviation(one, other))
    if isinstance(one, float) and isinstance(other, float):
        # A loss may be near 0, and its rounding error is relative to its terms, which are of the
        # size of an advantage. So divide by at least 1.
        relative = abs(one - other) / max(abs(one), abs(other), 1.0)
        return NumberDifference(what, section, name, relative, (one, other))
    if one is None or other is None:
        what = f"{what}, which only one of them has"
    return NumberDifference(what, section, name)


def _describe(section: str, name: str) -> str:
    """Return a description of an entry, for messages."""
    if section in ("before", "after"):
        kind, _, rest = name.partition(".")
        known = {"model": f"weight {rest}", "optimizer": f"optimizer state {rest}"}
        return known.get(kind, f"state {name}") + " before the update" * (section == "before")
    if section in ("advantages", "losses", "norms"):
        return name
    words = {"rollouts": "rollouts'", "plan": "batch plan's", "columns": "column"}
    return f"{words.get(section, 'gradient of')} {name}"


def _place(a: Line, b: Line, *, section: str, name: str) -> SequencePlace | None:
    """Return the first sequence in which a column of two steps differs; None without the column."""
    column = _COLUMNS.get((section, name), "")
    one = a.get("sequences", {})
    other = b.get("sequences", {})
    if column not in one or column not in other:
        return None
    ids = _ids(one)
    if not numpy.array_equal(ids, _ids(other)):
        return None  # the sequences themselves differ
    # Compare the bits of rewards (float64), so that two equal NaNs do not differ.
    numbers = [_decode(own[column], numpy.int64) for own in (one, other)]
    rows = numpy.flatnonzero(numbers[0] != numbers[1])
    if not len(rows):
        return None
    first = rows[0]
    values: tuple[float, ...] = ()
    if column == "rewards":
        values = tuple(float(own.view(numpy.float64)[first]) for own in numbers)
    group, sample, trace = ids[first].tolist()
    return SequencePlace(column, group, sample, len(rows), values, trace)


def _ids(sequences: dict[str, Any]) -> numpy.ndarray:
    """Return [S, 3], the group, sample and trace of each sequence."""
    count = len(_decode(sequences["rewards"], numpy.float64))
    if "group_size" in sequences:
        pair = numpy.divmod(numpy.arange(count), sequences["group_size"])
    else:
        pair = tuple(_decode(sequences[name], numpy.int32) for name in ("groups", "samples"))
    traces: numpy.ndarray = numpy.zeros(count, numpy.int32)
    if "traces" in sequences:
        traces = _decode(sequences["traces"], numpy.int32)
    return numpy.stack([*pair, traces], axis=1)


def _decode(text: str, kind: type) -> numpy.ndarray:
    return numpy.frombuffer(base64.b64decode(text), kind)
