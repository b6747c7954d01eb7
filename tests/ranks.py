"""Start real ranks for a test: one process each, gloo, a free port, never without a deadline."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import pickle
import queue
import random
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from spmdrl.proof.ranks import launch_env

_PORTS = range(16000, 20000)  # below those of jobs under Slurm, and those that the system deals out


def free_port() -> int:
    """Return a TCP port that was free a moment ago, and that no other test gets meanwhile.

    It may be seconds until ranks bind it. All processes of all runs of the tests on this machine
    therefore take the next one by a counter in a locked file.
    """
    counter = Path(tempfile.gettempdir()) / f"spmdrl-test-ports-{os.getuid()}"
    with counter.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        taken = int(file.read() or random.SystemRandom().choice(_PORTS))
        port = _next_free(taken)
        file.truncate(0)
        file.write(str(port))
    return port


def _next_free(port: int) -> int:
    for _ in _PORTS:
        port = port + 1 if port + 1 in _PORTS else _PORTS.start
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port of {_PORTS} is free")


def fork_rank(env: dict[str, str], target: Callable, *args: Any) -> BaseProcess:
    """Start `target(*args)` in a process that has done slow imports, with this environment.

    It is a fork of one that has done nothing else: a fresh process spends 5 s of a core on the
    imports of a trainer, and 15 s on those of an engine.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with mock.patch.dict(os.environ, PYTHONPATH=paths, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    process = context.Process(target=_in_environment, args=(env, target, *args), daemon=True)
    process.start()
    return process


def forget_imports() -> None:
    """Have the next rank be a fork of a new process, which finds the modules of today's paths."""
    forkserver._forkserver._stop()  # waits for the ranks that it has made, all of which are gone


def _in_environment(env: dict[str, str], target: Callable, *args: Any) -> None:
    os.environ.clear()
    os.environ.update(env)
    target(*args)


def _return(target: Callable, args: tuple, results: Any, rank: int) -> None:
    try:
        # Plain pickle copies tensors; the queue's own would pass handles of a dying process.
        results.put((rank, pickle.dumps(target(*args)), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    finally:
        results.close()
        results.join_thread()
        # Until all have answered: the others end where they see this process end.
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(0)  # leftover group threads of a failed rank must not keep the process


def _killed(processes: list[Any]) -> str:
    # A rank that raises ends with status 0.
    found = [r for r, p in enumerate(processes) if p.exitcode]
    return f"ranks {found} died without a result" if found else ""


def run_ranks(world_size: int, target: Callable, *args: Any, timeout_s: float = 600.0) -> list[Any]:
    """Run `target(*args)` (module-level, picklable) in `world_size` fresh processes.

    The target starts torch.distributed itself (env:// variables are set) and returns a
    picklable value. Returns the values in rank order. Raises AssertionError with the rank's
    traceback when one fails, or when the deadline passes, and naming those that died without a
    word, whatever their peers said of it before; all processes are gone either way.
    """
    results, port = multiprocessing.get_context("forkserver").Queue(), free_port()
    processes = [
        fork_rank(os.environ | launch_env(r, world_size, port), _return, target, args, results, r)
        for r in range(world_size)
    ]
    values: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while len(values) < world_size:
            try:
                rank, value, error = results.get(timeout=0.5)
            except queue.Empty:
                lost = [r for r, p in enumerate(processes) if not p.is_alive() and r not in values]
                missing = [r for r in range(world_size) if r not in values]
                assert time.monotonic() < deadline, f"no result in {timeout_s} s from {missing}"
                if lost and results.empty():
                    time.sleep(0.5)
                    assert not results.empty(), f"ranks {lost} died without a result"
                continue
            assert error is None, f"rank {rank} failed:\n{error}{_killed(processes)}"
            values[rank] = value
        return [pickle.loads(values[r]) for r in range(world_size)]
    finally:
        for process in processes:
            process.kill()
            process.join()
