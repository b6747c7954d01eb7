"""Run a function on ranks on this machine: processes with gloo and a deadline."""

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

PRELOADED = ["spmdrl.tools.proof.preloaded"]
"""Modules that the process imports whose forks the ranks are."""
_SECRET = secrets.token_hex(32)
"""The secret of all jobs that this process starts."""


@dataclass(frozen=True)
class RankError(Exception):
    """A rank raised an exception or was killed, or ranks did not answer in time."""

    kind: str
    """Name of the exception's class; `Timeout` or `Killed` if there was no exception."""
    message: str
    text: str
    """The traceback; empty if there was no exception."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"

    @property
    def is_refusal(self) -> bool:
        """Whether the program refused the job."""
        return self.kind == "Refusal" and "spmdrl" in self.text.rpartition("File ")[2]

    @property
    def is_timeout(self) -> bool:
        """Whether ranks did not answer in time."""
        return self.kind == "Timeout"


def start_rank(environment: dict[str, str], target: Callable[..., Any], *args: Any) -> BaseProcess:
    """Start `target(*args)` in a process with this environment, in which slow imports are done.

    The process is a fork of one that has only done these imports. They would take a new process 5 s
    of a core for a trainer, and 15 s for an engine.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    root = str(Path(__file__).parents[3])
    # An empty entry would be the current folder, which may have other modules.
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
    """Run `target(*args)` on `world_size` new ranks and return the results.

    Args:
        target: a function of a module, so that it can be pickled.
        log: file for the output of the ranks; None: the output of this process.
        port: TCP port of the rendezvous; None: a free one.
    Raises: RankError of the first rank that fails, after all processes have ended.
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
            raise RankError(kind, message, text + _describe_dead_ranks(processes))
        values[rank] = value
    return [pickle.loads(values[rank]) for rank in range(len(processes))]


def _describe_dead_ranks(processes: list[BaseProcess]) -> str:
    # A rank that raises ends with status 0.
    dead = [rank for rank, process in enumerate(processes) if process.exitcode]
    return _describe_deaths(dead, processes) if dead else ""


def _describe_deaths(dead: list[int], processes: list[BaseProcess]) -> str:
    # Exit statuses distinguish a segmentation fault from a kill by a watchdog or the system.
    statuses = ", ".join(f"rank {rank}: {processes[rank].exitcode}" for rank in dead)
    return f"ranks {dead} died without a result (exit status of {statuses})"


def _check_alive(
    processes: list[BaseProcess], results: Any, values: dict[int, Any], *, deadline: float
) -> None:
    if time.monotonic() > deadline:
        missing = [rank for rank in range(len(processes)) if rank not in values]
        raise RankError("Timeout", f"no answer in time from ranks {missing}", "")
    lost = [r for r, p in enumerate(processes) if not p.is_alive() and r not in values]
    if lost and results.empty():
        time.sleep(0.5)  # its result may still be in the pipe
        if results.empty():
            raise RankError("Killed", _describe_deaths(lost, processes), "")


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
        # Plain pickle copies tensors. The queue would pass handles, and this process ends.
        results.put((rank, pickle.dumps(target(*args)), None))
    except BaseException as error:
        text = traceback.format_exc()
        print(text, flush=True)
        results.put((rank, None, (type(error).__name__, str(error), text)))
    finally:
        results.close()
        results.join_thread()
        # Other ranks end when this process ends, so wait until the parent has all answers.
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(0)  # a failed rank may have group threads, which would keep the process alive
