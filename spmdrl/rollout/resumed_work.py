"""The groups that a checkpoint's replicas had under way, dealt to the replicas of this job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spmdrl.rollout.balance import deal, deal_again
from spmdrl.rollout.book import Book


@dataclass(frozen=True)
class Share:
    """A replica's share of the prompts."""

    replica: int
    replicas: int
    is_shared: bool
    """All replicas keep one book."""

    @property
    def part(self) -> int:
        """Return the replica's part in its book."""
        return self.replica if self.is_shared else 0

    @property
    def keepers(self) -> int:
        """Return how many replicas write in its book."""
        return self.replicas if self.is_shared else 1

    def own(self, parts: list[list[int]]) -> list[list[int]]:
        """Return those of all replicas' parts that are in its book."""
        return parts if self.is_shared else [parts[self.replica]]


@dataclass(frozen=True)
class Resumed:
    """The state that a replica resumes with."""

    book: Book
    """Its own, or the same on all that share it."""
    groups: list[tuple[int, dict[str, Any]]]
    """(number in the book, plain group) of the groups that this replica finishes."""
    states: list[dict[str, Any]]
    """Saved states whose rollouts made ahead this replica takes."""


def resumed(
    states: Sequence[dict[str, Any]],
    *,
    step: int,
    share: Share,
    costs_of: Callable[[int], Sequence[float]],
) -> Resumed:
    """Return the state that a replica resumes with: each group under way goes to one replica.

    If the job has the same replicas, each takes its own groups. Otherwise groups, and prompts that
    no replica had taken, are dealt again.

    Args:
        states: of the checkpoint's replicas, in their order.
        step: of the checkpoint.
        costs_of: expected cost of each prompt of a step.
    """
    is_same = len(states) == share.replicas and all(
        state["is_shared"] == share.is_shared for state in states
    )
    if is_same and not share.is_shared:
        states = [states[share.replica]]
    groups = _in_order(states)
    opened = max(state["opened"] for state in states)
    book = Book(next=max([step, *(state["next"] for state in states)]), opened=opened)
    numbers: Sequence[int]
    if is_same:
        # Decisions after the checkpoint name groups by their numbers.
        numbers = [plain["number"] for _, plain in groups]
        book.number = states[0]["number"]
        book.complete = list(states[0]["complete"])
        book.left = {k: [list(part) for part in parts] for k, parts in states[0]["left"].items()}
    else:
        if not share.is_shared:
            groups = groups[share.replica :: share.replicas]
        numbers = range(len(groups))
        book.number = len(groups)
        left = _left(states, opened=opened, costs_of=costs_of)
        again = deal_again(left, costs_of={k: costs_of(k) for k in left}, parts=share.replicas)
        book.left = {k: own for k, parts in again.items() if any(own := share.own(parts))}
    mine = []
    for number, (replica, plain) in zip(numbers, groups, strict=True):
        book.waiting[number] = (plain["version"], plain["step"], plain["slot"])
        owner = replica if is_same else number % share.replicas
        if owner == share.replica or not share.is_shared:
            mine.append((number, plain))
    is_alone = is_same and not share.is_shared
    ahead = states if is_alone else states[share.replica :: share.replicas]
    return Resumed(book, mine, list(ahead))


def _in_order(states: Sequence[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Return (replica, group) in the order of admission: numbers rise with versions."""
    groups = [(at, plain) for at, state in enumerate(states) for plain in state["waiting"]]
    return sorted(groups, key=lambda group: (group[1]["version"], group[1]["number"], group[0]))


def _left(
    states: Sequence[dict[str, Any]], *, opened: int, costs_of: Callable[[int], Sequence[float]]
) -> dict[int, list[int]]:
    """Return the slots of opened steps that no replica had taken. Replicas with a book each may
    have opened different steps."""
    left: dict[int, list[int]] = {}
    for replica, state in enumerate(states):
        if state["is_shared"] and replica:
            break  # the same book again
        for step, parts in state["left"].items():
            left.setdefault(step, []).extend(slot for part in parts for slot in part)
        for step in range(state["opened"], opened):
            left.setdefault(step, []).extend(deal(costs_of(step), len(states))[replica])
    return left
