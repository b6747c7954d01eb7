"""What is done with the share of an engine that is gone: copies of it, and drawing it again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from spmdrl.engine.protocol import EngineProtocol
from spmdrl.rollout.balance import deal_again
from spmdrl.rollout.book import Book, Ticket
from spmdrl.rollout.filling import StepFiller
from spmdrl.rollout.packing import concat_rollouts, pack_step, rollouts_from_dict, rollouts_to_dict
from spmdrl.rollout.resumed_work import Share
from spmdrl.types import Rollouts


class Survivor:
    """A replica that others may leave alone with their prompts.

    Args:
        filler: of its steps; nothing is under way in it while one of these methods is called.
        is_new: it is to join a job, of whose batches it has seen none.
    """

    def __init__(self, filler: StepFiller, *, is_new: bool = False):
        self._filler, self._is_new = filler, is_new
        self._copies: list[tuple[int, Rollouts]] = []  # (step, share) of all replicas
        self._lost: dict[int, list[int]] = {}  # by step: slots that engines which are gone had

    def held(self, taken: tuple[int, Rollouts] | None) -> dict[str, Any]:
        """Return which slots of which steps this replica has, as plain values.

        Args:
            taken: what was handed over and may not have come to the trainers.
        """
        filler = self._filler
        if taken is not None:
            filler.ahead.setdefault(*taken)
        slots = {step: sorted(_slots_of(own)) for step, own in filler.ahead.items()}
        copies = [(step, sorted(_slots_of(own))) for step, own in self._copies]
        planner = filler.prompts.state_dict()
        return {"next": filler.next, "slots": slots, "copies": copies, "planner": planner}

    def copies(self) -> list[Any]:
        """Return what this replica has drawn ahead, by step, as plain values."""
        return [(step, rollouts_to_dict(own)) for step, own in self._filler.ahead.items()]

    def keep_copies(self, shares: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """Keep what all replicas have drawn ahead, as `copies` gives it, in one order."""
        self._copies = [(step, rollouts_from_dict(share)) for step, share in shares]

    def share_out(self, told: Sequence[Mapping[str, Any]], *, first: int) -> bool:
        """Take one's part of what nobody has any more; return whether there is any to be drawn.

        Every replica that is left calls it with the same arguments.

        Args:
            told: what each of them holds. first: step that is the next to be trained on.
        """
        filler, every = self._filler, range(self._filler.cfg.batch.prompts_per_step)
        assert not filler.waiting and not filler.share.is_shared, "a turn lies between generations"
        replica, replicas = filler.world.replica, len(told)
        if self._is_new:
            filler.prompts.load_state_dict(told[0]["planner"], step=first)
            self._is_new = False
        filler.share = filler.prompts.share = Share(replica, replicas, is_shared=False)
        quota = len(every[replica::replicas])
        filler.rules = replace(filler.rules, quota=quota, lookahead=quota)  # none is over-sampled
        filler.next = max(own["next"] for own in told)
        # A replica may be behind another at the end of a turn, and have what was trained on.
        filler.ahead = {step: own for step, own in filler.ahead.items() if step >= first}
        held = {
            step: {slot for own in told for slot in own["slots"].get(step, ())}
            for step in range(first, filler.next)
        }
        for number, ((step, slots), holders) in enumerate(_offers(told).items()):
            if step in held and not held[step].intersection(slots):
                held[step].update(slots)
                if holders[number % len(holders)] == replica:
                    self._adopt(step, set(slots))
        missing = {step: sorted(set(every) - slots) for step, slots in held.items()}
        costs = {step: filler.prompts.costs(step) for step, slots in missing.items() if slots}
        dealt = deal_again(missing, costs_of=costs, parts=replicas)
        mine = {step: parts[replica] for step, parts in dealt.items()}
        self._lost = {step: slots for step, slots in mine.items() if slots}
        filler.keep(Book(next=filler.next, opened=filler.next))
        return bool(self._lost)

    def make_up(self, engine: EngineProtocol) -> None:
        """Draw what an engine that is gone had drawn, or was to."""
        filler = self._filler
        for step, slots in sorted(self._lost.items()):
            began = time.perf_counter()
            tickets = [Ticket(-1 - slot, step, slot) for slot in slots]
            groups = [filler.group(ticket, engine.version) for ticket in tickets]
            for group in groups:
                filler.loop.admit(group)
            while not all(group.is_complete for group in groups):
                filler.loop.tick(engine)
            rollouts = pack_step(
                groups,
                filler.cfg,
                is_first=False,
                seconds=time.perf_counter() - began,
                measured={},
                dropped=[],
                num_carried=0,
            )
            self._add(step, rollouts)
            del self._lost[step]

    def _adopt(self, step: int, slots: set[int]) -> None:
        found = (own for at, own in self._copies if at == step and _slots_of(own) == slots)
        self._add(step, next(found))

    def _add(self, step: int, rollouts: Rollouts) -> None:
        ahead = self._filler.ahead
        ahead[step] = concat_rollouts([*([ahead[step]] if step in ahead else []), rollouts])


def _offers(told: Sequence[Mapping[str, Any]]) -> dict[tuple[int, tuple[int, ...]], list[int]]:
    """Return {(step, slots): the replicas that have a copy of them}, larger ones first: a replica
    that has just joined has none, and one that is behind another may have older ones."""
    offers: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for replica, own in enumerate(told):
        for step, slots in own["copies"]:
            offers.setdefault((step, tuple(slots)), []).append(replica)
    return {key: offers[key] for key in sorted(offers, key=lambda key: (key[0], -len(key[1]), key))}


def _slots_of(rollouts: Rollouts) -> set[int]:
    return set(rollouts.scalars.group_ids.tolist())
