"""Plain values over a socket between two processes of ours: a length, then JSON."""

from __future__ import annotations

import json
import select
import socket
import struct
from typing import Any

_HEADER = struct.Struct("<I")
_READ_BYTES = 2**18


class FramedSocket:
    """One end of a socket that carries values of JSON, in order. Nothing blocks but `drain`.

    Args:
        end: a stream socket; this object closes it.
    """

    def __init__(self, end: socket.socket):
        end.setblocking(False)
        self._end = end
        self._inbox = bytearray()
        self._outbox = bytearray()
        self.has_ended = False
        """Whether the other end has been closed."""

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._end.fileno()

    def put(self, value: Any) -> None:
        """Queue a value, and send what the socket takes now."""
        data = json.dumps(value, separators=(",", ":")).encode()
        self._outbox += _HEADER.pack(len(data)) + data
        self.flush()

    def flush(self) -> bool:
        """Send what the socket takes now. Returns: whether nothing is left."""
        try:
            while self._outbox:
                del self._outbox[: self._end.send(self._outbox)]
        except BlockingIOError:
            return False
        except OSError:  # the other end is gone; nobody waits for the rest
            self.has_ended = True
            self._outbox.clear()
        return True

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is sent. Returns: whether it is."""
        poller = select.poll()
        poller.register(self._end, select.POLLOUT)
        while not self.flush():
            if not poller.poll(1000 * timeout_s):
                return False
        return True

    def receive(self) -> list[Any]:
        """Return the values that have arrived."""
        try:
            while data := self._end.recv(_READ_BYTES):
                self._inbox += data
            self.has_ended = True
        except BlockingIOError:
            pass
        except OSError:
            self.has_ended = True
        values = []
        while len(self._inbox) >= _HEADER.size:
            end = _HEADER.size + _HEADER.unpack_from(self._inbox)[0]
            if len(self._inbox) < end:
                break
            values.append(json.loads(self._inbox[_HEADER.size : end]))
            del self._inbox[:end]
        return values

    def close(self) -> None:
        """Close the socket; the other end sees it."""
        self._end.close()
