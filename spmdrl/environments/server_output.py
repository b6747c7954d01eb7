"""What a server that a worker has started writes to its standard error: shown in part."""

from __future__ import annotations

import os
import threading
import time
from typing import TextIO

_SHOWN_BYTES = 2**14
_WINDOW_S = 600.0
_READ_BYTES = 2**16


class ServerOutput:
    """Passes the output of a server on to this process's, 16 KiB in ten minutes.

    Args:
        name: of the server, for the lines that say what was dropped.
    """

    def __init__(self, name: str):
        self._name = name
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._shown = 0
        self._dropped = 0

    def open(self) -> TextIO:
        """Return a file for the standard error of a process. The caller closes it."""
        source, sink = os.pipe()
        threading.Thread(target=self._pass_on, args=(source,), daemon=True).start()
        return os.fdopen(sink, "w")

    def _pass_on(self, source: int) -> None:
        with os.fdopen(source, "rb", buffering=0) as pipe:
            while data := pipe.read(_READ_BYTES):
                with self._lock:
                    self._show(data)
        with self._lock:
            self._end_window()

    def _show(self, data: bytes) -> None:
        if time.monotonic() - self._began > _WINDOW_S:
            self._end_window()
        shown = data[: _SHOWN_BYTES - self._shown]
        self._shown += len(shown)
        os.write(2, shown)
        if len(shown) == len(data):
            return
        if not self._dropped:
            self._say(
                f"over {_SHOWN_BYTES} bytes of output in {_WINDOW_S:g} s; the rest is dropped"
            )
        self._dropped += len(data) - len(shown)

    def _end_window(self) -> None:
        if self._dropped:
            self._say(f"{self._dropped} bytes of output were dropped")
        self._began = time.monotonic()
        self._shown = 0
        self._dropped = 0

    def _say(self, text: str) -> None:
        os.write(2, f"\nthe MCP server {self._name!r}: {text}\n".encode())
