"""The token budget of a micro-batch, if trainers measure it: the same on every rank."""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Callable

from spmdrl.world.comm import agree, gather_objects
from spmdrl.world.world import World

log = logging.getLogger(__name__)


def agree_on_tokens(world: World, find: Callable[[int], int] | None) -> None:
    """Set `world.found_tokens` on every rank, if batch.tokens_per_microbatch is 0.

    A value from a restored checkpoint is kept. Every rank of the job calls it.

    Args:
        find: on trainers, returns the tokens that fit. It gets the number of ranks that share the
            memory of this rank.
    Raises: Refusal on all ranks if `find` raises it on one.
    """
    if world.cfg.batch.tokens_per_microbatch:
        return
    known = world.found_tokens
    with world.watch.wait("size micro-batches", -1):
        hosts = gather_objects(socket.gethostname(), group=world.control)
        shares = 1 if world.device.type == "cuda" else Counter(hosts)[hosts[world.rank]]
        with agree(group=world.control):
            own = 0 if known or find is None else find(shares)
        measured = gather_objects(own, group=world.control)[world.trainer_ranks[0]]
    world.found_tokens = known or measured
    if world.rank == 0:
        log.info(
            "micro-batches of %d tokens (batch.tokens_per_microbatch: 0%s)",
            world.found_tokens,
            ", as the checkpoint says" if known else "",
        )
