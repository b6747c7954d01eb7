"""A temporary folder and its removal, whatever a program made of it or ended its owner."""

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
    """Make an empty folder and remove it at the end; before, those of its kind that processes left
    which were killed.

    Args:
        kind: what it is for, part of its name. base: where; None for the system's folder.
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
        _remove_or_say(folder)
        os.close(held)


def _remove_or_say(folder: str) -> None:
    try:
        remove_folder(folder)
    except OSError as error:
        log.warning("%s: what a program left there cannot be removed: %s", folder, error)


@functools.cache
def _sweep(base: str, prefix: str) -> None:
    """Remove this user's folders of processes that were killed; once per process.

    A folder in use is locked by its owner, or so young that it may be about to be.
    """
    for name in os.listdir(base):
        if name.startswith(prefix):
            with contextlib.suppress(OSError):  # in use, another user's, or gone
                _remove_unused(os.path.join(base, name))


def _remove_unused(folder: str) -> None:
    held = os.open(folder, _FOLDER)
    try:
        found = os.fstat(held)
        if found.st_uid != os.geteuid() or time.time() - found.st_mtime < _YOUNG_S:
            return
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_folder(folder)
    finally:
        os.close(held)


def remove_folder(path: str) -> None:
    """Remove a folder and all in it, of which other processes hold nothing any more.

    Folders may be nested deeper than a path or a stack is long, closed to their owner, or links
    to elsewhere, which are removed and not followed: rm knows all that but closed ones.

    Raises: OSError for what cannot be removed.
    """
    remove = ["rm", "-rf", "--", path]
    if subprocess.run(remove, capture_output=True).returncode == 0:
        return
    subprocess.run(["chmod", "-R", "u+rwX", "--", path], capture_output=True)
    done = subprocess.run(remove, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise OSError(done.stderr.strip()[-500:])
