"""Find the best way to contain programs that this machine permits, by a program that probes it."""

from __future__ import annotations

import functools
import logging
import os
import sys
import tempfile
from dataclasses import dataclass

from spmdrl.imports import attempt
from spmdrl.sandbox.limits import Limits, Way
from spmdrl.sandbox.seccomp import seccomp_filter
from spmdrl.sandbox.supervisor import LaunchError, launch

log = logging.getLogger(__name__)

_PROBE_S = 20.0
# This program tries what it should not be able to do, and prints what worked.
_PROBE = """
import os, socket, sys, time
from contextlib import suppress
secret, processes, parent = sys.stdin.read().splitlines()
can = []
with suppress(OSError):
    open(secret).close()
    can.append("files")
with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
    one.connect(("127.0.0.1", 9))
    can.append("network")
with suppress(OSError):
    os.kill(int(parent), 0)
    can.append("signals")
with suppress(OSError):
    for _ in range(int(processes) + 1):
        if os.fork() == 0:
            time.sleep(10)
            os._exit(0)
    can.append("processes")
print(",".join(can))
"""


@dataclass(frozen=True, kw_only=True)
class Protection:
    """What a program in the sandbox cannot do on this machine.

    In any case it ends at its deadline with all processes that it started, and each process has
    limits of processor time, memory, file size and open files.
    """

    no_network: bool = False
    """It has no sockets."""
    no_files: bool = False
    """It can read only the Python installation and its own folder."""
    no_signals: bool = False
    """It cannot signal a process outside."""
    process_limit: bool = False
    """The number of its processes is limited."""
    text: str
    """Name of the way; or what is missing, and how to change that."""

    @property
    def is_enough(self) -> bool:
        """Whether it is safe to run code that nobody has read."""
        return self.no_network and self.no_files and self.no_signals


def protection() -> Protection:
    """Return the protection on this machine. The first call runs a probe, in about 0.1 s."""
    return choose_way()[1]


@functools.cache
def choose_way() -> tuple[Way, Protection]:
    """Return a way to contain programs, and its protection.

    This is the first way that is enough and limits processes. If there is none, it is the first
    that is enough; and if there is none, the way that protects most.
    """
    if sys.platform != "linux":
        return Way(), Protection(text=f"the sandbox needs Linux, this is {sys.platform}")
    problems = []
    enough: list[tuple[Way, Protection]] = []
    for name, way in ways():
        result, error = attempt(functools.partial(probe_way, way, name=name), LaunchError)
        if result and result.is_enough:
            if result.process_limit:
                return way, result
            enough.append((way, result))
            continue
        reason = str(error)
        if result:
            reason = f"works, but a program can still use {_not_blocked(result)}"
        problems.append(f"{name}: {reason}")
    if not enough:
        return _weakest("; ".join(problems))
    log.warning(
        "here the sandbox cannot limit how many processes a program starts (%s as root, and the "
        "kernel does not count processes of root); it limits time, memory and files of each. Run "
        "as another user, or in a container with the capability SYS_ADMIN",
        enough[0][1].text,
    )
    return enough[0]


def ways() -> list[tuple[str, Way]]:
    """Return (name, way) of the ways that may be enough, best first."""
    own_pids = seccomp_filter(has_own_pids=True)
    shared_pids = seccomp_filter(has_own_pids=False)
    is_root = os.geteuid() == 0
    result = [
        ("user namespaces", Way(namespaces=True, new_user=True, new_net=True, seccomp=own_pids)),
        ("user namespaces without seccomp", Way(namespaces=True, new_user=True, new_net=True)),
        ("Landlock and seccomp", Way(drop_uid=is_root, landlock=True, seccomp=shared_pids)),
    ]
    if is_root:
        as_root = Way(namespaces=True, new_net=True, drop_uid=True, seccomp=own_pids)
        result.insert(0, ("namespaces of root", as_root))
    return result


def _weakest(reasons: str) -> tuple[Way, Protection]:
    text = (
        "this machine permits no isolation of files and network (" + reasons + "). One of "
        "these is enough: unprivileged user namespaces (sysctl user.max_user_namespaces, "
        "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0), "
        "a container with the capability SYS_ADMIN, or Linux 5.13 with Landlock and seccomp "
        "and a Python installation that other users may read"
    )
    shared_pids = seccomp_filter(has_own_pids=False)
    is_root = os.geteuid() == 0
    for way in (
        Way(drop_uid=is_root, seccomp=shared_pids),
        Way(drop_uid=is_root),
        Way(seccomp=shared_pids),
        Way(),
    ):
        result, _ = attempt(functools.partial(probe_way, way, name=text), LaunchError)
        if result:
            return way, result
    return Way(), Protection(text=text)


def probe_way(way: Way, *, name: str) -> Protection:
    """Run a program in this way and return what it cannot do. Raises: LaunchError."""
    processes = 2
    with tempfile.NamedTemporaryFile("w", prefix="spmdrl_probe_") as secret:
        os.chmod(secret.name, 0o644)
        stdin = f"{secret.name}\n{processes}\n{os.getpid()}\n"
        limits = Limits(_PROBE_S, processes=processes)
        done = launch(_PROBE, way=way, limits=limits, stdin=stdin)
    if done.status != "ok":
        raise LaunchError(
            f"the probe ended with {done.status} {done.exit_code}: {done.stderr.strip()[-300:]}"
        )
    can = done.stdout.strip().split(",")
    # An attempt may have failed for another reason, so also check that the way prevents it.
    return Protection(
        no_network="network" not in can and (way.new_net or bool(way.seccomp)),
        no_files="files" not in can and (way.namespaces or way.landlock),
        no_signals="signals" not in can and (way.namespaces or bool(way.seccomp)),
        process_limit="processes" not in can,
        text=name,
    )


def _not_blocked(result: Protection) -> str:
    blocked = {"network": result.no_network, "files": result.no_files, "signals": result.no_signals}
    return ", ".join(name for name, is_blocked in blocked.items() if not is_blocked)
