"""The request to the launcher: the program, what it may read, and its limits."""

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
    "PYTHONHASHSEED": "0",  # so that a response always has the same score
    # By default each thread reserves an arena, and a few arenas fill the limited address space.
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def _check_files(files: Mapping[str, str | bytes]) -> dict[str, bytes]:
    checked = {}
    for name, content in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.name or name == "main.py":
            raise Refusal(
                f"files: {name!r} must be a relative path without `..`, and not "
                "main.py, which is the program"
            )
        checked[name] = as_bytes(content) if isinstance(content, str) else bytes(content)
    return checked


def make_request(
    code: str,
    *,
    way: Way,
    limits: Limits,
    files: Mapping[str, str | bytes],
    packages: Sequence[str],
) -> dict[str, Any]:
    """Return the request that `launcher.main` reads, as plain values to marshal.

    Raises: Refusal for wrong files or packages.
    """
    python = os.path.realpath(sys.executable)
    packages = [os.path.realpath(p) for p in packages]
    for folder in packages:
        if not os.path.isdir(folder):
            raise Refusal(f"packages: {folder!r} is not a folder")
        if way.drop_uid and os.stat(folder).st_mode & 0o5 != 0o5:
            raise Refusal(
                f"packages: {folder!r} cannot be read by other users, but programs run as another "
                "user; chmod o+rx it"
            )
    env = _ENVIRONMENT | library_path() | ({"PYTHONPATH": ":".join(packages)} if packages else {})
    paths = sysconfig.get_paths()
    candidates = [
        python,
        os.path.realpath(paths["stdlib"]),
        os.path.realpath(paths["platstdlib"]),
        os.path.join(sys.base_exec_prefix, "lib"),
        *_SYSTEM_LIBRARIES,
        *_DEVICES,
        *packages,
    ]
    existing = [p for p in dict.fromkeys(candidates) if os.path.exists(p)]
    links = [(p, os.readlink(p)) for p in existing if os.path.islink(p)]
    real = [p for p in existing if not os.path.islink(p)]
    return asdict(way) | {
        "files": _check_files(files) | {"main.py": as_bytes(code)},
        "files_mb": limits.files_mb,
        "limits": limits.of_system(way),
        "links": links,
        # The new root is mounted over this folder, in the program's mount namespace.
        "base": next(p for p in ("/tmp", "/mnt", "/var/tmp", "/home") if os.path.isdir(p)),
        "readable": [p for p in real if not any(p.startswith(q + "/") for q in real)],
        "argv": [python, "-S", "-s", "-B", "main.py"],
        "env": env,
    }


def library_path() -> dict[str, str]:
    """Return the variable with folders of shared libraries, if set: Python may need it."""
    name = "LD_LIBRARY_PATH"
    return {name: os.environ[name]} if os.environ.get(name) else {}


def as_bytes(text: str) -> bytes:
    """Return a text as UTF-8, including the lone surrogates that a model may write."""
    return text.encode("utf-8", "surrogatepass")
