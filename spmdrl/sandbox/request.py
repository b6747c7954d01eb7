"""What the launcher is asked for: the program, what it may read, and what binds it."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import PurePosixPath
from typing import Any

from spmdrl.errors import Refusal
from spmdrl.sandbox.limits import Limits, Way

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
