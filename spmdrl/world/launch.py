"""What torchrun or srun told this process, and what ranks that it starts are told.

Environment variables are read here and in the adapters of libraries; what else touches them stands
with its reason in tests/test_environment_reads.py.
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

_TOLD_CHARS = 2000
_TOLD_S = 60.0
_SOONER_S = 5.0
_GLOO = "GLOO_SOCKET_IFNAME"
SECRET = "SPMDRL_SECRET"
"""Variable with the job's secret, see secret.py."""
_SECRET_CHARS = 16
_OUTSIDE = ("8.8.8.8", "2001:4860:4860::8888")  # of no matter which: nothing is sent
# As early as possible: the parent may die any time.
_OWN_PID = os.getpid()
_PARENT_PID = os.getppid()
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
        "`torchrun --standalone --nproc-per-node N ...` or `srun python ...`"
    )


def find_launch(cfg: Config) -> Launch:
    """Return what the launcher told this process; a job of one rank needs no launcher.

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
    """Refuse a number of ranks that is not that of `layout`. Raises: Refusal."""
    if launch.world_size != cfg.layout.world_size:
        raise Refusal(
            f"layout.world_size is {cfg.layout.world_size}, but {launch.launcher} started "
            f"{launch.world_size} ranks; start {cfg.layout.world_size} or {_other_way(cfg, launch)}"
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


def child_environment(**more: str) -> dict[str, str]:
    """Return the environment of a process that this one starts: its own, and some variables."""
    return os.environ | more


def use_one_thread() -> None:
    """Have ranks that this process starts compute by one thread each, unless told otherwise."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def has_rank() -> bool:
    """Return whether the environment names this process's rank."""
    return "RANK" in os.environ or "SLURM_PROCID" in os.environ


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


def report_to_launcher(reason: str) -> None:
    """Leave the reason of an end where torchrun looks for it: it closes its own report with it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    text = printable(reason[:_TOLD_CHARS])
    if path:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w") as file:  # it is printed besides
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)


def report_refusal(reason: str) -> None:
    """Leave a refusal where slurm/attempt.sh looks for it before it queues a job again."""
    path = os.environ.get("SPMDRL_REFUSED")
    if path:
        with contextlib.suppress(OSError), open(path, "wb") as file:  # it is printed besides
            file.write(f"{printable(reason)}\n".encode())


def say_once(text: str, *, of_rank: str = "") -> None:
    """Print what several ranks come to alike: one of them on each machine does, the first of it
    where that comes to it soon; the others say that it is so for them.

    Args:
        of_rank: said before it, of the rank that speaks.
    """
    env = os.environ
    is_alone = (env.get("WORLD_SIZE") or env.get("SLURM_NTASKS") or "1") == "1"
    if not is_alone and _is_told(text):
        text = "ends for the same reason"
        of_rank = of_rank or f"[rank {known_rank()}] "
    say(f"{of_rank}{text}", file=sys.stderr, flush=True)


def _is_told(text: str) -> bool:
    """Return whether another rank of this job prints a text on this machine; else this one must."""
    # Ranks of a machine have one launcher, and no other job has its process at this time. Where it
    # is a shell it may have started another attempt before: what that told is older than we are.
    env = os.environ
    parent = os.getppid()
    launcher = birth(parent)
    own = birth(os.getpid())
    if not launcher or not own:
        return False
    job = [parent, launcher, env.get("MASTER_PORT"), env.get("TORCHELASTIC_RESTART_COUNT")]
    name = hashlib.sha256(json.dumps([*job, text]).encode()).hexdigest()[:32]
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(own) / os.sysconf("SC_CLK_TCK")
    # What other ranks print may be shown nowhere, as under torchrun's --local-ranks-filter 0.
    is_first = (env.get("LOCAL_RANK") or env.get("SLURM_LOCALID") or "0") == "0"
    try:
        return _is_marked(f"told-{name}", after=time.time() - age_s, waits=not is_first)
    except OSError:  # where there is no such folder each rank prints it
        return False


def _is_marked(name: str, *, after: float, waits: bool) -> bool:
    """Return whether a file of this user was marked after a time; mark it if not.

    Args:
        waits: a while, for others to mark it.
    Raises: OSError where there is no folder that is this user's alone.
    """
    folder = os.path.join(tempfile.gettempdir(), f"spmdrl-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(held)
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError(f"{folder} may be written by others")
        end = time.monotonic() + _SOONER_S * waits
        while _marked_at(name, held) < after and time.monotonic() < end:
            time.sleep(0.02)
        fcntl.flock(held, fcntl.LOCK_EX)
        for old in filter(re.compile("told-").match, os.listdir(held)):
            if time.time() - _marked_at(old, held) > _TOLD_S:
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
    """Return when a file of an open folder was marked, in seconds since 1970; 0 for none."""
    with contextlib.suppress(FileNotFoundError):
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
    return 0.0


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
    for name, addresses in psutil.net_if_addrs().items():
        if str(own) in [address.address.partition("%")[0] for address in addresses]:
            return name
    raise OSError(f"no interface has the address {own}")


def _own_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address of this machine from which packets to a host are sent."""
    family, kind, *_, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(where)
        return ipaddress.ip_address(way.getsockname()[0].partition("%")[0])
