"""The groups that engine replicas have under way for the steps to come, and who takes what next.

One replica keeps a book for itself, or all keep one together. Then a replica that is done early
takes prompts that were dealt to another, and none is lost or sampled twice. They keep the list of
moves in the job's store. What a move does is a function of the book and the move alone, so all that
play the moves in this order have the same book.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spmdrl.rollout.staleness import Rules, closing, num_to_admit
from spmdrl.world.sealed_store import SealedStore

_KEY = "rollout/move/{}"
_LOOKS_PER_S = 1000  # of all replicas


class Ticket(NamedTuple):
    """One group that a replica must sample."""

    number: int
    """Order of admission."""
    step: int
    """Step that its prompt belongs to."""
    slot: int
    """Index of the prompt among that step's."""


@dataclass
class Book:
    """The groups of a replica, or of all that share the book."""

    next: int = 0
    """First step that is not closed."""
    opened: int = 0
    """Steps whose prompts were dealt so far."""
    left: dict[int, list[list[int]]] = field(default_factory=dict)
    """{step: for each part, the slots that no replica has taken}; a part belongs to one replica."""
    number: int = 0
    """Of the next ticket."""
    waiting: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """{number: (version at admission, step, slot)} of groups that no step has taken yet."""
    complete: list[int] = field(default_factory=list)
    """Numbers of those that are complete."""
    closed: dict[int, dict[int, int]] = field(default_factory=dict)
    """{step: {number: slot in its batch}}."""
    dropped: int = 0
    """Groups that were replaced since the last step closed."""


class Move(NamedTuple):
    """What a replica tells the book, and asks of it; JSON makes its sequences lists."""

    part: int
    """The replica's."""
    version: int
    """Of its weights."""
    last: int
    """Last step that is wanted, and may be closed."""
    most: int
    """Tickets to take at most."""
    complete: Sequence[int] = ()
    """Numbers of groups that are complete."""
    dropped: Sequence[int] = ()
    """Numbers of groups to be replaced."""


@dataclass(frozen=True)
class BookRules:
    """The rules of a book; the same on all replicas that share it."""

    rules: Rules
    deal: Callable[[int], list[list[int]]]
    """Returns the slots of a step, for each part."""
    slots_of: Callable[[int], Sequence[int]]
    """Returns the slots of a step's batch that are filled from the book."""

    def play(self, book: Book, move: Move) -> list[Ticket]:
        """Change a book by a move; return the tickets that it takes."""
        for step in _handed_over(book, move):
            del book.closed[step]
        book.complete += move.complete
        for number in move.dropped:
            del book.waiting[number]
        book.dropped += len(move.dropped)
        while (chosen := self._closing(book, move)) is not None:
            groups = {number: book.waiting.pop(number) for number in chosen}
            book.complete = [number for number in book.complete if number not in groups]
            slots = self.slots_of(book.next)
            book.closed[book.next] = _placed(groups, step=book.next, slots=slots)
            book.next = book.next + 1
            book.dropped = 0
        return [
            self._take(book, move) for _ in range(min(move.most, self._num_to_take(book, move)))
        ]

    def changes(self, book: Book, move: Move) -> bool:
        """Return whether a move would change the book."""
        return bool(
            move.complete
            or move.dropped
            or _handed_over(book, move)
            or self._closing(book, move) is not None
            or (move.most and self._num_to_take(book, move))
        )

    def _take(self, book: Book, move: Move) -> Ticket:
        """Take a prompt of the earliest step that has any: from the replica's own part, or, where
        that is empty, the last one (the shortest, see `deal`) of the part with most left."""
        if not book.left:
            book.left[book.opened] = [list(slots) for slots in self.deal(book.opened)]
            book.opened += 1
        step = min(book.left)
        parts = book.left[step]
        slot = parts[move.part].pop(0) if parts[move.part] else max(parts, key=len).pop()
        if not any(parts):
            del book.left[step]
        book.waiting[book.number] = (move.version, step, slot)
        book.number += 1
        return Ticket(book.number - 1, step, slot)

    def _num_to_take(self, book: Book, move: Move) -> int:
        """Count the tickets that the rules leave to take."""
        return num_to_admit(
            self.rules,
            len(book.waiting),
            next_step=book.next,
            last_step=move.last,
            version=move.version,
        )

    def _closing(self, book: Book, move: Move) -> list[int] | None:
        """Return the groups of the next step if it can be closed now."""
        if book.next > move.last or len(book.complete) < self.rules.quota:
            return None
        versions = {number: version for number, (version, _, _) in book.waiting.items()}
        return closing(self.rules, versions, complete=set(book.complete), step=book.next)


def _handed_over(book: Book, move: Move) -> list[int]:
    """Return the closed steps that all replicas have handed over: before that no replica could have
    the weights of this move."""
    return [step for step in book.closed if step < move.version]


def _placed(
    groups: dict[int, tuple[int, int, int]], *, step: int, slots: Sequence[int]
) -> dict[int, int]:
    """Give each group a slot of the step's batch: its own if it is of this step's prompts."""
    placed = {n: slot for n, (_, own, slot) in groups.items() if own == step and slot in slots}
    free = iter(sorted(set(slots) - set(placed.values())))
    return {number: placed[number] if number in placed else next(free) for number in groups}


# --------------------------------------------------------------------------- where it is kept


class OwnBook:
    """A book of one replica alone."""

    def __init__(self, book: Book, practice: BookRules):
        self.book = book
        self.practice = practice

    @property
    def is_due(self) -> bool:
        """Return whether a replica that has other things to do should make a move now."""
        return True

    def move(self, move: Move) -> list[Ticket]:
        """Make a move, which changes `book`; return its tickets."""
        return self.practice.play(self.book, move)

    def follow(self) -> bool:
        """Bring `book` up to date; return whether another replica has changed it."""
        return False

    def settle(self, version: int) -> None:
        """Bring `book` to where all replicas were when they got weights of a version."""


class SharedBook(OwnBook):
    """A book of all replicas: each has a copy, and plays all moves in the order of the job's store.

    A move is some 60 bytes, however large the book. A replica that changes nothing and has other
    things to do asks the store once in `spacing_s`, so that the store bears many replicas
    (benchmarks/results/scale.md).

    Args:
        store: of the job.
        book: that stands before the first move; the same for all.
        replicas: how many share it.
    """

    def __init__(self, store: SealedStore, book: Book, practice: BookRules, *, replicas: int):
        super().__init__(book, practice)
        self.spacing_s = replicas / _LOOKS_PER_S
        self._store = store
        self._looked_at = -math.inf
        self.number = 0
        """Moves that are in `book`, since the run's first."""
        self.latest_own = 0
        """Number of this replica's latest move."""
        self._past: list[bytes] = []  # moves of earlier attempts
        self._own: list[int] = []  # this replica's moves that are in the store
        self._closed_at: dict[int, int] = {}  # {step: number of the move that closed it}

    @property
    def is_due(self) -> bool:
        """As OwnBook."""
        return time.monotonic() - self._looked_at >= self.spacing_s

    def move(self, move: Move) -> list[Ticket]:
        """As OwnBook. A move that would change nothing is not written down."""
        if self.is_due:
            self.follow()
        if not self.practice.changes(self.book, move):
            return []
        text = json.dumps(move)
        while (stands := self._write(text)) != text.encode():
            self._play(stands)  # the number was another's
        self._own.append(self.number + 1)
        self.latest_own = self.number + 1
        return self._play(stands)

    def follow(self) -> bool:
        """As OwnBook."""
        self._looked_at = time.monotonic()
        before = self.number
        self.play_until(len(self._past))
        count = 1
        while count:
            texts = self._read(count)
            for text in texts:
                self._play(text)
            if not texts:
                count //= 2
            else:
                count = 2 * count if len(texts) == count else 0
        return self.number > before

    def settle(self, version: int) -> None:
        """As OwnBook."""
        while self.number < len(self._past):
            if _move_of(self._past[self.number]).version >= version:
                return  # the moves that follow are repeated later
            self._play(self._past[self.number])
        self.follow()

    def remember(self, moves: Sequence[Sequence[Any]], *, begun: int) -> None:
        """Go on in a run's list of moves, each of which is played in its turn.

        Args:
            moves: all that are known, from the run's first on.
            begun: how many of them are in the book.
        """
        self._past = [json.dumps(move).encode() for move in moves]
        self.number = begun

    def play_until(self, number: int) -> list[Ticket]:
        """Play the known moves up to a number; return the tickets of the last."""
        tickets: list[Ticket] = []
        while self.number < number:
            tickets = self._play(self._past[self.number])
        return tickets

    def _read(self, count: int) -> list[bytes]:
        """Return the next `count` moves of the store; fewer where a stranger wrote one, none where
        it does not have so many yet."""
        keys = [_KEY.format(self.number + 1 + k) for k in range(count)]
        if not self._store.check(keys):
            return []
        return list(itertools.takewhile(bool, self._store.multi_get(keys)))

    def _write(self, text: str) -> bytes:
        """Have this be the next move, unless there is one; return which one it is."""
        if self.number < len(self._past):
            return self._past[self.number]
        return self._store.compare_set(_KEY.format(self.number + 1), "", text)

    def _play(self, text: bytes) -> list[Ticket]:
        move = _move_of(text)
        before = self.book.next
        self.number += 1
        tickets = self.practice.play(self.book, move)
        self._closed_at |= dict.fromkeys(range(before, self.book.next), self.number)
        # Weights of this version were pushed: all replicas had closed the steps before.
        past = [step for step in self._closed_at if step < move.version]
        end = max((self._closed_at.pop(step) for step in past), default=0)
        while self._own and self._own[0] <= end:
            self._store.delete_key(_KEY.format(self._own.pop(0)))
        return tickets


def _move_of(text: bytes) -> Move:
    return Move(*json.loads(text))
