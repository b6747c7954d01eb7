"""Pass connections on between a port and a socket file.

A container without a network reaches the gateway by a file that it shares with its agent's process.
One end runs there, and the other by itself in the container, so it imports the standard library
alone:

    python3 relay.py SOCKET PORT COMMAND...
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

_READ_BYTES = 2**16


def relay(listener: socket.socket, connect: Callable[[], socket.socket]) -> None:
    """Pass all connections on, each by threads of its own. Does not return.

    Args:
        listener: where they come from.
        connect: opens a connection to where they go.
    """
    while True:
        ours, _ = listener.accept()
        try:
            theirs = connect()
        except OSError:
            ours.close()
            continue
        for ends in ((ours, theirs), (theirs, ours)):
            threading.Thread(target=_pass_on, args=ends, daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_READ_BYTES):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def _open(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return connection


def _main(path: str, port: str, *command: str) -> None:
    listener = socket.create_server(("127.0.0.1", int(port)))
    ends = (listener, lambda: _open(path))
    threading.Thread(target=relay, args=ends, daemon=True).start()
    status = subprocess.call(command)
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    _main(*sys.argv[1:])
