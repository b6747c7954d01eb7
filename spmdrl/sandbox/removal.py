"""A folder for a program of its own, and its removal, whatever the program made of it."""

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

_PREFIX = "spmdrl_sandbox_"
_YOUNG_S = 60.0
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def own_folder() -> Iterator[str]:
    """Make an empty folder and remove it at the end."""
    _sweep()
    folder = tempfile.mkdtemp(prefix=_PREFIX)
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
def _sweep() -> None:
    """Remove the folders of processes that were killed while a program ran; once per process.

    A folder in use is locked by its owner, or so young that it may be about to be.
    """
    base = tempfile.gettempdir()
    for name in os.listdir(base):
        if name.startswith(_PREFIX):
            with contextlib.suppress(OSError):  # in use, another user's, or gone
                _remove_unused(os.path.join(base, name))


def _remove_unused(folder: str) -> None:
    if time.time() - os.lstat(folder).st_mtime < _YOUNG_S:
        return
    held = os.open(folder, _FOLDER)
    try:
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
