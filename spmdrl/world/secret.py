"""The job's secret, from which messages between ranks and values in their store get a MAC.

Every rank has it before it reads any message: from the launcher's environment, or from a file that
rank 0 makes for this attempt and only this user may read.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import stat
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.world.launch import SECRET, Launch, secret_of_environment

MARK_BYTES = 32
_WHERE = "secret"  # key of the store with the name of the secret's file
_SEEN_AFTER_S = 60.0  # a shared file system may show a new file late
_key = b""
_files: list[Path] = []


class Unauthentic(RuntimeError):
    """A message without a valid MAC."""


def adopt(secret: str, *, attempt: int = 0) -> None:
    """Use this secret for all MACs of this process; MACs of other attempts become invalid."""
    global _key
    _key = hmac.digest(os.fsencode(secret), b"spmdrl attempt %d" % attempt, "sha256")


def mark(place: str, data: bytes) -> bytes:
    """Return the MAC [MARK_BYTES] of data.

    Args:
        place: where the data belongs. Its MAC is not valid at another place.
    """
    if not _key:
        adopt(secret_of_environment() or _no_secret())
    code = hmac.new(_key, b"%d:%s" % (len(place.encode()), place.encode()), "sha256")
    code.update(data)
    return code.digest()


def is_marked(place: str, data: bytes, mac: bytes) -> bool:
    """Return whether `mac` is the MAC of the data."""
    return hmac.compare_digest(mark(place, data), mac)


def agree_on_secret(store: dist.Store, launch: Launch, *, shared: Path | None) -> None:
    """Agree on the job's secret and adopt it. Every rank calls it.

    Args:
        store: of the job, with a timeout.
        shared: folder that all nodes see; None without one.
    Raises: Refusal naming what is missing, or what differs between ranks.
    """
    if launch.rank == 0:
        secret = secret_of_environment()
        name = "" if secret else secrets.token_hex(16)
        if not secret:
            secret = secrets.token_hex(32)
            _files.append(_write(_folder(launch, shared) / name, secret))
        store.set(_WHERE, json.dumps(name))
    else:
        secret = _from_rank_0(store, launch, shared)
    adopt(secret, attempt=launch.attempt)


def remove_files() -> None:
    """Remove the file of the secret, which all ranks have read."""
    while _files:
        _files.pop().unlink(missing_ok=True)


def _from_rank_0(store: dist.Store, launch: Launch, shared: Path | None) -> str:
    name = store.get(_WHERE).decode(errors="replace")
    own = secret_of_environment()
    if name == json.dumps("") and own:
        return own
    if name == json.dumps("") or own:
        has, lacks = (launch.rank, 0) if own else (0, launch.rank)
        raise Refusal(
            f"rank {has} has {SECRET} in its environment and rank {lacks} has not: give all nodes "
            "the same, or none"
        )
    if not re.fullmatch('"[0-9a-f]{32}"', name):
        raise Refusal(
            f"the job's store has {name[:80]!r} where rank 0 says which file holds the job's "
            f"secret: somebody else writes into it. Set {SECRET} in the launcher's environment, "
            "and see docs/security.md"
        )
    return _read(_folder(launch, shared) / json.loads(name))


def _folder(launch: Launch, shared: Path | None) -> Path:
    """Return a folder that all ranks can read and no other user can enter."""
    if launch.nodes > 1 and shared is None:
        _no_secret()
    if launch.nodes > 1 and shared is not None:
        return private_folder(shared / ".secret")
    return private_folder()


def private_folder(folder: Path | None = None) -> Path:
    """Return a folder that no other user can enter; make it if it is missing.

    Args:
        folder: None for this user's own folder below the system's temporary one.
    Raises: Refusal for a folder that others can enter, or a link.
    """
    folder = folder or Path(tempfile.gettempdir()) / f"spmdrl-{os.getuid()}"
    with refusing(f"the job's secret cannot be kept in {folder}", OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_own or stat.S_IMODE(status.st_mode) & 0o077:
        raise Refusal(
            f"the job's secret cannot be kept in {folder}: others may enter it. Remove it, or set "
            f"{SECRET} in the launcher's environment"
        )
    return folder


def _write(path: Path, secret: str) -> Path:
    with open(path, "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())
    return path


def _read(path: Path) -> str:
    deadline = time.monotonic() + _SEEN_AFTER_S
    while True:
        try:
            secret = path.read_text()
        except FileNotFoundError:
            secret = ""
        if secret:
            return secret
        if time.monotonic() > deadline:
            raise Refusal(
                f"the file of the job's secret, {path}, is not there for this rank: the folder "
                f"must be one that all ranks share. Set {SECRET} in the launcher's environment to "
                "some 32 random characters, the same on all nodes"
            )
        time.sleep(0.05)


def _no_secret() -> NoReturn:
    raise Refusal(
        f"ranks that exchange messages need a secret: set {SECRET} in the launcher's environment "
        "to some 32 random characters, the same on all nodes"
    )
