"""One run to an output_dir: who has it, as a file says that is locked for as long as they live."""

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
"""Another machine's locks are not seen on every file system; its holder touches the file."""


@dataclass(frozen=True)
class Holder:
    """Who has a folder."""

    host: str
    boot: str
    """The kernel's own name for the time since its start: one machine, one value."""
    pid: int
    job: str
    """Of the scheduler; empty without one."""
    attempt: int
    """How often the scheduler has started that job anew."""
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
    """Have an output_dir for this job alone; rank 0 takes it, the others do nothing.

    What a dead process of this machine had is taken over, as is what an earlier attempt of the
    same job of the scheduler had, wherever it ran.

    Raises: Refusal naming who has it, why nothing can be written there, or the links in it.
    """
    if known_rank() != "0":
        yield
        return
    file = _take(folder)
    over = threading.Event()
    held = [file]
    # A child that is forked and lives longer must not keep the lock; nor close it twice.
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
    """Return why a run could not have this output_dir now; nothing is written."""
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
        os.close(file)  # somebody removed it in between: what we have locked is no longer it
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(asdict(Holder.own())).encode(), 0)
    return file


def _open(folder: Path, flags: int) -> int:
    """Open the lock. Raises: OSError, for what is no plain file of this folder too: a link's
    target would be emptied, and a pipe waited for."""
    file = os.open(folder / NAME, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(file)
        raise OSError(f"{folder / NAME} is no plain file, or has another name too")
    return file


def _touch(file: int, over: threading.Event) -> None:
    while not over.wait(_TOUCH_S):
        with contextlib.suppress(OSError):  # a full disk ends the run elsewhere, with its reason
            os.utime(file)


def _held(folder: Path, file: int, *, kind: int) -> list[str]:
    """Return who has a folder, as a problem; where nobody has, `file` is locked if that can be."""
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
    if holder.boot == own.boot:  # here a lock is seen; without locks, whether the process lives
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
    """Return whether a file could be locked; None on a file system that has no locks."""
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
        found = Holder(**json.loads(os.pread(file, 4096, 0)))
    # Empty, cut off by a crash, or not ours.
    except (ValueError, TypeError, RecursionError):
        return None
    kinds = dict.fromkeys(asdict(found), str) | {"pid": int, "attempt": int}
    return found if all(type(getattr(found, n)) is kind for n, kind in kinds.items()) else None


def _unwritable(folder: Path) -> list[str]:
    """Return why a folder, which need not exist, cannot be written to."""
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
