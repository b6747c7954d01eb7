"""What torchrun or srun told this process, and a job of one rank where neither did."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """What the launcher (torchrun or srun) told this process."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    launcher: str


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


def launch_alone() -> None:
    """Where no launcher set its variables, set those of a job of one rank on a free port."""
    if {"RANK", "SLURM_PROCID"} & os.environ.keys():
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ.update(
        RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
    )


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: `gpu[003-007,9],x` gives `gpu003`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodelist)
    if not match:
        raise ValueError(f"cannot read the Slurm node list {nodelist!r}; set MASTER_ADDR")
    return "".join(part or "" for part in match.groups())
