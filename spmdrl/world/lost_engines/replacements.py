"""Where processes ask to take the places of lost engines, and rank 0 lets them in.

Who asks says so again and again, each time otherwise: so it is known to live when it is let in, and
what a dead one has left is not taken for it.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from spmdrl.world.sealed_store import SealedStore

_ASK_EVERY_S = 0.1
_ANSWERS_WITHIN_S = 1.0
_OVER = "joins/over"


class Door:
    """One rank's view of it.

    Args:
        store: of the job, used by this object alone.
    """

    def __init__(self, store: SealedStore):
        self._store = store
        self._left: dict[int, bytes] = {}  # by rank, what one had said that said nothing more

    def asking(self, ranks: Sequence[int]) -> list[tuple[int, str]]:
        """Return (rank, name) of the processes that live and ask for the places of some ranks.

        It takes up to a second where one is silent that was not before."""
        said = {rank: self._said(rank) for rank in ranks if self._store.check([_key(rank)])}
        waiting = {rank: text for rank, text in said.items() if text != self._left.get(rank)}
        found, end = list[tuple[int, str]](), time.monotonic() + _ANSWERS_WITHIN_S
        while waiting and time.monotonic() < end:
            time.sleep(_ASK_EVERY_S / 2)
            for rank, text in [*waiting.items()]:
                if (now := self._said(rank)) != text:
                    del waiting[rank]
                    found.append((rank, now.decode().partition(" ")[0]))
        self._left |= waiting
        return sorted(pair for pair in found if pair[1])

    def let_in(self, rank: int, name: str, said: dict[str, Any]) -> None:
        """Tell a process that asks to come in, and what it has to know."""
        self._store.set(f"joined/{rank}/{name}", json.dumps(said))

    def ask(self, rank: int) -> dict[str, Any] | None:
        """Ask for the place of a rank until the job lets this process in; return what it says, or
        None once the job has come to its end."""
        name, number = uuid.uuid4().hex, 0
        key = f"joined/{rank}/{name}"
        while not self._store.check([key]):
            if self._store.check([_OVER]):
                return None
            number += 1
            self._store.set(_key(rank), f"{name} {number}")
            time.sleep(_ASK_EVERY_S)
        self._store.delete_key(_key(rank))
        return json.loads(self._store.get(key))

    def close(self) -> None:
        """Say that the job has come to its end."""
        self._store.set(_OVER, "")

    def _said(self, rank: int) -> bytes:
        return self._store.get(_key(rank))


def _key(rank: int) -> str:
    return f"joins/{rank}"
