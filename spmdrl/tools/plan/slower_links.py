"""Seconds of a push over links of several rates, with everything sent and with what changed."""

from __future__ import annotations

from collections.abc import Iterator

from spmdrl.sync.change_choice import EXPECTED_SHARE
from spmdrl.sync.changes import changes_s, encoded_share
from spmdrl.tools.plan.memory import link_of, rounds_s
from spmdrl.tools.plan.run import Run
from spmdrl.tools.plan.traffic import busiest_bytes
from spmdrl.world.axes import Axes
from spmdrl.world.machine.hardware import LINK_FRAC

GBITS = (400, 25, 1)
"""Links to compare, in 1e9 bits/s of a rank."""


def push_lines(run: Run, axes: Axes) -> Iterator[str]:
    """Yield the seconds of a full push and of one that sends what changed, link by link."""
    if not axes.engines or not axes.roles.overlaps or run.reloads:
        return
    whole, busiest = busiest_bytes(run, axes)
    sent_share = encoded_share(EXPECTED_SHARE, run.engine_bytes)
    yield (
        f"Push over a slower link, s (stream.delta: {run.cfg.stream.delta}; "
        f"{EXPECTED_SHARE:.0%} of the elements changed)"
    )
    yield "  Gbit/s   everything   what changed"
    for gbit in GBITS:
        link = link_of(run, axes).at(gbit * LINK_FRAC)
        full = busiest / link.bytes_per_s + rounds_s(run, axes, nbytes=whole)
        changed = changes_s(busiest, link, sent_share=sent_share)
        yield f"  {gbit:6}   {full:10.3f}   {changed:12.3f}"
