"""Which way to contain programs this machine permits: a program tries each of them, once."""

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
# It tries what it should not be able to do and prints what worked.
_PROBE = """
import os, socket, sys, time
from contextlib import suppress
planted, processes, parent = sys.stdin.read().splitlines()
can = []
with suppress(OSError):
    open(planted).close()
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

    It always ends at its deadline, with all that it started, and its processor time, memory, file
    size and open files are limited for each process.
    """

    no_network: bool = False
    """It has no sockets."""
    no_files: bool = False
    """It reads nothing but the Python installation and its own folder."""
    no_signals: bool = False
    """It cannot signal a process outside."""
    process_limit: bool = False
    """The number of its processes is limited too."""
    text: str
    """The name of the way; or what is missing, and how to get it."""

    @property
    def is_enough(self) -> bool:
        """Whether code that nobody has read may run."""
        return self.no_network and self.no_files and self.no_signals


def protection() -> Protection:
    """Return what this machine permits. The first call tries it, in about 0.1 s."""
    return chosen_way()[1]


@functools.cache
def chosen_way() -> tuple[Way, Protection]:
    """Return the first way that is enough and limits processes; if there is none, the first that is
    enough; if there is none, the way that protects most."""
    if sys.platform != "linux":
        return Way(), Protection(text=f"the sandbox needs Linux, this is {sys.platform}")
    failed = []
    enough: list[tuple[Way, Protection]] = []
    for name, way in ways():
        found, error = attempt(functools.partial(tried, way, name=name), LaunchError)
        if found and found.is_enough:
            if found.process_limit:
                return way, found
            enough.append((way, found))
            continue
        reason = str(error)
        if found:
            reason = f"works, but a program in it can still use {_open_doors(found)}"
        failed.append(f"{name}: {reason}")
    if not enough:
        return _weakest("; ".join(failed))
    log.warning(
        "the sandbox cannot limit here how many processes a program starts (%s as root, and the "
        "kernel does not count processes of root); time, memory and files of each are limited. Run "
        "as another user, or in a container with the capability SYS_ADMIN",
        enough[0][1].text,
    )
    return enough[0]


def ways() -> list[tuple[str, Way]]:
    """Return (name, way) of the ways that may be enough, the best first."""
    own_pids = seccomp_filter(has_own_pids=True)
    shared_pids = seccomp_filter(has_own_pids=False)
    is_root = os.geteuid() == 0
    found = [
        ("user namespaces", Way(namespaces=True, new_user=True, new_net=True, seccomp=own_pids)),
        ("user namespaces without seccomp", Way(namespaces=True, new_user=True, new_net=True)),
        ("Landlock and seccomp", Way(drop_uid=is_root, landlock=True, seccomp=shared_pids)),
    ]
    if is_root:
        as_root = Way(namespaces=True, new_net=True, drop_uid=True, seccomp=own_pids)
        found.insert(0, ("namespaces of root", as_root))
    return found


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
        found, _ = attempt(functools.partial(tried, way, name=text), LaunchError)
        if found:
            return way, found
    return Way(), Protection(text=text)


def tried(way: Way, *, name: str) -> Protection:
    """Return what a program in this way cannot do: one tries it. Raises: LaunchError."""
    processes = 2
    with tempfile.NamedTemporaryFile("w", prefix="spmdrl_probe_") as planted:
        os.chmod(planted.name, 0o644)
        stdin = f"{planted.name}\n{processes}\n{os.getpid()}\n"
        limits = Limits(_PROBE_S, processes=processes)
        done = launch(_PROBE, way=way, limits=limits, stdin=stdin)
    if done.status != "ok":
        raise LaunchError(
            f"the probe ended with {done.status} {done.exit_code}: {done.stderr.strip()[-300:]}"
        )
    can = done.stdout.strip().split(",")
    # A try may have failed for another reason, so the way must have the means too.
    return Protection(
        no_network="network" not in can and (way.new_net or bool(way.seccomp)),
        no_files="files" not in can and (way.namespaces or way.landlock),
        no_signals="signals" not in can and (way.namespaces or bool(way.seccomp)),
        process_limit="processes" not in can,
        text=name,
    )


def _open_doors(found: Protection) -> str:
    shut = {"network": found.no_network, "files": found.no_files, "signals": found.no_signals}
    return ", ".join(name for name, is_shut in shut.items() if not is_shut)
