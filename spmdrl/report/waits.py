"""Which rank waited for which, and which phases made a step as long as it is.

Pure functions of the timeline. In a phase in which ranks wait for each other, each rank waits from
when it enters until the last one of them does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spmdrl.report.timeline import RankStep, Span

OTHER = "other"
"""Name of time outside of all phases."""


@dataclass(frozen=True)
class Wait:
    """A rank waited in a phase until the last of the ranks that meet there had entered it."""

    name: str
    """Of the phase in which it waited."""
    rank: int
    for_rank: int
    began_unix_s: float
    seconds: float
    doing: str
    """The phase in which the last rank spent most of this time."""

    @property
    def ended_unix_s(self) -> float:
        """When the last rank entered."""
        return self.began_unix_s + self.seconds


class PhasePart(NamedTuple):
    """A stretch of a rank's time in its innermost phase."""

    rank: int
    name: str
    began_unix_s: float
    ended_unix_s: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.ended_unix_s - self.began_unix_s


def waits_of(ranks: Sequence[RankStep]) -> list[Wait]:
    """Return the waits of one step, the longest first.

    Args:
        ranks: that recorded the step, as `read_timeline` returns them.
    """
    by_rank = {one.rank: one for one in ranks}
    waits = []
    for meeting in _meetings(ranks):
        last = max(meeting, key=lambda rank: meeting[rank][0])
        arrived = meeting[last][0]
        for rank, (entered, left, name) in meeting.items():
            until = min(arrived, left)
            if rank != last and until > entered:
                doing = _longest(parts_of(by_rank[last], entered, until))
                waits.append(Wait(name, rank, last, entered, until - entered, doing))
    return sorted(waits, key=lambda wait: -wait.seconds)


def _meetings(ranks: Sequence[RankStep]) -> list[dict[int, tuple[float, float, str]]]:
    """Return for each phase in which ranks meet: {rank: when it entered and left it, its name}."""
    # All ranks of a group enter the same phases in the same order, so that the second `generate`
    # of one rank is the second of the others too.
    meetings: dict[tuple, dict[int, tuple[float, float, str]]] = {}
    for one in ranks:
        counts: dict[str, int] = {}
        for span in one.spans:
            if not span.waits:
                continue
            counts[span.name] = counts.get(span.name, 0) + 1
            replica = one.replica if span.waits == "replica" else None
            key = (span.waits, replica, span.name, counts[span.name])
            entered = one.began_unix_s + span.start_s
            meetings.setdefault(key, {})[one.rank] = (entered, entered + span.seconds, span.name)
    return [*meetings.values()]


def parts_of(one: RankStep, began: float, ended: float) -> list[PhasePart]:
    """Return what a rank did between two times, each stretch by its innermost phase, in order."""
    parts = []
    at = began
    for start, end, name in _innermost(one):
        first = max(start, at)
        last = min(end, ended)
        if last <= first:
            continue
        if first > at:
            parts.append(PhasePart(one.rank, OTHER, at, first))
        parts.append(PhasePart(one.rank, name, first, last))
        at = last
    if ended > at:
        parts.append(PhasePart(one.rank, OTHER, at, ended))
    return parts


def _innermost(one: RankStep) -> Iterator[tuple[float, float, str]]:
    """Yield begin, end and name of the innermost phases of a rank, in order."""
    open_spans: list[Span] = []  # each lies inside the one before
    at = 0.0

    def until(time_s: float) -> Iterator[tuple[float, float, str]]:
        nonlocal at
        while open_spans and at < time_s:
            end = min(open_spans[-1].end_s, time_s)
            if end > at:
                yield one.began_unix_s + at, one.began_unix_s + end, open_spans[-1].name
                at = end
            if open_spans[-1].end_s <= time_s:
                open_spans.pop()
        at = max(at, time_s)

    for span in one.spans:
        yield from until(span.start_s)
        open_spans.append(span)
    yield from until(max((span.end_s for span in one.spans), default=0.0))


def _longest(parts: Sequence[PhasePart]) -> str:
    seconds: dict[str, float] = {}
    for part in parts:
        seconds[part.name] = seconds.get(part.name, 0.0) + part.seconds
    return max(seconds, key=lambda name: seconds[name])


def critical_path(ranks: Sequence[RankStep]) -> list[PhasePart]:
    """Return the chain of phases that made a step as long as it is, in order of time.

    It goes back from the end of the step on the rank that ended last. Where that rank had waited
    for another one, it goes on with what the other one did. So the parts follow each other without
    a gap, and a phase that is not among them may become faster without a shorter step.

    Args:
        ranks: that recorded the step.
    """
    if not ranks:
        return []
    by_rank = {one.rank: one for one in ranks}
    waits: dict[int, list[Wait]] = {rank: [] for rank in by_rank}
    for wait in waits_of(ranks):
        waits[wait.rank].append(wait)
    rank = max(by_rank, key=lambda rank: by_rank[rank].ended_unix_s)
    at = by_rank[rank].ended_unix_s
    path: list[PhasePart] = []
    while True:
        earlier = [wait for wait in waits[rank] if wait.ended_unix_s < at]
        newest = max(earlier, key=lambda wait: wait.ended_unix_s, default=None)
        since = by_rank[rank].began_unix_s if newest is None else newest.ended_unix_s
        path = parts_of(by_rank[rank], since, at) + path
        if newest is None:
            return path
        rank = newest.for_rank
        at = since
