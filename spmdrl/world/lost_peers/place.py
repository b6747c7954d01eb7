"""Where a rank is in the program, as a value and as text."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import NamedTuple

from spmdrl.world.lost_peers.silence import Silence

WAIT: ContextVar[tuple[str, int]] = ContextVar("WAIT", default=("", -1))
"""Name and step of the wait that this thread is in."""


@contextlib.contextmanager
def in_wait(name: str, step: int) -> Iterator[None]:
    """Set WAIT while this thread is in a wait."""
    token = WAIT.set((name, step))
    try:
        yield
    finally:
        WAIT.reset(token)


class Place(NamedTuple):
    """Where a rank is."""

    phase: str
    step: int
    since: float  # of this process's time.monotonic()
    waits: bool
    timeout_s: float | None = None  # of this wait; None is the watch's

    def __str__(self) -> str:
        return f"'{self.phase}' at step {self.step}"


def place_after(left: Place, before: Place) -> Place:
    """Return the place after one is left: the one around it, or `after NAME` if there is none."""
    if before.phase != "start" and not before.phase.startswith("after "):
        return before
    return Place(f"after {left.phase}", left.step, time.monotonic(), False)


def state_text(state: dict | None, *, own: Place, beat_s: float, silent_s: float) -> str:
    """Describe where a rank is.

    Args:
        state: what it wrote last; None for nothing.
        own: place of the rank that asks.
        silent_s: since it wrote that.
    """
    if state is None:
        return "is missing: it never reported, or the store is gone"
    if "error" in state:
        return f"ended with {state['error']}"
    place = Place(**state["place"])
    host = f" on {state['host']}" if "host" in state else ""
    if silent_s > 2.5 * beat_s:
        return (
            f"is missing: no sign of life for {silent_s:.0f} s{host}, "
            f"last seen in {place} (killed, or its process stopped)"
        )
    line = f" ({state['line']})" if state.get("line") else ""
    if str(place) != str(own):
        inside_s = state["beat"] - place.since + silent_s
        return f"is missing: {inside_s:.0f} s in {place}{host}{line}"
    return f"waits in {place} too{line}"


def report_text(
    states: Sequence[dict | None],
    *,
    rank: int,
    own: Place,
    beat_s: float,
    dead: Mapping[int, str],
    silence: Silence,
) -> str:
    """Describe where every rank is; ranks with the same description share a line.

    Args:
        states: what each rank wrote last; None for nothing.
        rank, own: the rank that asks, and its place.
        dead: `death_text` of ranks whose processes are known to have ended.
        silence: of the rank that asks.
    """
    ranks_of: dict[str, list[int]] = {}
    for other, state in enumerate(states):
        if other != rank:
            text = dead.get(other, "") if "error" not in (state or {}) else ""
            silent_s = silence.seconds(other, state) if state else 0.0
            text = text or state_text(state, own=own, beat_s=beat_s, silent_s=silent_s)
            ranks_of.setdefault(text.removeprefix(f"rank {other} "), []).append(other)
    line = (states[rank] or {}).get("line")
    at = f" ({line})" if line else ""
    lines = [f"rank {rank} waited {time.monotonic() - own.since:.0f} s in {own}{at}"]
    lines += [f"  {names_of(ranks)} {text}" for text, ranks in ranks_of.items()]
    return "\n".join(lines)


def names_of(ranks: Sequence[int]) -> str:
    """Return `rank 3` for one rank, and `each of the ranks 0-2, 5` for several, in rising order."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []  # first and last rank of each
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    names = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"each of the ranks {', '.join(names)}"


def death_text(rank: int, state: dict | None, host: str) -> str:
    """Return a message that a rank's process is dead.

    Args:
        state: what it wrote last; None for nothing.
    """
    place = Place(**state["place"]) if state else "its start"
    process = f"its process {state['pid']}" if state else "its process"
    how = "has left" if state and "left" in state else "ended without a word (killed, or crashed)"
    return f"rank {rank} is missing: {process} on {host} {how}, last seen in {place}"


def lost_store_text(store_rank: int | None, state: dict | None) -> str:
    """Return a message that the job's store is gone.

    Args:
        store_rank: rank whose process held it; None for the launcher.
        state: what that rank wrote last, if it is known.
    """
    if store_rank is None:
        return "the job's store is gone with the launcher, which kept it"
    text = f"rank {store_rank} is missing, and with it the job's store, which it kept"
    if state is None:
        return text
    return f"{text}: on {state['host']}, last seen in {Place(**state['place'])}"
