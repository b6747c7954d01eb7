"""Temporary folders that are removed even after a hostile program, or after a kill."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator

log = logging.getLogger(__name__)

_YOUNG_S = 60.0
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def own_folder(kind: str = "sandbox", *, base: str | None = None) -> Iterator[str]:
    """Make an empty folder, and remove it at the end.

    First remove folders of this kind whose processes were killed.

    Args:
        kind: its purpose, part of its name.
        base: parent folder; None for the system's temporary folder.
    """
    base = base or tempfile.gettempdir()
    prefix = f"spmdrl_{kind}_"
    _sweep(base, prefix)
    folder = tempfile.mkdtemp(prefix=prefix, dir=base)
    held = os.open(folder, _FOLDER)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        try:
            remove_folder(folder)
        except OSError as error:
            log.warning("%s: files of a program there cannot be removed: %s", folder, error)
        os.close(held)


@functools.cache
def _sweep(base: str, prefix: str) -> None:
    """Remove this user's folders whose processes were killed, once per process.

    The owner of a folder that is in use has locked it; or the folder is so new that the owner may
    still lock it.
    """
    for name in os.listdir(base):
        if name.startswith(prefix):
            with contextlib.suppress(OSError):  # in use, another user's, or gone
                _remove_unused(os.path.join(base, name))


def _remove_unused(folder: str) -> None:
    held = os.open(folder, _FOLDER)
    try:
        status = os.fstat(held)
        if status.st_uid != os.geteuid() or time.time() - status.st_mtime < _YOUNG_S:
            return
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_folder(folder)
    finally:
        os.close(held)


def remove_folder(path: str) -> None:
    """Remove a folder and its content. No other process may use it.

    The content may be nested deeper than a path or the stack allows, or have no permissions for its
    owner. Links are removed and not followed. `rm` handles all of this but missing permissions.

    Raises: OSError if something cannot be removed.
    """
    remove = ["rm", "-rf", "--", path]
    if subprocess.run(remove, capture_output=True).returncode == 0:
        return
    subprocess.run(["chmod", "-R", "u+rwX", "--", path], capture_output=True)
    done = subprocess.run(remove, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise OSError(done.stderr.strip()[-500:])
