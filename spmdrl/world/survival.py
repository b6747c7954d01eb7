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
import gc
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from spmdrl.config import Config
from spmdrl.world.comm import await_all, gather_objects
from spmdrl.world.sealed_store import SealedStore
from spmdrl.world.torch_internals import drop_group, make_group
from spmdrl.world.watch import EngineLost, PeersMissing, Watch, is_peer_error
from spmdrl.world.where import names_of

log = logging.getLogger(__name__)
T = TypeVar("T")

_MEET_WITHIN = timedelta(seconds=60)
_LOOK_EVERY_S = 0.05
_FOREVER_S = 365 * 86400.0
_KNOWN_AFTER_S = 15.0
"""Seconds in which a death comes to be known once a connection is closed."""
_SILENT_S = 6.0
"""Of a rank whose machine is gone with all that could tell of it; others' beats are 1 s apart."""


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
        self._world, self._store, self._tensors = world, store.clone(), tensors
        self._said = SealedStore(store.clone())
        self.own = world.rank
        """Number that the launcher gave this rank, and that the watch and the logs know it by."""
        self.members = list(range(world.world_size))
        """Such numbers of those that are left; the place in the list is the rank of today."""
        self.epoch = 0
        """How often groups were made anew."""
        self.forget: list[Callable[[], None]] = []
        """Called when a turn has failed: let go of all that holds a group."""
        self.settle: list[Callable[[bool], None]] = []
        """Called on all ranks together when new groups are there, with whether the engines that
        are left have whole weights."""
        self.arrive: list[Callable[[int], None]] = []
        """Called on all ranks together when ranks have joined, with the step that is next."""
        self.is_alone, self._joined_at = is_alone, -1
        self._turn, self._is_through, self._is_within = 0, False, False
        self._groups: list[dist.ProcessGroup] = []
        if not is_alone:
            self._enter(self.members)

    def start(self, step: int) -> int:
        """Begin to go on without engines: start-up is over. One that is alone joins the job.

        Returns: the step to begin with.
        """
        world = self._world
        engines = [self.members[r] for r in world.inference_ranks]
        if self.is_alone:
            step = self._joined_at = self._join()
        world.watch.may_lose = frozenset(engines)
        return step

    # ---------------------------------------------------------------- those that come

    def take_in(self, step: int) -> None:
        """Take in the processes that are there for the places of lost engines; all ranks meet."""
        if step != self._joined_at:
            self.done(lambda: self._take_in(step), step=step, breaks_weights=True)

    def _take_in(self, step: int) -> None:
        world, lost = self._world, sorted(self._world.watch.lost)
        own = [rank for rank in lost if self._said.check([f"joins/{rank}"])]
        with world.watch.wait("take in engines", step):
            found: list[int] = gather_objects(own, group=world.control)[0]
        if not found:
            return
        self._let_go()
        self.epoch += 1
        members = self.members + found
        if world.rank == 0:
            said = json.dumps([self.epoch, self._turn, step, members])
            for rank in found:
                world.watch.board.tell_returned(rank)
                self._said.delete_key(f"joins/{rank}")
                self._said.set(f"joined/{rank}", said)
            log.warning("step %d: %s joins as an engine", step, names_of(found))
        self._arrived(members, step)

    def _join(self) -> int:
        """Wait until the job takes this rank in; return the step that is next."""
        watch = self._world.watch
        watch.is_done_again = True
        with watch.wait("join", -1, timeout_s=_FOREVER_S):
            self._said.delete_key(f"joined/{self.own}")
            self._said.set(f"joins/{self.own}", "here")
            log.info("waits for the job to take it in at the next step")
            said = json.loads(self._said.get(f"joined/{self.own}"))
            self.epoch, self._turn, step, members = said
        self.is_alone, self._is_within = False, True
        with _until_lost():
            self._arrived(members, step)
            with watch.wait("await peers", step):
                await_all(group=self._world.control)
            self._is_within = watch.is_done_again = False
            self._turn += 1
            return step
        watch.leave_after_peer("another engine was lost while this one joined")
        raise AssertionError("the process ends")

    def _arrived(self, members: list[int], step: int) -> None:
        with self._world.watch.wait("take in engines", step):
            self._enter(members)
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
        if self._is_within or not watch.may_lose:  # in start-up a death ends the job
            return turn()
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
            self._let_go()
            with _until_lost(), self._world.watch.wait("go on without an engine", -1):
                self.epoch += 1
                self._enter(self._agreed_members(step))
                told = gather_objects((self._turn, self._is_through), group=self._world.control)
                for settle in self.settle:
                    settle(is_whole)
                await_all(group=self._world.control)
                latest = max(turn for turn, _ in told)
                # Who is a turn further has met all the others at the end of this one.
                return self._turn < latest or all(through for _, through in told)

    def _let_go(self) -> None:
        """Close the connections of all groups, so that nobody waits for what cannot come."""
        for forget in self.forget:
            forget()
        # Connections close with the last reference, and frames of what failed hold some.
        self._world.control = self._world.everyone = None  # type: ignore[assignment]
        while self._groups:
            drop_group(self._groups.pop())
        gc.collect()

    def _agreed_members(self, step: int) -> list[int]:
        """Return who is left, as the first rank finds it once they all are here."""
        name, own = f"members/{self.epoch}", self.own
        self._said.set(f"{name}/{own}", "here")
        if self._world.rank != 0:
            return json.loads(self._said.get(name))
        board, began, gone = self._world.watch.board, time.monotonic(), dict[int, str]()
        while True:
            self._world.watch.look_beside()
            gone = board.lost(self._engines()) | self._silent()
            left = self._whole_replicas(gone)
            if gone and self._said.check([f"{name}/{rank}" for rank in left]):
                break
            if not gone and time.monotonic() - began > _KNOWN_AFTER_S:
                raise self._world.watch.explained(EngineLost("a connection to a rank is gone"))
            time.sleep(_LOOK_EVERY_S)
        self._say_lost(gone, left, step)
        self._said.set(name, json.dumps(left))
        return left

    def _engines(self) -> list[int]:
        return sorted(self._world.watch.may_lose & set(self.members))

    def _silent(self) -> dict[int, str]:
        """Return the engines' ranks that say nothing any more: their machine may be gone."""
        may_go = self._engines()
        states = self._world.watch.board.read(may_go)
        return {
            rank: f"rank {rank} is missing: no sign of life for {_SILENT_S:g} s"
            for rank, state in zip(may_go, states)
            if state and time.time() - state["beat"] > _SILENT_S
        }

    def _whole_replicas(self, gone: dict[int, str]) -> list[int]:
        """Return the ranks that are left when each engine that has lost one is gone."""
        world, size = self._world, self._world.cfg.layout.inference_tp
        first, left = len(world.trainer_ranks), list(self.members)
        for begin in range(first, len(self.members), size):
            replica = self.members[begin : begin + size]
            if any(rank in gone for rank in replica):
                left = [rank for rank in left if rank not in replica]
        return left

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

    def _enter(self, members: list[int]) -> None:
        """Take one's place among those that are left, and make the groups between them."""
        world = self._world
        if self.own not in members:
            world.watch.leave_after_peer("a rank of its engine is gone, and so is the engine")
        world.watch.wait_for(members)
        self.members, world.rank = members, members.index(self.own)
        world.world_size = size = len(members)
        world.cfg = replace(world.cfg, layout=replace(world.cfg.layout, world_size=size))
        world.control = self._made("control", range(size), backend="gloo")
        world.everyone = self._made("everyone", range(size), backend=self._tensors)

    def _made(self, name: str, ranks: Sequence[int], *, backend: str) -> dist.ProcessGroup:
        group = make_group(
            self._store,
            members=[self.members[rank] for rank in ranks],
            own=self.own,
            name=f"{name} {self.epoch}",
            device=self._world.device,
            backend=backend,
            meet_within=_MEET_WITHIN,
        )
        self._groups.append(group)
        return group


class _until_lost(contextlib.AbstractContextManager):
    """End a block quietly where it fails because an engine is gone."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, EngineLost):
            return True
        if isinstance(error, PeersMissing) or not isinstance(error, (dist.DistError, RuntimeError)):
            return False
        return is_peer_error(error)
