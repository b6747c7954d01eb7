"""Who samples what: every prompt once, steps full, whoever is fast, killed or resumed."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.config import ScheduleSettings
from spmdrl.rollout.balance import deal, deal_again
from spmdrl.rollout.book import Book, BookRules, Move, OwnBook, SharedBook, Ticket
from spmdrl.rollout.resumed_work import Share, resume_state
from spmdrl.rollout.staleness import horizon, make_rules
from tests.helpers.built import examples

COSTS = st.lists(st.integers(0, 50), min_size=1, max_size=24)


# --------------------------------------------------------------------------- dealing


@given(costs=COSTS, parts=st.integers(1, 6))
def test_prompts_are_dealt_evenly_by_number_and_the_longest_first(costs, parts):
    dealt = deal(costs, parts)
    assert sorted(slot for part in dealt for slot in part) == list(range(len(costs)))
    assert [len(part) for part in dealt] == [
        len(range(part, len(costs), parts)) for part in range(parts)
    ]
    for part in dealt:
        assert [costs[slot] for slot in part] == sorted((costs[s] for s in part), reverse=True)


@given(count=st.integers(1, 24), parts=st.integers(1, 6), cost=st.sampled_from([0.0, 0.1, 7.0]))
def test_prompts_that_are_all_alike_go_round_in_turns(count, parts, cost):
    assert deal([cost] * count, parts) == [list(range(p, count, parts)) for p in range(parts)]


@given(costs=COSTS, parts=st.integers(1, 4))
def test_no_replica_expects_more_than_one_prompt_above_the_even_share(costs, parts):
    """Graham's argument holds until a part is full; parts differ by one prompt at most."""
    sums = [sum(costs[slot] for slot in part) for part in deal(costs, parts)]
    assert max(sums) <= sum(costs) / parts + 2 * max(costs)


def test_a_long_tail_is_spread():
    costs = [100, 1, 90, 1, 80, 1, 70, 1]  # in turns, replica 0 gets all of it
    sums = [sum(costs[slot] for slot in part) for part in deal(costs, 2)]
    assert sorted(sums) == [172, 172]
    again = deal_again({3: [0, 2, 5]}, costs_of={3: costs}, parts=2)
    assert again == {3: [[0, 5], [2]]}
    assert deal_again({3: []}, costs_of={3: costs}, parts=2) == {}


# --------------------------------------------------------------------------- one book for all


class Replica:
    """What a replica does with a book: take, sample in any order, tell."""

    def __init__(self, store: dist.Store, rules, *, share: Share, costs):
        self.rules, self.share, self.costs = rules, share, costs
        book_rules = BookRules(rules, self.deal, self.slots)
        self.book = OwnBook(Book(), book_rules)
        if share.is_shared:
            self.book = SharedBook(store, Book(), book_rules, replicas=share.replicas)
        self.running: dict[int, tuple[int, int]] = {}
        self.done: list[int] = []
        self.versions: dict[int, int] = {}
        self.next = 0

    def turn(self, version: int, *, last: int, most: int) -> dict[int, dict[int, int]]:
        """As StepFiller._update_book; returns this replica's share of steps that closed."""
        self.book.follow()
        move = Move(self.share.part, version, last, most, complete=tuple(self.done))
        before = copy.deepcopy(self.book.book)
        changes = self.book.book_rules.changes(before, move)
        tickets = self.book.move(move)
        if not changes:
            assert self.book.book == before and not tickets
            self.book.book_rules.play(before, move)
            assert self.book.book == before, "a move that changes something was left out"
        self.done = []
        for number, step, slot in tickets:
            self.running[number], self.versions[number] = (step, slot), version
        own = {
            step: {n: slot for n, slot in groups.items() if n in self.versions}
            for step, groups in self.book.book.closed.items()
            if step >= self.next
        }
        self.next = max([self.next, *(step + 1 for step in own)])
        return own

    def deal(self, step: int) -> list[list[int]]:
        return self.share.select(deal(self.costs, self.share.replicas))

    def slots(self, step: int) -> list[int]:
        count = len(self.costs)
        return list(range(count)) if self.share.is_shared else self.deal(step)[0]


@examples(
    150,
    seed=st.integers(0, 2**32),
    replicas=st.integers(1, 3),
    prompts=st.integers(1, 6),
    over=st.sampled_from([1.0, 1.5, 2.0]),
    lag=st.integers(0, 2),
    is_shared=st.booleans(),
)
def test_every_prompt_is_sampled_once_and_every_step_full_whoever_is_fast(
    seed, replicas, prompts, over, lag, is_shared
):
    """Replicas act in any order, some never until they must; in the end nothing is missing."""
    store, steps, chance = dist.HashStore(), 4, random.Random(seed)
    costs = [chance.randrange(10) for _ in range(prompts)]
    crew = []
    for i in range(replicas):
        share = Share(i, replicas, is_shared)
        quota = prompts if is_shared else len(range(i, prompts, replicas))
        rules = make_rules(quota, over_sample=over, lag=lag, max_staleness="auto")
        crew.append(Replica(store, rules, share=share, costs=costs))
    sampled, batches = [], {step: {} for step in range(steps)}
    for version in range(steps):
        for last in (version, min(version + lag, steps - 1)):
            while any(r.next <= last for r in crew):
                late = [r for r in crew if r.next <= last]
                replica = chance.choice(late)
                before = set(replica.running)
                closed = replica.turn(version, last=last, most=chance.randint(1, 4))
                sampled += [replica.running[n] for n in set(replica.running) - before]
                for step, groups in closed.items():
                    for number, slot in groups.items():
                        assert slot not in batches[step], "two groups have one slot"
                        batches[step][slot] = replica.versions[number]
                        assert step - replica.versions[number] <= replica.rules.max_staleness
                for number in sorted(replica.running):
                    if chance.random() < 0.5:
                        del replica.running[number]
                        replica.done.append(number)
    assert len(sampled) == len(set(sampled)), "a prompt was sampled twice"
    for step in range(steps):
        assert sorted(batches[step]) == list(range(prompts))
    if over == 1:
        assert set(sampled) == {(step, slot) for step in range(steps) for slot in range(prompts)}


def test_a_replica_that_is_done_takes_the_shortest_of_another():
    book, rules = Book(), make_rules(6, over_sample=1, lag=0, max_staleness="auto")
    costs = [6, 5, 4, 3, 2, 1]
    book_rules = BookRules(rules, lambda step: deal(costs, 2), lambda step: range(6))

    def take(part: int, most: int) -> list[Ticket]:
        return book_rules.play(book, Move(part, 0, 0, most))

    assert [t.slot for t in take(part=0, most=3)] == [0, 3, 4]
    assert book.left == {0: [[], [1, 2, 5]]}
    assert [t.slot for t in take(part=0, most=1)] == [5]
    assert [t.slot for t in take(part=1, most=9)] == [1, 2]
    assert not book.left and not take(part=1, most=9)


def test_a_plain_step_keeps_its_prompts_in_their_slots_whoever_drew_them():
    book, rules = Book(), make_rules(4, over_sample=1, lag=0, max_staleness="auto")
    book_rules = BookRules(rules, lambda step: deal([0] * 4, 2), lambda step: range(4))
    tickets = [
        t for part in (1, 0, 1, 1) for t in book_rules.play(book, Move(part, 0, 0, max_tickets=1))
    ]
    book_rules.play(book, Move(0, 0, 0, max_tickets=0, complete=(3, 1, 0, 2)))
    assert book.closed == {0: {t.number: t.slot for t in tickets}}


def pair(*stores: Any, prompts: int = 6) -> list[SharedBook]:
    """Return the books of two replicas, each by its view of the store."""
    rules = make_rules(prompts, over_sample=1, lag=0, max_staleness="auto")
    book_rules = BookRules(rules, lambda step: deal([0] * prompts, 2), lambda step: range(prompts))
    return [SharedBook(store, Book(), book_rules, replicas=2) for store in stores]


class Interrupted:
    """A store in which another replica writes just before this one does."""

    def __init__(self, store: dist.Store, interrupt: Callable[[], None]):
        self._store, self._interrupt = store, interrupt

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def compare_set(self, *words: str) -> bytes:
        interrupt, self._interrupt = self._interrupt, lambda: None
        interrupt()
        return self._store.compare_set(*words)


def test_two_that_write_at_once_lose_nothing():
    store, taken = dist.HashStore(), []
    late = Move(part=1, version=0, last=0, max_tickets=4)
    one, two = pair(Interrupted(store, lambda: taken.extend(two.move(late))), store)
    tickets = one.move(Move(part=0, version=0, last=0, max_tickets=9))
    assert [t.slot for t in taken] == [1, 3, 5, 4] and [t.slot for t in tickets] == [0, 2]
    assert [t.number for t in [*taken, *tickets]] == [0, 1, 2, 3, 4, 5]
    assert two.book != one.book and two.follow() and two.book == one.book
    assert not one.follow() and not two.follow()
    assert one.move(Move(part=0, version=0, last=0, max_tickets=9)) == []
    assert not two.follow(), "nothing was changed"


def test_what_all_have_played_leaves_the_store():
    store = dist.HashStore()
    books = pair(store, store, prompts=4)
    for step in range(50):
        for _ in range(2):
            for part, book in enumerate(books):
                for ticket in book.move(Move(part, step, step, max_tickets=1)):
                    book.move(Move(part, step, step, max_tickets=0, complete=(ticket.number,)))
        for book in books:
            book.follow()
            assert book.book.next == step + 1 and set(book.book.closed[step].values()) == {
                *range(4)
            }
    assert store.num_keys() < 30, "8 moves a step"


def test_replicas_ask_more_seldom_the_more_they_are():
    store = dist.HashStore()
    book_rules = pair(store, store)[0].book_rules
    for replicas, is_due in ((2, True), (512, False)):
        book = SharedBook(store, Book(), book_rules, replicas=replicas)
        assert book.is_due
        book.follow()
        time.sleep(0.01)
        assert book.is_due == is_due and not book.follow()


# --------------------------------------------------------------------------- resume


@examples(
    100,
    data=st.data(),
    before=st.integers(1, 3),
    after=st.integers(1, 3),
    was_shared=st.booleans(),
    is_shared=st.booleans(),
)
def test_nothing_is_lost_or_doubled_on_another_number_of_replicas(
    data, before, after, was_shared, is_shared
):
    prompts, costs = 6, [5, 0, 3, 3, 9, 1]
    store, states, taken = dist.HashStore(), [], set()
    crew = []
    for i in range(before):
        share = Share(i, before, was_shared)
        rules = make_rules(
            prompts if was_shared else len(range(i, prompts, before)),
            over_sample=3.0,
            lag=0,
            max_staleness="auto",
        )
        crew.append(Replica(store, rules, share=share, costs=costs))
    for replica in crew:  # they come to different steps, as dynamic sampling lets them
        for _ in range(data.draw(st.integers(0, 4))):
            replica.turn(0, last=0, most=data.draw(st.integers(0, 3)))
            taken |= set(replica.running.values())
    for replica in crew:
        replica.book.follow()
        book = replica.book.book
        states.append(
            {
                "is_shared": was_shared,
                "next": book.next,
                "number": book.number,
                "complete": [],
                "opened": book.opened,
                "left": book.left,
                "waiting": [
                    {"version": replica.versions[n], "number": n, "step": step, "slot": slot}
                    for n, (step, slot) in replica.running.items()
                ],
            }
        )
    found = [
        resume_state(states, step=0, share=Share(i, after, is_shared), costs_of=lambda _: costs)
        for i in range(after)
    ]
    groups = [(g["step"], g["slot"]) for one in found for _, g in one.groups]
    assert sorted(groups) == sorted(taken)
    for one in found:
        for number, group in one.groups:
            assert one.book.waiting[number] == (0, group["step"], group["slot"])
    books = [found[0].book] if is_shared else [one.book for one in found]
    assert all(one.book == books[0] for one in found) or not is_shared
    left = [
        (step, slot)
        for book in books
        for step, parts in book.left.items()
        for part in parts
        for slot in part
    ]
    opened = max(book.opened for book in books)
    for i, book in enumerate(books):  # steps that this one has yet to open
        left += [(k, s) for k in range(book.opened, opened) for s in deal(costs, after)[i]]
    assert sorted([*left, *taken]) == [(k, s) for k in range(opened) for s in range(prompts)]


@pytest.mark.parametrize(
    "lag, over, in_flight, steps",
    [
        (0, 1.0, False, 1),
        (1, 1.0, False, 1),
        (2, 1.0, False, 2),
        (1, 1.5, False, 2),
        (0, 2.0, False, 2),
        (2, 2.5, False, 4),
        (1, 1.0, True, 2),
        (2, 1.5, True, 4),
    ],
)
def test_no_prompt_is_asked_for_before_its_step_was_planned(lag, over, in_flight, steps):
    """Admission at its most eager, by the rules, against the bound that plans rely on."""
    assert horizon(ScheduleSettings(over_sample=over, in_flight=in_flight), lag=lag) == steps
    assert horizon(ScheduleSettings(dynamic=4, over_sample=over), lag=lag) == 0
    prompts, book = 4, Book()
    rules = make_rules(prompts, over_sample=over, lag=lag, max_staleness="auto")
    book_rules = BookRules(rules, lambda step: [[*range(prompts)]], lambda step: range(prompts))
    latest = 0
    for version in range(5):
        for observed, last in ((version - 1, version), (version, version + lag)):
            farthest = version + lag if in_flight else last
            while book.next <= last:
                tickets = book_rules.play(book, Move(0, version, farthest, max_tickets=99))
                latest = max([latest, *(t.step - observed for t in tickets)])
                numbers = tuple(t.number for t in tickets)
                book_rules.play(book, Move(0, version, last, max_tickets=0, complete=numbers))
    assert latest <= steps
