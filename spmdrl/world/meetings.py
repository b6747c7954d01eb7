"""Where all ranks meet: small values told, and what is done again when an engine is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from spmdrl.world.comm import any_of, await_all, gather_objects
from spmdrl.world.lost_engines.going_on import Survival
from spmdrl.world.lost_peers.watch import Watch

T = TypeVar("T")


class Meetings:
    """The meetings of a World, which has what they need."""

    rank: int
    watch: Watch
    control: dist.ProcessGroup
    survival: Survival | None
    stop_requested: bool

    def from_rank_0(self, work: Callable[[], T], *, wait: str, step: int = -1) -> T:
        """Return on every rank the small value (see plain.py) that `work` returns on rank 0."""
        return self._met(
            lambda: gather_objects(
                work() if self.rank == 0 or self.is_alone else None, group=self.control
            )[0],
            wait=wait,
            step=step,
        )

    def gather(
        self, own: T, *, wait: str, step: int = -1, timeout_s: float | None = None
    ) -> list[T]:
        """Return on every rank the small value (see plain.py) of each rank, in rank order.

        Raises: Refusal naming each rank's line where they are not all in this wait of this step.
        """
        return self._met(
            lambda: gather_objects(own, group=self.control),
            wait=wait,
            step=step,
            timeout_s=timeout_s,
        )

    def meet(self, *, wait: str, step: int = -1) -> None:
        """Wait until every rank is here. Raises: as `gather`."""
        self._met(lambda: await_all(group=self.control), wait=wait, step=step)

    def _met(
        self, meeting: Callable[[], T], *, wait: str, step: int, timeout_s: float | None = None
    ) -> T:
        def turn() -> T:
            with self.watch.wait(wait, step, timeout_s=timeout_s):
                return meeting()

        return self.survive(turn, step=step)

    @property
    def is_alone(self) -> bool:
        """Whether this rank is to join a job, and meets nobody before it has."""
        return self.survival is not None and self.survival.is_alone

    def survive(self, turn: Callable[[], T], *, step: int, breaks_weights: bool = False) -> T:
        """Do what meets all ranks, again where an engine is lost meanwhile; see Survival.done."""
        if self.survival is None:
            return turn()
        return self.survival.done(turn, step=step, breaks_weights=breaks_weights)

    def group_of(self, ranks: Sequence[int], *, name: str) -> dist.ProcessGroup | None:
        """Return a group of some ranks for tensors, None off them; every rank must call it, for the
        same groups in one order."""
        if self.survival is None:
            return dist.new_group(list(ranks))
        return self.survival.group_of(ranks, name=name)

    def agree_to_stop(self, step: int) -> bool:
        """Return on all ranks, once all are here, whether any rank was asked to stop."""
        return self._met(
            lambda: any_of(self.stop_requested, group=self.control), wait="await peers", step=step
        )
