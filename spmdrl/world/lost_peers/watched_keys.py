"""A key of the job's store, waited for in a thread: looking at it costs the store nothing."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from spmdrl.world.sealed_store import SealedStore

_FOREVER = timedelta(days=365)
_AGAIN_S = 1.0


class WatchedKeys:
    """Whether keys of a store are set, one key at a time.

    Args:
        store: of the job. A waiting client does nothing else, so that this one gets a connection
            of its own with its first key.
    """

    def __init__(self, store: SealedStore):
        self._store = store
        self._own: SealedStore | None = None
        self._key = ""
        self._found = threading.Event()

    def is_set(self, key: str) -> bool:
        """Return whether `key` is known to be set. The first call for a key begins to wait for it;
        a key must be set before the next is asked for."""
        if key != self._key:
            self._own = self._own or self._store.clone()
            self._key = key
            self._found = threading.Event()
            work = (self._own, key, self._found)
            threading.Thread(target=_wait, args=work, daemon=True, name="spmdrl-awaited").start()
        return self._found.is_set()


def _wait(store: SealedStore, key: str, found: threading.Event) -> None:
    with contextlib.suppress(dist.DistError, RuntimeError):  # its host is gone: collectives say so
        store.wait([key], _FOREVER)
        while not store.get(key):  # a stranger's, in the place of what is still to come
            time.sleep(_AGAIN_S)
        found.set()
