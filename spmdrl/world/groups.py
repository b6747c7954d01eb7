"""The process groups of a job, made by every rank in one order."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.config import Config, inference_ranks, trainer_ranks
from spmdrl.world.launch import Launch
from spmdrl.world.lost_peers.watch import PeersMissing, first_line
from spmdrl.world.mesh import make_expert_mesh, make_meshes
from spmdrl.world.ports import listen
from spmdrl.world.secret import agree_on_secret, mark, remove_files
from spmdrl.world.torch_internals import set_group_timeout, split_no_groups


@dataclass
class WorldGroups:
    """The groups and meshes of a World."""

    control: dist.ProcessGroup
    """gloo group over all ranks, for small messages."""
    trainer_control: dist.ProcessGroup
    """gloo group over the trainer ranks, for the few numbers of an update."""
    saving: dist.ProcessGroup
    """gloo group over the trainer ranks for the thread that writes checkpoints. Two threads must
    not share a group: their collectives would be mixed up."""
    replica_control: dist.ProcessGroup | None
    """gloo group over the ranks of this rank's engine replica; None if that is one rank."""
    mesh: DeviceMesh
    """Mesh of the trainer ranks with axes MESH_AXES."""
    sharding: DeviceMesh
    """The same ranks with axes dp_replicate, fsdp (dp_shard and cp in one) and tp, over which
    parameters are sharded."""
    experts: DeviceMesh | None
    """The same ranks with axes dp_replicate, efsdp and ep, over which experts are sharded; None
    without expert or tensor parallelism."""


def meet(launch: Launch, *, shared: Path | None, within: timedelta) -> dist.Store:
    """Adopt the job's secret, and return the key-value store of this attempt of the job.

    The keys have a secret prefix, so that nobody else can guess the ones that torch reads.

    Args:
        shared: folder for the secret that all nodes see; None without one.
        within: time for rank 0 to start.
    Raises: Refusal for a port in use or a missing secret; PeersMissing if rank 0, or the
        launcher's store, does not answer.
    """
    # torchrun keeps its store when it restarts ranks: entries of the dead ones are still there.
    try:
        store = dist.PrefixStore(f"attempt{launch.attempt}", _open(launch, within))
        agree_on_secret(store, launch, shared=shared)
    except dist.DistError as error:
        keeper = "the launcher" if launch.keeps_store else "rank 0"
        raise PeersMissing(
            f"rank {launch.rank} on {socket.gethostname()} waited {within.total_seconds():.0f} s "
            f"in 'meet' at step -1: {keeper} is missing, which should keep the job's store at "
            f"{launch.address} port {launch.port}\ncaused by: {first_line(error)}"
        ) from error
    return dist.PrefixStore(mark("the job's store", b"").hex()[:32], store)


def _open(launch: Launch, timeout: timedelta) -> dist.Store:
    own: dict[str, Any] = {"timeout": timeout, "wait_for_workers": False}
    if not (launch.rank or launch.keeps_store):
        own |= {"is_master": True, "master_listen_fd": listen(launch).detach()}
    return dist.TCPStore(launch.address, launch.port, **own)


def join_world(
    backend: str, launch: Launch, *, store: dist.Store, device: torch.device, timeout: timedelta
) -> None:
    """Make the group of all ranks. NCCL's communicator is made at once, by all ranks.

    Args:
        backend: nccl or gloo.
        store: of `meet`.
        timeout: of this group and of all later ones, also of meshes and vLLM. It is longer than
            the deadlines of Watch, which should report first.
    """
    store.set_timeout(timeout)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("default_pg", store),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )
    # With a group that is bound to a device, torch makes new groups by a split in which all ranks
    # take part. The members of a gloo group do not, so that the others would wait forever.
    split_no_groups()
    set_group_timeout(timeout)
    remove_files()  # all ranks have the secret now


def make_groups(cfg: Config, *, rank: int, device: torch.device) -> WorldGroups:
    """Make all groups but vLLM's. Every rank must call it with the same config."""
    return WorldGroups(
        dist.new_group(backend="gloo"),
        dist.new_group(trainer_ranks(cfg), backend="gloo"),
        dist.new_group(trainer_ranks(cfg), backend="gloo"),
        _replica_group(cfg, rank),
        *make_meshes(cfg, device),
        make_expert_mesh(cfg, device),
    )


def _replica_group(cfg: Config, rank: int) -> dist.ProcessGroup | None:
    """Return the gloo group of this rank's engine replica. Every rank takes part in making all."""
    size = cfg.layout.replica_ranks
    own = None
    if size == 1:
        return None
    ranks = inference_ranks(cfg)
    for first in range(0, len(ranks), size):
        group = dist.new_group(ranks[first : first + size], backend="gloo")
        own = group if rank in ranks[first : first + size] else own
    return own
