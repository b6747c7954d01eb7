"""One event loop per process, in a thread of its own, for connections that outlive a call."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import Coroutine
from typing import Any


@functools.cache
def loop() -> asyncio.AbstractEventLoop:
    """Return the event loop, which runs until the process ends."""
    own = asyncio.new_event_loop()
    threading.Thread(target=own.run_forever, daemon=True).start()
    return own


def start(work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
    """Begin work in the loop; return its future."""
    return asyncio.run_coroutine_threadsafe(work, loop())


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Do work in the loop, and return its result."""
    return start(work).result()
