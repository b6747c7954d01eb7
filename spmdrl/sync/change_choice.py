"""Which pushes send only what changed: decided by numbers that all ranks know."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from spmdrl.config import StreamSettings
from spmdrl.sync.buckets import Traffic
from spmdrl.sync.changes import encoded_share, pays
from spmdrl.sync.negotiation import link_of
from spmdrl.world.comm import gather_objects
from spmdrl.world.machine.hardware import LinkCost
from spmdrl.world.world import World

log = logging.getLogger(__name__)

EXPECTED_SHARE = 0.05
"""Share of the elements that change in a step, assumed until a push has measured it."""
_PAUSE = 20  # full pushes after one that did not save time


@dataclass(frozen=True)
class Moved:
    """What all ranks together moved in a push."""

    nbytes: int
    changed: int = 0
    compared: int = 0  # elements; 0 if everything was sent


class ChangeChoice:
    """Decides push by push; every rank constructs it and calls its methods together.

    Args:
        traffic: of a full push.
        itemsize: bytes of an element.
        kind: name of the tensors, for the log.
    """

    def __init__(self, traffic: Traffic, world: World, *, itemsize: int, kind: str):
        self._cfg = world.cfg.stream
        self._link: LinkCost = gather_objects(link_of(world), group=world.control)[0]
        self._busiest = traffic.largest_bucket(1)
        self._pushes = 0
        self._since_full = 0
        self._full_until = 0
        against = why_not(
            self._cfg,
            self._link,
            busiest=self._busiest,
            itemsize=itemsize,
            is_on_gpu=world.wire.type != "cpu",
        )
        self.is_on = not against
        """Whether any push sends only what changed."""
        if against:
            log.info("weight stream: each push of %s sends everything: %s", kind, against)
        else:
            log.info(
                "weight stream: a push of %s sends what changed; for this a rank keeps a copy of "
                "up to %d bytes",
                kind,
                int(traffic.nbytes.sum(axis=1).max(initial=0)),
            )

    def is_full(self) -> bool:
        """Return whether the next push sends everything in any case."""
        every = self._cfg.full_every
        return not self.keeps or (bool(every) and self._since_full >= every - 1)

    @property
    def keeps(self) -> bool:
        """Whether sources copy what the next push sends if it is full, to compare with it later."""
        return self.is_on and self._pushes >= self._full_until

    def note(self, moved: Moved, *, full_bytes: int) -> None:
        """Count a push. If sending what changed did not save time, let the next ones be full."""
        self._pushes += 1
        self._since_full = self._since_full + 1 if moved.compared else 0
        if not moved.compared or self._cfg.delta == "always":
            return
        sent_share = moved.nbytes / full_bytes
        if not pays(self._busiest, self._link, sent_share=sent_share):
            self._full_until = self._pushes + _PAUSE
            log.info(
                "weight stream: %.3g of the elements changed; the next %d pushes send everything",
                moved.changed / moved.compared,
                _PAUSE,
            )


def why_not(
    cfg: StreamSettings, link: LinkCost, *, busiest: int, itemsize: int, is_on_gpu: bool
) -> str:
    """Return why each push sends everything; empty if later ones send what changed.

    Args:
        busiest: bytes that the busiest rank sends or receives in a full push.
        itemsize: bytes of an element.
    """
    if cfg.delta == "never":
        return "stream.delta is never"
    if cfg.delta == "always":
        return ""
    if is_on_gpu:
        return "pushes of what changed were never run on GPUs (stream.delta: always takes them)"
    if not pays(busiest, link, sent_share=encoded_share(EXPECTED_SHARE, itemsize)):
        return (
            f"over links of {8e-9 * link.bytes_per_s:.4g} Gbit/s that is faster than to compare "
            "(stream.gbit_per_s says another rate)"
        )
    return ""
