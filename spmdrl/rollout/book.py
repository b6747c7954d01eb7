"""The book of groups that engine replicas sample for later steps, and who takes which group next.

Each replica has a book of its own, or all share one. With a shared book, a replica that is done
early takes prompts that were dealt to another, and none is lost or sampled twice. The job's store
holds the list of moves. The effect of a move depends on the book and the move alone, so replicas
that play the moves in the same order have the same book.
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
    """The groups of one replica, or of all replicas that share the book."""

    next: int = 0
    """First step that is not closed."""
    opened: int = 0
    """Number of steps whose prompts have been dealt."""
    left: dict[int, list[list[int]]] = field(default_factory=dict)
    """{step: slots that no replica has taken, by part}; each part belongs to one replica."""
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
    """A replica's report to the book and its request for tickets; read from JSON, its sequences
    are lists."""

    part: int
    """Index of the replica's part."""
    version: int
    """Version of its weights."""
    last: int
    """Last step that may be closed."""
    most: int
    """Most tickets to take."""
    complete: Sequence[int] = ()
    """Numbers of groups that became complete."""
    dropped: Sequence[int] = ()
    """Numbers of groups to replace."""


@dataclass(frozen=True)
class BookRules:
    """The rules by which moves change a book; the same on all replicas that share it."""

    rules: Rules
    deal: Callable[[int], list[list[int]]]
    """Deals the slots of a step; returns them by part."""
    slots_of: Callable[[int], Sequence[int]]
    """Returns the slots of a step's batch that groups of the book fill."""

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
        """Take a prompt of the earliest step that has any left.

        It comes from the replica's own part. If that is empty, it is the last (the shortest, see
        `deal`) of the part with the most left.
        """
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
        """Return how many tickets the rules allow to be taken now."""
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
    """Return the closed steps that all replicas have handed over.

    A replica has weights of a version only after all replicas handed over the steps before it.
    """
    return [step for step in book.closed if step < move.version]


def _placed(
    groups: dict[int, tuple[int, int, int]], *, step: int, slots: Sequence[int]
) -> dict[int, int]:
    """Return {number: slot in the step's batch}.

    A group of this step's prompts keeps its slot, if it is one of `slots`. The others get the free
    slots in order.
    """
    placed = {n: slot for n, (_, own, slot) in groups.items() if own == step and slot in slots}
    free = iter(sorted(set(slots) - set(placed.values())))
    return {number: placed[number] if number in placed else next(free) for number in groups}


# --------------------------------------------------------------------------- keeping a book


class OwnBook:
    """A book of one replica alone."""

    def __init__(self, book: Book, book_rules: BookRules):
        self.book = book
        self.book_rules = book_rules

    @property
    def is_due(self) -> bool:
        """Return whether a replica with other work to do should make a move now."""
        return True

    def move(self, move: Move) -> list[Ticket]:
        """Make a move, which may change `book`; return its tickets."""
        return self.book_rules.play(self.book, move)

    def follow(self) -> bool:
        """Bring `book` up to date; return whether another replica has changed it."""
        return False

    def settle(self, version: int) -> None:
        """Play moves until `book` is as it was when all replicas got weights of a version."""


class SharedBook(OwnBook):
    """A book that all replicas share: each has a copy and plays all moves in the store's order.

    A move takes about 60 bytes, whatever the size of the book. A replica that changes nothing and
    has other work asks the store only once in `spacing_s`, so that the store can serve many
    replicas (benchmarks/results/scale.md).

    Args:
        store: of the job.
        book: its state before the first move; the same for all replicas.
        replicas: number of replicas that share it.
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
        self._past: list[bytes] = []  # moves of earlier attempts
        self._own: list[int] = []  # numbers of this replica's moves that are in the store
        self._closed_at: dict[int, int] = {}  # {step: number of the move that closed it}

    @property
    def is_due(self) -> bool:
        """As OwnBook."""
        return time.monotonic() - self._looked_at >= self.spacing_s

    def move(self, move: Move) -> list[Ticket]:
        """As OwnBook. A move that would change nothing is not written to the store."""
        if self.is_due:
            self.follow()
        if not self.book_rules.changes(self.book, move):
            return []
        text = json.dumps(move)
        while (written := self._write(text)) != text.encode():
            self._play(written)  # another replica wrote the move of this number first
        # The store has the move. It is deleted from there once all replicas have played it.
        self._own.append(self.number + 1)
        self.latest_own = self.number + 1
        return self._play(written)

    def follow(self) -> bool:
        """As OwnBook."""
        self._looked_at = time.monotonic()
        before = self.number
        self.play_until(len(self._past))
        # Read one move, then twice as many while the store has them, then half as many.
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
                return  # the later moves are repeated when their turn comes
            self._play(self._past[self.number])
        self.follow()

    def remember(self, moves: Sequence[Sequence[Any]], *, begun: int) -> None:
        """Repeat the moves that an earlier attempt of the run made.

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
        """Return the next `count` moves of the store; none if it does not have so many yet.

        Fewer if one of them does not bear the mark of the job's secret.
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
        # steps before: this replica's moves up to there can be deleted from the store.
        past = [step for step in self._closed_at if step < move.version]
        end = max((self._closed_at.pop(step) for step in past), default=0)
        while self._own and self._own[0] <= end:
            self._store.delete_key(_KEY.format(self._own.pop(0)))
        return tickets


def _move_of(text: bytes) -> Move:
    return Move(*json.loads(text))
