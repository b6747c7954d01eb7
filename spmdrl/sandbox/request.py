"""What the launcher is asked for: the program, what it may read, and the limits that bind it."""

from __future__ import annotations

import math
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from spmdrl.errors import Refusal

_LEAST_MEMORY_MB = 64
_SYSTEM_LIBRARIES = (
    "/lib",
    "/lib64",
    "/lib32",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/etc/ld.so.cache",
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/box",
    "TMPDIR": "/box",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # one response, one score
    # Else a few threads use up the address space that they may have.
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Way:
    """One way to contain a program."""

    namespaces: bool = False
    """Of processes, mounts, IPC and host name; a root file system of its own."""
    new_user: bool = False
    """A user namespace, for who is not root."""
    new_net: bool = False
    drop_uid: bool = False
    """Become another user; for root."""
    landlock: bool = False
    """Confine file access where there are no namespaces."""
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
        """Return the limits that the kernel keeps for each process, by their names there."""
        return {
            "RLIMIT_CORE": 0,
            "RLIMIT_CPU": math.ceil(self.timeout_s) + 1,
            "RLIMIT_AS": self.memory_mb << 20,
            "RLIMIT_FSIZE": self.files_mb << 20,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_MEMLOCK": 0,
            # The launcher and its init count in a user namespace of theirs.
            "RLIMIT_NPROC": self.processes + (2 if way.new_user else 0),
        }


def _checked(files: Mapping[str, str | bytes]) -> dict[str, bytes]:
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.name or name == "main.py":
            raise Refusal(
                f"files: {name!r} must be a relative path without `..`, and not "
                "main.py, which is the program"
            )
    return {n: as_bytes(d) if isinstance(d, str) else bytes(d) for n, d in files.items()}


def make_request(
    code: str,
    *,
    way: Way,
    limits: Limits,
    files: Mapping[str, str | bytes],
    packages: Sequence[str],
) -> dict[str, Any]:
    """Return what `launcher.main` reads: plain values, to be marshalled.

    Raises: Refusal for files and packages.
    """
    python = os.path.realpath(sys.executable)
    packages = [os.path.realpath(p) for p in packages]
    for folder in packages:
        if not os.path.isdir(folder):
            raise Refusal(f"packages: {folder!r} is not a folder")
        if way.drop_uid and os.stat(folder).st_mode & 0o5 != 0o5:
            raise Refusal(
                f"packages: {folder!r} is closed to other users, and programs run as "
                "another; chmod o+rx it"
            )
    env = _ENVIRONMENT | library_path() | ({"PYTHONPATH": ":".join(packages)} if packages else {})
    paths = sysconfig.get_paths()
    wanted = [
        python,
        os.path.realpath(paths["stdlib"]),
        os.path.realpath(paths["platstdlib"]),
        os.path.join(sys.base_exec_prefix, "lib"),
        *_SYSTEM_LIBRARIES,
        *_DEVICES,
        *packages,
    ]
    there = [p for p in dict.fromkeys(wanted) if os.path.exists(p)]
    links = [(p, os.readlink(p)) for p in there if os.path.islink(p)]
    real = [p for p in there if not os.path.islink(p)]
    return asdict(way) | {
        "files": {**_checked(files), "main.py": as_bytes(code)},
        "files_mb": limits.files_mb,
        "limits": limits.of_system(way),
        "links": links,
        # What the new root is built over; in a view of its own.
        "base": next(p for p in ("/tmp", "/mnt", "/var/tmp", "/home") if os.path.isdir(p)),
        "readable": [p for p in real if not any(p.startswith(q + "/") for q in real)],
        "argv": [python, "-S", "-s", "-B", "main.py"],
        "env": env,
    }


def library_path() -> dict[str, str]:
    """Return where the system was told to look for Python's own library, if anywhere."""
    name = "LD_LIBRARY_PATH"
    return {name: os.environ[name]} if os.environ.get(name) else {}


def as_bytes(text: str) -> bytes:
    """Return a text as UTF-8, halves of characters that a model may write included."""
    return text.encode("utf-8", "surrogatepass")
