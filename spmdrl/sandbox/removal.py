"""A folder for a program of its own, and its removal, whatever the program made of it."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
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
    to elsewhere, which are removed and not followed. So no path is longer than a name: a folder
    that is not empty is moved up to the first, until there are no deeper ones.

    Raises: OSError for what cannot be removed.
    """
    parent = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        name = os.path.basename(path)
        top = _opened(name, parent)
        try:
            _empty(top)
        finally:
            os.close(top)
        os.rmdir(name, dir_fd=parent)
    finally:
        os.close(parent)


def _empty(top: int) -> None:
    number = 0
    while names := _without_files(top):
        for name in names:
            number = _lift(name, top, number)
            os.rmdir(name, dir_fd=top)


def _lift(name: str, top: int, number: int) -> int:
    """Move what a folder holds beside it, as `moved_NUMBER`; return the last number."""
    inner = _opened(name, top)
    try:
        for deeper in _without_files(inner):
            number = _next_free(top, number)
            os.rename(deeper, f"moved_{number}", src_dir_fd=inner, dst_dir_fd=top)
    finally:
        os.close(inner)
    return number


def _next_free(top: int, number: int) -> int:
    with contextlib.suppress(FileNotFoundError):
        while True:  # the program may have names of this kind too
            number += 1
            os.stat(f"moved_{number}", dir_fd=top, follow_symlinks=False)
    return number


def _without_files(folder: int) -> list[str]:
    """Remove all that is no folder; return the names of the folders, which can be moved now."""
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    folders = [name for name, is_folder in found if is_folder]
    for name, is_folder in found:
        if not is_folder:
            os.unlink(name, dir_fd=folder)
    for name in folders:
        os.close(_opened(name, folder))
    return folders


def _opened(name: str, parent: int) -> int:
    """Return a folder, opened; one that its owner may not read or write is opened to him."""
    held = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{held}", 0o700)
        return os.open(".", _FOLDER, dir_fd=held)
    finally:
        os.close(held)
