"""Digests of a folder's files, which the trainer ranks share out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from spmdrl.imports import refusing
from spmdrl.world.comm import agree, gather_objects
from spmdrl.world.world import World


def file_digest(path: Path) -> str:
    """Return the sha256 of a file, hex. Raises: OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def shared_digests(
    folder: Path, names: Iterable[str], world: World, *, field: str
) -> dict[str, str]:
    """Return {name: sha256, hex} of files; every trainer rank calls it and reads a share of them.

    Args:
        field: of the config that names the folder, for messages.
    Raises: Refusal on all of them for a file that one cannot read.
    """
    own = {}
    group = world.trainer_control
    with agree(group=group, waiting=world.watch.wait("read digests", -1)):
        for name in sorted(names)[world.rank :: len(world.trainer_ranks)]:
            with refusing(f"{field}: cannot read {folder / name}", OSError):
                own[name] = file_digest(folder / name)
    with world.watch.wait("share digests", -1):
        every = gather_objects(own, group=group)
    return {name: digest for part in every for name, digest in part.items()}
