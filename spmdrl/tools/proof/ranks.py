"""Run a function on real ranks of this machine: a process each, gloo, never without a deadline."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import secrets
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from spmdrl.world.launch import child_environment

_SECRET = secrets.token_hex(32)
"""Of all jobs that this process starts."""


@dataclass(frozen=True)
class RankError(Exception):
    """A rank's own exception, or that none of them answered."""

    kind: str
    """Name of the exception's class; `Timeout` or `Killed` where there was none."""
    message: str
    text: str
    """The whole traceback."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"

    @property
    def is_refusal(self) -> bool:
        """Whether the product says by it that it will not do this."""
        return self.kind == "Refusal" and "spmdrl" in self.text.rpartition("File ")[2]

    @property
    def is_timeout(self) -> bool:
        """Whether it says only that no answer came in the time that there was."""
        return self.kind == "Timeout"


def start_rank(environment: dict[str, str], target: Callable[..., Any], *args: Any) -> BaseProcess:
    """Start `target(*args)` in a process with this environment that has done slow imports.

    It is a fork of one that has done nothing else: a fresh process spends 5 s of a core on the
    imports of a trainer, and 15 s on those of an engine.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["spmdrl.tools.proof.preloaded"])
    root = str(Path(__file__).parents[3])
    # An empty entry, as the current folder, may hold modules of somebody else's.
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment_of_server = {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    with mock.patch.dict(os.environ, environment_of_server):
        forkserver.ensure_running()
    process = context.Process(target=_with_environment, args=(environment, target, *args))
    process.daemon = True
    process.start()
    return process


def _with_environment(environment: dict[str, str], target: Callable[..., Any], *args: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*args)


def on_ranks(
    world_size: int,
    target: Callable[..., Any],
    *args: Any,
    timeout_s: float,
    log: Path | None = None,
    port: int | None = None,
) -> list[Any]:
    """Return what `target(*args)` gives on each of `world_size` fresh ranks.

    Args:
        target: of a module, so that it can be named to another process.
        log: file that takes what the ranks print; None: where this process prints.
        port: of TCP, at which they meet; None: one that is free.
    Raises: RankError of the first rank that fails; all processes are gone by then.
    """
    results = multiprocessing.get_context("forkserver").Queue()
    port = port or _free_port()
    processes: list[BaseProcess] = []
    try:
        for rank in range(world_size):
            environment = child_environment(**launch_env(rank, world_size, port))
            own = (log, results, rank, target, args)
            processes.append(start_rank(environment, _be_rank, *own))
        return _gather(processes, results, deadline=time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _gather(processes: list[BaseProcess], results: Any, *, deadline: float) -> list[Any]:
    values: dict[int, Any] = {}
    while len(values) < len(processes):
        try:
            rank, value, error = results.get(timeout=0.2)
        except queue.Empty:
            _check_alive(processes, results, values, deadline=deadline)
            continue
        if error is not None:
            kind, message, text = error
            raise RankError(kind, message, text + _killed(processes))
        values[rank] = value
    return [pickle.loads(values[rank]) for rank in range(len(processes))]


def _killed(processes: list[BaseProcess]) -> str:
    # A rank that raises ends with status 0.
    found = [rank for rank, process in enumerate(processes) if process.exitcode]
    return _say_dead(found, processes) if found else ""


def _say_dead(found: list[int], processes: list[BaseProcess]) -> str:
    # Exit statuses tell a fault of memory from an end that a watch or the system made.
    ends = ", ".join(f"rank {rank}: {processes[rank].exitcode}" for rank in found)
    return f"ranks {found} died without a result (exit status of {ends})"


def _check_alive(
    processes: list[BaseProcess], results: Any, values: dict[int, Any], *, deadline: float
) -> None:
    if time.monotonic() > deadline:
        missing = [rank for rank in range(len(processes)) if rank not in values]
        raise RankError("Timeout", f"no answer in time from ranks {missing}", "")
    lost = [r for r, p in enumerate(processes) if not p.is_alive() and r not in values]
    if lost and results.empty():
        time.sleep(0.5)  # what it sent may still be on its way
        if results.empty():
            raise RankError("Killed", _say_dead(lost, processes), "")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def launch_env(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set for one rank on this machine."""
    return dict(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        SPMDRL_SECRET=_SECRET,
        OMP_NUM_THREADS="1",
    )


def _be_rank(
    log: Path | None, results: Any, rank: int, target: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    if log:
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
    try:
        # Plain pickle copies tensors; the queue's own would pass handles of a dying process.
        results.put((rank, pickle.dumps(target(*args)), None))
    except BaseException as error:
        text = traceback.format_exc()
        print(text, flush=True)
        results.put((rank, None, (type(error).__name__, str(error), text)))
    finally:
        results.close()
        results.join_thread()
        # Until all have answered: the others end where they see this process end.
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(0)  # leftover group threads of a failed rank must not keep the process
