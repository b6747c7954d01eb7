"""What torchrun or srun told this process. Nothing else of ours reads such variables."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from dataclasses import dataclass

_TOLD_CHARS = 2000


@dataclass(frozen=True)
class Launch:
    """What the launcher (torchrun or srun) told this process."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    launcher: str
    keeps_store: bool = False
    """Whether the launcher's own process holds the job's key-value store; else rank 0 does."""
    attempt: int = 0
    """How often torchrun has started the ranks anew, on one store."""

    def pass_on(self) -> None:
        """Set the variables that torch and vLLM read, as torchrun does."""
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(self.local_rank),
            MASTER_ADDR=self.address,
            MASTER_PORT=str(self.port),
        )


def read_launch(env: dict[str, str] | None = None) -> Launch:
    """Read rank and rendezvous from torchrun's variables, or else from Slurm's own.

    Raises: ValueError when neither launcher set its variables.
    """
    env = dict(os.environ if env is None else env)
    if "RANK" in env:
        return Launch(
            int(env["RANK"]),
            int(env["WORLD_SIZE"]),
            int(env.get("LOCAL_RANK", 0)),
            env["MASTER_ADDR"],
            int(env["MASTER_PORT"]),
            "torchrun",
            keeps_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=int(env.get("TORCHELASTIC_RESTART_COUNT", 0)),
        )
    if "SLURM_PROCID" in env:
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", "localhost")
        job = int(env.get("SLURM_JOB_ID", 0)) * 64 + int(env.get("SLURM_STEP_ID", 0)) % 64
        return Launch(
            int(env["SLURM_PROCID"]),
            int(env["SLURM_NTASKS"]),
            int(env.get("SLURM_LOCALID", 0)),
            env.get("MASTER_ADDR") or first_host(nodes),
            int(env.get("MASTER_PORT") or 20000 + job % 40000),
            "srun",
        )
    raise ValueError(
        "no launcher: neither RANK (torchrun) nor SLURM_PROCID (srun) is set. Start with "
        "`torchrun --nproc-per-node N train.py --config FILE` or `srun python train.py ...`; "
        "`python train.py --config FILE --dry-run` needs no launcher"
    )


def is_launched() -> bool:
    """Return whether torchrun or srun started this process; a batch script's own is neither."""
    return "RANK" in os.environ or "SLURM_STEP_NUM_TASKS" in os.environ


def launch_alone() -> None:
    """Where no launcher started this process, make it a job of one rank on a free port."""
    if is_launched():
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        Launch(0, 1, 0, "127.0.0.1", free.getsockname()[1], "torchrun").pass_on()


def hides_gpus() -> bool:
    """Return whether this process was told to see no GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") == ""


def known_rank() -> str:
    """Return this process's rank for messages, `?` where no launcher said one."""
    return os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "?"


def tell_launcher(reason: str) -> None:
    """Leave the reason of an end where torchrun looks for it: it closes its own report with it."""
    path, text = os.environ.get("TORCHELASTIC_ERROR_FILE"), reason[:_TOLD_CHARS]
    if path:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w") as file:  # it is printed besides
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)


def ask_cublas_to_repeat() -> None:
    """Have cuBLAS give the same bits each time, as deterministic algorithms of torch need it."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: `gpu[003-007,9],x` gives `gpu003`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodelist)
    if not match:
        raise ValueError(f"cannot read the Slurm node list {nodelist!r}; set MASTER_ADDR")
    return "".join(part or "" for part in match.groups())
