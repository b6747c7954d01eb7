"""Which runs are this user's own: those with a MAC beside config.yaml that only they can make.

A user has a random key in ~/.config/spmdrl, which nobody else can read. A run writes config.mark,
an HMAC with that key over config.yaml, its path, and the current folder, in which relative names of
code are looked up. So a copied mark is valid nowhere.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import time
from pathlib import Path

from spmdrl.errors import Refusal
from spmdrl.imports import attempt
from spmdrl.run_folder import write_file

NAME = "config.mark"
_KEY_BYTES = 32
_SHOWN_WITHIN_S = 1.0  # for another process that is making the key


def mark_own(config: Path) -> str:
    """Write the mark of a run's config.yaml beside it; return why that failed, or an empty text.

    Without a home folder that can be written to, no mark is written and "" is returned.
    """
    key, why = _usable_key(makes=True)
    if key is None:
        return why
    write_file(config.with_name(NAME), _mark(key, config) + "\n")
    return ""


def is_own(config: Path) -> tuple[bool, str]:
    """Return whether a config.yaml is of this user's own run, and what is wrong with their key.

    The run must have been started in the current folder, and the file not been moved or changed.
    """
    try:
        mark = _read(config.with_name(NAME), limit=1024).decode(errors="replace").strip()
    except OSError:
        return False, ""
    key, why = _usable_key(makes=False)
    if key is None:
        return False, why
    expected, error = attempt(lambda: _mark(key, config), OSError)
    return error is None and hmac.compare_digest(mark.encode(), str(expected).encode()), ""


def key_file() -> Path:
    """Return where the user's key is. Raises: RuntimeError for a user without a home."""
    return Path.home() / ".config" / "spmdrl" / "key"


def _mark(key: bytes, config: Path) -> str:
    code = hmac.new(key, b"spmdrl config.yaml", "sha256")
    for part in (os.fsencode(config.resolve()), os.fsencode(Path.cwd()), config.read_bytes()):
        code.update(b"%d:%s" % (len(part), part))
    return code.hexdigest()


def _usable_key(*, makes: bool) -> tuple[bytes | None, str]:
    """Return the user's key; or None, and why if others can read or write it."""
    key, error = attempt(lambda: _key(makes=makes), (OSError, RuntimeError, Refusal))
    return key, str(error) if isinstance(error, Refusal) else ""


def _key(*, makes: bool) -> bytes:
    """Return the user's key.

    Raises: OSError or RuntimeError if there can be none; Refusal if others can read or write it.
    """
    path = key_file()
    if makes and not path.is_symlink() and not path.exists():
        _make(path)
    folder = os.stat(path.parent)
    if folder.st_uid != os.geteuid() or stat.S_IMODE(folder.st_mode) & 0o022:
        raise Refusal(f"{path.parent} is not yours alone to write to; run chmod 700 on it")
    end = time.monotonic() + _SHOWN_WITHIN_S
    while len(key := _secret(path)) < _KEY_BYTES and time.monotonic() < end:
        time.sleep(0.02)
    if len(key) != _KEY_BYTES:
        raise Refusal(f"{path} holds {len(key)} bytes, not {_KEY_BYTES}; remove it")
    return key


def _make(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        file = os.open(path, flags, 0o600)
    except FileExistsError:  # another process made it meanwhile
        return
    try:
        os.write(file, secrets.token_bytes(_KEY_BYTES))
        os.fsync(file)
    finally:
        os.close(file)


def _secret(path: Path) -> bytes:
    if path.is_symlink():
        raise Refusal(f"{path} is a link; remove it, and the next run makes another key")
    return _read(path, limit=_KEY_BYTES + 1, is_secret=True)


def _read(path: Path, *, limit: int, is_secret: bool = False) -> bytes:
    """Read a regular file that is no link.

    Raises: OSError; Refusal for a secret that others can read.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is no file")
        others = stat.S_IMODE(status.st_mode) & 0o077
        if is_secret and (others or status.st_uid != os.geteuid()):
            raise Refusal(
                f"{path} can be read by others, so that it marks nothing: remove it, and the next "
                "run makes another key"
            )
        return os.read(file, limit)
    finally:
        os.close(file)
