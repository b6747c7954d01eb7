"""What torchrun or srun told this process. Nothing else of ours reads such variables."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import re
import socket
import struct
import time
from dataclasses import dataclass

from spmdrl.errors import Refusal

_TOLD_CHARS = 2000
_GLOO = "GLOO_SOCKET_IFNAME"
SECRET = "SPMDRL_SECRET"
"""Variable with the job's secret, see secret.py."""
_SECRET_CHARS = 16
_OUTSIDE = ("8.8.8.8", "2001:4860:4860::8888")  # of no matter which: nothing is sent
_OWN_PID, _PARENT_PID = os.getpid(), os.getppid()  # as early as can be: it may die any time
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_ALONE: set[str] = set()  # ports that this process chose for jobs of itself alone


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
    nodes: int = 1

    def pass_on(self) -> None:
        """Set the variables that torch and vLLM read, as torchrun does, and have gloo listen where
        other nodes reach this one: it takes the address of the host's name, often 127.0.1.1."""
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(self.local_rank),
            MASTER_ADDR=self.address,
            MASTER_PORT=str(self.port),
        )
        if self.nodes > 1 and not os.environ.get(_GLOO):
            with contextlib.suppress(OSError):  # no such way: gloo looks for itself
                os.environ[_GLOO] = interface_towards(self.address)


def read_launch(env: dict[str, str] | None = None) -> Launch:
    """Read rank and rendezvous from torchrun's variables, or else from Slurm's own.

    Raises: Refusal when neither launcher set its variables.
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
            nodes=int(env.get("GROUP_WORLD_SIZE", 1)),
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
            nodes=int(env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES") or 1),
        )
    raise Refusal(
        "no launcher: neither RANK (torchrun) nor SLURM_PROCID (srun) is set. Start with "
        "`torchrun --nproc-per-node N train.py --config FILE` or `srun python train.py ...`; "
        "`python train.py --config FILE --dry-run` needs no launcher"
    )


def told_secret() -> str:
    """Return the secret that the launcher's environment gives the job; empty for none.

    Raises: Refusal for one that a stranger guesses: white space, or a few characters.
    """
    secret = os.environ.get(SECRET, "")
    if secret and len(secret.strip()) < _SECRET_CHARS:
        raise Refusal(
            f"{SECRET} has {len(secret.strip())} characters besides white space around them, which "
            "can be guessed: set it to some 32 random ones, the same on all nodes, or to none"
        )
    return secret


def is_launched() -> bool:
    """Return whether torchrun or srun started this process; a batch script's own is neither."""
    return "RANK" in os.environ or is_under_srun()


def is_under_srun() -> bool:
    """Return whether this process is one of a step of Slurm."""
    return "SLURM_STEP_NUM_TASKS" in os.environ


def launch_alone() -> None:
    """Where no launcher started this process, make it a job of one rank on a free port; one after
    another too, of which an earlier one's store may still hold its port."""
    if is_launched() and os.environ.get("MASTER_PORT") not in _ALONE:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        Launch(0, 1, 0, "127.0.0.1", free.getsockname()[1], "torchrun").pass_on()
    _ALONE.add(os.environ["MASTER_PORT"])


def is_orphaned() -> bool:
    """Return whether the launcher that started this process is gone; False where none did."""
    is_ours = "TORCHELASTIC_RUN_ID" in os.environ or is_under_srun()
    return is_ours and os.getpid() == _OWN_PID and os.getppid() != _PARENT_PID


def hides_gpus() -> bool:
    """Return whether this process was told to see no GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") == ""


def known_rank() -> str:
    """Return this process's rank for messages, `?` where no launcher said one."""
    return os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "?"


def job_of_launcher() -> tuple[str, int]:
    """Return the launcher's name for this job, empty without one, and how often it has started the
    job anew. Attempts of one name never run at the same time."""
    env = os.environ
    if "SLURM_JOB_ID" in env:
        cluster = env.get("SLURM_CLUSTER_NAME", "")
        name = f"Slurm job {env['SLURM_JOB_ID']}" + (f" of {cluster}" if cluster else "")
        return name, int(env.get("SLURM_RESTART_COUNT", 0))
    name = env.get("TORCHELASTIC_RUN_ID", "none")  # of all that were given no --rdzv-id
    if name == "none":
        return "", 0
    return f"torchrun's {name}", int(env.get("TORCHELASTIC_RESTART_COUNT", 0))


def tell_launcher(reason: str) -> None:
    """Leave the reason of an end where torchrun looks for it: it closes its own report with it."""
    path, text = os.environ.get("TORCHELASTIC_ERROR_FILE"), reason[:_TOLD_CHARS]
    if path:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w") as file:  # it is printed besides
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)


def tell_refused(reason: str) -> None:
    """Leave a refusal where slurm/attempt.sh looks for it before it queues a job again."""
    path = os.environ.get("SPMDRL_REFUSED")
    if path:
        with contextlib.suppress(OSError), open(path, "wb") as file:  # it is printed besides
            file.write(f"{reason}\n".encode(errors="backslashreplace"))


def ask_cublas_to_repeat() -> None:
    """Have cuBLAS give the same bits each time, as deterministic algorithms of torch need it."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: `gpu[003-007,9],x` gives `gpu003`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodelist)
    if not match:
        raise Refusal(f"cannot read the Slurm node list {nodelist!r}; set MASTER_ADDR")
    return "".join(part or "" for part in match.groups())


def interface_towards(host: str) -> str:
    """Return the network interface by which this machine reaches a host, such as `eth0`.

    Where the host is this machine itself under an address that others cannot reach, it is the one
    by which everything else is reached. Nothing is sent.

    Raises: OSError where there is no way, or no interface has the address that it begins at.
    """
    own = _own_address(host)
    for outside in _OUTSIDE if own.is_loopback else ():
        with contextlib.suppress(OSError):
            own = _own_address(outside)
            break
    for _, name in socket.if_nameindex():
        if own in _addresses(name):
            return name
    raise OSError(f"no interface has the address {own}")


Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _own_address(host: str) -> Address:
    """Return the address of this machine from which packets to a host are sent."""
    family, kind, *_, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(where)
        return ipaddress.ip_address(way.getsockname()[0].partition("%")[0])


def _addresses(interface: str) -> list[Address]:
    """Return the first IPv4 address and all IPv6 addresses of an interface."""
    found: list[Address] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_, contextlib.suppress(OSError):
        packed = fcntl.ioctl(any_, _GET_ADDRESS, struct.pack("256s", interface.encode()))
        found.append(ipaddress.IPv4Address(packed[20:24]))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        lines = [line.split() for line in file]
        found += [ipaddress.IPv6Address(bytes.fromhex(x[0])) for x in lines if x[5] == interface]
    return found
