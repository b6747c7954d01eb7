"""Logprobs of sequences on disk, indexed by the content of the sequences.

N sequences, L scored tokens of all of them. A key is a hash of token ids and mask, so that rows,
their order, the template or the tokenizer may change: a changed sequence has another key.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from spmdrl.imports import parsed_json, refusing
from spmdrl.run_folder import make_folder, rename, write_file
from spmdrl.same_run.differences import RunParts, differences
from spmdrl.world.comm import gather_objects
from spmdrl.world.world import World

_NAMES = ("keys", "offsets", "values")
_MADE = "made_of"


@dataclass(frozen=True)
class Table:
    """The logprobs of N sequences at their scored tokens."""

    keys: Tensor  # [N] int64, ascending
    offsets: Tensor  # [N+1] int64, where each sequence's values begin
    values: Tensor  # [L] float32, nats

    def find(self, key: int) -> Tensor | None:
        """Return a sequence's values in order of its scored tokens; None if it is not there."""
        at = int(torch.searchsorted(self.keys, torch.tensor(key)))
        if at == len(self.keys) or int(self.keys[at]) != key:
            return None
        return self.values[int(self.offsets[at]) : int(self.offsets[at + 1])]

    def joined(self, found: Mapping[int, Tensor]) -> Table:
        """Return this table with the sequences of {key: values} in it too."""
        pieces = dict(sorted((self.pieces() | dict(found)).items()))
        lengths = torch.tensor([len(piece) for piece in pieces.values()], dtype=torch.int64)
        return Table(
            keys=torch.tensor(list(pieces), dtype=torch.int64),
            offsets=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
            # torch.cat refuses an empty list.
            values=torch.cat([torch.zeros(0), *pieces.values()]),
        )

    def pieces(self) -> dict[int, Tensor]:
        """Return {key: values} of every sequence."""
        return dict(zip(self.keys.tolist(), self.values.split(self.offsets.diff().tolist())))

    def digest(self) -> str:
        """Return the sha256 of keys, offsets and values."""
        found = hashlib.sha256()
        for name in _NAMES:
            found.update(getattr(self, name).numpy())
        return found.hexdigest()


def empty_table() -> Table:
    """Return a table without sequences."""
    none = torch.zeros(0, dtype=torch.int64)
    return Table(keys=none, offsets=torch.zeros(1, dtype=torch.int64), values=torch.zeros(0))


def sequence_key(tokens: Tensor, mask: Tensor) -> int:
    """Return the 64 bits that stand for a sequence.

    Args:
        tokens: [T] int64 on the CPU. mask: [T] bool, the tokens to score.
    """
    found = hashlib.blake2b(tokens.int().numpy().tobytes(), digest_size=8)
    found.update(mask.numpy().tobytes())
    # Signed, since a table holds keys as int64.
    return int.from_bytes(found.digest(), "big", signed=True)


def table_file(folder: Path, made: RunParts) -> Path:
    """Return the file of one reference.

    Args:
        made: what its logprobs are made of, apart from the sequences.
    """
    digest = hashlib.sha256(_json_of(made).encode()).hexdigest()
    return folder / f"{digest[:16]}.safetensors"


def _json_of(made: RunParts) -> str:
    return json.dumps(made, sort_keys=True)


def write_table(path: Path, table: Table, made: RunParts, *, within: Path) -> None:
    """Write a table, by one rename.

    Args:
        within: output_dir, or the folder that the config names, see `open_file`.
    Raises: RuntimeError when the disk refuses.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # runs may share the folder
    what = f"the reference's logprobs cannot be written to {path}"
    hint = (
        "; free disk space, or name another folder by model.reference.cache_folder: {cache: FOLDER}"
    )
    with refusing(what, OSError, SafetensorError, hint=hint, kind=RuntimeError):
        make_folder(path.parent, within=within)
        content = {name: getattr(table, name) for name in _NAMES}
        data = save(content, metadata={_MADE: _json_of(made), "sha256": table.digest()})
        write_file(partial, data, within=within)
        rename(partial, path, within=within)


def read_table(path: Path, made: RunParts) -> tuple[Table | None, str]:
    """Return a table and ""; or None and what is wrong with its file, "" if there is none."""
    if not path.is_file():
        return None, ""
    table, metadata, problem = _content(path)
    if table is None:
        return None, problem
    if metadata.get(_MADE) != _json_of(made):
        return None, "is of another reference than its name says"
    if table.digest() != metadata.get("sha256"):
        return None, "does not match its own sha256: it was changed or damaged"
    return table, ""


def _content(path: Path) -> tuple[Table | None, dict[str, str], str]:
    """Return a file's table and metadata, and why it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            table = Table(**{name: file.get_tensor(name) for name in _NAMES})
            return table, file.metadata() or {}, ""
    except (OSError, SafetensorError) as error:
        return None, {}, f"cannot be read: {error}"


def other_parts(path: Path, made: RunParts) -> list[str]:
    """Return the differences to the newest other table of the folder; [] if there is none."""
    others = sorted(
        (p for p in path.parent.glob("*.safetensors") if p != path), key=lambda p: p.stat().st_mtime
    )
    for other in others[::-1]:
        _, metadata, _ = _content(other)
        there, _ = parsed_json(metadata.get(_MADE, ""))
        if isinstance(there, dict):  # else it is no table of ours
            return [one.what for one in differences(there, made)]
    return []


def shared_table(path: Path, made: RunParts, world: World) -> tuple[Table, str]:
    """Return on every trainer rank the table that rank 0 finds, empty if it finds none.

    Ranks that see the same file read it themselves, and its pages are shared by those of one
    machine; where some do not (output_dir is not shared), rank 0 sends it.

    Returns: the table, and what is wrong with rank 0's file.
    """
    first = world.trainer_ranks[0]
    table, problem = read_table(path, made) if world.rank == first else (None, "")
    sizes = (table.digest(), len(table.keys), len(table.values)) if table else ("", 0, 0)
    with world.watch.wait("find reference logprobs", -1):
        told = gather_objects((*sizes, problem), group=world.trainer_control)
    digest, num_keys, num_values, problem = told[0]
    if not digest:
        return empty_table(), problem
    if world.rank != first:
        table, _ = read_table(path, made)
    with world.watch.wait("find reference logprobs", -1):
        # All ranks decide alike, since `_sent` is a collective.
        digests = gather_objects(table.digest() if table else "", group=world.trainer_control)
    return (
        table
        if table and set(digests) == {digest}
        else _sent(table, world, num_keys=num_keys, num_values=num_values)
    ), ""


def _sent(table: Table | None, world: World, *, num_keys: int, num_values: int) -> Table:
    """Return rank 0's table on every trainer rank."""
    if table is None or world.rank != world.trainer_ranks[0]:
        table = Table(
            keys=torch.zeros(num_keys, dtype=torch.int64),
            offsets=torch.zeros(num_keys + 1, dtype=torch.int64),
            values=torch.zeros(num_values),
        )
    with world.watch.wait("send reference logprobs", -1):
        for name in _NAMES:
            dist.broadcast(
                getattr(table, name), src=world.trainer_ranks[0], group=world.trainer_control
            )
    return table
