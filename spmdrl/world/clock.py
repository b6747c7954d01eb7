"""How the clocks of the job's machines differ."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from spmdrl.world.lost_peers.local_ranks import own_process
from spmdrl.world.world import World

_ROUNDS = 8


class Exchange(NamedTuple):
    """When a rank entered a gather of all ranks and when it left it, by its own clock."""

    entered: float
    left: float


def clock_lead(world: World) -> float:
    """Return by how many seconds this machine's clock is ahead of that of rank 0's machine.

    Every rank must call it. It is 0 on rank 0's machine. Elsewhere the error is at most half the
    time of the fastest of a few gathers.
    """
    machines = world.gather(own_process()["machine"], wait="compare clocks")
    if len(set(machines)) == 1 and machines[0]:
        return 0.0
    own = []
    first = []
    for _ in range(_ROUNDS):
        entered = time.time()
        world.meet(wait="compare clocks")
        exchange = Exchange(entered, time.time())
        own.append(exchange)
        first.append(Exchange(*world.gather([*exchange], wait="compare clocks")[0]))
    same_machine = machines[0] and machines[world.rank] == machines[0]
    return 0.0 if same_machine else lead_of(own, first)


def lead_of(own: Sequence[Exchange], first: Sequence[Exchange]) -> float:
    """Return by how much this rank's clock is ahead of rank 0's, in seconds.

    No rank leaves a gather before all have entered it. So each gather bounds the lead from both
    sides, and the middle of the closest bounds is returned.

    Args:
        own, first: the same gathers, by the clock of this rank and by that of rank 0.
    """
    least = max(mine.entered - theirs.left for mine, theirs in zip(own, first))
    most = min(mine.left - theirs.entered for mine, theirs in zip(own, first))
    return (least + most) / 2
