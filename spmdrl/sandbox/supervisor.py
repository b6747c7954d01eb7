"""Start one program by the launcher, read its output, and stop it at its deadline."""

from __future__ import annotations

import contextlib
import marshal
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from spmdrl.sandbox.limits import Limits, Way
from spmdrl.sandbox.removal import own_folder
from spmdrl.sandbox.request import as_bytes, library_path, make_request

Status = Literal["ok", "error", "signal", "timeout", "output"]

_SETUP_S = 60.0  # a machine may be busy; the program's own time begins after this
_GRACE_S = 10.0
_READ_BYTES = 65536
_STOP = 40  # a real-time signal, which no scheduler sends
# Schedulers send these to every process of a job. The launcher ignores them: this process decides.
_JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_START = (
    "import sys; sys.path.append(sys.argv[1]); import launcher; "
    "launcher.main(*map(int, sys.argv[2:]))"
)


class LaunchError(RuntimeError):
    """The program could not be started, or its result is unknown."""


@dataclass(frozen=True)
class ProgramResult:
    """The result of one program."""

    status: Status
    """`ok`: exit status 0. `error`: another exit status (an exception has 1). `signal`: a crash, or
    a limit that kills. `timeout`: killed at its deadline. `output`: killed for too much output."""
    exit_code: int
    """Exit status; if negative, the signal; -9 if it was killed."""
    stdout: str
    """Its output up to the limit; bytes that are not UTF-8 are replaced."""
    stderr: str
    seconds: float
    """Wall-clock time from its first instruction to its end."""


def launch(
    code: str,
    *,
    way: Way,
    limits: Limits,
    stdin: str = "",
    files: Mapping[str, str | bytes] | None = None,
    packages: Sequence[str] = (),
) -> ProgramResult:
    """Run a program; see `run_python` for the arguments.

    Args:
        way: how to contain it.
    Raises: LaunchError if it cannot be started; Refusal for wrong files or packages.
    """
    request = make_request(code, way=way, limits=limits, files=files or {}, packages=packages)
    with contextlib.ExitStack() as stack:
        if not way.namespaces:
            folder = stack.enter_context(own_folder())
            request["workdir"] = folder
            request["env"] |= {"HOME": folder, "TMPDIR": folder}
        running = stack.enter_context(
            _RunningProgram(request, limits=limits, stdin=as_bytes(stdin))
        )
        running.watch()
        return running.result()


class _RunningProgram:
    """A launcher process, its pipes, and the data read from them so far."""

    def __init__(self, request: dict[str, Any], *, limits: Limits, stdin: bytes):
        self._limits = limits
        read, write = os.pipe()
        self._status = open(read, "rb", buffering=0)  # noqa: SIM115, closed at the exit
        with contextlib.ExitStack() as ours:
            memory = [_in_memory(data) for data in (marshal.dumps(request), stdin)]
            for fd in (*memory, write):
                ours.callback(os.close, fd)
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, _JOB_SIGNALS)  # the launcher inherits
            ours.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
            arguments = [Path(__file__).parent, memory[0], write, os.getpid()]
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, *map(str, arguments)],
                stdin=memory[1],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=[memory[0], write],
                start_new_session=True,
                cwd="/",
                env=library_path(),
            )
        out = self.process.stdout
        err = self.process.stderr
        assert out and err
        self._pipes = {pipe.fileno(): pipe for pipe in (self._status, out, err)}
        self._read = {fd: bytearray() for fd in self._pipes}
        self._stopped: Status | None = None
        self._began: float | None = None
        self._ended: float | None = None
        self._deadline = time.monotonic() + _SETUP_S

    def __enter__(self) -> _RunningProgram:
        return self

    def __exit__(self, *exc: object) -> None:
        """Make sure that no process is left."""
        if self.process.poll() is None:
            self.process.send_signal(_STOP)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=_GRACE_S)
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for pipe in self._pipes.values():
            pipe.close()

    def watch(self) -> None:
        """Read until all processes of the program have ended; stop it at its deadline."""
        poller = select.poll()
        for fd in self._pipes:
            poller.register(fd, select.POLLIN)
        num_open = len(self._pipes)
        while num_open:
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                self._stop_late()
                continue
            for fd, _ in poller.poll(math.ceil(1000 * left_s)):
                if data := os.read(fd, _READ_BYTES):
                    self._take(fd, data)
                else:
                    poller.unregister(fd)
                    num_open -= 1

    def _stop_late(self) -> None:
        if self._stopped or self._ended:
            raise LaunchError(f"not all of the program ended within {_GRACE_S:g} s")
        if self._began is None:
            raise LaunchError(f"the sandbox was not ready within {_SETUP_S:g} s")
        self._stop("timeout")

    def _stop(self, why: Status) -> None:
        self.process.send_signal(_STOP)
        self._stopped = why
        self._deadline = time.monotonic() + _GRACE_S

    def _take(self, fd: int, data: bytes) -> None:
        read = self._read[fd]
        now = time.monotonic()
        most = self._limits.output_bytes
        if fd != self._status.fileno():
            read += data[: max(0, most + 1 - len(read))]
            if len(read) > most and self._stopped is None and self._ended is None:
                self._stop("output")
            return
        read += data
        if self._began is None and b"started\n" in read:
            self._began = now
            self._deadline = now + self._limits.timeout_s
        if self._ended is None and b"\nended " in read:
            self._ended = now
            self._deadline = now + _GRACE_S

    def result(self) -> ProgramResult:
        """Return the program's result. Raises: LaunchError if it is unknown."""
        status, *texts = self._read.values()
        lines = status.decode("utf-8", "replace").splitlines()
        failure = next((line for line in lines if line.startswith("failed ")), "")
        most = self._limits.output_bytes
        out, err = (bytes(text[:most]).decode("utf-8", "replace") for text in texts)
        if failure or self._began is None:
            raise LaunchError(
                failure.removeprefix("failed ")
                or f"the launcher ended with {self.process.wait()}: {err.strip()[-500:]}"
            )
        code = next((int(x.split()[1]) for x in lines if x.startswith("ended ")), None)
        if self._stopped:
            code = -9
        elif code is None:
            raise LaunchError("the launcher was killed while the program ran")
        ending: Status = "error"
        if code == 0:
            ending = "ok"
        elif code < 0:
            ending = "signal"
        seconds = (self._ended or time.monotonic()) - self._began
        return ProgramResult(self._stopped or ending, code, out, err, seconds)


def _in_memory(data: bytes) -> int:
    fd = os.memfd_create("spmdrl")
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
