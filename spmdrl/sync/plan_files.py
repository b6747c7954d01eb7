"""Plans kept on disk, so that a restart of the same job on the same ranks plans nothing.

A folder is named by a hash of all that its plans depend on; what a rank sends and what comes to a
receiver are a file each, which begins with a hash of the rest.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from spmdrl import plain
from spmdrl.model import cuts
from spmdrl.plain import pack, unpack
from spmdrl.sync import bucket_size, describe, holders, plan, routes, tables
from spmdrl.sync.plan import Slices
from spmdrl.sync.tables import Array

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kept:
    """A rank's parts of several pushes."""

    sums: list[tuple[Array, Array]]  # of what it sends and of what comes to it, see route_sums
    slices: list[tuple[Slices, Slices]]  # likewise


@cache
def code_version() -> bytes:
    """Return a hash of the code that makes plans."""
    modules = (plain, cuts, tables, holders, routes, describe, plan, bucket_size)
    texts = (Path(str(module.__file__)).read_bytes() for module in modules)
    return hashlib.sha256(b"".join(texts)).digest()


class PlanFiles:
    """The files of one rank's plans: what it sends, and what comes to its receiver.

    Args:
        folder: of plans of one kind.
        rank: this one.
        receivers: ranks of each.
        depends_on: bytes of everything that the plans depend on, but for the code.
    """

    def __init__(
        self, folder: Path, rank: int, receivers: Sequence[tuple[int, ...]], *, depends_on: bytes
    ):
        self.folder = folder / hashlib.sha256(code_version() + depends_on).hexdigest()[:24]
        own = next((i for i, ranks in enumerate(receivers) if rank in ranks), "nothing")
        self._sent, self._taken = f"sent-{rank}", f"taken-{own}"  # replicas take the same
        self._is_first = rank == 0

    def load(self) -> Kept | None:
        """Return what was saved; None where something is not there, or damaged."""
        sent, taken = self._read(self._sent), self._read(self._taken)
        if sent is None or taken is None:
            return None
        sums, slices = zip(*((tuple(zip(*both))) for both in zip(sent, taken)))
        return Kept(list(sums), list(slices))

    def save(self, kept: Kept) -> None:
        """Keep it, and nothing of other layouts.

        A folder that cannot be written to is said once, and costs the next start the planning.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for side, name in enumerate((self._sent, self._taken)):
                pairs = zip(kept.sums, kept.slices)
                self._write(name, [(sums[side], slices[side].pack()) for sums, slices in pairs])
            if self._is_first:
                for other in set(self.folder.parent.iterdir()) - {self.folder}:
                    shutil.rmtree(other, ignore_errors=True)
        except OSError as error:
            log.warning("weight stream: the plan is not kept for the next start: %s", error)

    def _read(self, name: str) -> list[tuple[Array, Slices]] | None:
        path = self.folder / name
        try:
            found = path.read_bytes()
        except OSError:
            return None
        if hashlib.sha256(found[32:]).digest() != found[:32]:
            log.warning("weight stream: %s is damaged; planning anew", path)
            return None
        return [(sums, Slices.unpack(packed)) for sums, packed in unpack(found[32:])]

    def _write(self, name: str, parts: list[tuple[Array, bytes]]) -> None:
        data, draft = pack(parts), self.folder / f"{name}.{os.getpid()}"
        draft.write_bytes(hashlib.sha256(data).digest() + data)
        draft.replace(self.folder / name)
