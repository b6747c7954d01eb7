"""What ranks tell each other in the job's store: where each is, and why the job ends."""

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
    """One rank's view of it. Once the store's host is gone it is empty, and nothing is written.

    Args:
        store: a key-value store of the job, used by this object alone.
        keeper: rank in whose process the store lives and ends; None: in the launcher's.
    """

    def __init__(self, store: SealedStore, rank: int, *, keeper: int | None = None):
        self._store = store
        self._rank = rank
        self._keeper = keeper
        self._of_keeper: dict | None = None  # what it wrote last
        self.has_store = True

    def write(self, state: dict[str, Any]) -> None:
        """Say where this rank is."""
        self._set(f"watch/{self._rank}", json.dumps(state))

    def read(self, ranks: Sequence[int]) -> list[dict | None]:
        """Return what each of some ranks wrote last, in two requests if all have; None for
        nothing."""
        keys = [f"watch/{rank}" for rank in ranks]
        if self._stored(lambda: self._store.check(keys), False):
            texts = self._stored(lambda: self._store.multi_get(keys), [b"null"] * len(keys))
            return [json.loads(text or "null") for text in texts]
        if len(ranks) == 1 or not self.has_store:
            return [None] * len(ranks)
        half = len(ranks) // 2
        return self.read(ranks[:half]) + self.read(ranks[half:])

    def learn_keeper(self, *, anew: bool = False) -> None:
        """Read where the store's keeper is, if that is not known or has to be read anew: once the
        store is gone nobody can."""
        if self._keeper not in (None, self._rank) and (anew or not self._of_keeper):
            self._of_keeper = self.read([self._keeper or 0])[0] or self._of_keeper

    def lost_text(self) -> str:
        """Say that the store is gone, and who with it."""
        return lost_store_text(self._keeper, self._of_keeper)

    def claim_cause(self, text: str) -> bool:
        """Say why this rank ends; return whether no rank has given the same reason before."""
        first = self._claim({"rank": self._rank, "error": text})
        return first.get("rank") == self._rank or first.get("error") != text

    def tell_end(self, text: str, state: dict[str, Any]) -> None:
        """Let the other ranks end: they show `text` as what this rank ended with."""
        self.write(state | {"error": text})
        self._set(_ENDED, str(self._rank))

    def tell_missing(self, text: str) -> None:
        """Let the other ranks end because some are missing, unless they end for another reason."""
        self._claim({"missing": text})
        self._set(_ENDED, str(self._rank))

    def cause(self) -> str:
        """Return `rank R ended with ...` of the rank that failed first, or who is missing; empty
        for none."""
        if not self._stored(lambda: self._store.check([_CAUSE, _ENDED]), False):
            return ""
        first = json.loads(self._stored(lambda: self._store.get(_CAUSE), b"") or "{}")
        if "missing" in first:
            return first["missing"]
        return f"rank {first['rank']} ended with {first['error']}" if first else ""

    def _claim(self, cause: dict[str, Any]) -> dict[str, Any]:
        said = json.dumps(cause)
        stands = self._stored(lambda: self._store.compare_set(_CAUSE, "", said), said.encode())
        return json.loads(stands)

    def _set(self, key: str, text: str) -> None:
        self._stored(lambda: self._store.set(key, text), None)

    def _stored(self, use: Callable[[], T], otherwise: T) -> T:
        if self.has_store:
            try:
                return use()
            except (dist.DistError, RuntimeError):
                self.has_store = False
        return otherwise
