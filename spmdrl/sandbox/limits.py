"""What a program may use, and the ways to contain it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from spmdrl.errors import Refusal

_LEAST_MEMORY_MB = 64


@dataclass(frozen=True)
class Way:
    """One way to contain a program."""

    namespaces: bool = False
    """Namespaces of processes, mounts, IPC and host name, and a root file system of its own."""
    new_user: bool = False
    """A user namespace, which users other than root need for the other namespaces."""
    new_net: bool = False
    """A network namespace."""
    drop_uid: bool = False
    """Run as another user. This process must be root."""
    landlock: bool = False
    """Limit file access by Landlock, without namespaces."""
    seccomp: bytes = b""
    """A filter of system calls; empty for none."""


@dataclass(frozen=True)
class Limits:
    """What a program may use; see `run_python`.

    Raises (on construction): Refusal for a limit out of range.
    """

    timeout_s: float
    memory_mb: int = 512
    processes: int = 8
    files_mb: int = 64
    output_bytes: int = 1_000_000

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = _LEAST_MEMORY_MB - 1 if name == "memory_mb" else 0
            if not least < value < math.inf:
                raise Refusal(f"{name}: must be above {least}, got {value!r}")

    def of_system(self, way: Way) -> dict[str, int]:
        """Return {resource of setrlimit: value}; each process has these limits."""
        return {
            "RLIMIT_CORE": 0,
            "RLIMIT_CPU": math.ceil(self.timeout_s) + 1,
            "RLIMIT_AS": self.memory_mb << 20,
            "RLIMIT_FSIZE": self.files_mb << 20,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_MEMLOCK": 0,
            # In a user namespace, the launcher and init count as well.
            "RLIMIT_NPROC": self.processes + (2 if way.new_user else 0),
        }
