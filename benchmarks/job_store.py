"""The store of a job in a process of its own, and processes that are its many clients."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar

import torch.distributed as dist

PROCESSES = 2


_FORK = multiprocessing.get_context("fork")


class Host:
    """A store in a process of its own, for the time of a `with` block."""

    def __enter__(self) -> Host:
        self._pipe, theirs = _FORK.Pipe()
        self._process = _FORK.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        self.port = self._pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()

    @property
    def seconds(self) -> float:
        """Processor time of the store so far, seconds."""
        self._pipe.send("")
        return self._pipe.recv()


def _serve(pipe: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    while True:
        pipe.recv()
        pipe.send(time.process_time())


def connect(port: int) -> dist.TCPStore:
    """Return a connection to the store."""
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def connect_all(port: int, number: int) -> list[dist.TCPStore]:
    """Return connections, made side by side: the look-up of a name may take seconds."""
    with ThreadPoolExecutor(32) as pool:
        return list(pool.map(connect, [port] * number))


class CountedStore:
    """A store that counts what it is asked."""

    asked: ClassVar[Counter[str]] = Counter()

    def __init__(self, store: dist.Store):
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*args: Any) -> Any:
            """Ask the store, and count it."""
            CountedStore.asked[name] += 1
            return getattr(self._store, name)(*args)

        return ask


@contextmanager
def clients(work: Callable[..., Any], *args: Any) -> Iterator[list[Any]]:
    """Have some processes run `work(index, *args)`; the list has their results at the end."""
    found, results = [], _FORK.Queue()
    processes = [
        _FORK.Process(target=_work, args=(work, index, args, results), daemon=True)
        for index in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    yield found
    found += [results.get() for _ in processes]
    for process in processes:  # all at once: ranks that look for dead peers must not find any
        process.kill()
    for process in processes:
        process.join()


def _work(work: Callable[..., Any], index: int, args: tuple, results: Any) -> None:
    results.put(work(index, *args))
    threading.Event().wait()
