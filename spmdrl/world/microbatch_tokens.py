"""The size of a micro-batch, where trainers find it by trying: the same on every rank."""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Callable

from spmdrl.world.comm import agree, gather_objects
from spmdrl.world.world import World

log = logging.getLogger(__name__)


def agree_on_tokens(world: World, find: Callable[[int], int] | None) -> None:
    """Set `world.found_tokens` on every rank where the config leaves the size of a micro-batch
    open, unless a restored checkpoint said it; every rank of the job calls it.

    Args:
        find: on trainers, of the ranks that share this one's memory: the tokens that fit.
    Raises: Refusal on all ranks together when `find` does on one.
    """
    if world.cfg.batch.tokens_per_microbatch:
        return
    known = world.found_tokens
    with world.watch.wait("size micro-batches", -1):
        hosts = gather_objects(socket.gethostname(), group=world.control)
        shares = 1 if world.device.type == "cuda" else Counter(hosts)[hosts[world.rank]]
        with agree(group=world.control):
            own = 0 if known or find is None else find(shares)
        found = gather_objects(own, group=world.control)[world.trainer_ranks[0]]
    world.found_tokens = known or found
    if world.rank == 0:
        log.info(
            "micro-batches of %d tokens (batch.tokens_per_microbatch: 0%s)",
            world.found_tokens,
            ", as the checkpoint says" if known else "",
        )
