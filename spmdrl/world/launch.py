"""What torchrun or srun passes to this process through the environment.

Environment variables are read here and in the adapters of libraries. All other places are listed,
each with its reason, in tests/repository/test_environment_reads.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import json
import os
import re
import shlex
import socket
import sys
import tempfile
import time
from dataclasses import dataclass

import psutil

from spmdrl.config import Config
from spmdrl.errors import Refusal, printable, say
from spmdrl.world.lost_peers.local_ranks import birth

_MAX_REASON_CHARS = 2000
_MARK_LIVES_S = 60.0
_WAIT_FOR_FIRST_S = 5.0
_GLOO = "GLOO_SOCKET_IFNAME"
SECRET = "SPMDRL_SECRET"
"""Variable with the job's secret, see secret.py."""
_SECRET_CHARS = 16
_OUTSIDE = ("8.8.8.8", "2001:4860:4860::8888")  # any would do: nothing is sent
# As early as possible: the parent may die any time.
_OWN_PID = os.getpid()
_PARENT_PID = os.getppid()
_ALONE: set[str] = set()  # ports that this process chose for jobs of itself alone


@dataclass(frozen=True)
class Launch:
    """The place of this process in the job, from torchrun or srun."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    launcher: str
    keeps_store: bool = False
    """Whether the launcher holds the job's key-value store; else rank 0 does."""
    attempt: int = 0
    """How often torchrun has restarted the ranks, with one store."""
    nodes: int = 1

    def pass_on(self) -> None:
        """Set the variables that torch and vLLM read, as torchrun does.

        On several nodes, also set gloo's interface to the one by which other nodes reach this one.
        By default gloo takes the address of the host's name, which is often 127.0.1.1.
        """
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(self.local_rank),
            MASTER_ADDR=self.address,
            MASTER_PORT=str(self.port),
        )
        if self.nodes > 1 and not os.environ.get(_GLOO):
            with contextlib.suppress(OSError):  # no route: gloo chooses itself
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
        "`torchrun --standalone --nproc-per-node N ...` or `srun python ...`"
    )


def find_launch(cfg: Config) -> Launch:
    """Return the place of this process in the job. A job of one rank needs no launcher.

    Raises: Refusal for a launch that `layout` does not fit, and for several ranks without one.
    """
    size = cfg.layout.world_size
    if size == 1 and not has_rank():
        launch_alone()
    if not has_rank():
        command = shlex.join(sys.argv)
        raise Refusal(
            f"layout.world_size is {size}, and no launcher started this process. Start the "
            f"{size} ranks, on one machine by\n"
            f"  torchrun --standalone --nproc-per-node {size} {command}\n"
            f"or within a Slurm allocation by\n"
            f"  srun --ntasks {size} python {command}"
        )
    launch = read_launch()
    check_launch(cfg, launch)
    return launch


def check_launch(cfg: Config, launch: Launch) -> None:
    """Refuse ranks that `layout` does not fit: their number, or engines that nodes would divide.

    Raises: Refusal.
    """
    if launch.world_size != cfg.layout.world_size:
        raise Refusal(
            f"layout.world_size is {cfg.layout.world_size}, but {launch.launcher} started "
            f"{launch.world_size} ranks; start {cfg.layout.world_size} or {_other_way(cfg, launch)}"
        )
    size = cfg.layout.replica_ranks
    per_node = launch.world_size // launch.nodes
    if launch.nodes > 1 and per_node % size:
        name = "inference_tp" if cfg.layout.inference_dp == 1 else "inference_tp * inference_dp"
        raise Refusal(
            f"layout.{name}: {size} does not divide the {per_node} ranks of each of "
            f"{launch.nodes} nodes, so that an engine would lie on several; set it to a divisor of "
            f"{per_node}"
        )


def _other_way(cfg: Config, launch: Launch) -> str:
    size = launch.world_size
    if not cfg.layout.roles.overlaps or size > cfg.layout.trainer_ranks:
        return f"set --layout.world-size {size}"
    if size > 1:
        return (
            f"set --layout.world-size {size} --layout.trainer-ranks {size // 2}, so that "
            "split placement leaves ranks to generate"
        )
    return (
        f"set --layout.world-size {size} --layout.placement colocated: split placement needs "
        "a rank that trains and one that generates"
    )


def secret_of_environment() -> str:
    """Return the job's secret from the environment; empty if it has none.

    Raises: Refusal for a secret that is too short and could be guessed.
    """
    secret = os.environ.get(SECRET, "")
    if secret and len(secret.strip()) < _SECRET_CHARS:
        raise Refusal(
            f"{SECRET} has {len(secret.strip())} characters besides white space around them, which "
            "can be guessed: set it to some 32 random ones, the same on all nodes, or to none"
        )
    return secret


def child_environment(**more: str) -> dict[str, str]:
    """Return the environment of a process that this one starts: its own, and some variables."""
    return os.environ | more


def use_one_thread() -> None:
    """Let ranks that this process starts use one thread each, unless OMP_NUM_THREADS is set."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def has_rank() -> bool:
    """Return whether the environment names this process's rank."""
    return "RANK" in os.environ or "SLURM_PROCID" in os.environ


def is_launched() -> bool:
    """Return whether torchrun or srun started this process; a batch script alone is neither."""
    return "RANK" in os.environ or is_under_srun()


def is_under_srun() -> bool:
    """Return whether srun started this process."""
    return "SLURM_STEP_NUM_TASKS" in os.environ


def launch_alone() -> None:
    """Make this process a job of one rank on a free port, if no launcher started it.

    A process may be several such jobs in turn. The store of an earlier one may still hold its port.
    """
    if is_launched() and os.environ.get("MASTER_PORT") not in _ALONE:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        Launch(0, 1, 0, "127.0.0.1", free.getsockname()[1], "torchrun").pass_on()
    _ALONE.add(os.environ["MASTER_PORT"])


def is_orphaned() -> bool:
    """Return whether the launcher that started this process is gone; False without a launcher."""
    is_ours = "TORCHELASTIC_RUN_ID" in os.environ or is_under_srun()
    return is_ours and os.getpid() == _OWN_PID and os.getppid() != _PARENT_PID


def hides_gpus() -> bool:
    """Return whether the environment hides all GPUs from this process."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") == ""


def known_rank() -> str:
    """Return this process's rank for messages; `?` without a launcher."""
    return os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "?"


def job_of_launcher() -> tuple[str, int]:
    """Return the launcher's name for this job (empty without one) and how often it restarted it.

    Two attempts of one name never run at the same time.
    """
    env = os.environ
    if "SLURM_JOB_ID" in env:
        cluster = env.get("SLURM_CLUSTER_NAME", "")
        name = f"Slurm job {env['SLURM_JOB_ID']}" + (f" of {cluster}" if cluster else "")
        return name, int(env.get("SLURM_RESTART_COUNT", 0))
    name = env.get("TORCHELASTIC_RUN_ID", "none")  # the name of all jobs without --rdzv-id
    if name == "none":
        return "", 0
    return f"torchrun's {name}", int(env.get("TORCHELASTIC_RESTART_COUNT", 0))


def report_to_launcher(reason: str) -> None:
    """Write why this rank ends into the file that torchrun prints at the end of its report."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    text = printable(reason[:_MAX_REASON_CHARS])
    if path:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w") as file:  # it is printed too
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)


def report_refusal(reason: str) -> None:
    """Write a refusal into the file that slurm/attempt.sh reads before it queues a job again."""
    path = os.environ.get("SPMDRL_REFUSED")
    if path:
        with contextlib.suppress(OSError), open(path, "wb") as file:  # it is printed too
            file.write(f"{printable(reason)}\n".encode())


def say_once(text: str, *, of_rank: str = "") -> None:
    """Print a text that several ranks would print: once on each machine, if possible by its local
    rank 0. The other ranks print that they end for the same reason.

    Args:
        of_rank: prefix that names this rank.
    """
    env = os.environ
    is_alone = (env.get("WORLD_SIZE") or env.get("SLURM_NTASKS") or "1") == "1"
    if not is_alone and _is_printed(text):
        text = "ends for the same reason"
        of_rank = of_rank or f"[rank {known_rank()}] "
    say(f"{of_rank}{text}", file=sys.stderr, flush=True)


def _is_printed(text: str) -> bool:
    """Return whether another rank of this job prints the text on this machine."""
    # The ranks of a machine have one launcher process, which no other job has at this time. If it
    # is a shell, it may have started an earlier attempt: marks of that are older than this process.
    env = os.environ
    parent = os.getppid()
    launcher = birth(parent)
    own = birth(os.getpid())
    if not launcher or not own:
        return False
    job = [parent, launcher, env.get("MASTER_PORT"), env.get("TORCHELASTIC_RESTART_COUNT")]
    name = hashlib.sha256(json.dumps([*job, text]).encode()).hexdigest()[:32]
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(own) / os.sysconf("SC_CLK_TCK")
    # Local rank 0 is preferred: torchrun's --local-ranks-filter may hide the others.
    is_first = (env.get("LOCAL_RANK") or env.get("SLURM_LOCALID") or "0") == "0"
    try:
        return _is_marked(f"printed-{name}", after=time.time() - age_s, waits=not is_first)
    except OSError:  # without such a folder each rank prints it
        return False


def _is_marked(name: str, *, after: float, waits: bool) -> bool:
    """Return whether a file of this user was marked after a time; mark it if it was not.

    Args:
        waits: give other ranks some seconds to mark it first.
    Raises: OSError without a folder that only this user can write to.
    """
    folder = os.path.join(tempfile.gettempdir(), f"spmdrl-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(held)
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError(f"{folder} may be written by others")
        end = time.monotonic() + _WAIT_FOR_FIRST_S * waits
        while _marked_at(name, held) < after and time.monotonic() < end:
            time.sleep(0.02)
        fcntl.flock(held, fcntl.LOCK_EX)
        for old in filter(re.compile("printed-").match, os.listdir(held)):
            if time.time() - _marked_at(old, held) > _MARK_LIVES_S:
                os.unlink(old, dir_fd=held)
        if _marked_at(name, held) >= after:
            return True
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        os.close(os.open(name, flags, 0o600, dir_fd=held))
        os.utime(name, dir_fd=held)
        return False
    finally:
        os.close(held)


def _marked_at(name: str, folder: int) -> float:
    """Return when a file of an open folder was marked, in seconds since 1970; 0 without a file."""
    with contextlib.suppress(FileNotFoundError):
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
    return 0.0


def ask_cublas_to_repeat() -> None:
    """Make cuBLAS deterministic, as torch's deterministic algorithms need it."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: `gpu[003-007,9],x` gives `gpu003`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodelist)
    if not match:
        raise Refusal(f"cannot read the Slurm node list {nodelist!r}; set MASTER_ADDR")
    return "".join(part or "" for part in match.groups())


def interface_towards(host: str) -> str:
    """Return the network interface by which this machine reaches a host, such as `eth0`.

    If the host is this machine itself under a loopback address, return the interface of the default
    route. Nothing is sent.

    Raises: OSError without a route, or if no interface has the route's address.
    """
    own = _own_address(host)
    for outside in _OUTSIDE if own.is_loopback else ():
        with contextlib.suppress(OSError):
            own = _own_address(outside)
            break
    for name, addresses in psutil.net_if_addrs().items():
        if str(own) in [address.address.partition("%")[0] for address in addresses]:
            return name
    raise OSError(f"no interface has the address {own}")


def _own_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address from which this machine sends packets to a host."""
    family, kind, *_, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(where)
        return ipaddress.ip_address(way.getsockname()[0].partition("%")[0])
