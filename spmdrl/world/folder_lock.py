"""The lock of an output_dir: one run at a time, and a file that names it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from spmdrl.errors import Refusal
from spmdrl.run_folder import link_problems
from spmdrl.world.launch import job_of_launcher, known_rank

NAME = "run.lock"
# A process that only looks holds the lock for a moment.
_TRIES = 10
_BETWEEN_S = 0.1
_TOUCH_S = 20.0
_ALIVE_S = 90.0
"""Not every file system shows locks of other machines, so the holder also touches the file."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a folder."""

    host: str
    boot: str
    """Random id that the kernel gets at boot. It identifies the machine."""
    pid: int
    job: str
    """Of the scheduler; empty without one."""
    attempt: int
    """How often the scheduler has restarted that job."""
    since: str

    @classmethod
    def own(cls) -> Holder:
        """Return this process."""
        job, attempt = job_of_launcher()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        since = time.strftime("%F %T %z")
        return cls(socket.gethostname(), boot, os.getpid(), job, attempt, since)

    def __str__(self) -> str:
        job = f" of {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"


@contextlib.contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """Hold an output_dir for this job alone. Rank 0 takes the lock; the others do nothing.

    The folder of a dead process of this machine is taken over, and that of an earlier attempt of
    the same job of the scheduler on any machine.

    Raises: Refusal naming who holds it, why nothing can be written there, or the links in it.
    """
    if known_rank() != "0":
        yield
        return
    file = _take(folder)
    over = threading.Event()
    held = [file]
    # A forked child may live longer, and must neither keep the lock nor close it twice.
    os.register_at_fork(after_in_child=lambda: os.close(held.pop()) if held else None)
    threading.Thread(target=_touch, args=(file, over), daemon=True, name="spmdrl-lock").start()
    try:
        if problems := link_problems(folder):
            raise Refusal("\n".join(problems))
        yield
    finally:
        over.set()
        held.clear()
        os.ftruncate(file, 0)
        os.close(file)


def folder_problems(folder: Path) -> list[str]:
    """Return why a run could not hold this output_dir now. Nothing is written."""
    return _lock_problems(folder) or link_problems(folder)


def _lock_problems(folder: Path) -> list[str]:
    try:
        file = _open(folder, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return _unwritable(folder)
    except OSError as error:
        return [_no_folder(folder, error)]
    try:
        return _held(folder, file, kind=fcntl.LOCK_SH) or _unwritable(folder)
    finally:
        os.close(file)


def _take(folder: Path) -> int:
    while True:
        if problems := _unwritable(folder):
            raise Refusal(problems[0])
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = _open(folder, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise Refusal(_no_folder(folder, error)) from error
        if problems := _held(folder, file, kind=fcntl.LOCK_EX):
            os.close(file)
            raise Refusal(problems[0])
        try:
            if os.path.samestat(os.fstat(file), os.stat(folder / NAME)):
                break
        except FileNotFoundError:
            pass
        os.close(file)  # the file was removed in between: try the new one
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(asdict(Holder.own())).encode(), 0)
    return file


def _open(folder: Path, flags: int) -> int:
    """Open the lock file.

    Raises: OSError, also for a link, whose target would be emptied, and for a pipe, which blocks.
    """
    file = os.open(folder / NAME, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(file)
        raise OSError(f"{folder / NAME} is no plain file, or has another name too")
    return file


def _touch(file: int, over: threading.Event) -> None:
    while not over.wait(_TOUCH_S):
        with contextlib.suppress(OSError):  # a full disk is reported by what needs the space
            os.utime(file)


def _held(folder: Path, file: int, *, kind: int) -> list[str]:
    """Return who holds the folder, as a problem. If nobody does, `file` is locked if it can be."""
    is_locked = _try_lock(file, kind)
    holder = _read(file)
    own = Holder.own()
    advice = (
        f"two runs would write over each other: set another --output-dir, or end that one; if it "
        f"is gone for good, remove {folder / NAME}"
    )
    if is_locked is False:
        return [f"output_dir: {folder} is another run's, {holder or 'which is starting'}; {advice}"]
    if holder is None:
        return []
    if (
        holder.boot == own.boot
    ):  # locks of this machine are seen; without locks, ask for the process
        lives = is_locked is None and holder.pid != own.pid and Path(f"/proc/{holder.pid}").exists()
        return [f"output_dir: {folder} is another run's, {holder}; {advice}"] if lives else []
    age = time.time() - os.fstat(file).st_mtime
    is_earlier = bool(own.job) and own.job == holder.job and own.attempt != holder.attempt
    if is_earlier or age > _ALIVE_S:
        return []
    return [
        f"output_dir: {folder} is another run's, {holder}, alive {max(0.0, age):.0f} s ago; "
        f"{_ALIVE_S:.0f} s after it ends the folder is free. {advice.capitalize()}"
    ]


def _try_lock(file: int, kind: int) -> bool | None:
    """Return whether the file was locked; None on a file system without locks."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(_BETWEEN_S)
        except OSError:
            return None
    return False


def _read(file: int) -> Holder | None:
    try:
        holder = Holder(**json.loads(os.pread(file, 4096, 0)))
    # Empty, cut off by a crash, or not ours.
    except (ValueError, TypeError, RecursionError):
        return None
    kinds = dict.fromkeys(asdict(holder), str) | {"pid": int, "attempt": int}
    return holder if all(type(getattr(holder, n)) is kind for n, kind in kinds.items()) else None


def _unwritable(folder: Path) -> list[str]:
    """Return why a folder cannot be written to. It need not exist."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        return [_no_folder(folder, NotADirectoryError(f"{there} is a file"))]
    if there.resolve().is_relative_to("/proc") or there.resolve().is_relative_to("/sys"):
        return [_no_folder(folder, OSError("its files are the kernel's"))]
    if not os.access(there, os.W_OK | os.X_OK):
        return [_no_folder(folder, PermissionError(f"{there} may not be written to"))]
    return []


def _no_folder(folder: Path, error: OSError) -> str:
    return f"output_dir: {folder} cannot be written to ({error}); set another --output-dir"
