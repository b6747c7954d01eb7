"""Run a function on real ranks on this machine: processes with gloo and a deadline."""

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
"""The secret of all jobs that this process starts."""


@dataclass(frozen=True)
class RankError(Exception):
    """The exception of a rank, or that ranks did not answer."""

    kind: str
    """Name of the exception's class; `Timeout` or `Killed` where there was none."""
    message: str
    text: str
    """The whole traceback."""

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
    """Start `target(*args)` in a process with this environment and with slow imports done.

    It is a fork of a process that has only done these imports. A fresh process takes 5 s of a core
    for the imports of a trainer, and 15 s for those of an engine.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["spmdrl.tools.proof.preloaded"])
    root = str(Path(__file__).parents[3])
    # An empty entry is the current folder, which may hold other modules.
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
    """Return the results of `target(*args)` on `world_size` fresh ranks.

    Args:
        target: a function of a module, so that it can be pickled.
        log: file for the output of the ranks; None: this process's own output.
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
            raise RankError(kind, message, text + _killed(processes))
        values[rank] = value
    return [pickle.loads(values[rank]) for rank in range(len(processes))]


def _killed(processes: list[BaseProcess]) -> str:
    # A rank that raises ends with status 0.
    found = [rank for rank, process in enumerate(processes) if process.exitcode]
    return _say_dead(found, processes) if found else ""


def _say_dead(found: list[int], processes: list[BaseProcess]) -> str:
    # Exit statuses distinguish a segmentation fault from a kill by a watchdog or the system.
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
        time.sleep(0.5)  # its result may still be in the pipe
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
        # Plain pickle copies tensors; the queue would pass handles of a process that ends.
        results.put((rank, pickle.dumps(target(*args)), None))
    except BaseException as error:
        text = traceback.format_exc()
        print(text, flush=True)
        results.put((rank, None, (type(error).__name__, str(error), text)))
    finally:
        results.close()
        results.join_thread()
        # Wait until all have answered: the other ranks end when this process ends.
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(0)  # leftover group threads of a failed rank must not keep the process
