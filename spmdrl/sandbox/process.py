"""Start one program through the launcher, read what it says, keep its deadline."""

from __future__ import annotations

import contextlib
import marshal
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

Status = Literal["ok", "error", "signal", "timeout", "output"]

_SETUP_S = 60.0  # a machine may be busy; the program's own time begins after
_GRACE_S = 10.0
_READ_BYTES = 65536
_STOP = 40  # a real-time signal, which no scheduler sends
# Schedulers signal every process of a job; what to do about it is not the launcher's to say.
_FOR_THE_JOB = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_START = (
    "import sys; sys.path.append(sys.argv[1]); import launcher; "
    "launcher.main(*map(int, sys.argv[2:]))"
)
_SYSTEM_LIBRARIES = (
    "/lib",
    "/lib64",
    "/lib32",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/etc/ld.so.cache",
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/box",
    "TMPDIR": "/box",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # one response, one score
    # Else a few threads use up the address space that they may have.
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class LaunchError(RuntimeError):
    """The program could not be started: nothing is known of it."""


@dataclass(frozen=True)
class Way:
    """One way to contain a program."""

    namespaces: bool = False
    """Of processes, mounts, IPC and host name; a root file system of its own."""
    new_user: bool = False
    """A user namespace, for who is not root."""
    new_net: bool = False
    drop_uid: bool = False
    """Become another user; for root."""
    landlock: bool = False
    """Confine file access where there are no namespaces."""
    seccomp: bytes = b""
    """A filter of system calls; empty for none."""


@dataclass(frozen=True)
class Result:
    """What became of one program."""

    status: Status
    """`ok`: exit status 0. `error`: another one (an exception: 1). `signal`: a crash, or a limit
    that kills. `timeout`: killed at its deadline. `output`: killed for too much output."""
    exit_code: int
    """Exit status; negative: the signal; -9 when it was killed."""
    stdout: str
    """What it wrote, cut at the limit; bytes that are not UTF-8 are replaced."""
    stderr: str
    seconds: float
    """Wall-clock time from its first instruction to its end."""


def launch(
    code: str,
    *,
    way: Way,
    stdin: str = "",
    timeout_s: float,
    memory_mb: int = 512,
    files: Mapping[str, str | bytes] | None = None,
    packages: Sequence[str] = (),
    processes: int = 8,
    files_mb: int = 64,
    output_bytes: int = 1_000_000,
) -> Result:
    """Run a program in the given way; arguments are those of `run_python`.

    Raises: LaunchError when it cannot be started; ValueError for files and packages.
    """
    request = _request(
        way,
        files={**_checked(files or {}), "main.py": _bytes(code)},
        packages=packages,
        limits=_limits(
            timeout_s,
            memory_mb=memory_mb,
            files_mb=files_mb,
            # The launcher and its init count in a user namespace of theirs.
            processes=processes + (2 if way.new_user else 0),
        ),
    )
    request["files_mb"] = files_mb
    with contextlib.ExitStack() as stack:
        if not way.namespaces:
            folder = tempfile.mkdtemp(prefix="spmdrl_sandbox_")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            request["workdir"] = folder
            request["env"] |= {"HOME": folder, "TMPDIR": folder}
        running = stack.enter_context(_Running(request, stdin=_bytes(stdin)))
        return running.result(timeout_s=timeout_s, output_bytes=output_bytes)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _checked(files: Mapping[str, str | bytes]) -> dict[str, bytes]:
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.name or name == "main.py":
            raise ValueError(
                f"files: {name!r} must be a relative path without `..`, and not "
                "main.py, which is the program"
            )
    return {n: _bytes(d) if isinstance(d, str) else bytes(d) for n, d in files.items()}


def _limits(timeout_s: float, *, memory_mb: int, files_mb: int, processes: int) -> dict[str, int]:
    return {
        "RLIMIT_CORE": 0,
        "RLIMIT_CPU": math.ceil(timeout_s) + 1,
        "RLIMIT_AS": memory_mb << 20,
        "RLIMIT_FSIZE": files_mb << 20,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_NPROC": processes,
    }


def _request(
    way: Way, *, files: dict[str, bytes], packages: Sequence[str], limits: dict[str, int]
) -> dict[str, Any]:
    python = os.path.realpath(sys.executable)
    packages = [os.path.realpath(p) for p in packages]
    for folder in packages:
        if not os.path.isdir(folder):
            raise ValueError(f"packages: {folder!r} is not a folder")
        if way.drop_uid and os.stat(folder).st_mode & 0o5 != 0o5:
            raise ValueError(
                f"packages: {folder!r} is closed to other users, and programs run as "
                "another; chmod o+rx it"
            )
    env = _ENVIRONMENT | _library_path() | ({"PYTHONPATH": ":".join(packages)} if packages else {})
    paths = sysconfig.get_paths()
    wanted = [
        python,
        os.path.realpath(paths["stdlib"]),
        os.path.realpath(paths["platstdlib"]),
        os.path.join(sys.base_exec_prefix, "lib"),
        *_SYSTEM_LIBRARIES,
        *_DEVICES,
        *packages,
    ]
    there = [p for p in dict.fromkeys(wanted) if os.path.exists(p)]
    links = [(p, os.readlink(p)) for p in there if os.path.islink(p)]
    real = [p for p in there if not os.path.islink(p)]
    return asdict(way) | {
        "files": files,
        "limits": limits,
        "links": links,
        "base": _base(),
        "readable": [p for p in real if not any(_is_under(p, q) for q in real)],
        "argv": [python, "-S", "-s", "-B", "main.py"],
        "env": env,
    }


def _library_path() -> dict[str, str]:
    """Return where the system was told to look for Python's own library, if anywhere."""
    name = "LD_LIBRARY_PATH"
    return {name: os.environ[name]} if os.environ.get(name) else {}


def _is_under(path: str, folder: str) -> bool:
    return path != folder and path.startswith(folder + "/")


def _base() -> str:
    """Return a folder that the new root can be built over; in a view of its own."""
    return next(p for p in ("/tmp", "/mnt", "/var/tmp", "/home") if os.path.isdir(p))


# --------------------------------------------------------------------------- one run


class _Running:
    """A launcher and its pipes."""

    def __init__(self, request: dict[str, Any], *, stdin: bytes):
        memory = [_in_memory(data) for data in (marshal.dumps(request), stdin)]
        self.status, status_write = os.pipe()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_JOB)  # which it inherits
        try:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    "-c",
                    _START,
                    str(Path(__file__).parent),
                    str(memory[0]),
                    str(status_write),
                    str(os.getpid()),
                ],
                stdin=memory[1],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=[memory[0], status_write],
                start_new_session=True,
                cwd="/",
                env=_library_path(),
            )
        except BaseException:
            os.close(self.status)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for fd in (*memory, status_write):
                os.close(fd)
        self._lines = bytearray()

    def __enter__(self) -> _Running:
        return self

    def __exit__(self, *exc: object) -> None:
        """Make sure that nothing is left, whatever happened."""
        if self.process.poll() is None:
            self.process.send_signal(_STOP)
            try:
                self.process.wait(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        for fd in (self.process.stdout, self.process.stderr):
            fd.close()
        os.close(self.status)

    def result(self, *, timeout_s: float, output_bytes: int) -> Result:
        """Read until the launcher says that nothing is left."""
        texts = {pipe.fileno(): bytearray() for pipe in (self.process.stdout, self.process.stderr)}
        stopped: Status | None = None
        open_fds = {self.status, *texts}
        deadline = time.monotonic() + _SETUP_S
        began = ended = None
        poller = select.poll()
        for fd in open_fds:
            poller.register(fd, select.POLLIN)
        while open_fds:
            left = deadline - time.monotonic()
            if left <= 0:
                if stopped or ended:
                    raise LaunchError(f"not all of the program ended within {_GRACE_S:g} s")
                if began is None:
                    raise LaunchError(f"the sandbox was not ready within {_SETUP_S:g} s")
                stopped, deadline = "timeout", self._stop()
                continue
            for fd, _ in poller.poll(math.ceil(1000 * left)):
                data = os.read(fd, _READ_BYTES)
                if not data:
                    open_fds.discard(fd)
                    poller.unregister(fd)
                elif fd == self.status:
                    self._lines += data
                    if began is None and b"started\n" in self._lines:
                        began = time.monotonic()
                        deadline = began + timeout_s
                    if ended is None and b"\nended " in self._lines:
                        ended = time.monotonic()
                        deadline = ended + _GRACE_S
                elif len(texts[fd]) <= output_bytes:
                    texts[fd] += data[: output_bytes + 1 - len(texts[fd])]
                    if len(texts[fd]) > output_bytes and stopped is None and ended is None:
                        stopped, deadline = "output", self._stop()
        return self._made(
            texts, began=began, ended=ended, stopped=stopped, output_bytes=output_bytes
        )

    def _stop(self) -> float:
        self.process.send_signal(_STOP)
        return time.monotonic() + _GRACE_S

    def _made(
        self,
        texts: dict[int, bytearray],
        *,
        began: float | None,
        ended: float | None,
        stopped: Status | None,
        output_bytes: int,
    ) -> Result:
        lines = self._lines.decode("utf-8", "replace").splitlines()
        failure = next((line for line in lines if line.startswith("failed ")), "")
        out, err = (bytes(t[:output_bytes]).decode("utf-8", "replace") for t in texts.values())
        if failure or began is None:
            raise LaunchError(
                failure.removeprefix("failed ")
                or f"the launcher ended with {self.process.wait()}: {err.strip()[-500:]}"
            )
        code = next((int(x.split()[1]) for x in lines if x.startswith("ended ")), None)
        if stopped is None and code is None:
            raise LaunchError("the launcher was killed while the program ran")
        natural: Status = "ok" if code == 0 else "signal" if (code or 0) < 0 else "error"
        return Result(
            stopped or natural,
            -9 if stopped else code,
            out,
            err,
            (ended or time.monotonic()) - began,
        )


def _in_memory(data: bytes) -> int:
    fd = os.memfd_create("spmdrl")
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
