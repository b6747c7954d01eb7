"""The job's key-value store, whose values carry a MAC made from the job's secret.

Anybody who reaches the store can write into it. A value without a valid MAC is reported once and
otherwise ignored. That a key exists proves nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from spmdrl.world.secret import MARK_BYTES, mark

log = logging.getLogger(__name__)
_HEX = 2 * MARK_BYTES
_FOREVER = timedelta(days=365)
_AGAIN_S = 1.0


class SealedStore:
    """A torch Store of texts.

    Args:
        store: of this attempt of the job.
    """

    def __init__(self, store: dist.Store):
        self._store = store
        self._named: set[str] = set()

    def clone(self) -> SealedStore:
        """Return the same store by a connection of its own."""
        return SealedStore(self._store.clone())

    def set(self, key: str, text: str) -> None:
        """Write a value."""
        self._store.set(key, _sealed(key, text))

    def get(self, key: str) -> bytes:
        """Wait for a value and return it; b"" if it is forged."""
        return self._authentic(key, self._store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several values and return them; b"" for each forged one."""
        return list(map(self._authentic, keys, self._store.multi_get(list(keys))))

    def compare_set(self, key: str, expected: str, text: str) -> bytes:
        """Write a value if there is none, or only a forged one; return the value that the key has.

        Args:
            expected: must be "": no value.
        Raises: RuntimeError if a forged value cannot be replaced.
        """
        assert not expected, "only a first value can be compared with"
        stands = b""
        own = _sealed(key, text)
        while True:
            try:
                value = self._store.compare_set(key, stands.decode(), own)
            except UnicodeDecodeError as error:
                raise RuntimeError(_naming(key)) from error
            if authentic := self._authentic(key, value):
                return authentic
            stands = value

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all these keys exist, forged or not."""
        return self._store.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all these keys exist, forged or not."""
        self._store.wait(list(keys), timeout)

    def delete_key(self, key: str) -> bool:
        """Remove a value; return whether there was one."""
        return self._store.delete_key(key)

    def _authentic(self, key: str, value: bytes) -> bytes:
        seal = value[:_HEX]
        text = value[_HEX:]
        if hmac.compare_digest(seal, mark(key, text).hex().encode()):
            return text
        if key not in self._named:
            self._named.add(key)
            log.warning("%s", _naming(key))
        return b""


def _sealed(key: str, text: str) -> str:
    return mark(key, text.encode()).hex() + text


def _naming(key: str) -> str:
    return (
        f"somebody without the job's secret wrote {key} into the job's store, and is not believed: "
        "keep its port to the job's nodes, see docs/security.md"
    )


class WatchedKeys:
    """Tells whether a key of the store is set, by a thread that waits for it. One key at a time.

    Args:
        store: of the job. The thread gets a connection of its own, since a client that waits can
            do nothing else.
    """

    def __init__(self, store: SealedStore):
        self._store = store
        self._own: SealedStore | None = None
        self._key = ""
        self._found = threading.Event()

    def is_set(self, key: str) -> bool:
        """Return whether `key` is set, as far as this rank knows. The first call for a key starts
        the wait; a key must be set before the next one is asked for."""
        if key != self._key:
            self._own = self._own or self._store.clone()
            self._key = key
            self._found = threading.Event()
            work = (self._own, key, self._found)
            threading.Thread(
                target=_await_key, args=work, daemon=True, name="spmdrl-awaited"
            ).start()
        return self._found.is_set()


def _await_key(store: SealedStore, key: str, is_set: threading.Event) -> None:
    with contextlib.suppress(
        dist.DistError, RuntimeError
    ):  # the store is gone: collectives report it
        store.wait([key], _FOREVER)
        while not store.get(key):  # a forged value came first
            time.sleep(_AGAIN_S)
        is_set.set()
