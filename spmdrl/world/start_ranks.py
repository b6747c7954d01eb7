"""Start the ranks of a job on this machine, and let each of them end by itself.

torchrun ends all ranks when one ends; under `layout.survive_engines` the ranks decide that among
themselves. Their key-value store lives here, so that none of them takes it along.
"""

from __future__ import annotations

import math
import secrets
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence

import torch.distributed as dist

from spmdrl.world.launch import JOINS, SECRET, SPARES, child_environment

_LOOK_EVERY_S = 0.1
_AFTER_RANK_0_S = 60.0
"""What the other ranks may take to end once rank 0 has."""
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def start_ranks(program: Sequence[str], *, ranks: int, replacements: int = 0) -> int:
    """Run `ranks` processes of a Python program to their ends; return the exit status of rank 0,
    128 + N for signal N.

    A rank that ends badly is named on stderr. Signals are passed on to all.

    Args:
        replacements: how many ranks may be started anew, to join as engines, when they end badly.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        SPARES: "1",
    }
    # Who comes later finds no file of it.
    shared[SECRET] = child_environment().get(SECRET) or secrets.token_hex(32)

    def started(rank: int, **more: str) -> subprocess.Popen:
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        environment = child_environment(**shared, **place, **more)
        return subprocess.Popen([sys.executable, *program], env=environment)

    processes = [started(rank) for rank in range(ranks)]

    def pass_on(number: int, frame: object) -> None:
        for process in processes:
            process.send_signal(number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    try:
        while bad := await_some(processes):
            for rank in bad[:replacements]:
                print(f"rank {rank} is started anew, to join as an engine", file=sys.stderr)
                processes[rank] = started(rank, **{JOINS: "1"})
            replacements -= len(bad[:replacements])
        status = processes[0].returncode
        return status if status >= 0 else 128 - status
    finally:
        for process in processes:
            process.kill()


def await_some(processes: Sequence[subprocess.Popen]) -> list[int]:
    """Wait until ranks end badly, and return them; or until rank 0 has ended, and the others had
    their time to: none."""
    ended, deadline = {r for r, process in enumerate(processes) if process.returncode}, math.inf
    while True:
        statuses = [process.poll() for process in processes]
        bad = [rank for rank, status in enumerate(statuses) if status and rank not in ended]
        for rank in bad:
            print(f"rank {rank} {_ended(statuses[rank] or 0)}", file=sys.stderr, flush=True)
            ended.add(rank)
        if bad and statuses[0] is None:
            return bad
        if statuses[0] is not None:
            deadline = min(deadline, time.monotonic() + _AFTER_RANK_0_S)
            if None not in statuses or time.monotonic() > deadline:
                return []
        time.sleep(_LOOK_EVERY_S)


def _ended(status: int) -> str:
    if status > 0:
        return f"ended with status {status}"
    return f"was ended by {signal.Signals(-status).name}"
