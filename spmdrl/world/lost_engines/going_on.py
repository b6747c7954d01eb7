"""Going on without engines that are gone (`layout.survive_engines`): who is left, the groups
between them, and what is done again.

What all ranks do together in a step (rollouts to trainers, weights to engines, ...) is a turn. A
turn in which an engine's rank dies fails on all the others: a rank that sees it closes its
connections, so that nobody waits for what cannot come. Those that are left meet in the job's store,
make new groups under the numbers 0 to their count, and do the turn again, unless all had come to
its end. Trainers are ranks of which none may die: they keep their numbers.

Two rules follow for what a turn does. Done twice it is as done once; and behind the first line that
meets all ranks no line of it meets the trainers alone, who would wait for one that is elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from spmdrl.config import Config, LayoutSettings
from spmdrl.world.comm import await_all, gather_objects
from spmdrl.world.lost_engines.absent import Absent
from spmdrl.world.lost_engines.regroup import LiveGroups
from spmdrl.world.lost_engines.replacements import Door
from spmdrl.world.lost_peers.board import OUT
from spmdrl.world.lost_peers.place import names_of
from spmdrl.world.lost_peers.watch import EngineLost, PeersMissing, Watch, is_peer_error
from spmdrl.world.sealed_store import SealedStore

log = logging.getLogger(__name__)
T = TypeVar("T")

_LOOK_EVERY_S = 0.05
_FOREVER_S = 365 * 86400.0
_KNOWN_AFTER_S = 15.0
"""Seconds in which a death comes to be known once a connection is closed."""


class Job(Protocol):
    """What of a world changes with the ranks that are left."""

    cfg: Config
    rank: int
    world_size: int
    watch: Watch
    control: dist.ProcessGroup
    everyone: dist.ProcessGroup
    device: torch.device

    @property
    def trainer_ranks(self) -> list[int]:
        """Ranks that train, ascending."""

    @property
    def inference_ranks(self) -> list[int]:
        """Ranks that generate, ascending."""


class Survival:
    """The ranks that are left, as one of them sees it.

    Args:
        world: the job, whose rank, groups and config this object changes.
        store: of the job, unsealed: groups meet there.
        tensors: backend of the group that carries tensors, gloo or nccl.
        is_alone: this process is to join the job, in the place of a rank that is gone.
    """

    def __init__(self, world: Job, store: dist.Store, *, tensors: str, is_alone: bool = False):
        self._world, self._tensors = world, tensors
        self._said = SealedStore(store.clone())
        self._door = Door(SealedStore(store.clone()))
        self.own = world.rank
        """Number that the launcher gave this rank, and that the watch and the logs know it by."""
        self.members = list(range(world.world_size))
        """Such numbers of those that are left; the place in the list is the rank of today."""
        self.forget: list[Callable[[], None]] = []
        """Called when a turn has failed: let go of all that holds a group."""
        self.settle: list[Callable[[bool], None]] = []
        """Called on all ranks together when new groups are there, with whether the engines that
        are left have whole weights."""
        self.arrive: list[Callable[[int], None]] = []
        """Called on all ranks together when ranks have joined, with the step that is next."""
        self.ready: list[Callable[[], object]] = []
        """Called on all ranks together before others join: end what these could not go on with."""
        self.is_alone, self._joined_at = is_alone, -1
        self._turn, self._is_through, self._is_within = 0, False, False
        self._groups = LiveGroups(store, device=world.device)
        self._absent = Absent(world.watch)
        if not is_alone:
            self._enter(self.members, -1)

    def start(self, step: int) -> int:
        """Begin to go on without engines: start-up is over. One that is alone joins the job.

        Returns: the step to begin with; behind the last where the job has ended.
        """
        world = self._world
        engines = [self.members[r] for r in world.inference_ranks]
        if self.is_alone:
            step = self._joined_at = self._join()
        world.watch.may_lose = frozenset(engines)
        return step

    def close(self) -> None:
        """Let those that still wait to join know that the job has ended."""
        if self._world.rank == 0:
            self._door.close()

    # ---------------------------------------------------------------- those that come

    def take_in(self, step: int) -> None:
        """Take in the processes that are there for the places of lost engines; all ranks meet."""
        if step == self._joined_at:
            return
        losses, asking = self.done(lambda: self._asking(step), step=step, breaks_weights=False)
        if not asking:
            return
        for end in self.ready:
            end()

        def turn() -> None:
            if self._groups.losses == losses:  # else who came has left, or asks again
                self._take_in(dict(asking), step)

        self.done(turn, step=step, breaks_weights=True)

    def _asking(self, step: int) -> tuple[int, list[tuple[int, str]]]:
        world = self._world
        asking = self._door.asking(sorted(world.watch.lost)) if world.rank == 0 else []
        with world.watch.wait("take in engines", step):
            return gather_objects((self._groups.losses, asking), group=world.control)[0]

    def _take_in(self, asking: dict[int, str], step: int) -> None:
        groups, members = self._groups, self.members + [*asking]
        groups.arrivals += 1
        if self._world.rank == 0:
            numbers = {"losses": groups.losses, "arrivals": groups.arrivals, "turn": self._turn}
            said = numbers | {"step": step, "members": members}
            for rank, name in asking.items():
                self._world.watch.board.tell_returned(rank)
                self._door.let_in(rank, name, said)
            log.warning("step %d: %s joins as an engine", step, names_of([*asking]))
        self._arrived(members, step)

    def _join(self) -> int:
        """Wait until the job takes this rank in; return the step that is next."""
        watch = self._world.watch
        with watch.wait("join", -1, timeout_s=_FOREVER_S):
            log.info("waits for the job to take it in at the next step")
            said = self._door.ask(self.own)
        if said is None:
            log.info("the job has ended without it")
            return self._world.cfg.steps
        self._groups.losses, self._groups.arrivals = said["losses"], said["arrivals"]
        self._turn = said["turn"]
        self.is_alone, self._is_within, watch.is_done_again = False, True, True
        with _until_lost():
            self._arrived(said["members"], said["step"])
            with watch.wait("await peers", said["step"]):
                await_all(group=self._world.control)
            self._is_within = watch.is_done_again = False
            self._turn += 1
            return said["step"]
        watch.leave_after_peer("another engine was lost while this one joined")
        raise AssertionError("the process ends")

    def _arrived(self, members: list[int], step: int) -> None:
        with self._world.watch.wait("join groups", step):
            former = len(self._groups)
            self._enter(members, step)
            self._forget()
            # Not before: who is still at the end of the last turn would miss them.
            self._groups.drop(former)
            for settle in self.settle:
                settle(False)
            for arrive in self.arrive:
                arrive(step)

    def done(self, turn: Callable[[], T], *, step: int, breaks_weights: bool) -> T:
        """Do what meets all ranks, again where an engine is lost meanwhile.

        Args:
            breaks_weights: half done it leaves engines with weights of two versions.
        """
        watch = self._world.watch
        if self._is_within or self.is_alone or not watch.may_lose:
            return turn()  # in start-up a death ends the job
        self._is_within = watch.is_done_again = True
        try:
            while True:
                result, is_over = self._tried(turn, step)
                if is_over or self._go_on(step, is_whole=not breaks_weights):
                    break
        finally:
            self._is_within = watch.is_done_again = False
        self._turn += 1
        assert self._is_through
        return cast(T, result)

    def _tried(self, turn: Callable[[], T], step: int) -> tuple[T | None, bool]:
        """Return what a turn gives, and whether all ranks are known to have come to its end."""
        self._is_through, result = False, None
        with _until_lost():
            result = turn()
            self._is_through = True
            with self._world.watch.wait("await peers", step):
                await_all(group=self._world.control)
            return result, True
        return result, False

    def group_of(self, ranks: Sequence[int], *, name: str) -> dist.ProcessGroup | None:
        """Return a group of some of today's ranks for tensors, which they alone make; None
        elsewhere."""
        if self._world.rank not in ranks:
            return None
        return self._made(f"{name} {'-'.join(map(str, ranks))}", ranks, backend=self._tensors)

    # ---------------------------------------------------------------- after a loss

    def _go_on(self, step: int, *, is_whole: bool) -> bool:
        """Meet those that are left; return whether all of them had come to the turn's end."""
        while True:
            self._groups.give_up()
            self._let_go()
            with _until_lost(), self._world.watch.wait("go on without an engine", -1):
                self._groups.losses += 1
                self._enter(self._agreed_members(step), step)
                told = gather_objects((self._turn, self._is_through), group=self._world.control)
                for settle in self.settle:
                    settle(is_whole)
                await_all(group=self._world.control)
                latest = max(turn for turn, _ in told)
                # Who is a turn further has met all the others at the end of this one.
                return self._turn < latest or all(one == (latest, True) for one in told)

    def _let_go(self) -> None:
        """Close the connections of all groups, so that nobody waits for what cannot come."""
        self._forget()
        self._world.control = self._world.everyone = None  # type: ignore[assignment]
        self._groups.drop(len(self._groups))

    def _forget(self) -> None:
        for forget in self.forget:
            forget()

    def _agreed_members(self, step: int) -> list[int]:
        """Return who is left, as the first rank finds it once they all are here."""
        name, own = f"members/{self._groups.losses}", self.own
        self._said.set(f"{name}/{own}", "here")
        if self._world.rank != 0:
            return json.loads(self._said.get(name))
        began = time.monotonic()
        while True:
            gone = self._gone()
            left = _whole_replicas(self.members, gone, self._world.cfg.layout)
            if gone and self._said.check([f"{name}/{rank}" for rank in left]):
                break
            if not gone and time.monotonic() - began > _KNOWN_AFTER_S:
                raise self._world.watch.explained(EngineLost("a connection to a rank is gone"))
            time.sleep(_LOOK_EVERY_S)
        self._say_lost(gone, left, step)
        for rank in set(self.members) - {*left, *gone}:
            self._world.watch.board.tell_out(rank)
        self._said.set(name, json.dumps(left))
        return left

    def _gone(self) -> dict[int, str]:
        """Return what is known of the end of engines' ranks among the members."""
        return self._absent.among(sorted(self._world.watch.may_lose & set(self.members)))

    def _say_lost(self, gone: dict[int, str], left: list[int], step: int) -> None:
        world = self._world
        number = (len(left) - len(world.trainer_ranks)) // world.cfg.layout.inference_tp
        what = "; ".join(gone.values())
        if not number:
            raise PeersMissing(f"step {step}: the last engine is gone, and nobody samples: {what}")
        log.warning(
            "step %d: an engine is gone and its prompts are shared out anew, %d of them are "
            "left: %s",
            step,
            number,
            what,
        )

    def _enter(self, members: list[int], step: int) -> None:
        """Take one's place among those that are left, and make the groups between them."""
        world = self._world
        if self.own not in members:
            world.watch.leave_after_peer(OUT)
        world.watch.wait_for(members)
        self.members, world.rank = members, members.index(self.own)
        world.world_size = size = len(members)
        world.cfg = replace(world.cfg, layout=replace(world.cfg.layout, world_size=size))
        with world.watch.wait("make groups", step):
            control = self._made("control", range(size), backend="gloo")
            everyone = self._made("everyone", range(size), backend=self._tensors)
        world.control, world.everyone = control, everyone

    def _made(self, name: str, ranks: Sequence[int], *, backend: str) -> dist.ProcessGroup:
        return self._groups.made(
            name,
            members=[self.members[rank] for rank in ranks],
            own=self.own,
            backend=backend,
            is_in_vain=lambda: self._world.rank == 0 and bool(self._gone()),
        )


def _whole_replicas(
    members: Sequence[int], gone: Collection[int], layout: LayoutSettings
) -> list[int]:
    """Return who is left when each engine that has lost a rank is gone."""
    left, size = list(members), layout.inference_tp
    for begin in range(layout.trainer_ranks, len(members), size):
        replica = members[begin : begin + size]
        if any(rank in gone for rank in replica):
            left = [rank for rank in left if rank not in replica]
    return left


class _until_lost(contextlib.AbstractContextManager):
    """End a block quietly where it fails because an engine is gone."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, EngineLost):
            return True
        if isinstance(error, PeersMissing) or not isinstance(error, (dist.DistError, RuntimeError)):
            return False
        return is_peer_error(error)
