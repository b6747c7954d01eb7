"""Write, rename and remove files of a run's folder, and never through a link.

A folder may come from somebody else, and a link in it may lead to any file of the user. The folder
that the user names may be a link, but nothing below it. A file with a second name (a hard link) is
not written in place either, since the other name may be anywhere.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

FILES = (
    "run.lock",
    "config.yaml",
    "config.mark",
    "environment.json",
    "metrics.jsonl",
    "samples.jsonl",
    "certificate.jsonl",
    "curves.png",
    "page.html",
    "mlflow.db",
    "mlflow.db-journal",
    "mlflow.db-shm",
    "mlflow.db-wal",
    "mlflow_run.json",
    "trackio_run.json",
    "wandb_run.json",
)
FOLDERS = (
    ".secret",
    "checkpoints",
    "evaluations",
    "flight",
    "logs",
    "mlflow_artifacts",
    "profile",
    "reference_logprobs",
    "rollouts",
    "schedule",
    "serve",
    "skipped",
    "skipped_value",
    "tensorboard",
    "timeline",
    "trackio",
    "wandb",
)
"""Folders that runs write below output_dir."""
_OF_NEW_NAMES = ("wandb",)
"""Folders in which only new folders are written. W&B puts links to logs of its own there."""
_WRITTEN_ONCE = ("checkpoints", "logs", "reference_logprobs", "rollouts")
"""Folders whose files are never opened again for writing. These files may have other names."""
_FLAGS = {
    "w": os.O_WRONLY | os.O_CREAT,
    "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
    "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
}
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_ADVICE = "nothing is written or removed through a link"


def open_file(
    path: Path, mode: str, *, within: Path | None = None, is_private: bool = False, **options: Any
) -> IO[Any]:
    """Open a file to write or append, as `open` does.

    Args:
        path: of the file.
        mode: of `open`: w, x or a, perhaps with b.
        within: the folder that the user named, above the file; nothing below it may be a link.
            None: the folder that holds the file.
        is_private: whether a new file is for its owner alone.
        options: of `open`: encoding, errors, buffering.
    Raises: OSError, also for a link, a file with a second name, and anything but a regular file.
    """
    folder = _opened(path.parent, within or path.parent)
    try:
        _check_file(path, os.stat(path.name, dir_fd=folder, follow_symlinks=False))
    except FileNotFoundError:
        pass
    except BaseException:
        os.close(folder)
        raise
    # O_NONBLOCK: a pipe may have taken the file's place meanwhile, and must not block.
    flags = _FLAGS[mode[0]] | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(path.name, flags, 0o600 if is_private else 0o666, dir_fd=folder)
    finally:
        os.close(folder)
    # Again, since it may be another file than the one that was checked.
    try:
        _check_file(path, os.fstat(file))
        if mode[0] == "w":
            # Not by O_TRUNC, which would empty the file before this check.
            os.ftruncate(file, 0)
        return os.fdopen(file, mode.replace("x", "w"), **options)
    except BaseException:
        os.close(file)
        raise


def write_file(
    path: Path, content: str | bytes, *, within: Path | None = None, is_private: bool = False
) -> None:
    """Write a file as `open_file` opens it; text as UTF-8. Raises: OSError."""
    with open_file(path, "wb", within=within, is_private=is_private) as file:
        file.write(content if isinstance(content, bytes) else _bytes_of(content))


def make_folder(path: Path, *, within: Path) -> None:
    """Make a folder and its parents, if they are missing. Raises: OSError."""
    within.mkdir(parents=True, exist_ok=True)
    os.close(_opened(path, within, makes=True))


def rename(old: Path, new: Path, *, within: Path | None = None) -> None:
    """Rename a file, folder or link; it replaces what has the new name. Raises: OSError."""
    folder = _opened(old.parent, within or old.parent)
    try:
        target = _opened(new.parent, within or new.parent)
        try:
            os.rename(old.name, new.name, src_dir_fd=folder, dst_dir_fd=target)
        finally:
            os.close(target)
    finally:
        os.close(folder)


def remove(path: Path, *, within: Path | None = None) -> None:
    """Remove a file, a folder with its content, or a link (not its target), if it exists.

    Raises: OSError.
    """
    try:
        folder = _opened(path.parent, within or path.parent)
    except FileNotFoundError:
        return
    try:
        status = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            shutil.rmtree(path.name, dir_fd=folder)
        else:
            os.unlink(path.name, dir_fd=folder)
    except FileNotFoundError:
        pass
    finally:
        os.close(folder)


def link_problems(folder: Path) -> list[str]:
    """Return the links in the folder through which a run would write or remove, one line each.

    Files with a second name, and anything but files and folders, are problems too. Nothing is
    written.
    """
    advice = (
        "a run writes and removes nothing through links, since they may name anybody's files: "
        "remove it, or copy what it names there, or set another --output-dir"
    )
    return [f"output_dir: {problem}; {advice}" for problem in _problems(folder)]


def _problems(folder: Path) -> Iterator[str]:
    for name in (*FILES, *FOLDERS):
        path = folder / name
        kind = "file" if name in FILES else "folder"
        try:
            status = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            yield f"{path} cannot be looked at ({error})"
            continue
        is_right = stat.S_ISREG if kind == "file" else stat.S_ISDIR
        if not is_right(status.st_mode):
            yield f"{path} is {_kind(path, status)}, no {kind}"
        elif kind == "file":
            yield from _second_name(path, status)
        elif name not in _OF_NEW_NAMES:
            yield from _problems_below(path, name)


def _problems_below(folder: Path, top: str) -> Iterator[str]:
    """Yield the problems of a folder's content. `top` is the one of FOLDERS that holds it."""
    try:
        with os.scandir(folder) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:  # another run has removed it
        return
    except OSError as error:
        yield f"{folder} cannot be looked at ({error})"
        return
    is_checkpoints = folder.name == top == "checkpoints"
    for entry in ordered:
        # `best` is a link, which is replaced and never followed; other names are not ours.
        if is_checkpoints and not entry.name.startswith("step_"):
            continue
        with contextlib.suppress(FileNotFoundError):  # as above
            yield from _problems_of(entry, top)


def _problems_of(entry: os.DirEntry[str], top: str) -> Iterator[str]:
    path = Path(entry.path)
    if entry.is_dir(follow_symlinks=False):
        yield from _problems_below(path, top)
    elif not entry.is_file(follow_symlinks=False):
        yield f"{path} is {_kind(path, entry.stat(follow_symlinks=False))}"
    elif top not in _WRITTEN_ONCE:
        yield from _second_name(path, entry.stat(follow_symlinks=False))


def _second_name(path: Path, status: os.stat_result) -> Iterator[str]:
    if status.st_nlink > 1:
        yield f"{path} has another name too (it is a hard link), which would be written to as well"


def _opened(folder: Path, within: Path, *, makes: bool = False) -> int:
    """Open `within` or a folder below it; a link below it is not followed."""
    # Each part is opened relative to the folder before it, so that a link which replaces a part
    # meanwhile is not followed either.
    held = os.open(within, _FOLDER)
    path = within
    for part in folder.relative_to(within).parts:
        path /= part
        try:
            inner = _opened_part(part, path, held=held, makes=makes)
        finally:
            os.close(held)
        held = inner
    return held


def _opened_part(name: str, path: Path, *, held: int, makes: bool) -> int:
    if name == "..":
        raise OSError(f"{path} leads out of its folder")
    if makes:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=held)
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=held)
    except NotADirectoryError as error:
        status = os.stat(name, dir_fd=held, follow_symlinks=False)
        raise OSError(f"{path} is {_kind(path, status)}, no folder; {_ADVICE}") from error


def _check_file(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is {_kind(path, status)}, no file; {_ADVICE}")
    for problem in _second_name(path, status):
        raise OSError(f"{problem}; copy it and remove the other")


def _kind(path: Path, status: os.stat_result) -> str:
    if stat.S_ISLNK(status.st_mode):
        target = ""
        with contextlib.suppress(OSError):  # it was removed meanwhile
            target = f" to {os.readlink(path)}"
        return f"a link{target}"
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFREG: "a file", stat.S_IFIFO: "a pipe"}
    return kinds.get(stat.S_IFMT(status.st_mode), "a device or socket")


def _bytes_of(text: str) -> bytes:
    return text.encode(errors="backslashreplace")
