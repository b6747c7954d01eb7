"""Groups made again and again, by the ranks that are there.

A rank that has lost a connection closes all of them and says that it does; others that still make
groups then leave off too: a group waits for all its members, and one that is gone does not come.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from spmdrl.world.lost_peers.watch import EngineLost
from spmdrl.world.sealed_store import SealedStore
from spmdrl.world.torch_internals import drop_group, make_group

_MEET_WITHIN = timedelta(seconds=60)
_LOOK_EVERY_S = 0.2


class LiveGroups:
    """The groups that one rank has made.

    Args:
        store: of the job, unsealed: groups meet there.
        device: of tensors that NCCL carries.
    """

    def __init__(self, store: dist.Store, *, device: torch.device):
        self._store, self._device = store.clone(), device
        self._said = SealedStore(store.clone())
        self._groups: list[dist.ProcessGroup] = []
        self.losses = self.arrivals = 0
        """How often groups were made anew because a rank was gone, and because others came."""

    def __len__(self) -> int:
        return len(self._groups)

    def made(
        self,
        name: str,
        *,
        members: Sequence[int],
        own: int,
        backend: str,
        is_in_vain: Callable[[], bool],
    ) -> dist.ProcessGroup:
        """Make a group; see make_group.

        Args:
            is_in_vain: whether this rank knows of a member that is gone.
        Raises: EngineLost once it does, or another rank has given up its groups.
        """
        make = partial(
            make_group,
            self._store.clone(),  # one that is given up goes on waiting in it
            members=members,
            own=own,
            name=f"{name} {self.losses}.{self.arrivals}",
            device=self._device,
            backend=backend,
            meet_within=_MEET_WITHIN,
        )
        made = _begun(make)
        while not wait([made], timeout=_LOOK_EVERY_S).done:
            if self._said.check([self._given_up]) or is_in_vain():
                made.add_done_callback(_drop_made)
                raise EngineLost("a rank is gone with which a group was to be made")
        self._groups.append(made.result())
        return self._groups[-1]

    def give_up(self) -> None:
        """Have all ranks leave off to make groups, until the next loss is counted."""
        self._said.set(self._given_up, "")

    def drop(self, count: int) -> None:
        """Close the connections of the groups that were made first."""
        for _ in range(count):
            drop_group(self._groups.pop(0))
        gc.collect()  # they close with the last reference, and frames of what failed hold some

    @property
    def _given_up(self) -> str:
        return f"given up/{self.losses}"


def _begun(make: Callable[[], dist.ProcessGroup]) -> Future[dist.ProcessGroup]:
    """Begin to make a group beside: nothing interrupts its members as they wait for each other."""
    made = Future[dist.ProcessGroup]()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=run, daemon=True, name="spmdrl-groups").start()
    return made


def _drop_made(made: Future[dist.ProcessGroup]) -> None:
    if made.exception() is None:
        drop_group(made.result())
