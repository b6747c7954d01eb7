"""What engine replicas have under way for the steps to come, and who takes what next.

A book is kept by one replica for itself, or by all together in the job's store: then whoever is
done early takes prompts that were dealt to another, and none is lost or sampled twice.
`take_tickets` and `finish` change a book and nothing else, so that a change of the book in the
store, made by compare and set, may be tried again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch.distributed as dist

from spmdrl.rollout.staleness import Rules, closing, num_to_admit

T = TypeVar("T")
_KEY = "rollout/book"


class Ticket(NamedTuple):
    """The right, and the duty, to sample one group."""

    number: int
    """Order of admission."""
    step: int
    """Step whose prompts it is of."""
    slot: int
    """Position of the prompt among that step's."""


@dataclass
class Book:
    """The groups of a replica, or of all that share the book."""

    next: int = 0
    """First step that is not closed."""
    opened: int = 0
    """Steps whose prompts were dealt out so far."""
    left: dict[int, list[list[int]]] = field(default_factory=dict)
    """{step: by part, the slots that nobody has taken}; a part belongs to one replica."""
    number: int = 0
    """Of the next ticket."""
    waiting: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """{number: (version at admission, step, slot)} of groups in no step yet."""
    complete: list[int] = field(default_factory=list)
    """Those of them that are complete."""
    closed: dict[int, dict[int, int]] = field(default_factory=dict)
    """{step: {number: slot in its batch}}."""
    dropped: int = 0
    """Groups that were replaced since the last step closed."""


def take_tickets(
    book: Book,
    rules: Rules,
    *,
    part: int,
    most: int,
    last: int,
    version: int,
    deal: Callable[[int], list[list[int]]],
) -> list[Ticket]:
    """Take tickets: prompts of the earliest step that has any, of one's own part first.

    Where that is used up, the last prompt (the shortest, see `deal`) of whoever has most left.

    Args:
        part: the caller's. most: tickets to take at most.
        last: last step wanted. version: of the caller's weights.
        deal: returns the slots of a step by part.
    """
    count = num_to_admit(
        rules, len(book.waiting), next_step=book.next, last_step=last, version=version
    )
    tickets = []
    for _ in range(min(count, most)):
        if not book.left:
            book.left[book.opened] = [list(slots) for slots in deal(book.opened)]
            book.opened += 1
        step = min(book.left)
        parts = book.left[step]
        slot = parts[part].pop(0) if parts[part] else max(parts, key=len).pop()
        if not any(parts):
            del book.left[step]
        book.waiting[book.number] = (version, step, slot)
        tickets.append(Ticket(book.number, step, slot))
        book.number += 1
    return tickets


def finish(
    book: Book,
    rules: Rules,
    *,
    complete: Sequence[int],
    dropped: Sequence[int],
    last: int,
    slots_of: Callable[[int], Sequence[int]],
) -> None:
    """Note groups that are complete, or to be replaced, and close the steps that are full.

    Args:
        complete, dropped: numbers. last: the last step that may be closed now.
        slots_of: returns the slots of a step's batch that are filled from this book.
    """
    book.complete += complete
    for number in dropped:
        del book.waiting[number]
    book.dropped += len(dropped)
    while book.next <= last and len(book.complete) >= rules.quota:
        versions = {number: version for number, (version, _, _) in book.waiting.items()}
        chosen = closing(rules, versions, complete=set(book.complete), step=book.next)
        if chosen is None:
            return
        groups = {number: book.waiting.pop(number) for number in chosen}
        book.complete = [number for number in book.complete if number not in groups]
        book.closed[book.next] = _placed(groups, step=book.next, slots=slots_of(book.next))
        book.next, book.dropped = book.next + 1, 0


def _placed(
    groups: dict[int, tuple[int, int, int]], *, step: int, slots: Sequence[int]
) -> dict[int, int]:
    """Give each group a slot of the step's batch: its own if it is of this step's prompts."""
    placed = {n: slot for n, (_, own, slot) in groups.items() if own == step and slot in slots}
    free = iter(sorted(set(slots) - set(placed.values())))
    return {number: placed[number] if number in placed else next(free) for number in groups}


# --------------------------------------------------------------------------- where it is kept


class Keeper(Protocol):
    """Holds a book."""

    def update(self, change: Callable[[Book], T]) -> T:
        """Apply a change, which may run more than once, on its own, and return its result."""

    def read(self) -> Book:
        """Return the book; it is not to be changed."""


class OwnBook:
    """A book of one replica alone."""

    def __init__(self, book: Book):
        self.book = book

    def update(self, change: Callable[[Book], T]) -> T:
        """As Keeper."""
        return change(self.book)

    def read(self) -> Book:
        """As Keeper."""
        return self.book


class SharedBook:
    """A book of all replicas, in the job's store.

    Args:
        store: of the job.
        initial: the book that stands as long as nobody has changed it; the same for all.
        writer: this replica: what two write must differ, or both would take it as theirs.
    """

    def __init__(self, store: dist.Store, *, initial: Book, writer: int):
        self._store, self._initial, self._writer = store, _to_text(initial), writer
        self._changes = 0
        self._seen = ""

    def update(self, change: Callable[[Book], T]) -> T:
        """As Keeper: one round trip of about 0.1 ms, two where something changes."""
        seen = self._latest()
        while True:
            before = _body(seen) or self._initial
            book = _from_text(before)
            result = change(book)
            after = _to_text(book)
            if after == before:
                return result
            self._changes += 1
            wanted = f"{self._writer} {self._changes}\n{after}"
            seen = self._store.compare_set(_KEY, seen, wanted).decode()
            if seen == wanted:
                self._seen = seen
                return result

    def read(self) -> Book:
        """As Keeper."""
        return _from_text(_body(self._latest()) or self._initial)

    def is_changed(self) -> bool:
        """Whether another replica has changed it since this one last looked."""
        seen = self._seen
        return self._latest() != seen

    def _latest(self) -> str:
        has_any = self._seen or self._store.check([_KEY])
        self._seen = self._store.get(_KEY).decode() if has_any else ""
        return self._seen


def _body(text: str) -> str:
    return text.partition("\n")[2]


def _to_text(book: Book) -> str:
    return json.dumps(asdict(book), separators=(",", ":"))


def _from_text(text: str) -> Book:
    return book_from_dict(json.loads(text))


def book_from_dict(plain: dict[str, Any]) -> Book:
    """Undo dataclasses.asdict, whether or not it went through JSON, where keys are text."""
    return Book(
        **plain
        | {
            "left": {
                int(step): [list(slots) for slots in parts] for step, parts in plain["left"].items()
            },
            "waiting": {int(number): tuple(group) for number, group in plain["waiting"].items()},
            "closed": {
                int(step): {int(number): slot for number, slot in groups.items()}
                for step, groups in plain["closed"].items()
            },
        }
    )
