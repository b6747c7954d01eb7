"""The port of the job's store: bound to the job's address only, or refused with who has it."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import socket

import psutil

from spmdrl.errors import Refusal
from spmdrl.world.launch import Launch

log = logging.getLogger(__name__)


def listen(launch: Launch) -> socket.socket:
    """Return a socket that listens at the job's address only.

    It listens at all addresses of this machine if the job's address is a loopback address here, or
    no address of this machine.

    Raises: Refusal with the process that has the port, and what to do.
    """
    try:
        addresses = socket.getaddrinfo(launch.address, launch.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise Refusal(
            f"MASTER_ADDR: {launch.address} is the name of no host ({error.strerror}); set it to "
            "an address of the first node that all nodes reach"
        ) from error
    family, _, _, _, place = addresses[0]
    if launch.nodes > 1 and ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback:
        return _bind_all(launch)
    try:
        return _bind(family, place, launch)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    return _bind_all(launch)


def _bind_all(launch: Launch) -> socket.socket:
    log.warning(
        "the job's store listens on all addresses of this machine, port %d: %s is no address of "
        "its own by which others reach it. Set MASTER_ADDR to one (docs/security.md)",
        launch.port, launch.address,
    )  # fmt: skip
    return _bind(socket.AF_INET, ("0.0.0.0", launch.port), launch)


def _bind(family: int, place: tuple, launch: Launch) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise Refusal(_refusal(launch, error.errno == errno.EADDRINUSE)) from error
    return listening


def _refusal(launch: Launch, is_in_use: bool) -> str:
    holder = _holder(launch.port) or "a process of another user, or one that has just ended"
    why = f"is taken, by {holder}" if is_in_use else "may not be taken by this user"
    return (
        f"MASTER_PORT: port {launch.port} of {launch.address} ({socket.gethostname()}), where the "
        f"ranks were to meet, {why}. If that is an earlier run, end it; else set MASTER_PORT to "
        "another port, the same on all nodes"
    )


def _holder(port: int) -> str:
    """Return which process listens at a port of this machine; empty if that cannot be seen."""
    with contextlib.suppress(psutil.Error, OSError):  # gone, or another user's
        for link in psutil.net_connections("tcp"):
            if link.status == psutil.CONN_LISTEN and link.laddr.port == port and link.pid:
                command = " ".join(psutil.Process(link.pid).cmdline())
                return f"process {link.pid} ({command[:80]})"
    return ""
