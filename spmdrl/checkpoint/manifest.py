"""A checkpoint on disk: its folder, the manifest that proves it whole, and safe readers.

    OUTPUT_DIR/checkpoints/step_20/         complete: the name appears by one rename
        manifest.json                       step, config, evaluation, size and sha256 of every file
        policy/                             weights and optimizer state (DCP), sharded
        rollouts_RANK.pt, rng_RANK.pt       what each rank adds
    OUTPUT_DIR/checkpoints/best             link to the best one, see `keep`
    OUTPUT_DIR/checkpoints/step_30.partial/ being written, or left by a run that was killed
    OUTPUT_DIR/checkpoints/step_10.damaged/ could not be used and was set aside

Nothing here unpickles arbitrary objects: a checkpoint may come from another person.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from spmdrl import run_files, run_folder
from spmdrl.checkpoint.index_form import check_archive, check_index
from spmdrl.errors import Refusal, message_of, printable
from spmdrl.imports import attempt, refusing
from spmdrl.plain import record
from spmdrl.run_folder import open_file
from spmdrl.value_forms import (
    Form,
    are_wholes,
    check_values,
    is_count,
    is_number,
    is_object,
    is_text,
)
from spmdrl.world.torch_internals import INDEX_CLASSES

NAME = "manifest.json"
POLICY = "policy"
_FORMAT = 1


@record
@dataclass(frozen=True)
class FileEntry:
    """The entry of one file in a manifest."""

    size: int  # bytes
    sha256: str  # hex


@record
@dataclass(frozen=True)
class Manifest:
    """The description of one checkpoint, and its files."""

    step: int
    """Training steps done; also the policy version."""
    config: dict[str, Any]
    """Flattened config of the run that wrote it."""
    model: str
    """Folder (absolute) or hub name that config and tokenizer come from."""
    tokenizer: str
    """The same for the tokenizer."""
    rollout_ranks: tuple[int, ...]
    """Ranks that saved rollouts which were made ahead."""
    files: dict[str, FileEntry]
    """Path within the checkpoint -> size and digest."""
    evaluated: dict[str, float] = field(default_factory=dict)
    """{metric: value} of the evaluation of these weights; empty where none was due."""
    found_tokens: int = 0
    """Tokens of a micro-batch that the run chose under batch.tokens_per_microbatch 0; else 0."""
    data: dict[str, str] = field(default_factory=dict)
    """What the files of data.train held when the run started, see `data_digests`."""


def checkpoints_folder(output_dir: str | Path) -> Path:
    """Return where a run keeps its checkpoints."""
    return Path(output_dir) / "checkpoints"


def step_folder(root: Path, step: int) -> Path:
    """Return the folder of the complete checkpoint of one step."""
    return root / f"step_{step}"


def complete_checkpoints(root: Path) -> list[Path]:
    """Return the checkpoint folders under `root` that were completed, newest first."""
    found = [path for path in root.glob("step_*") if path.is_dir() and step_of(path) >= 0]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """Return the step in a complete checkpoint's name, -1 for any other name."""
    match = re.fullmatch(r"step_(\d+)", folder.name)
    return int(match[1]) if match else -1


def file_entry(path: Path) -> FileEntry:
    """Read one file and return its size and digest."""
    with run_files.opened(path, run_files.TENSORS) as f:
        size = os.fstat(f.fileno()).st_size
        return FileEntry(size, hashlib.file_digest(f, "sha256").hexdigest())


def write_file(path: Path, content: bytes) -> None:
    """Write a file of a checkpoint and wait until the disk has it. Raises: OSError."""
    # parents[2] of OUTPUT_DIR/checkpoints/step_N.partial/NAME is OUTPUT_DIR: no folder below it
    # may be a link. For `remove` and `rename`, which take the folder itself, it is parents[1].
    with open_file(path, "wb", within=path.parents[2]) as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the disk has the folder's entries. Raises: OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, with a digest of itself. Raises: OSError."""
    body = asdict(manifest) | {"format": _FORMAT}
    text = json.dumps({"sha256": _digest(body), **body}, indent=1)
    write_file(folder / NAME, text.encode())


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of one checkpoint.

    Raises: Refusal naming the file and what is wrong with it.
    """
    path = folder / NAME
    if not path.exists():
        raise Refusal(f"{path} is missing")
    kinds = (OSError, ValueError, KeyError, AttributeError, TypeError)
    with refusing(f"{path} is not a manifest", *kinds, passes_refusals=True):
        text = run_files.read_bytes(path, run_files.MANIFEST)
        body = run_files.json_object(text, place=f"{path} is not a manifest")
        written = body.pop("sha256")
    if written != _digest(body):
        raise Refusal(f"{path} does not match its own sha256: it was changed or damaged")
    if body.pop("format", None) != _FORMAT:
        raise Refusal(f"{path} is of another format than {_FORMAT}; use the version that wrote it")
    with refusing(f"{path} is not a manifest of this version", Refusal, TypeError):
        content = _manifest_of(body)
    # A copy may have any name but that of another step, by which a resume would sort it.
    if step_of(folder) not in (-1, content.step):
        raise Refusal(
            f"{path} is of step {content.step}, and its folder is called {folder.name}: it was "
            "copied or renamed; give it its own name"
        )
    return content


def _manifest_of(body: dict[str, Any]) -> Manifest:
    """Return a manifest of plain values. Raises: Refusal, TypeError for others."""
    # These fields have defaults, so a manifest may lack them.
    check_values({"evaluated": {}, "found_tokens": 0, "data": {}, **body}, _FORMS)
    for name, entry in body["files"].items():
        check_values(entry, {"size": is_count, "sha256": is_text}, within=f"files.{name}")
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise Refusal(f"the file {name!r} is outside of the folder")
    files = {name: FileEntry(**entry) for name, entry in body["files"].items()}
    return Manifest(**body | {"files": files, "rollout_ranks": tuple(body["rollout_ranks"])})


def _are_numbers(value: Any) -> bool:
    """an object of numbers"""
    return is_object(value) and all(map(is_number, value.values()))


def _are_texts(value: Any) -> bool:
    """an object of texts"""
    return is_object(value) and all(map(is_text, value.values()))


def _are_entries(value: Any) -> bool:
    """an object of objects"""
    return is_object(value) and all(map(is_object, value.values()))


_FORMS: dict[str, Form] = {
    "step": is_count,
    "config": is_object,
    "model": is_text,
    "tokenizer": is_text,
    "rollout_ranks": are_wholes,
    "files": _are_entries,
    "evaluated": _are_numbers,
    "found_tokens": is_count,
    "data": _are_texts,
}


def remove(path: Path) -> None:
    """Remove a file or folder in the folder of checkpoints, or a link and not its target. Raises:
    OSError."""
    run_folder.remove(path, within=path.parents[1])


def rename(old: Path, new: Path) -> None:
    """Rename a file or folder in the folder of checkpoints. Raises: OSError."""
    run_folder.rename(old, new, within=old.parents[1])


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def damages(
    folder: Path, manifest: Manifest, *, part: int = 0, num_parts: int = 1, digests: bool = True
) -> list[str]:
    """Return the problems of a checkpoint's files, one line each.

    Args:
        folder, manifest: of the checkpoint.
        part, num_parts: check only this share of the files, so that ranks divide the work.
        digests: read the contents too, not only the sizes.
    """
    problems = []
    for name in sorted(manifest.files)[part::num_parts]:
        problem, error = attempt(
            lambda: _damage(folder / name, manifest.files[name], digests=digests), OSError
        )
        problems.append(f"{folder / name} cannot be read: {error}" if error else problem)
    return [problem for problem in problems if problem]


def _damage(path: Path, entry: FileEntry, *, digests: bool) -> str | None:
    """Return the problem of a file; None for none. Raises: OSError."""
    if not path.is_file():
        return f"{path} is missing"
    if path.stat().st_size != entry.size:
        return (
            f"{path} has {path.stat().st_size} bytes, the manifest says "
            f"{entry.size}: it was truncated or changed"
        )
    if digests and file_entry(path) != entry:
        return f"{path} does not match the manifest's sha256: it was changed or damaged on disk"
    return None


def whole_checkpoint(path: Path) -> tuple[Path, Manifest]:
    """Return a checkpoint's folder and manifest: `path` itself, or the newest whole one of a run.

    Raises: Refusal when there is none, with the problems of each that is there.
    """
    candidates = [path]
    if not (path / NAME).is_file():
        candidates = complete_checkpoints(checkpoints_folder(path))
        candidates = candidates or complete_checkpoints(path)
    problems = []
    for folder in candidates:
        content, error = attempt(lambda: read_manifest(folder))
        wrong = damages(folder, content) if content else [str(error)]
        if content and not wrong:
            return folder, content
        problems += wrong
        warnings.warn(printable(f"{folder} cannot be used: {'; '.join(wrong)}"), stacklevel=2)
    raise Refusal(
        f"{path} is no whole checkpoint and no run that has one"
        + "".join(f"\n  {problem}" for problem in problems)
    )


class TensorReader(FileSystemReader):
    """DCP's reader, with an unpickler that makes only DCP's own plain records.

    DCP pickles its index, and `pickle.load` would run any code in the file.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index of tensors. Raises: Refusal when the file holds anything else."""
        path = Path(self.path) / ".metadata"
        what = f"{path} is not an index of tensors"
        with refusing(what, Exception, passes_refusals=True):  # the bytes may be anything
            data = run_files.read_bytes(path, run_files.INDEX)
            metadata = _IndexUnpickler(io.BytesIO(data)).load()
            if not isinstance(metadata, Metadata):
                raise Refusal(f"{path} holds a {type(metadata).__name__}, not an index of tensors")
            check_index(metadata, path)
        return metadata


def unreadable(reader: TensorReader, error: CheckpointException) -> Refusal:
    """Return a Refusal for files of tensors that do not fit their index."""
    causes = [cause for cause, _ in error.failures.values()]
    why = "; ".join(
        dict.fromkeys(f"{type(cause).__name__}: {message_of(cause):.300}" for cause in causes)
    )
    return Refusal(f"{reader.path}: its files do not hold what its .metadata says: {why}")


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a class of DCP's index, or refuse."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index needs")


def load_plain(path: Path) -> dict[str, Any]:
    """Read a dictionary of tensors and plain values, without running any code in the file.

    Raises: OSError; Refusal naming the file for anything else.
    """
    data = io.BytesIO(run_files.read_bytes(path, run_files.STATE))
    what = f"{path} is no file of tensors and plain values"
    with refusing(what, Exception, names_kind=True, passes_refusals=True):
        check_archive(data, place=path)
        content = torch.load(data, map_location="cpu", weights_only=True)
    if not isinstance(content, dict):
        raise Refusal(f"{path} holds a {type(content).__name__}, no dictionary of tensors")
    return content
