"""The book of groups that engine replicas sample for later steps, and who takes which group next.

Each replica has a book of its own, or all replicas share one. With a shared book, a replica that
finishes early takes prompts that were dealt to another one, and no prompt is lost or sampled twice.
The job's store holds the list of moves. The effect of a move depends on the book and the move
alone, so replicas that play the same moves in the same order have the same book.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spmdrl.rollout.staleness import Rules, choose_groups, num_to_admit
from spmdrl.world.sealed_store import SealedStore

_KEY = "rollout/move/{}"
_LOOKS_PER_S = 1000  # of all replicas together


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
    """The groups of one replica, or of all replicas that share the book."""

    next: int = 0
    """First step that is not closed."""
    opened: int = 0
    """Number of steps with dealt prompts."""
    left: dict[int, list[list[int]]] = field(default_factory=dict)
    """{step: slots that no replica has taken, by part}. Each part belongs to one replica."""
    number: int = 0
    """Number of the next ticket."""
    waiting: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """{number: (version at admission, step, slot)} of groups that no step has taken yet."""
    complete: list[int] = field(default_factory=list)
    """Numbers of the waiting groups that are complete."""
    closed: dict[int, dict[int, int]] = field(default_factory=dict)
    """{step: {number of a group: its slot in the step's batch}}."""
    dropped: int = 0
    """Groups that were replaced since the last step closed."""


class Move(NamedTuple):
    """A replica's report to the book and its request for tickets.

    Moves that were read from JSON hold lists in place of tuples.
    """

    part: int
    """Index of the replica's part."""
    version: int
    """Version of its weights."""
    last: int
    """Last step that may be closed."""
    max_tickets: int
    """Most tickets to take."""
    complete: Sequence[int] = ()
    """Numbers of groups that became complete."""
    dropped: Sequence[int] = ()
    """Numbers of groups to replace."""


@dataclass(frozen=True)
class BookRules:
    """The rules by which moves change a book. They are the same on all replicas that share it."""

    rules: Rules
    deal: Callable[[int], list[list[int]]]
    """Deals the slots of a step; returns them by part."""
    slots_of: Callable[[int], Sequence[int]]
    """Returns the slots of a step's batch that groups of the book fill."""

    def play(self, book: Book, move: Move) -> list[Ticket]:
        """Apply a move to a book; return the tickets that the move takes."""
        # Without this the book would grow with every step.
        for step in _steps_handed_over(book, move):
            del book.closed[step]
        book.complete += move.complete
        for number in move.dropped:
            del book.waiting[number]
        book.dropped += len(move.dropped)
        while (chosen := self._choose_groups(book, move)) is not None:
            groups = {number: book.waiting.pop(number) for number in chosen}
            book.complete = [number for number in book.complete if number not in groups]
            slots = self.slots_of(book.next)
            book.closed[book.next] = _assign_slots(groups, step=book.next, slots=slots)
            book.next += 1
            book.dropped = 0
        count = min(move.max_tickets, self._num_to_take(book, move))
        return [self._take(book, move) for _ in range(count)]

    def changes(self, book: Book, move: Move) -> bool:
        """Return whether a move would change the book."""
        return bool(
            move.complete
            or move.dropped
            or _steps_handed_over(book, move)
            or self._choose_groups(book, move) is not None
            or (move.max_tickets and self._num_to_take(book, move))
        )

    def _take(self, book: Book, move: Move) -> Ticket:
        """Take a prompt of the earliest step that has any left.

        It is the first of the replica's own part. If that part is empty, it is the last of the part
        with the most left: `deal` puts the prompt with the shortest expected response last.
        """
        if not book.left:
            book.left[book.opened] = [list(slots) for slots in self.deal(book.opened)]
            book.opened += 1
        step = min(book.left)
        parts = book.left[step]
        own = parts[move.part]
        slot = own.pop(0) if own else max(parts, key=len).pop()
        if not any(parts):
            del book.left[step]
        ticket = Ticket(book.number, step, slot)
        book.waiting[ticket.number] = (move.version, step, slot)
        book.number += 1
        return ticket

    def _num_to_take(self, book: Book, move: Move) -> int:
        """Return how many tickets the rules allow to take now."""
        return num_to_admit(
            self.rules,
            len(book.waiting),
            next_step=book.next,
            last_step=move.last,
            version=move.version,
        )

    def _choose_groups(self, book: Book, move: Move) -> list[int] | None:
        """Return the groups of the next step if it can be closed now, else None."""
        if book.next > move.last or len(book.complete) < self.rules.quota:
            return None
        versions = {number: version for number, (version, _, _) in book.waiting.items()}
        return choose_groups(self.rules, versions, complete=set(book.complete), step=book.next)


def _steps_handed_over(book: Book, move: Move) -> list[int]:
    """Return the closed steps that all replicas have handed over.

    A replica has weights of a version only after all replicas handed over the steps before it.
    """
    return [step for step in book.closed if step < move.version]


def _assign_slots(
    groups: dict[int, tuple[int, int, int]], *, step: int, slots: Sequence[int]
) -> dict[int, int]:
    """Return {number: slot in the step's batch}.

    A group of one of this step's prompts keeps its slot, if it is among `slots`. The others get the
    free slots in order.

    Args:
        groups: {number: (version at admission, step, slot)}.
        step: the step that takes the groups.
        slots: slots of its batch, one for each group.
    """
    fixed = {}
    for number, (_, prompt_step, slot) in groups.items():
        if prompt_step == step and slot in slots:
            fixed[number] = slot
    free = iter(sorted(set(slots) - set(fixed.values())))
    return {number: fixed[number] if number in fixed else next(free) for number in groups}


# --------------------------------------------------------------------------- books of replicas


class OwnBook:
    """A book that one replica has for itself."""

    def __init__(self, book: Book, book_rules: BookRules):
        self.book = book
        self.book_rules = book_rules

    @property
    def is_due(self) -> bool:
        """Whether a replica that has other work should make a move now."""
        return True

    def move(self, move: Move) -> list[Ticket]:
        """Make a move, which may change `book`; return its tickets."""
        return self.book_rules.play(self.book, move)

    def follow(self) -> bool:
        """Bring `book` up to date; return whether another replica has changed it."""
        return False

    def settle(self, version: int) -> None:
        """Bring `book` to the state in which all replicas got weights of a version."""


class SharedBook(OwnBook):
    """A book that all replicas share: each has a copy and plays all moves in the store's order.

    A move takes about 60 bytes, for a book of any size. A replica that changes nothing and has
    other work asks the store only once in `spacing_s`, so that the store can serve many replicas
    (benchmarks/results/scale.md).

    Args:
        store: the job's store.
        book: the state before the first move; the same for all replicas.
        replicas: number of replicas that share the book.
    """

    def __init__(self, store: SealedStore, book: Book, book_rules: BookRules, *, replicas: int):
        super().__init__(book, book_rules)
        self.spacing_s = replicas / _LOOKS_PER_S
        self._store = store
        self._looked_at = -math.inf
        self.number = 0
        """Number of the run's moves that `book` includes."""
        self.latest_own = 0
        """Number of this replica's latest move."""
        self._past: list[bytes] = []  # moves of earlier attempts of the run
        self._own: list[int] = []  # numbers of this replica's moves that are in the store
        self._closed_at: dict[int, int] = {}  # {step: number of the move that closed it}

    @property
    def is_due(self) -> bool:
        """See OwnBook."""
        return time.monotonic() - self._looked_at >= self.spacing_s

    def move(self, move: Move) -> list[Ticket]:
        """See OwnBook. A move that would change nothing is not written to the store."""
        if self.is_due:
            self.follow()
        if not self.book_rules.changes(self.book, move):
            return []
        text = json.dumps(move)
        # The store keeps the first move of a number and returns it to everyone who writes one.
        while (written := self._write(text)) != text.encode():
            self._play(written)  # another replica wrote the move of this number first
        # The store has the move. It is deleted from there once all replicas have played it.
        self._own.append(self.number + 1)
        self.latest_own = self.number + 1
        return self._play(written)

    def follow(self) -> bool:
        """See OwnBook."""
        self._looked_at = time.monotonic()
        before = self.number
        self.play_until(len(self._past))
        # Read one move, then twice as many each time until the store has fewer, then half as many.
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
        """See OwnBook."""
        while self.number < len(self._past):
            if _move_of(self._past[self.number]).version >= version:
                return  # `Decisions` plays the later ones when they are due
            self._play(self._past[self.number])
        self.follow()

    def remember(self, moves: Sequence[Sequence[Any]], *, begun: int) -> None:
        """Set the moves that earlier attempts of the run made, so that this one repeats them.

        Args:
            moves: all known moves of the run, from the first on.
            begun: how many of them the book already includes.
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
        """Return the next `count` moves of the store; none if the store has fewer.

        The list ends before a move without the mark of the job's secret.
        """
        keys = [_KEY.format(self.number + 1 + k) for k in range(count)]
        if not self._store.check(keys):
            return []
        return list(itertools.takewhile(bool, self._store.multi_get(keys)))

    def _write(self, text: str) -> bytes:
        """Write the next move, unless there is one already; return the one that counts."""
        if self.number < len(self._past):
            return self._past[self.number]
        return self._store.compare_set(_KEY.format(self.number + 1), "", text)

    def _play(self, text: bytes) -> list[Ticket]:
        move = _move_of(text)
        before = self.book.next
        self.number += 1
        tickets = self.book_rules.play(self.book, move)
        self._closed_at |= dict.fromkeys(range(before, self.book.next), self.number)
        # Weights of this version were pushed, so all replicas have played the moves that closed the
        # earlier steps. Nobody needs this replica's moves up to there: delete them from the store.
        earlier = [step for step in self._closed_at if step < move.version]
        end = max((self._closed_at.pop(step) for step in earlier), default=0)
        while self._own and self._own[0] <= end:
            self._store.delete_key(_KEY.format(self._own.pop(0)))
        return tickets


def _move_of(text: bytes) -> Move:
    return Move(*json.loads(text))
