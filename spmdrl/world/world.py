"""The world: all ranks of the job, their roles, process groups and meshes; start and end."""

from __future__ import annotations

import faulthandler
import gc
import json
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.config import Config, flatten, inference_ranks, trainer_ranks
from spmdrl.config.fields import least_tokens
from spmdrl.errors import Refusal
from spmdrl.world.comm import any_of, await_all, gather_objects
from spmdrl.world.groups import WorldGroups, join_world, make_groups, meet
from spmdrl.world.launch import Launch, ask_cublas_to_repeat, find_launch, is_orphaned
from spmdrl.world.leaving import handle_signals
from spmdrl.world.lost_peers.watch import Watch, store_timeout
from spmdrl.world.machine.gpus import check_driver, check_memory, check_own_gpus, warn_of_detours
from spmdrl.world.machine.host_memory import MemoryWatch, keep_freed_memory
from spmdrl.world.sealed_store import SealedStore, WatchedKeys

T = TypeVar("T")


@dataclass
class World(WorldGroups):
    """One rank's view of the job. Made by `World.start`, ended by `close`."""

    cfg: Config
    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    """Backend that sends tensors between ranks: nccl or gloo."""
    watch: Watch
    store: SealedStore
    """Key-value store of the job, for what a rank may read without waiting for others."""
    stop_requested: bool = field(default=False)
    """A signal arrived: the run saves at the end of this step and stops."""
    is_started: bool = field(default=False)
    """Start-up is over, so a signal saves before the run stops."""
    updated: WatchedKeys = field(init=False)
    """The trainers' announcement of an update, which engines in flight look at."""
    found_tokens: int = field(default=0)
    """Token budget that was measured for batch.tokens_per_microbatch 0; 0 until then."""

    unshared: dict[str, str] = field(default_factory=dict)
    """{model of the run: why its rows cannot share prefixes}; every rank knows it once the models
    are built."""

    def __post_init__(self) -> None:
        self.updated = WatchedKeys(self.store)

    @classmethod
    def start(cls, cfg: Config) -> World:
        """Join the job and make all groups. Every rank must call it with the same config.

        Raises: Refusal, before any group exists, if the number of ranks does not match the
            layout; RuntimeError if ranks have different configs.
        """
        faulthandler.enable(sys.__stderr__ or 2)  # a crash of native code shows the Python lines
        launch = find_launch(cfg)
        check_driver(cfg)
        device = pick_device(cfg, launch.local_rank)
        if device.type == "cuda":
            check_memory(cfg, launch, device)
            warn_of_detours(launch)
            # An import of vLLM does this too. A run and its verification, which has no engine,
            # would else take other kernels.
            torch.backends.cuda.enable_cudnn_sdp(False)
            # With gloo, ranks of higher local ranks share its GPU.
            launch = replace(launch, local_rank=device.index)
        else:
            keep_freed_memory()
        timeout = store_timeout(
            max(
                cfg.layout.wait_timeout_s,
                cfg.layout.startup_timeout_s,
                cfg.checkpoint.write_timeout_s,
            )
        )
        watch, store = _join(cfg, launch, device=device, timeout=timeout)
        if launch.local_rank == 0:
            MemoryWatch().start(watch)
        with watch.start_up():
            with watch.wait("create groups", -1):
                groups = make_groups(cfg, rank=launch.rank, device=device)
            world = cls(
                cfg=cfg,
                rank=launch.rank,
                world_size=launch.world_size,
                local_rank=launch.local_rank,
                device=device,
                backend=pick_backend(cfg),
                watch=watch,
                store=store,
                **vars(groups),
            )
            _check_same_config(world)
        handle_signals(world)
        if cfg.deterministic:
            ask_cublas_to_repeat()
            torch.use_deterministic_algorithms(True, warn_only=True)
            # Else each new tensor is first filled with NaN, also buffers of the engine and FSDP2.
            # That takes time, and routers would get NaN in rows that only pad a batch.
            torch.utils.deterministic.fill_uninitialized_memory = False
        return world

    # ---------------------------------------------------------------- roles

    @property
    def is_trainer(self) -> bool:
        """Whether this rank holds a shard of the policy."""
        return self.rank in self.trainer_ranks

    @property
    def is_inference(self) -> bool:
        """Whether this rank holds an engine, or a part of one."""
        return self.rank in self.inference_ranks

    @property
    def trainer_ranks(self) -> list[int]:
        """Ranks that train, ascending."""
        return trainer_ranks(self.cfg)

    @property
    def inference_ranks(self) -> list[int]:
        """Ranks that generate, ascending."""
        return inference_ranks(self.cfg)

    @property
    def num_replicas(self) -> int:
        """Engine replicas in the job."""
        return len(self.inference_ranks) // self.cfg.layout.replica_ranks

    @property
    def replica(self) -> int:
        """Index of this rank's engine replica; -1 if it has none."""
        if not self.is_inference:
            return -1
        return self.inference_ranks.index(self.rank) // self.cfg.layout.replica_ranks

    @property
    def replica_rank(self) -> int:
        """Position within the replica, whose leader is 0; -1 if it has none. Ranks of one
        tensor-parallel group are neighbours."""
        if not self.is_inference:
            return -1
        return self.inference_ranks.index(self.rank) % self.cfg.layout.replica_ranks

    @property
    def inference_dp_rank(self) -> int:
        """Index of this rank's part of a replica with data-parallel attention; -1 if it has no
        replica."""
        return self.replica_rank // self.cfg.layout.inference_tp

    @property
    def ranks_per_dp(self) -> int:
        """Trainer ranks with the same data-parallel index, which share sequences: cp * tp."""
        return self.cfg.layout.cp * self.cfg.layout.tp

    @property
    def dp_size(self) -> int:
        """Data-parallel size, the parts of a batch: dp_replicate * dp_shard."""
        return len(self.trainer_ranks) // self.ranks_per_dp

    def dp_index(self, rank: int) -> int:
        """Return the data-parallel index of a trainer rank; cp and tp ranks share one."""
        return self.trainer_ranks.index(rank) // self.ranks_per_dp

    @property
    def tokens_per_microbatch(self) -> int:
        """Token budget of a micro-batch: the config's; if that is 0 the measured one; and the least
        possible one before it is measured."""
        return self.cfg.batch.tokens_per_microbatch or self.found_tokens or least_tokens(self.cfg)

    @property
    def shares_prefixes(self) -> bool:
        """Whether a prefix that sequences of a micro-batch have in common is computed once."""
        return self.cfg.batch.share_prefixes == "auto" and not self.unshared

    @property
    def is_dp_leader(self) -> bool:
        """Whether this rank is the first trainer of its data-parallel index. Trainers of one index
        share sequences; a value that all of them know is counted by this one only."""
        return self.is_trainer and self.trainer_ranks.index(self.rank) % self.ranks_per_dp == 0

    @property
    def wire(self) -> torch.device:
        """Device from which tensors are sent: gloo sends from and to host memory."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    # ---------------------------------------------------------------- among all ranks

    def from_rank_0(self, work: Callable[[], T], *, wait: str, step: int = -1) -> T:
        """Run `work` on rank 0, and return its result, a small value (plain.py), on every rank."""
        with self.watch.wait(wait, step):
            return gather_objects(work() if self.rank == 0 else None, group=self.control)[0]

    def gather(
        self, own: T, *, wait: str, step: int = -1, timeout_s: float | None = None
    ) -> list[T]:
        """Return on every rank the small value (plain.py) of each rank, in rank order.

        Raises: Refusal naming each rank's line if they are not all in this wait of this step.
        """
        with self.watch.wait(wait, step, timeout_s=timeout_s):
            return gather_objects(own, group=self.control)

    def meet(self, *, wait: str, step: int = -1) -> None:
        """Wait until every rank is here. Raises: as `gather`."""
        with self.watch.wait(wait, step):
            await_all(group=self.control)

    def agree_to_stop(self, step: int, *, stop: bool = False) -> bool:
        """Return on all ranks, once all are here, whether one of them got a signal or `stop`."""
        with self.watch.wait("agree to stop", step):
            return any_of(self.stop_requested or stop, group=self.control)

    # ---------------------------------------------------------------- among trainers

    def gather_per_dp(self, own: T) -> list[T]:
        """Return on every trainer rank the small value (plain.py) of each data-parallel index."""
        mine = own if self.is_dp_leader else None
        return gather_objects(mine, group=self.trainer_control)[:: self.ranks_per_dp]

    def count_once(self, own: Tensor) -> Tensor:
        """Return `own` on the CPU; zeros if another rank of this data-parallel index counts it."""
        return own.cpu() if self.is_dp_leader else torch.zeros_like(own, device="cpu")

    def sum_over_trainers(self, own: Tensor) -> Tensor:
        """Return on every trainer rank the sum over data-parallel indices, on the CPU. The ranks of
        one index have the same tensor, which is added once."""
        total = self.count_once(own)
        dist.all_reduce(total, group=self.trainer_control)
        return total

    # ---------------------------------------------------------------- life

    def started(self) -> None:
        """End start-up: from now on waits have the short deadline, and a signal saves first.

        Python's garbage collector leaves out what exists now, until `close`: vLLM has it collect
        whenever an engine sleeps or wakes.
        """
        gc.collect()
        gc.freeze()
        self.watch.timeout_s = self.cfg.layout.wait_timeout_s
        self.is_started = True

    def announce_updated(self, step: int) -> None:
        """Write into the store that the trainers are done with `step`."""
        if self.rank == self.trainer_ranks[0]:
            self.store.set(f"updated/{step}", "1")
            self.store.delete_key(f"updated/{step - 2}")

    def is_updated(self, step: int) -> bool:
        """Return whether the trainers have announced `step`. Repeated calls cost one request."""
        return self.updated.is_set(f"updated/{step}")

    def close(self) -> None:
        """Leave the job together with all other ranks. Close the engines first."""
        gc.unfreeze()
        self.watch.announce_leaving()
        self.meet(wait="leave")
        self.watch.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _join(
    cfg: Config, launch: Launch, *, device: torch.device, timeout: timedelta
) -> tuple[Watch, SealedStore]:
    """Start this rank's watch and make the group of all ranks; return watch and store."""
    launch.pass_on()
    within_s = cfg.layout.startup_timeout_s
    backend = pick_backend(cfg)
    store = meet(launch, shared=Path(cfg.output_dir), within=timedelta(seconds=within_s))
    sealed = SealedStore(store.clone())
    watch = Watch(
        sealed.clone(),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout_s=within_s,
        store_rank=None if launch.keeps_store else 0,
        is_orphaned=is_orphaned,
        flight_folder=Path(cfg.output_dir) / "flight",
    )
    with watch.start_up(), watch.wait("meet", -1):
        if backend == "nccl":
            check_own_gpus(launch, device, sealed)
        join_world(backend, launch, store=store, device=device, timeout=timeout)
    return watch, sealed


def _check_same_config(world: World) -> None:
    own = json.loads(json.dumps(flatten(world.cfg), default=str))
    configs = world.gather(own, wait="compare configs")
    for rank, other in enumerate(configs):
        differing = [k for k, v in configs[0].items() if other[k] != v]
        if differing:
            name = differing[0]
            raise RuntimeError(
                f"rank {rank} has {name} = {other[name]!r}, rank 0 has {configs[0][name]!r}; "
                "every rank must be started with the same config file and flags"
            )


@contextmanager
def any_algorithms() -> Iterator[None]:
    """Let torch take algorithms that do not repeat to the last bit, inside a `with` block."""
    is_on = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_on, warn_only=warns)


def is_on_cpu(cfg: Config) -> bool:
    """Return whether ranks on this machine take the CPU."""
    kind = cfg.layout.device
    return kind == "cpu" or (kind == "auto" and torch.cuda.device_count() == 0)


def device_problem(cfg: Config) -> str:
    """Return why this machine lacks the device or backend of the config; empty if it has them."""
    layout = cfg.layout
    host = socket.gethostname()
    if torch.cuda.device_count():
        return ""
    why = f"torch {torch.__version__} sees none (nvidia-smi, CUDA_VISIBLE_DEVICES)"
    if torch.version.cuda is None:
        why = f"torch {torch.__version__} is built for CPUs alone"
    if layout.device == "cuda":
        return (
            f"layout.device: cuda needs a GPU, and {host} has none that can be used: {why}; start "
            "the run on a machine with GPUs, or set --layout.device cpu"
        )
    if layout.backend == "nccl":
        return (
            f"layout.backend: nccl needs GPUs, and layout.device {layout.device} takes the CPU on "
            f"{host}: {why}; start the run on a machine with GPUs, or set --layout.backend auto"
        )
    return ""


def pick_backend(cfg: Config) -> str:
    """Return the backend: nccl for GPUs, unless the config asks for gloo."""
    return "gloo" if is_on_cpu(cfg) or cfg.layout.backend == "gloo" else "nccl"


def pick_device(cfg: Config, local_rank: int) -> torch.device:
    """Return this rank's device.

    Raises: Refusal for a `device_problem`, and if NCCL has no GPU for this rank. With gloo, ranks
        share GPUs.
    """
    if problem := device_problem(cfg):
        raise Refusal(problem)
    if is_on_cpu(cfg):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count and pick_backend(cfg) == "nccl":
        raise Refusal(
            f"layout.device: rank with local rank {local_rank} on {socket.gethostname()} needs "
            f"GPU {local_rank}, but {count} are visible; start {count} ranks per node, or let "
            "ranks share a GPU, slowly, by --layout.backend gloo"
        )
    index = local_rank % count
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
