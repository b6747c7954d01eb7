"""What the files of data.train hold, as digests."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from spmdrl.config import Config
from spmdrl.config.fields import replay_folder
from spmdrl.imports import refusing

_PART = 2**20
_MOST_PARTS = 256


def data_digests(cfg: Config) -> dict[str, str]:
    """Return {source, as `data.train` or `data.train[1]`: first 16 digits of a sha256} of files.

    The digest is over the size, and over the whole file up to 256 MiB; of a larger one over 256
    parts of 1 MiB each, the first and the last among them, so that a start stays cheap. Generated
    tasks and datasets of the hub have no digest: the config names them. Nor have rows that a replay
    does not read.

    Raises: Refusal for a file that cannot be read.
    """
    if replay_folder(cfg):
        return {}
    is_one = isinstance(cfg.data.train, str)
    found = {}
    for i, source in enumerate(cfg.data.sources("train")):
        path = Path(source.path).expanduser()
        if path.is_file():
            found["data.train" if is_one else f"data.train[{i}]"] = _digest(path)
    return found


def _digest(path: Path) -> str:
    with refusing(f"{path}: cannot be read", OSError):
        found = path.stat()
        return _digest_of(path, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=64)
def _digest_of(path: Path, size: int, changed_ns: int) -> str:
    """Return the digest of a file as it was last changed: a start asks for it several times."""
    with path.open("rb") as file:
        begins = [*range(0, size, _PART)]
        if len(begins) > _MOST_PARTS:
            begins = [(size - _PART) * i // (_MOST_PARTS - 1) for i in range(_MOST_PARTS)]
        found = hashlib.sha256(f"{size}\n".encode())
        for begin in begins:
            file.seek(begin)
            found.update(file.read(_PART))
    return found.hexdigest()[:16]
