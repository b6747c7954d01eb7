"""What ranks write into the job's store: where each rank is, and why the job ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from spmdrl.world.lost_peers.place import lost_store_text
from spmdrl.world.sealed_store import SealedStore

T = TypeVar("T")
_CAUSE = "watch/cause"
_ENDED = "watch/ended"


class Board:
    """Reads and writes these entries for one rank.

    Once the store is gone, reads return nothing and writes do nothing.

    Args:
        store: a key-value store of the job, used by this object alone.
        store_rank: rank in whose process the store lives and ends; None: in the launcher's.
    """

    def __init__(self, store: SealedStore, rank: int, *, store_rank: int | None = None):
        self._store = store
        self._rank = rank
        self._store_rank = store_rank
        self._store_rank_state: dict | None = None  # what it wrote last
        self.has_store = True

    def write(self, state: dict[str, Any]) -> None:
        """Write where this rank is."""
        self._set(f"watch/{self._rank}", json.dumps(state))

    def read(self, ranks: Sequence[int]) -> list[dict | None]:
        """Return the last state of each of these ranks; None for a rank that wrote none.

        It takes two requests if all of them have written.
        """
        keys = [f"watch/{rank}" for rank in ranks]
        if self._stored(lambda: self._store.check(keys), False):
            texts = self._stored(lambda: self._store.multi_get(keys), [b"null"] * len(keys))
            return [json.loads(text or "null") for text in texts]
        if len(ranks) == 1 or not self.has_store:
            return [None] * len(ranks)
        half = len(ranks) // 2
        return self.read(ranks[:half]) + self.read(ranks[half:])

    def read_store_rank(self, *, again: bool = False) -> None:
        """Read the state of the rank that holds the store, if it is not known or `again`. Once the
        store is gone, nobody can read it."""
        if self._store_rank not in (None, self._rank) and (again or not self._store_rank_state):
            self._store_rank_state = self.read([self._store_rank or 0])[0] or self._store_rank_state

    def lost_text(self) -> str:
        """Return a message that the store is gone, with the rank that held it."""
        return lost_store_text(self._store_rank, self._store_rank_state)

    def claim_cause(self, text: str) -> bool:
        """Write why this rank ends; return whether no other rank gave the same reason before."""
        first = self._claim({"rank": self._rank, "error": text})
        return first.get("rank") == self._rank or first.get("error") != text

    def announce_end(self, text: str, state: dict[str, Any]) -> None:
        """Make the other ranks end; they show `text` as the error of this rank."""
        self.write(state | {"error": text})
        self._set(_ENDED, str(self._rank))

    def announce_missing(self, text: str) -> None:
        """Make the other ranks end because some are missing, unless another cause is known."""
        self._claim({"missing": text})
        self._set(_ENDED, str(self._rank))

    def cause(self) -> str:
        """Return why the job ends, `rank R ended with ...` or who is missing; empty if it runs."""
        if not self._stored(lambda: self._store.check([_CAUSE, _ENDED]), False):
            return ""
        first = json.loads(self._stored(lambda: self._store.get(_CAUSE), b"") or "{}")
        if "missing" in first:
            return first["missing"]
        return f"rank {first['rank']} ended with {first['error']}" if first else ""

    def _claim(self, cause: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(cause)
        first = self._stored(lambda: self._store.compare_set(_CAUSE, "", text), text.encode())
        return json.loads(first)

    def _set(self, key: str, text: str) -> None:
        self._stored(lambda: self._store.set(key, text), None)

    def _stored(self, use: Callable[[], T], otherwise: T) -> T:
        if self.has_store:
            try:
                return use()
            except (dist.DistError, RuntimeError):
                self.has_store = False
        return otherwise
